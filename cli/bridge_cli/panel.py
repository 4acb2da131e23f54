"""The panel of the live view: the figures of a run as curves, its phase, and one completion to read.

No line has a border at its right, which a character that the terminal draws wider than expected would break.
"""

import itertools
import math
import re
import statistics
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from bridge.core.private import cleaned
from bridge.run import reporting
from bridge.run.metrics import Evaluation, StepMetrics
from bridge.run.reporting import Phase, Sample
from bridge_cli.steps import duration, or_dash, tokens_per_s

NARROWEST, LOWEST = 80, 24
"""Columns and rows of the smallest terminal that gets a panel."""
CHART_HEIGHT = 7
TIMES_WIDTH = 10
FIGURES_WIDTH, CURVE_WIDTH = 42, 12
MOST_SAMPLE_LINES = 12
ROWS_FOR_LINES = 9
"""Rows that are left for the lines above the panel."""
MOST_CHARTED = 4000
"""Steps in the chart; of more, only every second or third is shown."""
READ_CHARACTERS = 4000
"""Characters of a text that are read to show a few lines of it."""
WIDE = re.compile(r"[^\0-\u052f]")
"""Neither Latin nor Greek nor Cyrillic: a terminal may draw such a character two cells wide."""
FILLER = "\ufffe"
BLOCKS, DOT = " ▁▂▃▄▅▆▇█", "●"
PHASES = {
    "rollouts": "sampling and scoring",
    "train": "forward and backward",
    "fence": "fence",
    "evaluation": "evaluating on held-out problems",
    "save": "saving a checkpoint",
}
LABEL, TITLE = "dim", "bold"


def _balance(step: StepMetrics) -> str:
    """Return how much more the busiest of several ranks has to train on."""
    return f", busiest {step.rank_token_balance:.2f}x" if math.isfinite(step.rank_token_balance) else ""


Figure = tuple[str, Callable[[StepMetrics], str], Callable[[StepMetrics], float] | None]
REWARD: Figure = ("reward", lambda step: f"{step.reward_mean:.3f} ± {step.reward_std:.3f}", None)
FIGURES: tuple[Figure, ...] = (
    (
        "|dlogprob|",
        lambda step: f"{or_dash(step.logprob_diff_mean, 4)} max {or_dash(step.logprob_diff_max, 3)}",
        lambda step: step.logprob_diff_mean,
    ),
    ("fence", lambda step: duration(step.fence_s), lambda step: step.fence_s),
    ("rollouts", lambda step: f"{tokens_per_s(step):,.0f} tok/s", tokens_per_s),
    ("training", lambda step: duration(step.train_s) + _balance(step), lambda step: step.train_s),
    ("memory", lambda step: f"{step.peak_memory_gib:.2f} GiB", lambda step: step.peak_memory_gib),
)
"""Name, value of the last step as text, and the value of the curve beside it."""


@dataclass
class Seen:
    """The run so far: written by the training thread, read by the painter."""

    num_steps: int
    """Steps that the run will take."""
    steps: list[StepMetrics] = field(default_factory=list)
    step_ends: deque[float] = field(default_factory=lambda: deque(maxlen=21))
    """When the last steps ended, in seconds of a monotonic clock."""
    evaluations: list[Evaluation] = field(default_factory=list)
    phase: Phase | None = None
    phase_began: float = 0.0
    """In seconds of the same clock."""
    progress: tuple[int, int] | None = None
    """Groups scored in this phase, and how many there will be."""
    waiting: str = ""
    """What is awaited, such as a restarting server."""
    sample: Sample | None = None
    """A completion of the last step."""


def render(seen: Seen, *, now: float, width: int, height: int) -> Text:
    """Return the panel for a terminal of that size; nothing if it is too small."""
    if width < NARROWEST or height < LOWEST:
        return Text()
    lines = [_header(seen, width), *_curves(seen, width), *_times(seen), _status(seen, now, width)]
    room = min(height - ROWS_FOR_LINES - len(lines) - 1, MOST_SAMPLE_LINES)
    if seen.sample is not None:
        lines += _sample(seen.sample, seen.steps[-1].step if seen.steps else 0, width, room)
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


def _header(seen: Seen, width: int) -> Text:
    if not seen.steps:
        return _rule(Text(f"{seen.num_steps} steps to take", TITLE), "", width)
    last, ends = seen.steps[-1], list(seen.step_ends)
    pace_s = last.step_s
    if len(ends) > 1:
        pace_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    left_s = pace_s * (seen.num_steps - last.step)
    rest = f"about {duration(left_s)} left" if left_s else "all steps taken"
    title = Text(f"step {last.step}/{seen.num_steps}", TITLE)
    return _rule(title, f"{duration(pace_s)} a step, {rest}", width)


def _rule(title: Text, right: str, width: int) -> Text:
    right = f" {right} ──" if right else ""
    line = Text.assemble(("── ", LABEL), title, " ")
    return line.append("─" * (width - line.cell_len - len(right)) + right, LABEL)


def _curves(seen: Seen, width: int) -> list[Text]:
    """Return the chart of the rewards, with the figures beside it."""
    stride = 1 + len(seen.steps) // MOST_CHARTED
    rewards = [step.reward_mean for step in seen.steps[::stride]]
    first = seen.steps[0].step if seen.steps else 1
    held_out = {(each.step - first) // stride: each.reward_mean for each in seen.evaluations}
    room = width - FIGURES_WIDTH - 11
    lines = bars(rewards, held_out, width=room, height=CHART_HEIGHT)
    low, high = _bounds([*rewards, *held_out.values()])
    labels = {0: f"{high:6.3f}", CHART_HEIGHT - 1: f"{low:6.3f}"} if rewards or held_out else {}
    ends = [f"{each.reward_mean:.3f}" for each in (*seen.evaluations[:1], *seen.evaluations[1:][-1:])]
    evaluated = Text.assemble((f"held-out {DOT}  ", "yellow"), " -> ".join(ends) or "-")
    figures = [_figure(seen, REWARD), evaluated, *(_figure(seen, figure) for figure in FIGURES)]
    return [
        Text.assemble((f"{labels.get(row, ''):>6} │", LABEL), line, " " * (room - line.cell_len + 2), figure)
        for row, (line, figure) in enumerate(zip(lines, figures, strict=True))
    ]


def _figure(seen: Seen, figure: Figure) -> Text:
    name, shown, value = figure
    last = shown(seen.steps[-1]) if seen.steps else "-"
    line = Text.assemble((f"{name:12}", LABEL), f"{last:{FIGURES_WIDTH - CURVE_WIDTH - 12}}")
    if value is not None:
        line.append(sparkline([value(step) for step in seen.steps[-CURVE_WIDTH:]]), "cyan")
    return line


def _times(seen: Seen) -> Iterator[Text]:
    """Yield where the last step's time went, and what is in flight, if the server samples throughout."""
    if not seen.steps or not seen.steps[-1].groups_in_flight:
        return
    last, begun = seen.steps[-1], 0
    parts = [("wait", last.rollout_s, "yellow"), ("train", last.train_s, "green"), ("fence", last.fence_s, "red")]
    whole, line = math.fsum(seconds for _, seconds, _ in parts), Text.assemble((" time   ", LABEL))
    for place, (_, _, color) in enumerate(parts, start=1):
        end = round(TIMES_WIDTH * math.fsum(seconds for _, seconds, _ in parts[:place]) / whole) if whole else 0
        line.append("━" * (end - begun), color)
        begun = end
    shares = "  ".join(f"{name} {seconds / whole:.0%}" for name, seconds, _ in parts if whole)
    age = f", staleness {last.staleness:.0f}" if math.isfinite(last.staleness) else ""
    yield line.append(f"  {shares}  {last.groups_in_flight} in flight{age}", LABEL)


def _status(seen: Seen, now: float, width: int) -> Text:
    line = Text.assemble((" now   ", LABEL))
    if seen.waiting:
        return line.append(next(wrapped(cleaned(f" {seen.waiting}"), width - 8)), "yellow")
    if seen.phase is None:
        return line.append("-")
    line.append(f" {PHASES[seen.phase]}", TITLE)
    if seen.progress is not None:
        done, total = seen.progress
        filled = 20 * done // max(total, 1)
        line.append("  ").append("━" * filled, "green").append("─" * (20 - filled), LABEL)
        line.append(f" {done} of {total} groups")
    seconds = now - seen.phase_began
    return line.append(f"  {seconds:.1f} s" if seconds < 1 else f"  {duration(seconds)}", LABEL)


def _sample(sample: Sample, step: int, width: int, room: int) -> list[Text]:
    """Return a title and at most `room` lines: the end of the prompt, and the completion."""
    reason = ", truncated" if sample.completion.finish_reason == "length" else ""
    title = Text.assemble((f"a sample of step {step}", TITLE), f"  reward {sample.reward:.3f}")
    prompt = last_lines(reporting.prompt_text(sample.group), width - 4, max(1, room // 4))
    answer = first_lines(sample.completion.text, width - 4, room - len(prompt))
    return [
        _rule(title, f"{len(sample.completion.token_ids):,} tokens{reason}", width),
        *(Text(f"  {line}", LABEL) for line in prompt),
        *(Text(f"  {line}") for line in answer),
    ]


def first_lines(text: str, width: int, num_lines: int) -> list[str]:
    """Return the first lines of `text` and, if there are more, its last one."""
    kept = list(itertools.islice(wrapped(cleaned(text[:READ_CHARACTERS]), width), num_lines + 1))
    if len(kept) <= num_lines and len(text) <= READ_CHARACTERS:
        return kept
    return [*kept[: num_lines - 2], "…", *_ending(text, width)[-1:]]


def last_lines(text: str, width: int, num_lines: int) -> list[str]:
    """Return the last lines of `text`."""
    kept = _ending(text, width - 2)
    return kept if len(kept) <= num_lines else [f"… {kept[-num_lines].lstrip()}", *kept[len(kept) - num_lines + 1 :]]


def _ending(text: str, width: int) -> list[str]:
    return list(wrapped(cleaned(text.rstrip()[-READ_CHARACTERS:]), width))


def wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the lines of cleaned `text`, at most `width` cells each in any terminal, broken between words."""
    for line in text.split("\n"):
        filled = WIDE.sub(rf"{FILLER}\g<0>", line)  # counts as two
        limit = width if filled == line else width - 1  # a filler may be parted from its character
        for part in textwrap.wrap(filled, limit, break_on_hyphens=False, replace_whitespace=False) or [""]:
            yield part.replace(FILLER, "")


def bars(values: Sequence[float], dots: Mapping[int, float], *, width: int, height: int) -> list[Text]:
    """Return lines, from the top down, with a bar for each value, or for the mean of several if they are many.

    `dots` maps an index of `values` to another value, drawn over the bar.
    """
    num_columns = min(width, len(values))
    edges = [place * len(values) // num_columns for place in range(num_columns + 1)] if num_columns else []
    columns = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = _bounds([*columns, *dots.values()])
    full = len(BLOCKS) - 1
    levels = [_level(value, low, high, full * height) for value in columns]
    rows = [[(BLOCKS[min(max(level - full * row, 0), full)], "green") for level in levels] for row in range(height)]
    for place, value in dots.items():
        if columns and math.isfinite(value):
            column = min(max(place, 0) * num_columns // len(values), num_columns - 1)
            row = min(height * _level(value, low, high, full * height) // (full * height + 1), height - 1)
            rows[row][column] = (DOT, "bold yellow")
    return [Text.assemble(*cells) for cells in reversed(rows)]


def sparkline(values: Sequence[float]) -> str:
    """Return a small curve, one character per value; differences below a fifth of the largest value look flat."""
    low, high = _bounds(values)
    middle, half = (low + high) / 2, max(high - low, abs(high) / 5) / 2
    return "".join(BLOCKS[_level(value, middle - half, middle + half, len(BLOCKS) - 1)] for value in values)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest finite value."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _level(value: float, low: float, high: float, num_levels: int) -> int:
    """Return the place of a value between `low` and `high`, from 1 to `num_levels`; 0 for NaN."""
    if not math.isfinite(value):
        return 0
    return 1 + round((value - low) / (high - low) * (num_levels - 1)) if high > low else 1
