"""The live view of a run: its lines scroll as usual; progress bars, the metrics and a sample stay below them.

A separate thread draws on the terminal: training hands it lines and metrics, and never waits for it.
"""

import itertools
import math
import os
import re
import statistics
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from bridge.checkpoints.metric_table import METRICS, Metric, is_number
from bridge.checkpoints.metrics import Evaluation, StepMetrics
from bridge.core.interrupt import deferred_interrupt
from bridge.core.redaction import escaped
from bridge.run import reporting
from bridge.types import Group as Rollouts
from bridge_cli import console
from bridge_cli.step_lines import Lines, duration, value_range

PERIOD_S = 0.25
"""Between two refreshes of the terminal."""
LONGEST_GOODBYE_S = 3.0
"""A terminal that takes no more output holds up the end of a run for this long."""
NARROWEST, LOWEST = 80, 24
"""Columns and rows of the smallest terminal that gets a view."""
WIDE_ENOUGH = 100
"""Columns of a terminal that also gets the ranges of the values."""
ROWS_FOR_LINES = 9
"""Rows that are left for the lines above the view."""
MOST_SAMPLE_LINES = 12
MOST_STEPS = 2000
"""Steps whose metrics are kept for the bars."""
READ_CHARACTERS = 4000
"""Characters of a text that are read to show a few lines of it."""
WIDE = re.compile(r"[^\0-\u052f]")
"""Neither Latin nor Greek nor Cyrillic: a terminal may draw such a character two cells wide."""
BLOCKS = " ▁▂▃▄▅▆▇█"
PHASES = {
    "rollouts": "sampling and scoring",
    "train": "forward and backward",
    "fence": "fence",
    "evaluation": "evaluating on held-out problems",
    "save": "saving a checkpoint",
}


@contextmanager
def reporting_to_people(num_steps: int, opening: str, *, data: Callable[[str], None] | None = None) -> Iterator[Lines]:
    """Report a run of `num_steps` in lines, with a view below them on a terminal that can show it."""
    if not wanted(console.people, os.environ, has_data=data is not None):
        yield Lines(num_steps, opening, data=data)
        return
    view = View(console.people, num_steps, opening, data=data)
    with console.shared_with(view.say, view.wait_for):
        try:
            yield view
        finally:
            with deferred_interrupt():
                view.close()


def wanted(terminal: Console, environment: Mapping[str, str], *, has_data: bool) -> bool:
    """Return whether a person looks at `terminal`, and no lines of data on stdout would break the view."""
    return (
        terminal.is_interactive
        and not terminal.is_dumb_terminal
        and terminal.file.isatty()
        and terminal.encoding.startswith("utf")
        and not environment.get("CI")
        and not (has_data and sys.stdout.isatty())
    )


class View(Lines):
    """Reports lines, and a view below them."""

    def __init__(
        self, terminal: Console, num_steps: int, opening: str = "", *, data: Callable[[str], None] | None = None
    ) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(num_steps, opening, data=data)
        self._terminal = terminal
        self._bars = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(None, complete_style="green", finished_style="green", pulse_style="cyan"),
            TextColumn("{task.fields[detail]}", style="dim"),
            TimeElapsedColumn(),
            console=terminal,
            expand=True,
        )
        self._run_bar = self._bars.add_task("", total=num_steps, detail=f"{num_steps} steps to take")
        self._phase_bar = self._bars.add_task("", total=None, detail="", visible=False)
        self._phase: reporting.Phase | None = None
        self._steps: deque[StepMetrics] = deque(maxlen=MOST_STEPS)
        self._step_ends: deque[float] = deque(maxlen=21)
        self._evaluations: list[Evaluation] = []
        self._sample: Rollouts | None = None
        self._num_reports = 0
        self._drawn: tuple[int, int, int] | None = None
        """Size of the terminal and number of steps and evaluations that `_body` shows."""
        self._body: list[Table | Text] = []
        self._lines: deque[Text] = deque()
        """Lines that are not printed yet."""
        self._printed: deque[Text] = deque(maxlen=ROWS_FOR_LINES - 1)
        """The last lines; they are printed again when the terminal gets smaller."""
        self._over = threading.Event()
        self._painter = threading.Thread(target=self._paint, name="live view", daemon=True)

    def say(self, line: Text) -> None:
        """Print `line` above the view soon, or at once if there is no view."""
        self._lines.append(line)
        if not self._painter.is_alive():
            self._print_lines()

    def wait_for(self, what: str) -> None:
        """Show what is awaited; empty: the wait is over."""
        name = PHASES[self._phase] if self._phase else ""
        self._bars.update(self._phase_bar, description=escaped(what).partition("\n")[0] or name)

    def phase(self, name: reporting.Phase) -> None:
        self._phase = name
        self._bars.reset(self._phase_bar, total=None, description=PHASES[name], detail="", visible=True)
        if not self._painter.ident:  # not before: what opens a run may ask a person something
            self._painter.start()

    def progress(self, done: int, total: int) -> None:
        detail = f"{done} of {total} groups"
        self._bars.update(self._phase_bar, completed=done, total=total, detail=detail, visible=True)

    def step(self, metrics: StepMetrics, groups: Sequence[Rollouts]) -> None:
        self._steps.append(metrics)
        self._step_ends.append(time.monotonic())
        self._sample = reporting.sample(groups)
        ends = self._step_ends
        pace_s = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else metrics.step_s
        left = self._num_steps - metrics.step
        rest = f"about {duration(pace_s * left)} left" if left else "all steps taken"
        self._bars.update(
            self._run_bar, completed=metrics.step, description=f"step {metrics.step}/{self._num_steps}",
            detail=f"{duration(pace_s)} a step, {rest}",
        )  # fmt: skip
        self._num_reports += 1
        self.width = self._terminal.width
        super().step(metrics, groups)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.append(evaluation)
        self._num_reports += 1
        super().evaluation(evaluation)

    def close(self) -> None:
        """Remove the view; the lines stay."""
        self._over.set()
        if self._painter.ident:
            self._painter.join(LONGEST_GOODBYE_S)
        self._print_lines()

    def __rich__(self) -> Group:
        width, height = self._terminal.size
        if width < NARROWEST or height < LOWEST:
            return Group()
        state = (width, height, self._num_reports)
        if state != self._drawn:  # else the bars alone move
            self._drawn = state
            self._body = self._drawing(width, height)
        return Group(self._bars.get_renderable(), *self._body)

    def _drawing(self, width: int, height: int) -> list[Table | Text]:
        steps, evaluations = list(self._steps), list(self._evaluations)
        table, num_lines = _table(steps, evaluations, room=height - ROWS_FOR_LINES - 5, has_ranges=width >= WIDE_ENOUGH)
        room = min(height - ROWS_FOR_LINES - 3 - num_lines, MOST_SAMPLE_LINES)
        sample = _sample(self._sample, steps[-1].step, width, room) if self._sample and steps and room > 1 else []
        return [table, *sample]

    def _paint(self) -> None:
        from rich.live import Live

        size = self._terminal.size
        with (
            suppress(OSError, SystemExit),  # the terminal is gone: whoever prints the next line finds out
            Live(self, console=self._terminal, auto_refresh=False, transient=True, redirect_stdout=False) as live,
        ):
            while not self._over.wait(PERIOD_S):
                now = self._terminal.size
                if now.width < size.width or now.height < size.height:  # terminals wrap longer lines in different ways
                    self._terminal.clear()
                    self._lines.extendleft(reversed(self._printed))
                size = now
                if not self._print_lines():  # which draws the view as well
                    live.refresh()
            self._print_lines()

    def _print_lines(self) -> bool:
        """Print the waiting lines in one go, and return whether there were any."""
        waiting = []
        with suppress(IndexError):  # another thread may take the last one
            while True:
                waiting.append(self._lines.popleft())
        if waiting:
            self._printed.extend(waiting)
            self._terminal.print(Text("\n").join(waiting))
        return bool(waiting)


class Bars:
    """A bar for each value, or for the mean of several if they are many; NaN is a gap."""

    def __init__(self, values: Sequence[float], *, height: int = 1, style: str = "cyan") -> None:
        self.values = values
        self.height = height
        self._style = style

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(self.rows(options.max_width)), style=self._style, no_wrap=True, overflow="crop")

    def rows(self, width: int) -> list[str]:
        """Return the lines from the top down; differences below a fifth of the largest value look flat."""
        num_columns = min(width, len(self.values))
        edges = [index * len(self.values) // num_columns for index in range(num_columns + 1)] if num_columns else []
        columns = [statistics.fmean(self.values[start:end]) for start, end in itertools.pairwise(edges)]
        finite = [value for value in columns if math.isfinite(value)] or [0.0]
        middle = (min(finite) + max(finite)) / 2
        half = max(max(finite) - min(finite), max(map(abs, finite)) / 5) / 2 or 1.0
        full = len(BLOCKS) - 1
        steps = full * self.height - 1
        levels = [
            1 + round((value - middle + half) / (2 * half) * steps) if math.isfinite(value) else 0 for value in columns
        ]
        return [
            "".join(BLOCKS[min(max(level - full * row, 0), full)] for level in levels)
            for row in reversed(range(self.height))
        ]


def _table(
    steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation], *, room: int, has_ranges: bool
) -> tuple[Table, int]:
    """Return a table of at most `room` lines, and their number.

    It has the metrics declared `live` that are not 0 throughout, and those of a custom loss: the last value, and bars.
    """
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, min_width=12)
    table.add_column(ratio=1)
    table.add_column(style="dim", no_wrap=True, justify="right")
    left = room
    for metric in steps[-1].metrics() if steps else METRICS.values():
        if not metric.live and metric.name in METRICS:
            continue
        is_reward = metric.name == "reward_mean"
        values = [float(value) if is_number(value := step.get(metric.name)) else math.nan for step in steps]
        finite = [value for value in values if math.isfinite(value)]
        bars = Bars(values, height=min(3, room // 6), style="green") if is_reward else Bars(values)
        if any(finite) and bars.height <= left:
            span = value_range(_shown(metric, min(finite)), _shown(metric, max(finite))) if has_ranges else ""
            table.add_row(metric.title, _shown(metric, values[-1]), bars, span)
            left -= bars.height
        if is_reward and evaluations:
            rewards = [evaluation.reward_mean for evaluation in evaluations]
            ends = " → ".join(f"{reward:.3f}" for reward in dict.fromkeys([rewards[0], rewards[-1]]))
            table.add_row("Held-out reward", ends, Bars(rewards, style="yellow"))
            left -= 1
    return table, room - left


def _shown(metric: Metric, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    if metric.unit in ("s", "ms"):
        return duration(value)
    number = f"{metric.scale * value:,.0f}" if abs(value) >= 1000 else f"{metric.scale * value:.3g}"
    return f"{number} {metric.unit}".rstrip()


def _sample(group: Rollouts, step: int, width: int, room: int) -> list[Text]:
    """Return a title and at most `room` lines: the end of the prompt, and the completion."""
    completion = group.completions[0]
    reason = ", truncated" if completion.finish_reason == "length" else ""
    prompt = last_lines(reporting.prompt_text(group), width - 4, max(1, room // 4))
    answer = first_lines(completion.text, width - 4, room - len(prompt))
    title = Text.assemble((f"a sample of step {step}", "bold"), f"  reward {group.rewards[0]:.3f}  ")
    title.append(f"{len(completion.token_ids):,} tokens{reason}", "dim")
    lines = [title, *(Text(f"  {line}", "dim") for line in prompt), *(Text(f"  {line}") for line in answer)]
    return [Text(no_wrap=True, overflow="crop").append_text(line) for line in lines]


def first_lines(text: str, width: int, num_lines: int) -> list[str]:
    """Return the first lines of `text` and, if there are more, its last one."""
    kept = list(itertools.islice(wrapped(escaped(text[:READ_CHARACTERS]), width), num_lines + 1))
    if len(kept) <= num_lines and len(text) <= READ_CHARACTERS:
        return kept
    last = [*wrapped(escaped(text.rstrip()[-READ_CHARACTERS:]), width)][-1:]
    return [*kept[: max(num_lines - 2, 1)], "…", *last][:num_lines]


def last_lines(text: str, width: int, num_lines: int) -> list[str]:
    """Return the last lines of `text`."""
    kept = [*wrapped(escaped(text.rstrip()[-READ_CHARACTERS:]), width - 2)]
    return kept if len(kept) <= num_lines else [f"… {kept[-num_lines].lstrip()}", *kept[len(kept) - num_lines + 1 :]]


def wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the lines of escaped `text`, at most `width` cells each in any terminal, broken between words."""
    for line in text.split("\n"):
        limit = width // 2 if WIDE.search(line) else width
        yield from textwrap.wrap(line, limit, break_on_hyphens=False, replace_whitespace=False) or [""]
