"""The records of steps and evaluations; `metric_table.py` declares the metrics in them."""

import difflib
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bridge.checkpoints.metric_table import METRICS, Metric, is_number, number
from bridge.errors import UsageError

TEXTS = ("step", "objective", "rollouts", "device")
"""The keys of `metrics.jsonl` that are not metrics: the number of the step from 1, the loss (`sft` in a warm-up), the
digest of the step's token ids in order (steps with equal digests had the same rollouts), and the trainer's device type,
`cuda` or `cpu`."""
OF_EVALUATIONS = ("seconds", "num_problems", "pass_at_k")
RECORDED = (
    "step",
    *(name for name, metric in METRICS.items() if metric.derive is None and name not in OF_EVALUATIONS),
    *TEXTS[1:],
)
"""Keys of every line of `metrics.jsonl`, in order."""
OF_A_LOSS = ("clipped_low_share", "clipped_high_share")
"""Metrics of Bridge's losses that a custom loss may also return."""
NOT_OF_EVERY_LOSS = (*OF_A_LOSS, "divergence", "margin", "preference_accuracy")
"""Metrics that only some losses measure."""


class StepMetrics(dict[str, Any]):
    """The record of one step, as in `metrics.jsonl`; recorded and derived metrics are also attributes."""

    _curve: ClassVar[str] = "curve"
    """The field of `Metric` that holds the name of the curve."""

    def __missing__(self, name: str) -> Any:
        if name in METRICS and (derive := METRICS[name].derive):
            return derive(self)
        raise KeyError(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name}") from None

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    @property
    def is_published(self) -> bool:
        """Whether the server got the weights of this step."""
        return bool(self["fence_publish_s"] > 0)

    def numbers(self) -> Iterator[tuple[Metric, str, float]]:
        """Yield each recorded or derived number as its metric, its item ("" for a scalar metric), and its value."""
        for metric in self.metrics():
            value = self.get(metric.name)
            if isinstance(value, list | tuple):
                names = metric.items or map(str, itertools.count())
                value = {item: part for item, part in zip(names, value, strict=False) if item}
            pairs = value.items() if isinstance(value, Mapping) else [("", value)]
            yield from ((metric, str(item), float(part)) for item, part in pairs if is_number(part))

    def metrics(self) -> list[Metric]:
        """Return all declared metrics, followed by the undeclared ones in this record."""
        return [*METRICS.values(), *(undeclared(name) for name in self if name not in METRICS and name not in TEXTS)]

    def curves(self) -> dict[str, float]:
        """Return the finite numbers of this record by the names of their curves."""
        return {
            curve + item: value * (metric.scale if metric.unit == "ms" else 1)
            for metric, item, value in self.numbers()
            if (curve := getattr(metric, self._curve)) and math.isfinite(value)
        }


class Evaluation(StepMetrics):
    """The record of one evaluation: the held-out problems, sampled and scored, but not trained on."""

    _curve = "held_out"


def check_names(names: Collection[str], loss: str) -> None:
    """Check that a custom loss does not reuse the name of one of Bridge's own metrics.

    Raises:
        UsageError: a name is taken.
    """
    if taken := sorted(({*names} - {*OF_A_LOSS}) & {*METRICS, *TEXTS}):
        raise UsageError(
            f"--loss {loss} returns a metric named {taken[0]!r}, which Bridge measures itself", hint="rename it"
        )


def undeclared(name: str) -> Metric:
    """Return a declaration for a metric that a custom loss or a library loop introduces."""
    return Metric(name=name, title=name, curve=f"loss/{name}")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run."""

    steps: int
    """Number of the last step."""
    updates: int
    """Optimizer steps taken since this process started."""
    weight_version: int
    """Version that the server serves now."""
    checkpoint: Path
    """The last checkpoint."""
    reward_before: float | None
    """Mean held-out reward before the run's first step, even if the run was resumed; None without evaluation."""
    reward_after: float | None
    """Held-out reward after training."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    logprob_diff_max: float
    """Largest log-prob mismatch of all steps, in nats; not finite if nothing was trained on."""
    fence_p50_ms: float
    """Median of `StepMetrics.fence_s` over the published steps, in milliseconds."""
    attach_ms: float
    """Time to attach or load all parameters, in milliseconds."""
    weight_bytes: int
    """Bytes of weights that the trainer holds in addition to the server's; 0 with one copy."""


Goal = Callable[[StepMetrics], bool]
"""Returns whether a step or an evaluation meets the condition that ends the run."""
CONDITION = re.compile(r"(\w+)\s*(>=|<=)\s*(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", re.IGNORECASE)
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


def goal_of(stop_at: str | None, of_loss: Collection[str]) -> Goal:
    """Parse `stop_at`, a condition on one metric, where `eval_` marks metrics of evaluations; None: never stop.

    `of_loss` are the metrics that the run's loss has.

    Raises:
        UsageError: `stop_at` is not a condition, or its metric does not exist.
    """
    if stop_at is None:
        return lambda _: False
    condition = CONDITION.fullmatch(stop_at.strip())
    if condition is None:
        raise UsageError(
            f"--stop-at: found {stop_at!r}, expected a metric, >= or <=, and a number",
            hint="--stop-at 'eval_reward_mean>=0.9', in quotes",
        )
    plain = [metric for metric in METRICS.values() if metric.items is None]
    of_steps = {metric.name for metric in plain} - {*OF_EVALUATIONS, *NOT_OF_EVERY_LOSS} | {*of_loss}
    known = [*of_steps, *(f"eval_{metric.name}" for metric in plain if metric.held_out)]
    name, comparison, bound = condition.groups()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = "take a field of metrics.jsonl, or of evaluations.jsonl with eval_ before it"
        if near:
            hint = f"did you mean {near[0]}?"
        if name in NOT_OF_EVERY_LOSS:
            raise UsageError(
                f"--stop-at: the loss of this run does not measure {name}",
                hint="--teacher MODEL measures divergence, --loss dpo margin and preference_accuracy",
            )
        raise UsageError(f"--stop-at: there is no metric {name!r}", hint=hint)
    of_evaluation = name not in of_steps
    field = name.removeprefix("eval_") if of_evaluation else name
    compare = COMPARISONS[comparison]
    limit = float(bound)

    def is_reached(record: StepMetrics) -> bool:
        return isinstance(record, Evaluation) == of_evaluation and compare(number(record, field), limit)

    return is_reached
