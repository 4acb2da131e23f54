"""Tinker's losses in float64 against the formulas, written out datum by datum and token by token."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.errors import UsageError
from bridge.tinker.losses import NAMES, OF_RATIOS, Rows, cross_entropy, refuse_other

LENGTHS = (5, 1, 8)


def rows_of(seed: int, spread: float = 0.8) -> Rows:
    """Return rows of three data in float64, with ratios on both sides of every clip, and a prompt without weight."""
    chance = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(sum(LENGTHS), generator=chance, dtype=torch.float64) * 3
    sampled = logprobs + torch.randn(len(logprobs), generator=chance, dtype=torch.float64) * spread
    advantages = torch.randn(len(logprobs), generator=chance, dtype=torch.float64)
    mask = torch.tensor([0.0, 1, 1, 1, 0] + [1.0] + [0.0] * 3 + [1.0] * 5, dtype=torch.float64)
    sequences = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    return Rows(logprobs.requires_grad_(), sampled, advantages * mask, mask, sequences)


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return torch.where(value < low, torch.full_like(value, low), torch.where(value > high, high, value))


def importance_sampling(p: Tensor, q: Tensor, advantage: Tensor, _: Tensor, __: Mapping[str, float]) -> Tensor:
    return -(torch.exp(p - q) * advantage)


def ppo(p: Tensor, q: Tensor, advantage: Tensor, _: Tensor, config: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(p - q)
    clipped = clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return -min(ratio * advantage, clipped * advantage, key=float)


def cispo(p: Tensor, q: Tensor, advantage: Tensor, _: Tensor, config: Mapping[str, float]) -> Tensor:
    factor = clip(torch.exp(p - q), config["clip_low_threshold"], config["clip_high_threshold"]).item()
    return -(factor * p * advantage)


def dro(p: Tensor, q: Tensor, advantage: Tensor, _: Tensor, config: Mapping[str, float]) -> Tensor:
    return -(p * advantage - 0.5 * config["beta"] * (p - q) ** 2)


def gspo(p: Tensor, _: Tensor, advantage: Tensor, sequence: Tensor, config: Mapping[str, float]) -> Tensor:
    ratio = math.exp(sequence.item()) * torch.exp(p - p.item())
    clipped = clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return -min(ratio * advantage, clipped * advantage, key=float)


REFERENCES: dict[str, tuple[Callable[..., Tensor], dict[str, float]]] = {
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": (cispo, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": (dro, {"beta": 0.3}),
    "gspo": (gspo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
}
OTHERS = {
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {"beta": 2.0},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01},
}


def exact(name: str, rows: Rows, config: Mapping[str, float]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    start = 0
    for length in LENGTHS:
        own = [of_rows[start : start + length] for of_rows in rows[:4]]
        inside = [(p - q).item() for p, q, _, is_inside in zip(*own, strict=True) if is_inside]
        sequence = torch.tensor(sum(inside) / len(inside), dtype=torch.float64)
        for p, q, advantage, _ in zip(*own, strict=True):
            total = total + REFERENCES[name][0](p, q, advantage, sequence, config)
        start += length
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", OF_RATIOS)
def test_losses_and_gradients_are_those_of_the_formulas(name: str, seed: int) -> None:
    loss = OF_RATIOS[name]
    for given in ({}, OTHERS.get(name, {})):
        config = REFERENCES[name][1] | given
        ours, theirs = rows_of(seed), rows_of(seed)
        actual = loss.compute(ours, loss.chosen(name, config if name == "dro" else given))
        expected = exact(name, theirs, config)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        (own,) = torch.autograd.grad(actual, ours.logprobs_N)
        (other,) = torch.autograd.grad(expected, theirs.logprobs_N)
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OF_RATIOS)
def test_losses_are_sums_however_they_are_cut(name: str) -> None:
    loss, rows = OF_RATIOS[name], rows_of(3)
    config = loss.chosen(name, {"beta": 0.1} if name == "dro" else {})
    parts = [
        loss.compute(
            Rows._make([*(of_rows[start:end] for of_rows in rows[:4]), rows.sequences_N[start:end] - first]), config
        )
        for start, end, first in ((0, 5, 0), (5, 14, 1))
    ]
    torch.testing.assert_close(sum(parts), loss.compute(rows, config), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(7,), (7, 4)])
def test_cross_entropy_is_a_weighted_sum(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logprobs, weights = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.rand(shape).double()
    loss = cross_entropy(logprobs, weights)
    expected = -math.fsum(p * w for p, w in zip(logprobs.flatten().tolist(), weights.flatten().tolist(), strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.equal(gradient, -weights)


@pytest.mark.parametrize("name", OF_RATIOS)
def test_tokens_without_advantage_cost_nothing(name: str) -> None:
    """A prompt's log-probabilities are 0 in a datum, and the trained ones may be anything."""
    far = torch.tensor([-1e4, 0.0, -1.0], requires_grad=True)
    sampled = torch.tensor([0.0, -1e4, -1.0])
    rows = Rows(far, sampled, torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3).long())
    loss = OF_RATIOS[name].compute(rows, OF_RATIOS[name].chosen(name, {"beta": 0.0} if name == "dro" else {}))
    (gradient,) = torch.autograd.grad(loss, far)
    assert gradient.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("ppo", {"clip": 0.2}, "loss_fn_config of ppo has 'clip', expected clip_low_threshold, clip_high_threshold"),
        ("importance_sampling", {"beta": 0.1}, "has 'beta', expected none"),
        ("dro", {}, "loss_fn_config of dro: beta is missing"),
        ("dro", {"beta": "much"}, "beta is 'much', expected a number"),
        ("cispo", {"clip_high_threshold": math.nan}, "clip_high_threshold is nan"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(name: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        OF_RATIOS[name].chosen(name, given)


def test_an_unknown_loss_names_those_that_there_are() -> None:
    for name in NAMES:
        refuse_other(name)
    with pytest.raises(
        UsageError, match="'stable_reinforce' is not supported here, only cross_entropy, import"
    ) as error:
        refuse_other("stable_reinforce")
    assert "importance_sampling" in error.value.hint
