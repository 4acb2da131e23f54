"""Show a training run to people: a line per step and per evaluation and, on a terminal, a live view below them.

rich's thread draws the view and prints the lines above it, so that training never waits for the terminal.
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
from typing import NamedTuple

from rich.console import Console, ConsoleDimensions, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bridge.checkpoints.metric_table import METRICS, Metric, is_number
from bridge.checkpoints.metrics import Evaluation, StepMetrics, Summary
from bridge.checkpoints.run_directory import labelled_json
from bridge.config.sections import ROW_LOSSES
from bridge.core import json_lines
from bridge.core.interrupt import deferred_interrupt
from bridge.core.redaction import escaped
from bridge.run import reporting
from bridge.types import Group as Rollouts
from bridge_cli import console

PERIOD_S = 0.25
"""Time between two refreshes of the terminal."""
LONGEST_GOODBYE_S = 3.0
"""Longest time that a terminal that no longer accepts output may delay the end of a run."""
NARROWEST, LOWEST = 80, 24
"""Columns and rows of the smallest terminal that gets a view."""
WIDE_ENOUGH = 100
"""Columns of a terminal that also shows the range of each value."""
ROWS_FOR_LINES = 9
"""Rows that are left for the lines above the view."""
MOST_SAMPLE_LINES = 12
MOST_STEPS = 2000
"""Steps whose metrics are kept for the bars."""
READ_CHARACTERS = 4000
"""Number of characters that are read from a text to show a few lines of it."""
WIDE = re.compile(r"[^\0-\u052f]")
"""Characters outside Latin, Greek and Cyrillic, which a terminal may draw two cells wide."""
BLOCKS = " ▁▂▃▄▅▆▇█"
GAP = "  "
"""Separator between two figures of a line."""
PHASES = {
    "rollouts": "sampling and scoring",
    "train": "forward and backward",
    "fence": "fence",
    "evaluation": "evaluating on held-out problems",
    "save": "saving a checkpoint",
}


@contextmanager
def reporting_to_people(
    num_steps: int, opening: str, *, data: Callable[[str], None] | None = None
) -> Iterator[reporting.Reporter]:
    """Report a run of `num_steps` in lines, with a view below them on a terminal that can show it."""
    if not wanted(console.people, os.environ, has_data=data is not None):
        yield Lines(num_steps, opening, data=data)
        return
    view = View(console.people, num_steps)
    with console.shared_with(view.say, view.wait_for):
        try:
            yield reporting.Reporters(Lines(num_steps, opening, data=data, terminal=console.people), view)
        finally:
            with deferred_interrupt():
                view.close()


def wanted(terminal: Console, environment: Mapping[str, str], *, has_data: bool) -> bool:
    """Return whether `terminal` is interactive, and no lines of data on stdout would break the view."""
    return (
        terminal.is_interactive
        and not terminal.is_dumb_terminal
        and terminal.file.isatty()
        and terminal.encoding.startswith("utf")
        and not environment.get("CI")
        and not (has_data and sys.stdout.isatty())
    )


class Lines(reporting.Reporter):
    """Reports each step and each evaluation as one line for people, and as JSON to `data`."""

    def __init__(
        self,
        num_steps: int,
        opening: str = "",
        *,
        data: Callable[[str], None] | None = None,
        terminal: Console | None = None,
    ) -> None:
        """Report a run of `num_steps`; `opening` is printed before the first line, if there is one.

        The line of a step is cut to the width of `terminal`, if given.
        """
        self._num_steps = num_steps
        self._opening = opening
        self._data = data
        self._terminal = terminal

    def step(self, metrics: StepMetrics, groups: Sequence[Rollouts]) -> None:  # noqa: ARG002 - as inherited
        width = self._terminal.width if self._terminal else None
        self._report(step_line(metrics, self._num_steps, width=width), json_lines.line(metrics))

    def evaluation(self, evaluation: Evaluation) -> None:
        passed = "".join(f"  pass@{k} {share:.3f}" for k, share in [*evaluation.pass_at_k.items()][-1:])
        line = (
            f"held-out reward {evaluation.reward_mean:.3f} after step {evaluation.step}{passed}"
            f"  {evaluation.num_problems} problems  {evaluation.seconds:.1f} s"
        )
        self._report(line, labelled_json("evaluation", evaluation))

    def _report(self, line: str, document: str) -> None:
        if self._opening:
            console.note(self._opening, style="dim")
            self._opening = ""
        console.note(line)
        if self._data is not None:
            self._data(document)


class View(reporting.Reporter):
    """Shows the progress of a run below its lines: bars, the metrics and a sample."""

    def __init__(self, terminal: Console, num_steps: int) -> None:
        self._terminal = terminal
        self._num_steps = num_steps
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
        self._drawn: Drawn | None = None
        self._lines: deque[Text] = deque()
        """Lines that are yet to be printed."""
        self._printed: deque[Text] = deque(maxlen=ROWS_FOR_LINES - 1)
        """The last printed lines, which are printed again when the terminal shrinks."""
        self._size = terminal.size
        self._painter: Painter | None = None
        """None until the first phase, because opening a run may prompt the user."""

    def say(self, line: Text) -> None:
        """Queue `line` to be printed above the view, or print it at once if there is no view."""
        self._lines.append(line)
        if self._painter is None or self._painter.has_ended.is_set():
            self.print_lines()

    def wait_for(self, what: str) -> None:
        """Show `what` Bridge is waiting for; an empty string ends the wait."""
        name = PHASES[self._phase] if self._phase else ""
        self._bars.update(self._phase_bar, description=escaped(what).partition("\n")[0] or name)

    def phase(self, name: reporting.Phase) -> None:
        self._phase = name
        self._bars.reset(self._phase_bar, total=None, description=PHASES[name], detail="", visible=True)
        if self._painter is None:
            self._painter = Painter(self, self._terminal)
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

    def evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.append(evaluation)
        self._num_reports += 1

    def close(self) -> None:
        """Remove the view, but keep the lines."""
        if self._painter is not None:
            self._painter.is_over = True
            self._painter.has_ended.wait(LONGEST_GOODBYE_S)
        self.print_lines()

    def __rich__(self) -> Group:
        size = self._terminal.size
        if size.width < NARROWEST or size.height < LOWEST:
            return Group()
        if self._drawn is None or (self._drawn.size, self._drawn.num_reports) != (size, self._num_reports):
            self._drawn = Drawn(size, self._num_reports, self._drawing(size.width, size.height))
        return Group(self._bars.get_renderable(), *self._drawn.body)  # only the bars change between two reports

    def _drawing(self, width: int, height: int) -> list[Table | Text]:
        steps, evaluations = list(self._steps), list(self._evaluations)
        table, num_lines = _table(steps, evaluations, room=height - ROWS_FOR_LINES - 5, has_ranges=width >= WIDE_ENOUGH)
        room = min(height - ROWS_FOR_LINES - 3 - num_lines, MOST_SAMPLE_LINES)
        sample = _sample(self._sample, steps[-1].step, width, room) if self._sample and steps and room > 1 else []
        return [table, *sample]

    def print_lines(self) -> bool:
        """Print all queued lines at once, and return whether there were any."""
        waiting = []
        with suppress(IndexError):  # another thread may take the last line
            while True:
                waiting.append(self._lines.popleft())
        if waiting:
            self._printed.extend(waiting)
            self._terminal.print(Text("\n").join(waiting))
        return bool(waiting)

    def fit_terminal(self) -> None:
        """Clear a terminal that shrank and print the last lines again, because terminals rewrap lines differently."""
        size, self._size = self._size, self._terminal.size
        if self._size.width < size.width or self._size.height < size.height:
            self._terminal.clear()
            self._lines.extendleft(reversed(self._printed))


class Drawn(NamedTuple):
    """What the view shows below its bars."""

    size: ConsoleDimensions
    num_reports: int
    """Number of steps and evaluations reported when it was drawn."""
    body: list[Table | Text]


class Painter(Live):
    """rich's live display, whose thread also prints the lines, so that no other thread waits for the terminal."""

    def __init__(self, view: View, terminal: Console) -> None:
        super().__init__(view, console=terminal, refresh_per_second=1 / PERIOD_S, transient=True, redirect_stdout=False)
        self._view = view
        self.is_over = False
        """Set by another thread: the next refresh is the last one."""
        self.has_ended = threading.Event()

    def start(self, refresh: bool = False) -> None:
        try:
            super().start(refresh)
        except (OSError, SystemExit):
            self.has_ended.set()  # the terminal is gone: the next print raises the error

    def refresh(self) -> None:
        """Print the queued lines and draw the view; rich's thread calls this. An error ends the view, not the run."""
        if not self.is_started:  # stop() calls refresh() once more
            return
        is_last = True
        try:
            is_over = self.is_over  # read first, so that lines queued before the end are not missed
            self._view.fit_terminal()
            if not self._view.print_lines():  # printing lines draws the view as well
                super().refresh()
            is_last = is_over
        except (OSError, SystemExit):
            pass  # the terminal is gone
        finally:
            if is_last:
                with suppress(OSError, SystemExit):
                    self.stop()
                self.has_ended.set()


class Bars:
    """One bar per value, or per mean of consecutive values if there are too many; NaN leaves a gap."""

    def __init__(self, values: Sequence[float], *, height: int = 1, style: str = "cyan") -> None:
        self.values = values
        self.height = height
        self._style = style

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(self.rows(options.max_width)), style=self._style, no_wrap=True, overflow="crop")

    def rows(self, width: int) -> list[str]:
        """Return the lines from top to bottom. A range below a fifth of the largest value is not magnified."""
        columns = self._columns(width)
        finite = [value for value in columns if math.isfinite(value)] or [0.0]
        lowest = min(finite)
        highest = max(finite)
        largest = max(abs(value) for value in finite)
        middle = (lowest + highest) / 2
        half = max(highest - lowest, largest / 5) / 2 or 1.0
        full = len(BLOCKS) - 1
        steps = full * self.height - 1
        levels = []
        for value in columns:
            share = (value - middle + half) / (2 * half)
            levels.append(1 + round(share * steps) if math.isfinite(value) else 0)
        rows = []
        for row in reversed(range(self.height)):
            filled = [min(max(level - full * row, 0), full) for level in levels]
            rows.append("".join(BLOCKS[eighths] for eighths in filled))
        return rows

    def _columns(self, width: int) -> list[float]:
        """Return the values, or means of consecutive values, so that there are at most `width`."""
        num_columns = min(width, len(self.values))
        if not num_columns:
            return []
        edges = [index * len(self.values) // num_columns for index in range(num_columns + 1)]
        return [statistics.fmean(self.values[start:end]) for start, end in itertools.pairwise(edges)]


def _table(
    steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation], *, room: int, has_ranges: bool
) -> tuple[Table, int]:
    """Return a table of at most `room` lines, and its number of lines.

    Each row has a metric's last value and bars: those declared `live` that are not always 0, a custom loss's own, and
    the loss if it is of given completions.
    """
    shown = {"loss"} if steps and steps[-1].get("objective") in ROW_LOSSES else set()
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, min_width=12)
    table.add_column(ratio=1)
    table.add_column(style="dim", no_wrap=True, justify="right")
    left = room
    for metric in steps[-1].metrics() if steps else METRICS.values():
        if not metric.live and metric.name in METRICS and metric.name not in shown:
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
    lines = [*wrapped(escaped(text.rstrip()[-READ_CHARACTERS:]), width - 2)]
    if len(lines) <= num_lines:
        return lines
    first, *rest = lines[len(lines) - num_lines :]
    return [f"… {first.lstrip()}", *rest]


def wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the lines of escaped `text`, at most `width` cells each in any terminal, broken between words."""
    for line in text.split("\n"):
        limit = width // 2 if WIDE.search(line) else width
        yield from textwrap.wrap(line, limit, break_on_hyphens=False, replace_whitespace=False) or [""]


def step_line(metrics: StepMetrics, num_steps: int, *, width: int | None = None) -> str:
    """Return the figures of a step in columns: as many as fit into `width`."""
    has_teacher = metrics.get("divergence") is not None and math.isfinite(metrics["divergence"])
    figures = [
        f"step {metrics.step:{len(str(num_steps))}}/{num_steps}",
        _result(metrics),
        *([f"divergence {or_dash(metrics.get('divergence'), 4)}"] if has_teacher else []),
        f"len {whole_or_dash(metrics.completion_tokens_mean):>5}",
        f"truncated {percent_or_dash(metrics.truncated_share):>4}",
        f"entropy {or_dash(metrics.entropy, 3)}",
        f"grad {or_dash(metrics.grad_norm, 3)}",
        f"|dlogprob| {or_dash(metrics.logprob_diff_mean, 4)}",
        f"fence {duration(metrics.fence_s) if metrics.is_published else '-':>8}",
        f"rollout {metrics.rollout_s:5.2f} s",
        f"train {metrics.train_s:5.2f} s",
        f"{tokens_per_s(metrics):7,.0f} tok/s",
    ]
    while width is not None and len(GAP.join(figures)) > width and len(figures) > 1:
        figures.pop()
    return GAP.join(figures)


def _result(metrics: StepMetrics) -> str:
    """Return what a step achieved: its reward, or its loss if it was on given completions."""
    objective = metrics.get("objective")
    if objective == "dpo":
        return f"dpo loss {metrics.loss:.4f}  margin {metrics.margin:.4f}"
    if objective == "sft":
        return f"sft loss {metrics.loss:.4f}"
    return f"reward {metrics.reward_mean:6.3f} +- {metrics.reward_std:.3f}"


def summary_line(summary: Summary) -> str:
    """Return a line that sums up a finished run."""
    rewards = ""
    if summary.reward_before is not None and summary.reward_after is not None:
        rewards = f"  held-out reward {summary.reward_before:.3f} -> {summary.reward_after:.3f}"
    return (
        f"done: {summary.steps} steps{rewards}  |dlogprob| max {or_dash(summary.logprob_diff_max, 3)}"
        f"  fence p50 {duration(summary.fence_p50_ms / 1e3)}"
    )


def tokens_per_s(metrics: StepMetrics) -> float:
    """Return how many tokens were sampled per second of sampling."""
    return metrics.tokens_generated / metrics.sampling_s if metrics.sampling_s else 0.0


def duration(seconds: float) -> str:
    """Return a time in a readable unit, or a dash if it is unknown."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"


def value_range(low: str, high: str) -> str:
    """Return a range of two values as text; a single unit that both values share is written once."""
    number, *units = low.split(" ")
    _, *units_of_high = high.split(" ")
    if units == units_of_high and len(units) < 2:
        return f"{number} to {high}"
    return f"{low} to {high}"


def whole_or_dash(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def percent_or_dash(share: float) -> str:
    return f"{share:.0%}" if math.isfinite(share) else "-"


def or_dash(value: float, digits: int) -> str:
    """Return `value`, or a dash of the same width if no token was trained (each group's rewards were all equal)."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-".center(digits + 2)
