"""Every metric, declared once: its meaning, its unit, how it aggregates, and its curve in the trackers.

`metrics.jsonl` and `evaluations.jsonl` have the fields under their names. A new metric is one field here, and one value
where it is measured (`measuring.py`).
"""

import dataclasses
import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bridge.errors import UsageError
from bridge.types import LOGPROB_DIFF_EDGES

BINS = (*(f"below_{edge:g}" for edge in LOGPROB_DIFF_EDGES), f"from_{LOGPROB_DIFF_EDGES[-1]:g}")
"""Bins of `logprob_diff_histogram`; each begins where the previous one ends."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The declaration of one metric."""

    title: str
    unit: str = ""
    """Of the number as it is shown: `s`, `ms`, `%`, `nats`, `tokens`, `GiB`, `versions`; empty for plain numbers."""
    scale: float = 1.0
    """Factor from the stored number to the shown one: 100 for a share in percent."""
    curve: str = ""
    """Name of its curve in TensorBoard and Weights & Biases; empty: none."""
    over: Literal["mean", "sum", "max", "same"] = "mean"
    """How the values of several parts of a step (mini-batches, trainer ranks) become one."""


def metric(title: str, unit: str = "", **more: Any) -> Any:
    """Declare a field of a record as a metric."""
    default = more.pop("default", dataclasses.MISSING)
    declared = Metric(title=title, unit=unit, **more)
    return dataclasses.field(default=default, metadata={"metric": declared})


def share(title: str, **more: Any) -> Any:
    """Declare a share, 0 to 1, that is shown in percent."""
    return metric(title, "%", scale=100.0, **more)


def declared(record: type) -> dict[str, Metric]:
    """Return the metrics of a record by the names of their fields."""
    return {field.name: field.metadata["metric"] for field in dataclasses.fields(record) if "metric" in field.metadata}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step behind one fence. A number that is not finite is null in `metrics.jsonl`."""

    step: int
    """Number of the step, from 1."""
    weight_version: int = metric("Version", over="same", curve="train/weight_version")
    """Version that this step published."""
    reward_mean: float = metric("Mean reward", curve="reward/mean")
    """Mean reward of the step's completions, sampled before the update.

    With --skip-without-signal, this and the other figures of the completions include the replaced groups.
    """
    reward_std: float = metric("Standard deviation of the rewards", curve="reward/std")
    """Standard deviation of the same rewards."""
    reward_parts: Mapping[str, float]
    """Mean of each part of the reward, before its weight, by the part's name."""
    unscored: int = metric("Unscored completions", over="sum", curve="reward/unscored")
    """Completions that were left out because scoring failed."""
    completion_tokens_mean: float = metric("Completion length", "tokens", curve="rollout/completion_tokens")
    """Mean length of the completions."""
    truncated_share: float = share("Truncated completions", curve="rollout/truncated_share")
    """Share of the completions that reached the length limit."""
    turns_mean: float = metric("Turns", curve="rollout/turns", default=math.nan)
    """Mean number of the model's turns in a completion; not finite without tools."""
    tool_errors: float = metric("Failed tool calls", over="sum", curve="rollout/tool_errors", default=math.nan)
    """Calls of tools that raised; not finite without tools."""
    no_signal_share: float = share("Groups without signal", curve="reward/no_signal_share")
    """Share of the groups that teach nothing because all rewards of the group are equal, replaced ones included."""
    retries: int = metric("Retries", over="sum", curve="rollout/retries")
    """Requests that were retried."""
    loss: float = metric("Policy loss", over="sum", curve="train/loss")
    """Policy loss, mean over the step's updates."""
    grad_norm: float = metric("Gradient norm", over="same", curve="train/grad_norm")
    """Global norm of the gradient before clipping, mean over the step's updates."""
    lr: float = metric("Learning rate", over="same", curve="train/lr", default=math.nan)
    """Learning rate of the step's first update; in a schedule it may change with every update."""
    updates: int = metric("Updates", over="same", curve="train/updates")
    """Optimizer steps; fewer than configured if there was nothing to learn or a gradient was not finite."""
    skipped_updates: int = metric("Skipped updates", over="same", curve="train/skipped_updates", default=0)
    """Updates that were skipped because their gradient was not finite."""
    entropy: float = metric("Entropy", "nats", curve="train/entropy")
    """Mean entropy of the policy at the sampled tokens, before the update; over what top-k, top-p and min-p kept."""
    clipped_low_share: float = share("Tokens clipped low", curve="train/clipped_low_share")
    """Share of the tokens with a ratio below the clip range and a negative advantage; with `cispo`, any advantage."""
    clipped_high_share: float = share("Tokens clipped high", curve="train/clipped_high_share")
    """Share of the tokens with a ratio above the clip range and a positive advantage; with `cispo`, any advantage."""
    kl: float = metric("KL from the reference", "nats", curve="train/kl")
    """Mean KL divergence from the reference over the tokens; 0 without a reference."""
    logprob_diff_mean: float = metric("Log-prob mismatch, mean", "nats", curve="mismatch/logprob_diff_mean")
    """Mean of |log-prob of vLLM - log-prob of the trainer| over the tokens trained on, before the update.

    Not finite when no group's rewards differ: nothing is trained on then.
    """
    logprob_diff_max: float = metric("Log-prob mismatch, max", "nats", over="max", curve="mismatch/logprob_diff_max")
    """Largest of the same differences."""
    logprob_diff_histogram: tuple[float, ...]
    """Share of the tokens in each of `BINS`."""
    corrected_share: float = share("Tokens corrected", curve="mismatch/corrected_share")
    """Share of the tokens whose importance weight was truncated, or that were masked."""
    importance_weight: float = metric("Importance weight", curve="mismatch/importance_weight")
    """Mean importance weight of the tokens, 1 where vLLM and the trainer agree."""
    effective_share: float = share("Effective sample size", curve="mismatch/effective_share")
    """Effective sample size of the importance weights over the number of tokens."""
    staleness: float = metric("Staleness", "versions", over="max", curve="rollout/staleness")
    """Versions published between the sampling of a token and the step that trains on it, at most.

    Over the tokens whose version is known; not finite when none is.
    """
    staleness_mean: float = metric("Staleness, mean", "versions", curve="rollout/staleness_mean", default=math.nan)
    """Mean of the same over these tokens."""
    lag_shares: tuple[float, ...] = ()
    """Share of these tokens that are 0, 1, 2, ... versions old."""
    groups_in_flight: int = metric("Groups in flight", over="sum", curve="rollout/groups_in_flight", default=0)
    """Groups begun and not trained on, while this step was computed."""
    skipped_groups: int = metric("Groups replaced", over="sum", curve="rollout/skipped_groups", default=0)
    """Groups without signal that others took the place of, with --skip-without-signal."""
    changed_weight_share: float = share("Weights changed", curve="train/changed_weight_share")
    """Share of the weights whose bytes this step changed."""
    rollout_s: float = metric("Rollouts", "s", over="max", curve="rollout/seconds")
    """Time spent on waiting for groups that are sampled and scored."""
    train_s: float = metric("Training", "s", over="max", curve="train/seconds")
    """Time spent on forward and backward passes."""
    fence_pause_s: float = metric("Pause", "ms", scale=1e3, over="max", curve="fence/pause_ms")
    """Time until the server was paused and its devices idle; 0 in modes that pause nothing."""
    fence_prepare_s: float = metric("Passes in the fence", "ms", scale=1e3, over="max", curve="fence/prepare_ms")
    """Part of `train_s` during which the server was paused, by choice or because its KV cache slept."""
    fence_write_s: float = metric("Write", "ms", scale=1e3, over="max", curve="fence/write_ms")
    """Time until the optimizer had written and its device was idle."""
    fence_publish_s: float = metric("Publish", "ms", scale=1e3, over="max", curve="fence/publish_ms")
    """Time until the server generated with the new weights: after the fence, a load from disk, or a restart.

    0 if the step was not published: mode `none` publishes every `vllm_restart_interval` steps.
    """
    rollouts: str
    """Digest of the step's token ids, in order: steps with equal digests had the same rollouts."""
    tokens_generated: int = metric("Tokens generated", over="sum", curve="rollout/tokens")
    """Sampled tokens of the step, those of replaced groups included."""
    tokens_trained: int = metric("Tokens trained on", over="sum", curve="train/tokens")
    """Sampled tokens that were trained on; the others had no advantage, were masked, or are of replaced groups."""
    rank_token_balance: float = metric(
        "Tokens of the busiest rank over the mean", over="same", curve="train/rank_token_balance", default=math.nan
    )
    """Tokens of the rank that trains on most of them over the mean of the ranks; not finite with one rank."""
    peak_memory_gib: float = metric("Trainer's peak memory", "GiB", over="max", curve="memory/peak_gib")
    """Peak memory of the trainer so far: on the GPU, or of the process on the CPU."""
    device: str
    """Where that memory is: `cuda` or `cpu`."""

    @property
    def fence_s(self) -> float:
        """Seconds from the pause until the server generates with the new weights, without passes computed meanwhile."""
        return self.fence_pause_s + self.fence_write_s + self.fence_publish_s

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.rollout_s + self.train_s + self.fence_s

    @property
    def sampling_s(self) -> float:
        """Seconds in which the tokens were sampled: the whole step, if groups are in flight throughout."""
        if not self.groups_in_flight or self.fence_prepare_s:
            return self.rollout_s
        return self.step_s

    @property
    def is_published(self) -> bool:
        """Whether the server got the weights of this step."""
        return self.fence_publish_s > 0

    def curves(self) -> dict[str, float]:
        """Return the finite points of this step by the names of their curves."""
        shares = zip(BINS, self.logprob_diff_histogram, strict=False)
        more = {f"logprob_diff_share/{name}": value for name, value in shares} | {"fence/total_ms": 1e3 * self.fence_s}
        if self.sampling_s:
            more["rollout/tokens_per_s"] = self.tokens_generated / self.sampling_s
        return _points(self, "reward/part/", more)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The held-out problems, sampled and scored as in training, but not trained on."""

    step: int
    """Steps taken so far; 0: before training."""
    weight_version: int
    """Version that sampled the completions."""
    reward_mean: float = metric("Mean reward", curve="held_out/reward_mean")
    """Mean reward of the completions."""
    reward_std: float = metric("Standard deviation of the rewards", curve="held_out/reward_std")
    """Standard deviation of the same rewards."""
    reward_parts: Mapping[str, float]
    """Mean of each part of the reward, before its weight, by the part's name."""
    unscored: int = metric("Unscored completions", over="sum", curve="held_out/unscored")
    """Completions that are left out because scoring failed."""
    num_problems: int
    """Held-out problems."""
    pass_at_k: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """k -> share of the problems that at least one of k completions passes, estimated from all completions."""
    completion_tokens_mean: float = metric("Completion length", "tokens", curve="held_out/completion_tokens")
    """Mean length of the completions."""
    truncated_share: float = share("Truncated completions", curve="held_out/truncated_share")
    """Share of the completions that reached the length limit."""
    turns_mean: float = metric("Turns", curve="held_out/turns", default=math.nan)
    """Mean number of the model's turns in a completion; not finite without tools."""
    tool_errors: float = metric("Failed tool calls", over="sum", curve="held_out/tool_errors", default=math.nan)
    """Calls of tools that raised; not finite without tools."""
    seconds: float = metric("Time", "s", over="max", curve="held_out/seconds")
    """Time spent on sampling and scoring."""

    def curves(self) -> dict[str, float]:
        """Return the finite points of this evaluation by the names of their curves."""
        return _points(self, "held_out/part/", {f"held_out/pass_at_{k}": each for k, each in self.pass_at_k.items()})


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run."""

    steps: int
    """The last step."""
    updates: int
    """Optimizer steps taken since this process started."""
    weight_version: int
    """Version that the server serves now."""
    checkpoint: Path
    """The last checkpoint."""
    reward_before: float | None
    """Mean held-out reward before the first step, also of a resumed run; None without evaluation."""
    reward_after: float | None
    """The same afterwards."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    logprob_diff_max: float
    """Largest log-prob mismatch of all steps, in nats; not finite when nothing was trained on."""
    fence_p50_ms: float
    """Median of `StepMetrics.fence_s` over the published steps, in milliseconds."""
    attach_ms: float
    """Time to attach or load all parameters, in milliseconds."""
    weight_bytes: int
    """Bytes of weights that the trainer holds beside the server's; 0 with one copy."""


Goal = Callable[[StepMetrics | Evaluation], bool]
"""Whether a step or an evaluation reaches what ends the run."""
CONDITION = re.compile(r"(\w+)\s*(>=|<=)\s*(-?[\d.]+(?:e[+-]?\d+)?)", re.IGNORECASE)
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


def goal_of(stop_at: str | None) -> Goal:
    """Return when to stop: at a condition on one metric, `eval_` before those of evaluations; None: never.

    Raises:
        UsageError: it is no condition, or there is no such metric.
    """
    if stop_at is None:
        return lambda _: False
    found = CONDITION.fullmatch(stop_at.strip())
    if found is None or found[3].count(".") > 1:
        raise UsageError(
            f"--stop-at: found {stop_at!r}, expected a metric, >= or <=, and a number",
            remedy="--stop-at 'eval_reward_mean>=0.9', in quotes",
        )
    known: dict[str, tuple[type, str]] = {name: (StepMetrics, name) for name in declared(StepMetrics)}
    known |= {f"eval_{name}": (Evaluation, name) for name in declared(Evaluation)}
    if found[1] not in known:
        near = difflib.get_close_matches(found[1], known, n=1)
        raise UsageError(
            f"--stop-at: there is no metric {found[1]!r}",
            remedy=f"did you mean {near[0]}?"
            if near
            else "take a field of metrics.jsonl, or of evaluations.jsonl with eval_ before it",
        )
    (kind, name), compare, bound = known[found[1]], COMPARISONS[found[2]], float(found[3])
    return lambda record: isinstance(record, kind) and compare(getattr(record, name), bound)


def _points(record: StepMetrics | Evaluation, parts: str, more: dict[str, float]) -> dict[str, float]:
    points = {
        each.curve: float(getattr(record, name)) * (each.scale if each.unit == "ms" else 1)
        for name, each in declared(type(record)).items()
        if each.curve
    }
    points |= {parts + name: mean for name, mean in record.reward_parts.items()} | more
    return {name: value for name, value in points.items() if math.isfinite(value)}
