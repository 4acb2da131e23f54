"""Metrics of a step that are derived from other metrics."""

import math
from typing import Any

import pytest

from bridge.engine import measuring
from bridge.types import Completion

TIMES = {"train_s": 1.5, "fence_write_s": 0.5}


def test_entropy_without_training_is_estimated_from_samples() -> None:
    known: dict[str, Any] = {"text": "", "finish_reason": "stop"}
    one = Completion(token_ids=(1, 2, 3), logprobs=(-1.0, math.nan, -3.0), **known)
    tool = Completion(token_ids=(1, 2), logprobs=(-9.0, -2.0), sampled=(False, True), **known)
    assert measuring.sampled_entropy([one, tool]) == pytest.approx(2.0)
    assert math.isnan(measuring.sampled_entropy([]))


@pytest.mark.parametrize(
    ("peak", "times", "utilization"),
    [(1e12, TIMES, 0.25), (math.nan, TIMES, math.nan), (1e12, dict.fromkeys(TIMES, 0.0), math.nan)],
    ids=["known", "a CPU", "a step without time"],
)
def test_mfu_is_operations_over_the_peak(peak: float, times: dict[str, float], utilization: float) -> None:
    record = measuring.step_metrics(3, times, {"train_flops": 5e11, "peak_flops": peak})
    assert record.mfu == pytest.approx(utilization, nan_ok=True)


@pytest.mark.parametrize(
    ("in_flight", "tokens_per_s"),
    [(0, 400.0), (math.nan, 400.0), (5, 50.0)],
    ids=["sampled in the step", "unknown", "sampled during several steps"],
)
def test_throughput_with_groups_in_flight_counts_the_full_step(in_flight: float, tokens_per_s: float) -> None:
    times = {"rollout_s": 0.25, "train_s": 1.0, "fence_pause_s": 0.0, "fence_write_s": 0.75, "fence_publish_s": 0.0}
    record = measuring.step_metrics(3, times, {"groups_in_flight": in_flight, "tokens_generated": 100})
    assert record.tokens_per_s == pytest.approx(tokens_per_s)
