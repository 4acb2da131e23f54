"""Importance weights and the log-prob mismatch between two engines, compared with numbers computed by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.config import TrainConfig
from bridge.learn.mismatch import Correction, Tally, alarm, measure
from bridge.types import LOGPROB_DIFF_EDGES

CPU = torch.device("cpu")
SAMPLED_N = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
RATIOS = (0.25, 0.5, 1.0, 2.0, 8.0)
"""The trainer's probability divided by the server's; powers of two, so that bounds are hit exactly."""


def old() -> Tensor:
    return SAMPLED_N + torch.tensor(RATIOS).log()


def correction(**choices: Any) -> Correction:
    return Correction.of(TrainConfig.model_validate({"model_name": "tiny"} | choices).loss)


@pytest.mark.parametrize(
    ("choices", "weights"),
    [
        ({"mismatch": "none"}, [1, 1, 1, 1, 1]),
        ({"mismatch": "truncate"}, [0.25, 0.5, 1, 2, 2]),
        ({"mismatch": "truncate", "mismatch_high": 1.5}, [0.25, 0.5, 1, 1.5, 1.5]),
        ({"mismatch": "mask"}, [0, 0.5, 1, 2, 0]),
        ({"mismatch": "mask", "mismatch_low": 0.1, "mismatch_high": 9.0}, [0.25, 0.5, 1, 2, 8]),
        ({"mismatch": "mask", "mismatch_low": 0.9, "mismatch_high": 1.1}, [0, 0, 1, 0, 0]),
    ],
)
def test_importance_weights_match_the_papers(choices: dict[str, Any], weights: list[float]) -> None:
    found_N = correction(**choices).weights(old(), SAMPLED_N)
    torch.testing.assert_close(found_N, torch.tensor(weights, dtype=torch.float32), rtol=1e-6, atol=0)


def test_sequence_weight_is_the_product_of_known_tokens() -> None:
    sequences_N = torch.tensor([0, 0, 0, 1, 1])
    unknown_N = torch.tensor([-1.0, -1.0, -1.0, math.nan, -1.0])
    by = correction(mismatch="truncate")
    assert by.weights(old(), SAMPLED_N, sequences_N).tolist() == pytest.approx([0.125] * 3 + [2] * 2)
    assert by.changed(old(), SAMPLED_N, sequences_N).tolist() == [False] * 3 + [True] * 2
    assert by.weights(old(), unknown_N, sequences_N).tolist() == pytest.approx([0.125] * 3 + [2] * 2)
    metrics = measure(old(), unknown_N, by, sequences_N).metrics()
    assert metrics["corrected_share"] == pytest.approx(1 / 4)
    assert metrics["importance_weight"] == pytest.approx((3 * 0.125 + 2) / 4)


def test_sequence_is_masked_by_the_product_of_its_tokens() -> None:
    # 0.25 * 8 = 2 and 0.5 * 1 * 2 = 1 are kept, though 0.25 and 8 alone are not; 0.25 * 0.5 and 2 * 8 are masked
    by = correction(mismatch="mask", mismatch_level="sequence")
    for sequences, weights in (([0, 1, 1, 1, 0], [2, 1, 1, 1, 2]), ([0, 0, 1, 2, 2], [0, 0, 1, 0, 0])):
        sequences_N = torch.tensor(sequences)
        assert by.weights(old(), SAMPLED_N, sequences_N).tolist() == pytest.approx(weights)
        assert by.changed(old(), SAMPLED_N, sequences_N).tolist() == [weight == 0 for weight in weights]
        metrics = measure(old(), SAMPLED_N, by, sequences_N).metrics()
        assert metrics["corrected_share"] == pytest.approx(weights.count(0) / 5)
        assert metrics["importance_weight"] == pytest.approx(sum(weights) / 5)


def test_importance_ratio_at_a_bound_is_kept() -> None:
    both = Correction(kind="mask", low=0.5, high=2.0)
    ratios_N = torch.tensor([0.5, 2.0])
    sampled_N = torch.zeros(2)
    assert not both.changed(ratios_N.log(), sampled_N).any()
    assert (both.weights(ratios_N.log(), sampled_N) > 0).all()


def test_importance_weight_has_no_gradient() -> None:
    old_N = old().requires_grad_()
    for kind in ("truncate", "mask", "none"):
        assert not correction(mismatch=kind).weights(old_N, SAMPLED_N).requires_grad


def test_importance_weights_of_huge_differences_are_finite() -> None:
    old_N, sampled_N = torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])
    assert correction(mismatch="truncate").weights(old_N, sampled_N).tolist() == [2.0, 0.0]
    assert correction(mismatch="mask").weights(old_N, sampled_N).tolist() == [0.0, 0.0]


def test_masking_does_not_hide_nan() -> None:
    for kind in ("truncate", "mask"):
        assert correction(mismatch=kind).weights(torch.tensor([math.nan]), torch.tensor([0.0])).isnan().all()


@pytest.mark.parametrize("kind", ["none", "truncate", "mask"])
def test_unknown_logprob_has_weight_one_and_is_not_measured(kind: str) -> None:
    unknown_N = torch.tensor([math.nan, -1.0, math.nan, -1.0, -1.0])
    spec, known = correction(mismatch=kind), [1, 3, 4]
    assert spec.weights(old(), unknown_N)[[0, 2]].tolist() == [1.0, 1.0]
    assert spec.weights(old(), unknown_N)[known].equal(spec.weights(old(), SAMPLED_N)[known])
    assert not spec.changed(old(), unknown_N)[[0, 2]].any()
    assert measure(old(), unknown_N, spec).metrics() == measure(old()[known], SAMPLED_N[known], spec).metrics()


def test_unknown_logprobs_give_no_metric_and_no_alarm() -> None:
    metrics = measure(old(), torch.full_like(SAMPLED_N, math.nan), correction(mismatch="truncate")).metrics()
    assert all(math.isnan(value) for name, value in metrics.items() if name != "logprob_diff_histogram")
    assert alarm(metrics, threshold=0.1) is None


def test_mismatch_matches_a_hand_computation() -> None:
    differences_N = torch.tensor([0.0, 0.0005, 0.002, 0.004, 0.02, 0.05, 0.2, 0.5, 1.0, 2.0])
    signs_N = torch.tensor([1.0, -1.0] * 5)
    sampled_N = torch.full((10,), -3.0)
    metrics = measure(sampled_N + differences_N * signs_N, sampled_N, Correction(kind="truncate", high=2.0)).metrics()
    assert metrics["logprob_diff_mean"] == pytest.approx(3.7765 / 10, rel=1e-5)
    assert metrics["logprob_diff_max"] == pytest.approx(2.0)
    assert len(metrics["logprob_diff_histogram"]) == len(LOGPROB_DIFF_EDGES) + 1 == 8
    assert metrics["logprob_diff_histogram"] == pytest.approx([0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2])
    ratios_N = (differences_N * signs_N).double()
    assert metrics["mismatch_kl"] == pytest.approx((ratios_N.exp() - 1 - ratios_N).mean().item(), rel=1e-5)
    # + 0, 0.002, 0.02, 0.2 and 1; - 0.0005, 0.004, 0.05, 0.5 and 2; e is truncated to 2
    weights = [1, math.exp(0.002), math.exp(0.02), math.exp(0.2), 2]
    weights += [math.exp(-0.0005), math.exp(-0.004), math.exp(-0.05), math.exp(-0.5), math.exp(-2)]
    assert metrics["corrected_share"] == pytest.approx(0.1)
    assert metrics["importance_weight"] == pytest.approx(sum(weights) / 10, rel=1e-5)
    squares = sum(weight * weight for weight in weights)
    assert metrics["effective_share"] == pytest.approx(sum(weights) ** 2 / (10 * squares), rel=1e-5)


def test_impossible_tokens_have_an_infinite_kl() -> None:
    impossible, possible = torch.tensor([-math.inf]), torch.tensor([-1.0])
    for old_N, sampled_N in ((impossible, possible), (possible, impossible)):
        assert measure(old_N, sampled_N, correction()).metrics()["mismatch_kl"] == math.inf
    assert measure(impossible, impossible, correction()).metrics()["mismatch_kl"] == 0


@pytest.mark.parametrize(
    ("kind", "changed", "weight"), [("none", 0.0, 1.0), ("truncate", 0.2, 5.75 / 5), ("mask", 0.4, 3.5 / 5)]
)
def test_truncated_and_masked_shares_are_reported(kind: str, changed: float, weight: float) -> None:
    metrics = measure(old(), SAMPLED_N, correction(mismatch=kind)).metrics()
    assert metrics["corrected_share"] == pytest.approx(changed)
    assert metrics["importance_weight"] == pytest.approx(weight, rel=1e-6)


def test_without_correction_no_token_counts_as_changed() -> None:
    assert measure(old(), SAMPLED_N, correction(mismatch="none", mismatch_high=1.5)).metrics()["corrected_share"] == 0


def test_equal_logprobs_have_no_mismatch() -> None:
    assert measure(SAMPLED_N, SAMPLED_N, correction()).metrics() == {
        "logprob_diff_mean": 0, "logprob_diff_max": 0, "logprob_diff_histogram": (1.0, 0, 0, 0, 0, 0, 0, 0),
        "mismatch_kl": 0, "corrected_share": 0, "importance_weight": 1, "effective_share": 1,
    }  # fmt: skip


@pytest.mark.parametrize("cut", [0, 1, 17, 40])
def test_mismatch_sums_of_parts_add_up(cut: int) -> None:
    torch.manual_seed(0)
    old_N, sampled_N = torch.randn(40), torch.randn(40)
    by = correction(mismatch="mask")
    whole = measure(old_N, sampled_N, by).metrics()
    parts = measure(old_N[:cut], sampled_N[:cut], by) + measure(old_N[cut:], sampled_N[cut:], by)
    summed = (Tally.zero(CPU) + parts).metrics()
    assert summed["logprob_diff_max"] == whole["logprob_diff_max"]
    assert summed["logprob_diff_histogram"] == whole["logprob_diff_histogram"]
    assert summed["corrected_share"] == whole["corrected_share"]
    for name in ("logprob_diff_mean", "mismatch_kl", "importance_weight", "effective_share"):
        assert summed[name] == pytest.approx(whole[name], rel=1e-12)


def test_measuring_does_not_wait_for_the_device() -> None:
    """Tensors on the meta device have no values, so reading one would fail."""
    old_N, sampled_N = old().to("meta"), SAMPLED_N.to("meta")
    for kind in ("truncate", "mask", "none"):
        tally = measure(old_N, sampled_N, correction(mismatch=kind)) + Tally.zero(torch.device("meta"))
        with pytest.raises((RuntimeError, NotImplementedError)):
            tally.metrics()


def test_step_without_tokens_has_no_mismatch_and_no_alarm() -> None:
    metrics = Tally.zero(CPU).metrics()
    histogram = metrics.pop("logprob_diff_histogram")
    assert all(math.isnan(value) for value in (*metrics.values(), *histogram))
    assert alarm(metrics, 0.1) is None


def test_mean_at_the_threshold_raises_an_alarm_with_causes() -> None:
    sampled_N = torch.zeros(4)
    metrics = measure(torch.tensor([0.5, 0.25, 0.25, 0.0]), sampled_N, correction()).metrics()
    assert metrics["logprob_diff_mean"] == 0.25
    line = alarm(metrics, 0.25)
    assert line is not None
    assert "\n" not in line
    for words in ("0.25 nats", "up to 0.5", "0.013 to 0.024", "prefix cache", "temperature", "dtype", "top-p"):
        assert words in line
    assert alarm(metrics, 0.26) is None
