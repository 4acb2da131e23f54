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
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from bridge.core.private import cleaned
from bridge.run.metrics import StepMetrics
from bridge.types import Message
from bridge_cli import console, live, panel, steps
from tests.cli.test_run_directory import evaluation, group, metrics

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]no markup[/bold] \x9b2J \u202eevil \x00\x7f\r\n\ttab"
PICTURES = "你好世界 שלום עולם مرحبا 👨‍👩‍👧 e\u0301 हिन्दी " * 20
CLEARED = "\x1b[2J\x1b[H"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def terminal(width: int = 100, height: int = 40, **changed: Any) -> Console:
    """Return a terminal that keeps its output."""
    known: dict[str, Any] = {"file": io.StringIO(), "force_terminal": True, "width": width, "height": height}
    return Console(**(known | {"_environ": {"TERM": "xterm-256color"}, "soft_wrap": True} | changed))


def written(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def step(number: int, **changed: Any) -> StepMetrics:
    known: dict[str, Any] = {"rollout_s": 2.0, "train_s": 0.25, "tokens_generated": 4000, "reward_mean": 0.1 * number}
    return metrics(number, **(known | changed))


def cells(text: str) -> int:
    """Return the most cells that a terminal may use for `text`."""
    return len(text) + len(panel.WIDE.findall(text))


def fed(text: str = "the answer is 5", *, prompt: str | list[Message] = "2+3=", num_steps: int = 4) -> live.View:
    """Return the view of a run in flight, without the thread that paints it."""
    clock = iter(range(1000))
    view = live.View(terminal(), 9, clock=lambda: float(next(clock)))
    view._seen.phase = "rollouts"
    view.evaluation(evaluation(0, 0.25))
    for number in range(1, num_steps + 1):
        view.step(step(number), [group(), group(text, prompt=prompt)])
    view.progress(3, 8)
    return view


def shown(view: live.View, width: int = 100, height: int = 40) -> list[str]:
    return panel.render(view._seen, now=100.0, width=width, height=height).plain.split("\n")


def test_the_view_shows_the_figures_of_the_run_what_it_is_at_and_a_sample() -> None:
    text = "\n".join(shown(fed()))
    for part in (
        "step 4/9", "1.0 s a step, about 5.0 s left", "0.400 ± 0.500", "0.250", "|dlogprob|  0.5000 max 0.500",
        "fence       1.5 s", "2,000 tok/s", "250 ms", "0.50 GiB", "sampling and scoring", "3 of 8 groups",
        "a sample of step 4  reward 0.000", "2 tokens", "2+3=", "the answer is 5",
    ):  # fmt: skip
        assert part in text, part
    assert panel.DOT in text


def test_a_step_in_which_nothing_was_trained_on_leaves_a_gap_and_no_error() -> None:
    view = fed()
    view.step(step(5, logprob_diff_mean=math.nan, logprob_diff_max=math.nan, reward_mean=math.nan), [group()])
    text = "\n".join(shown(view))
    assert "nan ± 0.500" in text
    assert re.search(r"\|dlogprob\|\s+-\s+max\s+-", text)


def test_with_groups_in_flight_it_shows_where_the_time_goes_and_how_old_they_are() -> None:
    view = fed()
    more = {"groups_in_flight": 240, "staleness": 12.0, "fence_write_s": 0.25, "fence_publish_s": 0.0, "rollout_s": 0.5}
    view.step(step(5, fence_pause_s=0.0, fence_prepare_s=0.0, **more), [group()])
    (line,) = [line for line in shown(view, 80, 30) if line.startswith(" time ")]
    assert line.endswith("  wait 50%  train 25%  fence 25%  240 in flight, staleness 12")
    assert line.count("━") == panel.TIMES_WIDTH
    assert len(line) <= 80


def test_a_view_of_nothing_yet_is_one_too() -> None:
    lines = shown(live.View(terminal(), 9))
    assert "9 steps to take" in lines[0]
    assert len(lines) == 1 + panel.CHART_HEIGHT + 1


@pytest.mark.parametrize(("width", "height"), [(80, 24), (81, 30), (120, 40), (300, 90)])
@pytest.mark.parametrize("text", ["", "x", "word " * 4000, "x" * 40_000, HOSTILE * 9, PICTURES, "\n" * 100])
def test_it_fits_the_terminal_whatever_was_sampled(width: int, height: int, text: str) -> None:
    view = fed(text, prompt=[{"role": "user", "content": text}])
    lines = shown(view, width, height)
    assert len(lines) <= height - panel.ROWS_FOR_LINES
    for line in lines:
        assert cell_len(line) <= width
        assert "\x1b" not in line
    sample = lines[next(place for place, line in enumerate(lines) if "a sample of" in line) + 1 :]
    assert all(cells(line) <= width for line in sample)


@pytest.mark.parametrize(("width", "height"), [(79, 50), (100, 23), (20, 5)])
def test_a_small_terminal_has_lines_alone(width: int, height: int) -> None:
    assert shown(fed(), width, height) == [""]


def test_nothing_that_was_sampled_acts_on_the_terminal() -> None:
    view = fed(HOSTILE)
    on = terminal()
    on.print(panel.render(view._seen, now=100.0, width=100, height=40))
    text = ESCAPE.sub("", written(on))
    assert r"\x1b[31mred\x1b]0;title\x07 [bold]no markup[/bold] \x9b2J \u202eevil \x00\x7f" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert "\n      tab" in text


def test_lines_are_broken_between_words_and_no_terminal_draws_one_too_wide() -> None:
    assert list(panel.wrapped("one two  three\n\nfour", 8)) == ["one two", "three", "", "four"]
    assert list(panel.wrapped("    indented text", 12)) == ["    indented", "text"]
    assert list(panel.wrapped("abcdefgh", 3)) == ["abc", "def", "gh"]
    for width in (2, 7, 40):
        lines = list(panel.wrapped(cleaned(PICTURES), width))
        assert all(cells(line) <= width and cell_len(line) <= width for line in lines)
        assert "".join("".join(lines).split()) == "".join(cleaned(PICTURES).split())


def test_of_a_long_text_the_beginning_and_the_end_are_shown_and_of_a_long_prompt_the_end() -> None:
    text = "first " + "word " * 5000 + "last"
    lines = panel.first_lines(text, 40, 5)
    assert (len(lines), lines[0][:5], lines[3], lines[4][-4:]) == (5, "first", "…", "last")
    lines = panel.last_lines(text, 40, 2)
    assert (len(lines), lines[0][:2], lines[1][-4:]) == (2, "… ", "last")
    assert panel.first_lines("a\nb", 40, 2) == panel.last_lines("a\nb", 40, 2) == ["a", "b"]


def test_bars_rise_with_the_values_and_dots_stand_where_they_belong() -> None:
    rows = [line.plain for line in panel.bars([0.0, 0.5, 1.0], {2: 0.0}, width=9, height=2)]
    assert rows == [" ▁█", "▁█●"]
    many = [line.plain for line in panel.bars([float(value) for value in range(1000)], {}, width=10, height=1)]
    assert many == ["▁▂▃▃▄▅▆▆▇█"]
    assert [line.plain for line in panel.bars([], {-1: 0.5}, width=10, height=2)] == ["", ""]
    assert [line.plain for line in panel.bars([math.nan, 1.0], {}, width=10, height=1)] == [" ▁"]


def test_a_curve_is_level_where_little_changes_and_has_a_gap_where_there_is_no_number() -> None:
    assert panel.sparkline([1.0, 1.01, 0.99, 1.0]) == "▅▅▄▅"
    assert panel.sparkline([0.0, 1.0, math.nan, 1.0]) == "▁█ █"
    assert panel.sparkline([]) == ""


def test_a_line_of_a_step_is_cut_at_a_figure_and_only_where_it_is_too_long() -> None:
    full = steps.step_line(step(3), 60)
    assert steps.step_line(step(3), 60, width=len(full)) == full
    assert "\n" not in full
    for width in range(60, len(full)):
        cut = steps.step_line(step(3), 60, width=width)
        assert len(cut) <= width
        assert full.startswith(f"{cut}{steps.GAP}")


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
        (False, {"TERM": "xterm-256color"}, False),
        (False, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}, False),
    ],
)
def test_only_a_person_at_a_terminal_gets_the_view(
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


def test_where_there_is_no_terminal_a_run_is_one_line_a_step_and_an_evaluation(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with live.reporting_to_people(2, "run directory: r", data=told.append) as reporter:
        reporter.phase("evaluation")
        reporter.evaluation(evaluation(0))
        for number in (1, 2):
            reporter.phase("rollouts")
            reporter.progress(1, 2)
            reporter.step(step(number), [group("4")])
    out, err = capfd.readouterr()
    expected = ["run directory: r", "held-out reward 0.500 after step 0  8 problems  1.0 s"]
    assert err.splitlines() == [*expected, *(steps.step_line(step(number), 2) for number in (1, 2))]
    assert out == ""
    first, *rest = [json.loads(line) for line in told]
    assert (first["evaluation"]["step"], first["evaluation"]["reward_mean"]) == (0, 0.5)
    assert [each["step"] for each in rest] == [1, 2]


def test_a_run_that_reports_nothing_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with live.reporting_to_people(2, "run directory: r"):
        pass
    assert capfd.readouterr() == ("", "")


@contextmanager
def painted(on: Console, monkeypatch: pytest.MonkeyPatch) -> Iterator[live.View]:
    """Show a view on the terminal `on`, as a run does."""
    monkeypatch.setattr(console, "people", on)
    monkeypatch.setattr(live, "wanted", lambda *_, has_data: True)
    monkeypatch.setattr(live, "LONGEST_GOODBYE_S", 60.0)
    with live.reporting_to_people(9, "run directory: r") as view:
        assert isinstance(view, live.View)
        yield view


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lines_and_notes_are_printed_above_the_view_in_their_order_and_stay_when_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
            until(lambda: "restarting vLLM  3 s" in written(on))
    text = written(on)
    places = [text.rindex(part) for part in ("run directory: r", "step 1/9  reward", "[red]a note", "a sample of step")]
    assert places == sorted(places)
    assert text.count("[red]a note") == 1
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")
    assert not view._painter.is_alive()
    console.note("afterwards")
    assert written(on).endswith("afterwards\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_end_by_error_gives_the_terminal_back(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    on = terminal()
    before = sys.stderr
    with pytest.raises(error), painted(on, monkeypatch) as view:  # noqa: PT012
        view.phase("fence")
        view.step(step(1), [])
        raise error
    assert "step 1/9  reward" in written(on)
    assert written(on).rindex("\x1b[?25h") > written(on).rindex("step 1/9")
    assert (sys.stderr, console._view) == (before, None)


def test_a_terminal_that_takes_nothing_any_more_does_not_hold_training_up(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, stuck = threading.Event(), threading.Event()

    class Stalled(io.StringIO):
        def write(self, text: str) -> int:
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
def test_a_terminal_that_gets_smaller_has_the_lines_and_the_view_once_and_nothing_of_the_old_view(
    monkeypatch: pytest.MonkeyPatch, smaller: tuple[int, int]
) -> None:
    on = terminal()
    with painted(on, monkeypatch) as view:
        view.phase("rollouts")
        for number in range(1, 100):
            view.step(step(number), [group("4")])
        until(lambda: "a sample of step 99" in written(on))
        on.size = ConsoleDimensions(*smaller)
        until(lambda: CLEARED in written(on))
        until(lambda: "step 99/9  reward" in written(on).rpartition(CLEARED)[2])
        view.step(step(100), [group("4")])
        until(lambda: "step 100/9  reward" in written(on).rpartition(CLEARED)[2])
    screen = ESCAPE.sub("", written(on).rpartition(CLEARED)[2])
    assert written(on).count(CLEARED) == 1
    assert screen.count("step 99/9  reward") == screen.count("step 100/9  reward") == 1
    assert ("a sample of step 100" in screen) == (smaller[0] >= panel.NARROWEST and smaller[1] >= panel.LOWEST)
    assert "step 50/9  reward" not in screen


def test_a_terminal_that_is_gone_is_an_error_of_the_next_line_as_without_a_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"), painted(terminal(file=Gone()), monkeypatch) as view:  # noqa: PT012
        view.phase("rollouts")
        until(lambda: not view._painter.is_alive())
        view.step(step(1), [group("4")])
        pytest.fail("the line went nowhere")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_view_costs_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    on = terminal()

    def broken(*_: object, **__: object) -> Text:
        raise ZeroDivisionError

    monkeypatch.setattr(panel, "render", broken)
    with painted(on, monkeypatch) as view:
        view.phase("rollouts")
        until(lambda: not view._painter.is_alive())
        view.step(step(1), [group("4")])
        assert "step 1/9  reward" in written(on)
    assert written(on).rstrip().endswith("fence    1.5 s  rollout  2.00 s")


PROGRAM = """
import sys, time
from bridge_cli import console, live
from tests.cli.test_live import HOSTILE, evaluation, group, step
with live.reporting_to_people(3, "run directory: r") as reporter:
    for number in (1, 2, 3):
        reporter.phase("rollouts")
        reporter.progress(1, 2)
        reporter.step(step(number), [group(HOSTILE)])
        print("a stray line", file=sys.stderr)
        time.sleep(0.4)
console.note("done")
"""


def test_a_real_terminal_shows_the_view_and_is_left_as_it_was() -> None:
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
    assert r"\x1b]0;title\x07" in text
    assert "\x1b]" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith("done\r\n")
    for number in (1, 2, 3):
        assert f"step {number}/3  reward" in text


def _read_all(descriptor: int) -> str:
    found = b""
    while select.select([descriptor], [], [], 60)[0]:
        try:
            read = os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            break
        if not read:
            break
        found += read
    os.close(descriptor)
    return found.decode()
