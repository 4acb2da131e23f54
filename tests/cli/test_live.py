"""The live view: what it shows, what it does to the terminal, and that training never waits for it."""

import fcntl
import io
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions
from rich.live import _RefreshThread

from bridge.checkpoints.metrics import StepMetrics
from bridge.run.reporting import Reporter
from bridge.types import Message
from bridge_cli import console, live
from tests.cli.test_run_directory import evaluation, group, metrics

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]no markup[/bold] \x9b2J \u202eevil \x00\x7f\r\n\ttab"
PICTURES = "你好世界 שלום עולם مرحبا 👨‍👩‍👧 e\u0301 हिन्दी " * 20
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def terminal(width: int = 100, height: int = 40, **changed: Any) -> Console:
    """Return a terminal that records its output."""
    known: dict[str, Any] = {"file": io.StringIO(), "force_terminal": True, "width": width, "height": height}
    return Console(**(known | {"_environ": {"TERM": "xterm-256color"}, "soft_wrap": True} | changed))


def written(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def step(number: int, **changed: Any) -> StepMetrics:
    known: dict[str, Any] = {"rollout_s": 2.0, "train_s": 0.25, "tokens_generated": 4000, "reward_mean": 0.1 * number}
    return metrics(number, **(known | changed))


def fed(text: str = "the answer is 5", *, prompt: str | list[Message] = "2+3=", **changed: Any) -> live.View:
    """Return the view of a run in progress, without the thread that draws it."""
    view = live.View(terminal(), 9)
    view.evaluation(evaluation(0, 0.25))
    for number in range(1, 5):
        view.step(step(number, **changed), [group(), group(text, prompt=prompt)])
    view.progress(3, 8)
    return view


def shown(view: live.View, width: int = 100, height: int = 40) -> list[str]:
    on = terminal(width, height)
    view._terminal = on
    on.print(view)
    return ESCAPE.sub("", written(on)).rstrip("\n").split("\n")


def test_view_shows_progress_metrics_and_a_sample() -> None:
    text = "\n".join(shown(fed(groups_in_flight=7, my_ratio=0.75)))
    for part in (
        "step 4/9", "about", "3 of 8 groups", "Mean reward", "0.1 to 0.4", "Held-out reward", "0.250", "0.5 nats",
        "Groups without signal", "Completion length", "Truncated completions", "Entropy", "Gradient norm",
        "Fence", "1.5 s", "1,067", "250 ms", "0.5 GiB", "Groups in flight", "my_ratio", "0.75",
        "a sample of step 4  reward 0.000  2 tokens", "2+3=", "the answer is 5",
    ):  # fmt: skip
        assert part in text, part
    assert "Unscored" not in "\n".join(shown(fed(unscored=0))), "it is 0 in every step"
    assert "max" not in text, "an alarm reports the largest mismatch"


def test_view_of_given_completions_has_the_loss_and_no_sample() -> None:
    view = live.View(terminal(), 9)
    for number in range(1, 5):
        row = step(
            number, objective="dpo", reward_mean=math.nan, divergence=None, loss=0.69 - 0.01 * number, margin=0.25
        )
        view.step(row, [replace(group(), rewards=())])
    text = "\n".join(shown(view))
    for part in ("step 4/9", "Loss", "0.65", "Preference margin", "0.25"):
        assert part in text, part
    assert "a sample of step" not in text
    assert "Mean reward" not in text
    assert live.step_line(row, 9).startswith("step 4/9  dpo loss 0.6500  margin 0.2500  len")


@pytest.mark.parametrize(
    ("low", "high", "span"),
    [
        ("0.1", "0.4", "0.1 to 0.4"),
        ("87.3 ms", "412 ms", "87.3 to 412 ms"),
        ("884 ms", "6.9 s", "884 ms to 6.9 s"),
        ("1 min 47 s", "2 min 03 s", "1 min 47 s to 2 min 03 s"),
        ("1 min 03 s", "2 min 03 s", "1 min 03 s to 2 min 03 s"),
    ],
)
def test_value_range_has_both_units_if_they_differ(low: str, high: str, span: str) -> None:
    assert live.value_range(low, high) == span


def test_missing_values_are_gaps_and_an_empty_view_is_one_bar() -> None:
    view = fed()
    view.step(step(5, logprob_diff_mean=math.nan, reward_mean=math.nan), [group()])
    assert re.search(r"\|Δ log-probability\|\s+-\s+▅▅▅▅ ", "\n".join(shown(view)))
    (line,) = shown(live.View(terminal(), 9))
    assert "9 steps to take" in line


@pytest.mark.parametrize(("width", "height"), [(80, 24), (81, 30), (300, 90)])
@pytest.mark.parametrize("text", ["", "word " * 4000, "x" * 40_000, HOSTILE * 9, PICTURES, "\n" * 100])
def test_view_fits_the_terminal_whatever_was_sampled(width: int, height: int, text: str) -> None:
    view = fed(text, prompt=[{"role": "user", "content": text}], **{f"own_{number}": 0.5 for number in range(50)})
    lines = shown(view, width, height)
    assert len(lines) <= height - live.ROWS_FOR_LINES
    assert all(cell_len(line) <= width for line in lines)
    sample = (
        lines[next(index for index, line in enumerate(lines) if "a sample of" in line) + 1 :] if height > 30 else []
    )
    assert all(len(line) + len(live.WIDE.findall(line)) <= width for line in sample)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", "\n".join(lines)), "it controls the terminal"


@pytest.mark.parametrize(("width", "height"), [(79, 50), (100, 23), (20, 5)])
def test_small_terminal_has_no_view(width: int, height: int) -> None:
    assert shown(fed(), width, height) == [""]


def test_long_texts_keep_their_start_or_their_end() -> None:
    text = "first " + "word " * 5000 + "last"
    lines = live.first_lines(text, 40, 5)
    assert (len(lines), lines[0][:5], lines[3], lines[4][-4:]) == (5, "first", "…", "last")
    lines = live.last_lines(text, 40, 2)
    assert (len(lines), lines[0][:2], lines[1][-4:]) == (2, "… ", "last")
    assert live.first_lines("a\nb", 40, 2) == live.last_lines("a\nb", 40, 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("values", "width", "height", "rows"),
    [
        ([0.0, 0.5, 1.0], 9, 2, [" ▁█", "▁██"]),
        ([float(value) for value in range(1000)], 10, 1, ["▁▂▃▃▄▅▆▆▇█"]),
        ([], 10, 2, ["", ""]),
        ([1.0, 1.01, 0.99, 1.0], 9, 1, ["▅▅▄▅"]),  # small changes look small
        ([0.0, 1.0, math.nan, 1.0], 9, 1, ["▁█ █"]),
        ([0.0, 0.0], 9, 1, ["▅▅"]),
    ],
)
def test_bars_rise_with_the_values(values: list[float], width: int, height: int, rows: list[str]) -> None:
    assert live.Bars(values, height=height).rows(width) == rows


def test_step_line_is_cut_between_figures() -> None:
    full = live.step_line(step(3), 60)
    assert live.step_line(step(3), 60, width=len(full)) == full
    for width in range(60, len(full)):
        cut = live.step_line(step(3), 60, width=width)
        assert len(cut) <= width
        assert full.startswith(f"{cut}{live.GAP}")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("is_tty", "environment", "wanted"),
    [
        (True, {"TERM": "xterm-256color"}, True),
        (True, {"TERM": "xterm-256color", "NO_COLOR": "1"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm-256color", "CI": "true"}, False),
        (True, {"TERM": "xterm-256color", "TTY_INTERACTIVE": "0"}, False),
        (False, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}, False),
    ],
)
def test_view_is_shown_only_on_an_interactive_terminal(
    is_tty: bool, environment: Mapping[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR", "CI", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    on = Console(file=Tty() if is_tty else io.StringIO(), _environ=environment)
    monkeypatch.setattr(Console, "encoding", "utf-8")
    assert live.wanted(on, environment, has_data=False) is wanted
    monkeypatch.setattr(sys, "stdout", Tty())
    assert live.wanted(on, environment, has_data=True) is False
    monkeypatch.setattr(Console, "encoding", "ascii")
    assert live.wanted(on, environment, has_data=False) is False


def test_output_without_a_terminal_has_one_line_per_step(capfd: pytest.CaptureFixture[str]) -> None:
    documents: list[str] = []
    with live.reporting_to_people(2, "run directory: r", data=documents.append) as reporter:
        reporter.phase("evaluation")
        reporter.evaluation(evaluation(0))
        for number in (1, 2):
            reporter.progress(1, 2)
            reporter.step(step(number), [group("4")])
    out, err = capfd.readouterr()
    expected = ["run directory: r", "held-out reward 0.500 after step 0  8 problems  1.0 s"]
    assert err.splitlines() == [*expected, *(live.step_line(step(number), 2) for number in (1, 2))]
    assert out == ""
    first, *rest = [json.loads(line) for line in documents]
    assert (first["evaluation"]["step"], first["evaluation"]["reward_mean"]) == (0, 0.5)
    assert [line["step"] for line in rest] == [1, 2]


@contextmanager
def painted(on: Console, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reporter]:
    """Show a view on the terminal `on`, as a run does."""
    monkeypatch.setattr(console, "people", on)
    monkeypatch.setattr(live, "wanted", lambda *_, has_data: True)
    monkeypatch.setattr(live, "LONGEST_GOODBYE_S", 60.0)
    with live.reporting_to_people(9, "run directory: r") as reporter:
        yield reporter


def painters() -> list[threading.Thread]:
    """Return rich's threads that draw a view."""
    return [thread for thread in threading.enumerate() if isinstance(thread, _RefreshThread)]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lines_stay_above_the_view_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    on = terminal()
    with painted(on, monkeypatch) as view:
        console.note("before anything")
        assert "before anything" in written(on)
        assert "\x1b[?25l" not in written(on)
        view.phase("rollouts")
        view.step(step(1), [group("4")])
        console.note("[red]a note", style="dim")
        until(lambda: "a sample of step 1" in written(on))
        with console.waiting("restarting vLLM") as detail:
            detail("3 s")
            until(lambda: "restarting vLLM  3 s" in ESCAPE.sub("", written(on)))
    text = written(on)
    positions = [
        text.rindex(part) for part in ("run directory: r", "step 1/9  reward", "[red]a note", "a sample of step")
    ]
    assert positions == sorted(positions)
    assert text.count("[red]a note") == 1
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")
    until(lambda: not painters())
    console.note("afterwards")
    assert written(on).endswith("afterwards\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_error_restores_the_terminal(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    on = terminal()
    before = sys.stderr
    with pytest.raises(error), painted(on, monkeypatch) as view:  # noqa: PT012
        view.phase("fence")
        view.step(step(1), [])
        raise error
    assert written(on).rindex("\x1b[?25h") > written(on).rindex("step 1/9  reward")
    assert (sys.stderr, console._view) == (before, None)


def test_stalled_terminal_does_not_delay_training(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, stuck = threading.Event(), threading.Event()

    class Stalled(io.StringIO):
        def write(self, text: str) -> int:
            if painters():  # the view was opened while the terminal still accepted output
                stuck.set()
                taken.wait()
            return super().write(text)

    on = terminal(file=Stalled())
    try:
        with painted(on, monkeypatch) as view:
            view.phase("rollouts")
            stuck.wait()
            for number in range(1, 10):
                view.progress(number, 9)
                view.step(step(number), [group("4")])
                console.note("a note")
            taken.set()
    finally:
        taken.set()
    assert written(on).count("a note") == 9


@pytest.mark.parametrize("smaller", [(85, 40), (100, 30), (60, 20)])
def test_shrunk_terminal_is_cleared_and_gets_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, smaller: tuple[int, int]
) -> None:
    on, cleared = terminal(), "\x1b[2J\x1b[H"
    with painted(on, monkeypatch) as view:
        view.phase("rollouts")
        for number in range(1, 100):
            view.step(step(number), [group("4")])
        until(lambda: "a sample of step 99" in written(on))
        on.size = ConsoleDimensions(*smaller)
        until(lambda: "step 99/9  reward" in written(on).rpartition(cleared)[2])
        view.step(step(100), [group("4")])
        until(lambda: "step 100/9  reward" in written(on).rpartition(cleared)[2])
    screen = ESCAPE.sub("", written(on).rpartition(cleared)[2])
    assert written(on).count(cleared) == 1
    assert screen.count("step 99/9  reward") == screen.count("step 100/9  reward") == 1
    assert ("a sample of step 100" in screen) == (smaller[0] >= live.NARROWEST and smaller[1] >= live.LOWEST)
    assert "step 50/9  reward" not in screen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_gone", [True, False], ids=["the terminal is gone", "the view has a bug"])
def test_view_that_cannot_draw_loses_no_line(monkeypatch: pytest.MonkeyPatch, is_gone: bool) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    on = terminal(file=Closed()) if is_gone else terminal()
    monkeypatch.setattr(live, "_table", broken)
    with pytest.raises(OSError if is_gone else AssertionError), painted(on, monkeypatch) as view:  # noqa: PT012
        view.phase("rollouts")
        until(lambda: not painters())
        view.step(step(1), [group("4")])
        assert is_gone or "step 1/9  reward" not in written(on)


PROGRAM = """
import sys, time
from bridge_cli import console, live
from tests.cli.test_live import HOSTILE, group, step
live.LONGEST_GOODBYE_S = 60.0
with live.reporting_to_people(3, "run directory: r") as reporter:
    view = reporter._reporters[-1]
    for number in (1, 2, 3):
        reporter.phase("rollouts")
        reporter.progress(1, 2)
        reporter.step(step(number), [group(HOSTILE)])
        print("a stray line", file=sys.stderr)
        while view._drawn is None or view._drawn.num_reports < number:
            time.sleep(0.01)
console.note("done")
"""


def test_real_terminal_shows_the_view_and_is_restored() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in {"CI", "NO_COLOR", "TTY_INTERACTIVE"}}
    environment = plain | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        text = _read_all(ours)
    assert process.returncode == 0, text
    assert "a sample of step" in text
    assert "\x1b]" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith("done\r\n")
    for number in (1, 2, 3):
        assert f"step {number}/3  reward" in text


def _read_all(descriptor: int) -> str:
    text = b""
    while select.select([descriptor], [], [], 60)[0]:
        try:
            read = os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            break
        if not read:
            break
        text += read
    os.close(descriptor)
    return text.decode()
