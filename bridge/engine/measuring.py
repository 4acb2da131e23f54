"""Compute the metrics of a step, an evaluation and a run, and log alarms.

Not covered: what the metrics mean (`bridge/checkpoints/metric_table.py`).
"""

import hashlib
import logging
import math
import resource
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bridge.checkpoints.metrics import RECORDED, Evaluation, StepMetrics, Summary
from bridge.errors import UsageError
from bridge.learn.mismatch import alarm as mismatch_alarm
from bridge.learn.mismatch import share
from bridge.learn.samples import has_signal, mean
from bridge.passes.flops import peak_flops
from bridge.passes.packing import of_sampled
from bridge.rollouts.groups import Stream
from bridge.server.fence import FenceTimes
from bridge.types import Completion, Group
from bridge.weights.attach import OpenedModel

logger = logging.getLogger(__name__)

MAX_SKIPS = 3
"""The run ends after this many consecutive steps whose first gradient is not finite: the next would not be better."""
ROUNDING = 1e-9
"""Tolerance for rounding in a weighted sum of rewards."""


def step_metrics(step: int, *measured: Mapping[str, Any]) -> StepMetrics:
    """Return the record of one step, from the results of `rollouts` and `times`, the learner and the trainer.

    Metrics that were not measured are NaN, which is null in `metrics.jsonl`.
    """
    record = StepMetrics(dict.fromkeys(RECORDED, math.nan))
    for part in (*measured, {"step": step}):
        record.update(part)
    trained_s = record["train_s"] + record["fence_write_s"]
    record["mfu"] = record["train_flops"] / (trained_s * record["peak_flops"]) if trained_s else math.nan
    return record


def rollouts(groups: Sequence[Group], stream: Stream, *, served: int) -> dict[str, Any]:
    """Return the metrics of a step's rollouts; the server had version `served` when the batch was complete.

    They include the groups that --skip-without-signal replaced. Without these, the mean reward would cover only
    problems that are sometimes solved.
    """
    completions = _sampled(groups)
    every_group = [*groups, *stream.skipped]
    by_lag = lags(completions, served)
    num_known = by_lag.total()
    largest_lag = max(by_lag, default=None)
    lag_shares = () if largest_lag is None else tuple(share(by_lag[lag], num_known) for lag in range(largest_lag + 1))
    tokens = [sequence.token_ids for sequence in _sequences(completions)]
    digest = hashlib.sha256(repr(tokens).encode()).hexdigest()
    without_signal = sum(not has_signal(group) for group in every_group)
    is_given = not any(group.rewards or group.unscored for group in every_group)  # rows of a file
    return {
        **_of_rollouts(every_group),
        "no_signal_share": share(without_signal, len(every_group)),
        "retries": stream.num_retries,
        "staleness": math.nan if largest_lag is None else float(largest_lag),
        "staleness_mean": share(sum(lag * count for lag, count in by_lag.items()), num_known),
        "lag_shares": lag_shares,
        "groups_in_flight": stream.num_in_flight,
        "skipped_groups": len(stream.skipped),
        "rollouts": digest[:16],
        "tokens_generated": sum(completion.num_sampled for completion in _sampled(every_group) if not is_given),
        "entropy": sampled_entropy(completions),
    }


def sampled_entropy(completions: Sequence[Completion]) -> float:
    """Estimate the policy's entropy as the mean of -log-prob of the sampled tokens; NaN if the server sent none.

    If the step trains on anything, the learner's exact value, over the full vocabulary, replaces this estimate.
    """
    logprobs = [
        logprob
        for sequence in _sequences(completions)
        for logprob in of_sampled(sequence.logprobs, sequence.sampled)
        if not math.isnan(logprob)
    ]
    return -_mean(logprobs)


def times(fence: FenceTimes, *, rollout_s: float, train_s: float) -> dict[str, Any]:
    """Return the version that a step published, and where its time went."""
    return {
        "weight_version": fence.version,
        "rollout_s": rollout_s,
        "train_s": train_s + fence.prepare_s,
        **{f"fence_{name}": getattr(fence, name) for name in ("pause_s", "prepare_s", "write_s", "publish_s")},
    }


def devices(device: torch.device, world_size: int) -> dict[str, Any]:
    """Return the peak operations per second of all ranks' devices, and this process's peak memory so far.

    The memory is the GPU's or, on the CPU, the process's.
    """
    if device.type == "cuda":
        peak_gib = torch.cuda.max_memory_allocated(device) / 2**30
    else:
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux reports KiB
    return {"peak_memory_gib": peak_gib, "device": device.type, "peak_flops": peak_flops(device) * world_size}


def evaluation(
    groups: Sequence[Group], *, step: int, version: int, seconds: float, pass_reward: float = 1.0
) -> Evaluation:
    """Return the metrics of an evaluation, with pass@k for powers of two up to the completions per problem."""
    most = max((len(group.completions) + len(group.unscored) for group in groups), default=0)
    counts = [2**power for power in range(most.bit_length())]
    if most and most not in counts:
        counts.append(most)
    return Evaluation(
        {
            "step": step,
            "weight_version": version,
            "num_problems": len(groups),
            "seconds": seconds,
            "pass_at_k": {str(count): pass_at(groups, count, pass_reward) for count in counts},
            **_of_rollouts(groups),
        }
    )


def pass_at(groups: Sequence[Group], k: int, pass_reward: float) -> float:
    """Return pass@k: the unbiased estimate of how many problems at least one of k completions passes, as a share.

    Problems with fewer than k scored completions are left out; NaN if no problem has k.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1.
    """
    shares = []
    for rewards in (group.rewards for group in groups if len(group.rewards) >= k):
        num_failed = sum(reward < pass_reward - ROUNDING for reward in rewards)
        shares.append(1 - math.comb(num_failed, k) / math.comb(len(rewards), k))
    return _mean(shares)


def summary(
    steps: Sequence[StepMetrics],
    opened: OpenedModel,
    *,
    last: int,
    version: int,
    checkpoint: Path,
    before: float | None,
    after: float | None,
) -> Summary:
    """Return the result of a run that ended with step `last`."""
    fences = [metrics.fence_s for metrics in steps if metrics.is_published]
    diffs = [metrics.logprob_diff_max for metrics in steps if metrics.logprob_diff_max >= 0]
    return Summary(
        steps=last,
        updates=sum(metrics.updates for metrics in steps),
        weight_version=version,
        checkpoint=checkpoint,
        reward_before=before,
        reward_after=after,
        rewards=tuple(metrics.reward_mean for metrics in steps),
        logprob_diff_max=max(diffs, default=math.nan),
        fence_p50_ms=statistics.median(fences) * 1e3 if fences else math.nan,
        attach_ms=opened.open_s * 1e3,
        weight_bytes=opened.weight_bytes,
    )


def nothing_learnt(metrics: StepMetrics) -> str | None:
    """Return why a step had nothing to learn from, and the likely cause; None if at least one group has a signal."""
    if metrics.no_signal_share < 1 or math.isnan(metrics.no_signal_share):
        return None
    if metrics.unscored and math.isnan(metrics.reward_mean):
        return (
            f"step {metrics.step} has nothing to learn from: none of its {metrics.unscored} completions has a reward;"
            " `unscored` in rollouts.jsonl has the reason for each of them"
        )
    if metrics.truncated_share > 0.5:
        cause = f"{metrics.truncated_share:.0%} of the completions were truncated; raise --max-new-tokens"
    elif metrics.reward_std == 0:
        cause = (
            f"every reward is {metrics.reward_mean:g}; compare the completions in rollouts.jsonl with what the reward"
            " expects, and whether the problems are too hard or too easy for this model"
        )
    else:
        cause = "each problem is solved always or never; take a larger --group-size, or a higher --temperature"
    return f"step {metrics.step} has nothing to learn from: in each group all rewards are equal; likely cause: {cause}"


class Alarms:
    """Logs what is wrong with a step; of consecutive steps with the same alarm, only the first is logged.

    The part of an alarm after its last semicolon, such as a hint, is logged once per run.
    """

    def __init__(self, *, mismatch_limit: float, needs_rewards: bool = True) -> None:
        """Without `needs_rewards`, equal rewards are no alarm."""
        self._mismatch_limit = mismatch_limit
        self._needs_rewards = needs_rewards
        self._active: dict[str, str | None] = {}
        """Alarms of the last step, by kind."""
        self._explained: set[str] = set()
        """Hints of alarms that have been logged already."""
        self._is_ahead = False
        """Whether the server has older weights than the trainer, as in mode `none` between reloads."""
        self._skipped = 0
        """Number of consecutive steps without an update because the first gradient was not finite."""

    def check(self, metrics: StepMetrics, *, is_published: bool) -> None:
        """Log an unexpected mismatch between vLLM and the trainer, and a step that had nothing to learn from."""
        self._report_alarm("mismatch", None if self._is_ahead else mismatch_alarm(metrics, self._mismatch_limit))
        self._is_ahead = not is_published
        self._report_alarm("signal", nothing_learnt(metrics) if self._needs_rewards else None)

    def count_skipped(self, metrics: StepMetrics) -> None:
        """Log a skipped update; the step was published with the weights of the preceding update.

        Raises:
            UsageError: too many consecutive steps had no update.
        """
        if metrics.updates:
            self._skipped = 0
        if not metrics.skipped_updates:
            return
        if metrics.updates:
            left = f"{metrics.updates} updates of the batch were applied before it, and none after it"
        else:
            self._skipped += 1
            left = f"no weight was changed ({self._skipped} consecutive steps; the run ends after {MAX_SKIPS})"
        logger.warning(f"step {metrics.step}: a gradient was not finite, and its update was skipped: {left}")
        if self._skipped == MAX_SKIPS:
            raise UsageError(
                f"the gradients of {MAX_SKIPS} consecutive steps were not finite; these steps changed no weight",
                hint="lower --lr or --max-grad-norm and continue with --resume; if no step before them had an update,"
                " check the model with bridge verify",
            )

    def _report_alarm(self, kind: str, alarm: str | None) -> None:
        if alarm and not self._active.get(kind):
            what, _, explanation = alarm.rpartition("; ")
            logger.warning(what if explanation in self._explained else alarm)
            self._explained.add(explanation)
        self._active[kind] = alarm


def lags(completions: Sequence[Completion], served: int) -> Counter[int]:
    """Count the tokens whose version is known, by how many versions older than `served` they are."""
    return Counter(
        served - version for sequence in _sequences(completions) for version in sequence.versions if version is not None
    )


def _of_rollouts(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the metrics that steps and evaluations have in common; a mean of nothing is NaN."""
    rewards = [reward for group in groups for reward in group.rewards]
    completions = _sampled(groups)
    with_tools = [completion for completion in completions if completion.sampled is not None]
    names = dict.fromkeys(name for group in groups for name in group.reward_parts)
    parts = {name: [part for group in groups for part in group.reward_parts.get(name, ())] for name in names}
    applied = {name: [part for part in values if not math.isnan(part)] for name, values in parts.items()}
    return {
        "reward_mean": _mean(rewards),
        "reward_std": statistics.pstdev(rewards) if rewards else math.nan,
        "reward_parts": {name: _mean(values) for name, values in applied.items()},
        "unscored": sum(len(group.unscored) for group in groups),
        "completion_tokens_mean": _mean([completion.num_sampled for completion in completions]),
        "truncated_share": share(sum(c.finish_reason == "length" for c in completions), len(completions)),
        "turns_mean": _mean([completion.num_turns for completion in with_tools]),
        "tool_errors": sum(completion.tool_errors for completion in with_tools) if with_tools else math.nan,
    }


def _sequences(completions: Sequence[Completion]) -> list[Completion]:
    return [sequence for completion in completions for sequence in completion.sequences]


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else math.nan


def _sampled(groups: Sequence[Group]) -> list[Completion]:
    """Return all completions, the ones with a reward first."""
    scored = [completion for group in groups for completion in group.completions]
    return scored + [unscored.completion for group in groups for unscored in group.unscored]
