"""All metrics, declared once in `SECTIONS`: their meaning, their unit, and where they are shown.

The declarations drive `metrics.jsonl`, `evaluations.jsonl`, `--stop-at`, trackers, the live view, `bridge report` and
the table in docs/looking.md. A new metric needs one row here and one value where it is measured. An undeclared metric
of a custom loss is recorded and shown under its own name.

Not covered: measuring (`bridge/engine/measuring.py`), the records (`metrics.py`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from bridge.types import LOGPROB_DIFF_EDGES

SCALES = {"%": 100.0, "ms": 1e3}
"""Unit -> factor from the recorded to the displayed number; other units have a factor of 1."""
Derive = Callable[[Mapping[str, Any]], float]
"""Computes a metric from a record."""


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(record: Mapping[str, Any], name: str) -> float:
    """Return a number of a record; NaN if it is missing or not a number."""
    return value if is_number(value := record.get(name)) else math.nan


def known_sum(values: Iterable[Any]) -> float:
    """Return the sum of the numbers among the values; NaN if there are none."""
    known = [value for value in values if is_number(value) and not math.isnan(value)]
    return sum(known) if known else math.nan


@dataclass(frozen=True)
class Total:
    """Computes a metric as the sum of other metrics."""

    names: tuple[str, ...]

    def __call__(self, record: Mapping[str, Any]) -> float:
        return known_sum(record.get(name) for name in self.names)


def sum_of_items(name: str, first: int, end: int | None = None) -> Derive:
    """Return a function that sums the items of a recorded list from `first` to `end`."""
    return lambda record: known_sum(value[first:end] if isinstance(value := record.get(name), list | tuple) else ())


@dataclass(frozen=True)
class PerSecond:
    """Computes a metric as an amount per second, from two other metrics."""

    amount: str
    seconds: str

    def __call__(self, record: Mapping[str, Any]) -> float:
        return number(record, self.amount) / (number(record, self.seconds) or math.nan)


def _sampling_s(record: Mapping[str, Any]) -> float:
    """Return the time in which a step's tokens were sampled; with groups in flight, that is the whole step."""
    return number(record, "step_s" if number(record, "groups_in_flight") > 0 else "rollout_s")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The declaration of one metric."""

    name: str
    """Key in `metrics.jsonl`, unless `derive` is set."""
    title: str
    about: str = ""
    """Description for the docs and the report."""
    unit: str = ""
    """Unit of the displayed number: `s`, `ms`, `%`, `nats`, `tokens`, `GiB`, `versions`."""
    curve: str = ""
    """Name of the curve in TensorBoard and Weights & Biases, or prefix of several curves; empty: no curve."""
    held_out: str = ""
    """Name of the curve in evaluations; empty: evaluations do not have this metric."""
    items: tuple[str, ...] | None = None
    """For a list or mapping: the names of the items in order, "" for hidden ones; empty: the mapping's own keys."""
    over_run: Literal["", "total", "median", "largest", "overall"] = ""
    """How a report summarizes the values of all steps; `overall`: total per second; empty: not summarized."""
    live: bool = False
    """Whether the live view shows it."""
    chart: Literal["plain", "smooth", "log", "stacked", "ramp"] = "smooth"
    """How a report draws the metric. `stacked`: its items, or the metrics that it sums, on top of each other. `ramp`:
    the same with the items in a sequential color scale."""
    derive: Derive | None = None
    """Computes the metric from a record; None: the metric is recorded itself."""

    @property
    def scale(self) -> float:
        return SCALES.get(self.unit, 1.0)


BINS = (*(f"below_{edge:g}" for edge in LOGPROB_DIFF_EDGES), f"from_{LOGPROB_DIFF_EDGES[-1]:g}")
"""Names of the bins of `logprob_diff_histogram`; each bin begins where the previous one ends."""
LARGE_BIN = 5
MOST_LAGS = 9
SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "": (
        Metric(name="reward_mean", title="Mean reward", curve="reward/mean",
               held_out="held_out/reward_mean", live=True,
               about="Mean reward of the step's completions, sampled before the update. With --skip-without-signal,"
               " this and the other metrics of the completions include the replaced groups."),
    ),
    "Learning": (
        Metric(name="reward_parts", title="Parts of the reward", items=(), curve="reward/part/",
               held_out="held_out/part/", about="Mean of each part of the reward, unweighted, by its name."),
        Metric(name="reward_std", title="Reward deviation", curve="reward/std",
               held_out="held_out/reward_std", about="Standard deviation of the rewards of the step's completions."),
        Metric(name="no_signal_share", title="Groups without signal", unit="%",
               curve="reward/no_signal_share", live=True,
               about="Share of the groups without a learning signal because all rewards are equal, including replaced"
               " groups."),
        Metric(name="completion_tokens_mean", title="Completion length", unit="tokens",
               curve="rollout/completion_tokens", held_out="held_out/completion_tokens", live=True,
               about="Mean length of the completions."),
        Metric(name="truncated_share", title="Truncated completions", unit="%",
               curve="rollout/truncated_share", held_out="held_out/truncated_share", live=True,
               about="Share of the completions that reached the length limit."),
        Metric(name="turns_mean", title="Turns", chart="plain", curve="rollout/turns", held_out="held_out/turns",
               about="Mean number of the model's turns in a completion; null without tools."),
        Metric(name="tool_errors", title="Failed tool calls", chart="plain", curve="rollout/tool_errors",
               held_out="held_out/tool_errors",
               about="Tool calls that raised or could not be read; null without tools."),
        Metric(name="entropy", title="Entropy", unit="nats", curve="train/entropy", live=True,
               about="Mean entropy of the policy at the sampled tokens, before the update, over the tokens that filters"
               " kept. If a step trains on nothing, it is estimated by the mean -log-prob of the sampled tokens."),
        Metric(name="kl", title="KL from the reference", unit="nats", curve="train/kl", live=True,
               about="Mean KL(policy || reference) over the sampled tokens, estimated by k3; 0 without a reference."),
        Metric(name="divergence", title="Divergence from the teacher", unit="nats", curve="train/divergence", live=True,
               about="Mean divergence from the teacher over the sampled tokens, before its weight; with `sampled`, the"
               " mean log-ratio of the sampled tokens, which estimates the reverse KL. Only with --teacher."),
        Metric(name="clipped_share", title="Tokens clipped", unit="%",
               derive=Total(("clipped_low_share", "clipped_high_share")),
               about="Share of the tokens that are clipped, because the policy has moved far enough there. Derived, not"
               " recorded."),
        Metric(name="clipped_low_share", title="Tokens clipped low", unit="%",
               curve="train/clipped_low_share",
               about="Share of the tokens with a ratio below the clip range and a negative advantage; with `cispo`, any"
               " advantage."),
        Metric(name="clipped_high_share", title="Tokens clipped high", unit="%",
               curve="train/clipped_high_share",
               about="Share of the tokens with a ratio above the clip range and a positive advantage, or above"
               " --clip-dual and a negative one; with `cispo`, any advantage."),
        Metric(name="margin", title="Preference margin", curve="train/margin", live=True,
               about="With --loss dpo, mean of the chosen completion's implicit reward minus the rejected one's, before"
               " each update; null otherwise."),
        Metric(name="preference_accuracy", title="Preference accuracy", unit="%", curve="train/preference_accuracy",
               live=True, about="With --loss dpo, share of the pairs with a margin above 0, before each update."),
        Metric(name="grad_norm", title="Gradient norm", curve="train/grad_norm", live=True,
               about="Global norm of the gradient before it is clipped, mean over the step's updates."),
        Metric(name="lr", title="Learning rate", chart="plain", curve="train/lr",
               about="Learning rate of the step's first update; with a schedule, updates may have different ones."),
        Metric(name="loss", title="Loss", curve="train/loss",
               about="Loss, mean over the step's updates. A policy loss is not a measure of progress: it need not"
               " decrease, as the losses sft and dpo do."),
        Metric(name="changed_weight_share", title="Weights changed", unit="%",
               curve="train/changed_weight_share", about="Share of the weights whose bytes this step changed."),
        Metric(name="updates", title="Updates", chart="plain", curve="train/updates",
               about="Optimizer steps; fewer than configured if there is no learning signal or a gradient is not"
               " finite."),
        Metric(name="skipped_updates", title="Skipped updates", chart="plain", curve="train/skipped_updates",
               about="Updates that were skipped because their gradient was not finite."),
        Metric(name="unscored", title="Unscored completions", chart="plain", curve="reward/unscored",
               held_out="held_out/unscored", over_run="total", live=True,
               about="Completions that were left out because scoring failed."),
        Metric(name="retries", title="Retried requests", chart="plain", curve="rollout/retries", over_run="total",
               about="Requests that were retried."),
    ),
    "Two engines, one policy": (
        Metric(name="logprob_diff_mean", title="|Δ log-probability|", chart="log", unit="nats", over_run="median",
               curve="mismatch/logprob_diff_mean", live=True,
               about="Mean of |log-prob of vLLM - log-prob of the trainer| over the tokens trained on, before the"
               " update; null if nothing is trained on because no group's rewards differ."),
        Metric(name="logprob_diff_max", title="|Δ log-probability|, max", chart="log", unit="nats",
               over_run="largest", curve="mismatch/logprob_diff_max",
               about="Largest |log-prob of vLLM - log-prob of the trainer| of a token in the step."),
        Metric(name="mismatch_kl", title="Mismatch KL", chart="log", unit="nats", over_run="median",
               curve="mismatch/kl",
               about="KL(vLLM || trainer), estimated on the tokens that vLLM sampled by Schulman's k3."),
        Metric(name="logprob_diff_large_share", title="Tokens with a large mismatch", unit="%",
               chart="plain",
               derive=sum_of_items("logprob_diff_histogram", LARGE_BIN),
               about=f"Share of the tokens whose log-probs differ by {LOGPROB_DIFF_EDGES[LARGE_BIN - 1]:g} nats or"
               " more. Derived, not recorded."),
        Metric(name="logprob_diff_histogram", title="Tokens by mismatch", chart="ramp", unit="%", items=BINS,
               curve="logprob_diff_share/",
               about="Share of the tokens in each bin of |log-prob of vLLM - log-prob of the trainer|, from 0.001 nats"
               " to 1 nat and more."),
        Metric(name="importance_weight", title="Importance weight", curve="mismatch/importance_weight",
               about="Mean importance weight of the tokens, 1 where vLLM and the trainer agree."),
        Metric(name="effective_share", title="Effective sample size",
               curve="mismatch/effective_share",
               about="Effective sample size of the importance weights over the number of tokens, 1 where vLLM and the"
               " trainer agree."),
        Metric(name="corrected_share", title="Tokens corrected", unit="%", curve="mismatch/corrected_share",
               about="Share of the tokens whose importance weight was truncated, or that were masked."),
        Metric(name="rerouted_share", title="Rerouted choices of experts", unit="%", curve="mismatch/rerouted_share",
               about="With router replay, share of the choices of experts that the trainer would have made"
               " differently."),
        Metric(name="max_vio", title="Busiest expert", unit="%", curve="experts/max_vio",
               about="Tokens of a layer's busiest expert over the mean of its experts, minus 1; mean over the layers."),
        Metric(name="dead_experts", title="Dead experts", unit="%", curve="experts/dead",
               about="Share of the experts in all layers to which no token of the step was routed."),
        Metric(name="staleness", title="Staleness", chart="plain", unit="versions", curve="rollout/staleness",
               live=True,
               about="Largest number of versions published between the sampling of a token and the step that trains on"
               " it, over the tokens with a known version; null if there are none."),
        Metric(name="staleness_mean", title="Staleness, mean", chart="plain", unit="versions",
               curve="rollout/staleness_mean", about="Mean staleness of these tokens."),
        Metric(name="older_share", title="Tokens from older weights", unit="%",
               chart="plain",
               derive=sum_of_items("lag_shares", 1, MOST_LAGS),
               about="Share of the tokens sampled by a version before the latest one. Derived, not recorded."),
        Metric(name="lag_shares", title="Tokens by age", chart="stacked", unit="%",
               items=("", *map(str, range(1, MOST_LAGS))),
               about="Share of these tokens that are 0, 1, 2, ... versions old."),
        Metric(name="groups_in_flight", title="Groups in flight", chart="plain", curve="rollout/groups_in_flight",
               live=True,
               about="Groups that were started but not yet trained on while this step was computed."),
        Metric(name="skipped_groups", title="Groups replaced", chart="plain", curve="rollout/skipped_groups",
               about="Groups without a learning signal that --skip-without-signal replaced."),
    ),
    "Time and memory": (
        Metric(name="step_s", title="Time of a step", unit="s", over_run="median", chart="stacked",
               derive=Total(("rollout_s", "train_s", "fence_s")),
               about="Waiting for rollouts, forward and backward passes, and the fence. Derived, not recorded."),
        Metric(name="rollout_s", title="Rollouts", unit="s", curve="rollout/seconds", live=True,
               about="Time spent waiting for groups that are sampled and scored."),
        Metric(name="train_s", title="Training", unit="s", curve="train/seconds", live=True,
               about="Time spent on forward and backward passes."),
        Metric(name="fence_s", title="Fence", unit="ms", curve="fence/total_ms", live=True, chart="stacked",
               derive=Total(("fence_pause_s", "fence_write_s", "fence_publish_s")),
               about="Time during which the server does not generate: pause, write and publish. Derived, not"
               " recorded."),
        Metric(name="fence_pause_s", title="Pause", unit="ms", curve="fence/pause_ms",
               about="Time until the server was paused and its devices were idle; 0 in modes that do not pause it."),
        Metric(name="fence_write_s", title="Write", unit="ms", curve="fence/write_ms",
               about="Time until the optimizer had written the weights and its device was idle."),
        Metric(name="fence_publish_s", title="Publish", unit="ms", curve="fence/publish_ms",
               about="Time until the server generated with the new weights, after the fence, a load from disk, or a"
               " restart. 0 if the step was not published: mode `none` publishes every `vllm_restart_interval` steps."),
        Metric(name="tokens_per_s", title="Tokens generated per second", over_run="overall",
               curve="rollout/tokens_per_s", live=True, derive=PerSecond("tokens_generated", "sampling_s"),
               about="Tokens generated per second of sampling. Derived, not recorded."),
        Metric(name="train_tokens_per_s", title="Tokens trained on per second",
               derive=PerSecond("tokens_trained", "train_s"),
               about="Tokens trained on per second of forward and backward passes. Derived, not recorded."),
        Metric(name="mfu", title="Model FLOPs utilization", unit="%", over_run="median",
               curve="train/mfu", live=True,
               about="`train_flops` per second of training and writing, over the dense bf16 peak of all GPUs; null"
               " where the peak is unknown, as on a CPU."),
        Metric(name="tokens_generated", title="Tokens generated", curve="rollout/tokens",
               over_run="total", about="Tokens sampled for the step, including those of replaced groups."),
        Metric(name="tokens_trained", title="Tokens trained on", curve="train/tokens",
               about="Sampled tokens that were trained on; the others had no advantage, were masked, or belong to"
               " replaced groups."),
        Metric(name="rank_token_balance", title="Tokens of the busiest rank over the mean", chart="plain",
               curve="train/rank_token_balance", live=True,
               about="Tokens of the rank with the most tokens to train on, over the mean of all ranks, which wait for"
               " it; null with one rank."),
        Metric(name="peak_memory_gib", title="Peak memory of the trainer", chart="plain", unit="GiB",
               over_run="largest", curve="memory/peak_gib", live=True,
               about="Peak memory of the trainer so far: on the GPU, or of its process when it trains on a CPU."),
    ),
}  # fmt: skip
"""Section of a report -> its metrics, each with a chart."""
NOT_CHARTED = (
    Metric(name="weight_version", title="Version", curve="train/weight_version",
           about="Version that this step published, or that sampled the completions of an evaluation."),
    Metric(name="fence_prepare_s", title="Passes in the fence", unit="ms", curve="fence/prepare_ms",
           about="Part of `train_s` during which the server was paused, by configuration or because its KV cache was"
           " asleep."),
    Metric(name="train_flops", title="Model FLOPs", curve="train/flops",
           about="Floating-point operations of the updates' forward and backward passes on all ranks: matrix products"
           " and causal attention, without recomputation."),
    Metric(name="peak_flops", title="Peak FLOPs per second", curve="train/peak_flops",
           about="Peak of all ranks' devices in bf16, according to the data sheet; null if unknown, as on a CPU."),
    Metric(name="sampling_s", title="Sampling time", unit="s", derive=_sampling_s),
    Metric(name="seconds", title="Evaluation time", unit="s", held_out="held_out/seconds",
           about="Time spent sampling and scoring an evaluation."),
    Metric(name="num_problems", title="Held-out problems", about="Number of held-out problems in an evaluation."),
    Metric(name="pass_at_k", title="pass@k", items=(), held_out="held_out/pass_at_",
           about="In an evaluation, share of the problems that at least one of k completions passes, estimated from all"
           " completions."),
)  # fmt: skip
METRICS = {metric.name: metric for metrics in (*SECTIONS.values(), NOT_CHARTED) for metric in metrics}
