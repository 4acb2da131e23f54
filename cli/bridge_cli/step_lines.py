"""A training run in plain lines: one per step, one per evaluation, one at the end."""

import math
from collections.abc import Callable, Sequence

from bridge.checkpoints.metrics import Evaluation, StepMetrics, Summary
from bridge.checkpoints.run_directory import labelled_json
from bridge.core import json_lines
from bridge.run.reporting import Reporter
from bridge.types import Group
from bridge_cli import console

GAP = "  "
"""Between two figures of a line."""


class Lines(Reporter):
    """Reports each step and each evaluation in a line: to people, and as JSON to `data`."""

    width: int | None = None
    """Columns to which a step's line is cut."""

    def __init__(self, num_steps: int, opening: str = "", *, data: Callable[[str], None] | None = None) -> None:
        """Report a run of `num_steps`; `opening` comes before the first line, if there is one."""
        self._num_steps = num_steps
        self._opening = opening
        self._data = data

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:  # noqa: ARG002 - the base's
        self._report(step_line(metrics, self._num_steps, width=self.width), json_lines.line(metrics))

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


def step_line(metrics: StepMetrics, num_steps: int, *, width: int | None = None) -> str:
    """Return the figures of a step in columns: as many as fit into `width`."""
    figures = [
        f"step {metrics.step:{len(str(num_steps))}}/{num_steps}",
        f"reward {metrics.reward_mean:6.3f} +- {metrics.reward_std:.3f}",
        f"len {whole_or_dash(metrics.completion_tokens_mean):>5}",
        f"truncated {percent_or_dash(metrics.truncated_share):>4}",
        f"entropy {or_dash(metrics.entropy, 3)}",
        f"|dlogprob| {or_dash(metrics.logprob_diff_mean, 4)}",
        f"fence {duration(metrics.fence_s) if metrics.is_published else '-':>8}",
        f"rollout {metrics.rollout_s:5.2f} s",
        f"train {metrics.train_s:5.2f} s",
        f"{tokens_per_s(metrics):7,.0f} tok/s",
    ]
    while width is not None and len(GAP.join(figures)) > width and len(figures) > 1:
        figures.pop()
    return GAP.join(figures)


def summary_line(summary: Summary) -> str:
    """Return the result of a run."""
    rewards = ""
    if summary.reward_before is not None and summary.reward_after is not None:
        rewards = f"  held-out reward {summary.reward_before:.3f} -> {summary.reward_after:.3f}"
    return (
        f"done: {summary.steps} steps{rewards}  |dlogprob| max {or_dash(summary.logprob_diff_max, 3)}"
        f"  fence p50 {duration(summary.fence_p50_ms / 1e3)}"
    )


def tokens_per_s(metrics: StepMetrics) -> float:
    """Return the sampled tokens per second of sampling."""
    return metrics.tokens_generated / metrics.sampling_s if metrics.sampling_s else 0.0


def duration(seconds: float) -> str:
    """Return a time in a readable unit, or a dash if it is unknown."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{1e3 * seconds:.{1 if seconds < 0.1 else 0}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def value_range(low: str, high: str) -> str:
    """Return a range of two values as text; its unit is written once if both ends have the same, and one alone."""
    number, *units = low.split(" ")
    return f"{number if units == high.split(' ')[1:] and len(units) < 2 else low} to {high}"


def whole_or_dash(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def percent_or_dash(share: float) -> str:
    return f"{share:.0%}" if math.isfinite(share) else "-"


def or_dash(value: float, digits: int) -> str:
    """Return `value`, or a dash of the same width if no token was trained: all rewards of each group were equal."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-".center(digits + 2)
