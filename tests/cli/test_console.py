"""Output from a server or an environment cannot control the terminal."""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from bridge.checks import failed
from bridge_cli import console, doctor

ESCAPES = "a server's\x1b[2J\x1b]0;title\x07 words\x9b31m \u202e\x08"
SHOWN = "a server's\\x1b[2J\\x1b]0;title\\x07 words\\x9b31m \\u202e\\x08"


class View:
    """What is shown at the bottom of the terminal."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: Text) -> None:
        self.lines.append(line.plain)

    def wait_for(self, what: str) -> None:
        self.lines.append(what)


def wait() -> None:
    with console.waiting(ESCAPES) as detail:
        detail(ESCAPES)


def log() -> None:
    with console.printing_logs():
        logging.getLogger("bridge.run").info(ESCAPES)


WAYS: dict[str, Any] = {
    "log": log,
    "note": lambda: console.note(ESCAPES),
    "verdict": lambda: console.verdict("PASS", ESCAPES),
    "error": lambda: console.error(ESCAPES, "none"),
    "hint": lambda: console.error("none", ESCAPES),
    "waiting": wait,
    "doctor": lambda: doctor.report([("Server", [failed("Fence", ESCAPES, ESCAPES, ESCAPES)])]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_terminal_control_sequences_are_printed_escaped(
    way: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    people = Console(file=output, force_terminal=is_terminal, no_color=True, width=400, soft_wrap=True, emoji=False)
    monkeypatch.setattr(console, "people", people)
    WAYS[way]()
    printed = output.getvalue()
    assert SHOWN in printed
    assert not any(acting in printed for acting in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e", "\x08"))


@pytest.mark.parametrize("way", ["log", "note", "waiting"])
def test_control_sequences_are_escaped_above_a_live_view(way: str) -> None:
    view = View()
    with console.shared_with(view.say, view.wait_for):
        WAYS[way]()
    assert SHOWN in view.lines[0]
    assert "\x1b" not in "".join(view.lines)


@pytest.mark.parametrize("has_view", [False, True])
def test_narrow_terminal_shortens_the_wait_text_first(has_view: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    view, output = View(), io.StringIO()
    monkeypatch.setattr(console, "people", Console(file=output, force_terminal=True, no_color=True, width=80))
    what = "starting vLLM (pid 23033, log runs/20261126-193957-Calculator/serve.log)"
    with console.shared_with(view.say, view.wait_for) if has_view else nullcontext(), console.waiting(what) as detail:
        detail("161 s  compiling (66 s)")
    lines = view.lines if has_view else output.getvalue().splitlines()
    shown = next(line for line in lines if "161 s  compiling (66 s)" in line)
    assert "starting v" in shown
    assert not has_view or len(shown) <= 40


def test_logged_lines_are_printed_once_and_warnings_in_yellow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(console, "people", Console(file=output, force_terminal=True, color_system="standard"))
    with console.printing_logs():
        logging.getLogger("bridge.run.trainer").info("plain")
        logging.getLogger("bridge.processes.server_command").info("dim")
        logging.getLogger("bridge.processes.server_process").warning("yellow")
        logging.getLogger("bridge.passes").debug("unseen")
        logging.getLogger("elsewhere").warning("of another package")
    logging.getLogger("bridge.run.trainer").info("after the command")
    assert output.getvalue() == "plain\n\x1b[2mdim\x1b[0m\n\x1b[33myellow\x1b[0m\n"
    assert caplog.messages == ["of another package", "after the command"]


def test_other_ranks_print_only_what_their_servers_log(capsys: pytest.CaptureFixture[str]) -> None:
    with console.printing_logs():
        with console.printing_only(*console.OF_STARTS):
            logging.getLogger("bridge.run.trainer").info("the server died")
            logging.getLogger("bridge.processes.server_process").info("vLLM is ready")
            logging.getLogger("bridge.engine.compile_ahead").info("waiting")
            logging.getLogger("bridge.engine.compile_aheads").info("of another logger")
        logging.getLogger("bridge.run.trainer").info("done")
    assert capsys.readouterr().err == "vLLM is ready\nwaiting\ndone\n"


def test_line_breaks_in_a_note_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    console.note("one\n  two")
    assert capsys.readouterr().err == "one\n  two\n"


@pytest.mark.parametrize("which", ["error", "hint"])
def test_very_long_errors_and_hints_are_shortened(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    long = f"model 'begin{'x' * 5_000_000}end' is not there"
    console.error(*((long, "none") if which == "error" else ("none", long)))
    printed = capsys.readouterr().err
    assert len(printed) < 2 * console.LONGEST_FAULT
    assert "model 'begin" in printed
    assert "end' is not there" in printed
    assert "characters left out" in printed


@pytest.mark.parametrize("show", [console.note, lambda text: console.error(text, text)], ids=["note", "error"])
def test_url_passwords_are_not_printed(show: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    show("no server answers at http://user:hunter2@host:8000/v1?token=hunter3")
    shown = capsys.readouterr().err
    assert "hunter" not in shown
    assert "host:8000/v1" in shown


def test_data_prints_file_names_in_any_stdout_encoding(tmp_path: Path) -> None:
    code = "import sys; from bridge_cli import console; console.data(sys.argv[1])"
    for name in ("é☃".encode(), b"run\xff\xfe", b"a\x1b[31m"):
        for environment in ({}, {"PYTHONIOENCODING": "ascii:strict"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}):
            done = subprocess.run(
                [sys.executable, "-c", code, name], capture_output=True, env={**os.environ, **environment}, check=False
            )
            assert (done.stdout, done.stderr) == (name + b"\n", b"")


def test_data_on_a_terminal_has_no_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Tty()
    monkeypatch.setattr(sys, "stdout", terminal)
    console.data(ESCAPES)
    assert terminal.getvalue() == SHOWN + "\n"
