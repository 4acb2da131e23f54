"""Names under which figures of a run are drawn: grouped by what they tell of, one curve each.

Not covered: who draws them (`trackers.py`).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from bridge.learn.mismatch import HISTOGRAM_EDGES
from bridge.run.metrics import Evaluation, StepMetrics

STEP_CURVES: Mapping[str, str] = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "unscored": "reward/unscored",
    "completion_tokens_mean": "rollout/completion_tokens",
    "truncated_share": "rollout/truncated_share",
    "no_signal_share": "reward/no_signal_share",
    "retries": "rollout/retries",
    "staleness": "rollout/staleness",
    "tokens_generated": "rollout/tokens",
    "rollout_s": "rollout/seconds",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "updates": "train/updates",
    "skipped_updates": "train/skipped_updates",
    "entropy": "train/entropy",
    "kl": "train/kl",
    "clipped_low_share": "train/clipped_low_share",
    "clipped_high_share": "train/clipped_high_share",
    "changed_weight_share": "train/changed_weight_share",
    "tokens_trained": "train/tokens",
    "train_s": "train/seconds",
    "weight_version": "train/weight_version",
    "logprob_diff_mean": "mismatch/logprob_diff_mean",
    "logprob_diff_max": "mismatch/logprob_diff_max",
    "corrected_share": "mismatch/corrected_share",
    "importance_weight": "mismatch/importance_weight",
    "effective_share": "mismatch/effective_share",
    "fence_pause_s": "fence/pause_ms",
    "fence_prepare_s": "fence/prepare_ms",
    "fence_write_s": "fence/write_ms",
    "fence_publish_s": "fence/publish_ms",
    "fence_s": "fence/total_ms",
    "peak_memory_gib": "memory/peak_gib",
}
"""Field of a step -> its curve, in milliseconds where the curve's name says so."""
EVALUATION_CURVES: Mapping[str, str] = {
    "reward_mean": "held_out/reward_mean",
    "reward_std": "held_out/reward_std",
    "unscored": "held_out/unscored",
    "completion_tokens_mean": "held_out/completion_tokens",
    "truncated_share": "held_out/truncated_share",
    "seconds": "held_out/seconds",
}
BINS = (*(f"below_{edge:g}" for edge in HISTOGRAM_EDGES), f"from_{HISTOGRAM_EDGES[-1]:g}")
"""Bins of the differences of log-probabilities; each begins where the one before ends."""


def of_step(metrics: StepMetrics) -> dict[str, float]:
    """Return the curves' values after a step, without those that are no finite number."""
    curves = dict(_values(metrics, STEP_CURVES))
    curves |= {f"reward/part/{name}": mean for name, mean in metrics.reward_parts.items()}
    shares = zip(BINS, metrics.logprob_diff_histogram, strict=False)
    curves |= {f"logprob_diff_share/{name}": share for name, share in shares}
    if metrics.rollout_s:
        curves["rollout/tokens_per_s"] = metrics.tokens_generated / metrics.rollout_s
    return _finite(curves)


def of_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Return the curves' values of one evaluation, without those that are no finite number."""
    parts = {f"held_out/part/{name}": mean for name, mean in evaluation.reward_parts.items()}
    return _finite({**dict(_values(evaluation, EVALUATION_CURVES)), **parts})


def _values(record: Any, curves: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for field, curve in curves.items():
        yield curve, float(getattr(record, field)) * (1e3 if curve.endswith("_ms") else 1)


def _finite(curves: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in curves.items() if math.isfinite(value)}
