"""What the live view shows: the figures of a run as curves, what it is at, and one completion to read.

No line has a border at its right: characters that a terminal draws wider or from right to left cannot break it.

Not covered: when it is painted (`live.py`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from bridge.run import reporting
from bridge.run.metrics import Evaluation, StepMetrics
from bridge.run.reporting import Phase, Sample
from cli import chart, visible
from cli.steps import duration, or_dash, tokens_per_s

NARROWEST, LOWEST = 80, 24
"""Columns and rows of a terminal; a smaller one shows lines alone."""
CHART_HEIGHT = 7
FIGURES_WIDTH, CURVE_WIDTH = 42, 12
MOST_SAMPLE_LINES = 12
MOST_READ = 4000
"""Steps that the chart is made of; of more, every second or third is left out."""
ROWS_FOR_LINES = 9
"""Rows of the terminal that are left to the lines above."""
PHASES = {
    "rollouts": "sampling and scoring",
    "train": "forward and backward",
    "fence": "fence",
    "evaluation": "evaluating on held-out problems",
    "save": "saving a checkpoint",
}
LABEL, TITLE, SAMPLE_PROMPT = "dim", "bold", "dim"


@dataclass
class Seen:
    """What is known of the run so far. The training thread writes it, another one reads it."""

    num_steps: int
    """Steps that the run is to take."""
    steps: list[StepMetrics] = field(default_factory=list)
    """The steps taken."""
    step_ends: deque[float] = field(default_factory=lambda: deque(maxlen=21))
    """When the last of them ended, in seconds of a clock that never goes back."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """The evaluations on held-out problems."""
    phase: Phase | None = None
    """What is being done; None: it has not been told."""
    phase_began: float = 0.0
    """When that began, by the same clock."""
    progress: tuple[int, int] | None = None
    """How many groups of this phase have been scored, of how many."""
    waiting: str = ""
    """What is waited for meanwhile, such as a server that is started again."""
    sample: Sample | None = None
    """A completion of the last step."""


def render(seen: Seen, *, now: float, width: int, height: int) -> Text:
    """Return the whole view for a terminal of that size; nothing where it is too small."""
    if width < NARROWEST or height < LOWEST:
        return Text()
    lines = [_header(seen, width), *_curves(seen, width), _status(seen, now, width)]
    room = min(height - ROWS_FOR_LINES - len(lines) - 1, MOST_SAMPLE_LINES)
    if seen.sample is not None:
        lines += _sample(seen.sample, seen.steps[-1].step if seen.steps else 0, width, room)
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


def _header(seen: Seen, width: int) -> Text:
    last = seen.steps[-1].step if seen.steps else 0
    title = f"step {last}/{seen.num_steps}" if last else f"{seen.num_steps} steps to take"
    pace = _pace_s(seen)
    times = f"{duration(pace)} a step, {_left(pace * (seen.num_steps - last))}" if pace is not None else ""
    return _rule(Text(title, TITLE), times, width)


def _left(seconds: float) -> str:
    return f"about {duration(seconds)} left" if seconds else "all steps taken"


def _pace_s(seen: Seen) -> float | None:
    """Return how long a step takes, all that lies between two steps included."""
    ends = list(seen.step_ends)
    if len(ends) > 1:
        return (ends[-1] - ends[0]) / (len(ends) - 1)
    return next((step.rollout_s + step.train_s + step.fence_s for step in seen.steps[-1:]), None)


def _rule(title: Text, right: str, width: int) -> Text:
    right = f" {right} ──" if right else ""
    line = Text.assemble(("── ", LABEL), title, " ")
    return line.append("─" * (width - line.cell_len - len(right)) + right, LABEL)


def _curves(seen: Seen, width: int) -> list[Text]:
    """Return the chart of the rewards, with the figures beside it."""
    stride = 1 + len(seen.steps) // MOST_READ  # however long the run, a picture takes no longer
    rewards = [step.reward_mean for step in seen.steps[::stride]]
    first = seen.steps[0].step if seen.steps else 1
    held_out = {(each.step - first) // stride: each.reward_mean for each in seen.evaluations}
    room = width - FIGURES_WIDTH - 11
    lines = chart.bars(rewards, held_out, width=room, height=CHART_HEIGHT)
    low, high = chart.bounds([*rewards, *held_out.values()])
    labels = {0: f"{high:6.3f}", CHART_HEIGHT - 1: f"{low:6.3f}"} if rewards or held_out else {}
    return [
        Text.assemble((f"{labels.get(row, ''):>6} │", LABEL), line, " " * (room - line.cell_len + 2), figures)
        for row, (line, figures) in enumerate(zip(lines, _figures(seen), strict=True))
    ]


def _figures(seen: Seen) -> list[Text]:
    return [
        _figure(seen, "reward", lambda step: f"{step.reward_mean:.3f} ± {step.reward_std:.3f}"),
        Text.assemble((f"held-out {chart.DOT}  ", "yellow"), _held_out(seen.evaluations)),
        _figure(seen, "|dlogprob|", _differences, lambda step: step.logprob_diff_mean),
        _figure(seen, "fence", lambda step: duration(step.fence_s), lambda step: step.fence_s),
        _figure(seen, "rollouts", lambda step: f"{tokens_per_s(step):,.0f} tok/s", tokens_per_s),
        _figure(seen, "training", lambda step: duration(step.train_s), lambda step: step.train_s),
        _figure(seen, "memory", lambda step: f"{step.peak_memory_gib:.2f} GiB", lambda step: step.peak_memory_gib),
    ]


def _figure(
    seen: Seen, name: str, shown: Callable[[StepMetrics], str], value: Callable[[StepMetrics], float] | None = None
) -> Text:
    """Return a name, what it was in the last step and, of a `value`, a small curve of the last steps."""
    line = Text.assemble((f"{name:12}", LABEL), f"{_of_last(seen, shown):{FIGURES_WIDTH - CURVE_WIDTH - 12}}")
    if value is not None:
        line.append(chart.curve([value(step) for step in seen.steps[-2 * CURVE_WIDTH :]]), "cyan")
    return line


def _differences(step: StepMetrics) -> str:
    return f"{or_dash(step.logprob_diff_mean, 4)} max {or_dash(step.logprob_diff_max, 3)}"


def _of_last(seen: Seen, shown: Callable[[StepMetrics], str]) -> str:
    return shown(seen.steps[-1]) if seen.steps else "-"


def _held_out(evaluations: Sequence[Evaluation]) -> str:
    ends = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations
    return " -> ".join(f"{each.reward_mean:.3f}" for each in ends) or "-"


def _status(seen: Seen, now: float, width: int) -> Text:
    """Return what is going on now."""
    line = Text.assemble((" now   ", LABEL))
    if seen.waiting:
        return line.append(next(visible.wrapped(visible.cleaned(f" {seen.waiting}"), width - 8)), "yellow")
    if seen.phase is None:
        return line.append("-")
    line.append(f" {PHASES[seen.phase]}", TITLE)
    if seen.progress is not None:
        done, total = seen.progress
        filled = 20 * done // max(total, 1)
        line.append("  ").append("━" * filled, "green").append("─" * (20 - filled), LABEL)
        line.append(f" {done} of {total} groups")
    seconds = now - seen.phase_began
    return line.append(f"  {seconds:.1f} s" if seconds < 60 else f"  {duration(seconds)}", LABEL)


def _sample(sample: Sample, step: int, width: int, room: int) -> list[Text]:
    """Return a rule and at most `room` lines: the end of the prompt, and the completion."""
    reason = ", cut off" if sample.completion.finish_reason == "length" else ""
    num_tokens = len(sample.completion.token_ids)
    title = Text.assemble((f"a sample of step {step}", TITLE), f"  reward {sample.reward:.3f}")
    prompt = visible.last_lines(reporting.prompt_text(sample.group), width - 4, max(1, room // 4))
    answer = visible.first_lines(sample.completion.text, width - 4, room - len(prompt))
    return [
        _rule(title, f"{num_tokens:,} tokens{reason}", width),
        *(Text(f"  {line}", SAMPLE_PROMPT) for line in prompt),
        *(Text(f"  {line}") for line in answer),
    ]
