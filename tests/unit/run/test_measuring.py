"""Metrics of a step that follow from others."""

import math

import pytest

from bridge.run import measuring

TIMES = {"train_s": 1.5, "fence_write_s": 0.5}


@pytest.mark.parametrize(
    ("peak", "times", "utilization"),
    [(1e12, TIMES, 0.25), (math.nan, TIMES, math.nan), (1e12, dict.fromkeys(TIMES, 0.0), math.nan)],
    ids=["known", "a CPU", "a step without time"],
)
def test_utilization_is_operations_over_the_peak(peak: float, times: dict[str, float], utilization: float) -> None:
    record = measuring.step_metrics(3, times, {"train_flops": 5e11, "peak_flops": peak})
    assert record.mfu == pytest.approx(utilization, nan_ok=True)
