"""The policy losses: hand-computed values, gradients, clips, truncation, and the expectation over stale samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.config import TrainConfig
from bridge.learn.mismatch import Correction, measure
from bridge.learn.policy_loss import LOSSES, LossSpec, divergence, least_entropy, means, policy_loss
from bridge.learn.samples import samples
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.types import Completion, Group

CPU = torch.device("cpu")
CLIPPED = LossSpec(ratio_level="token", aggregation="token_mean", advantage_scale="none", clip_low=0.2, clip_high=0.3)
BY_SEQUENCE = replace(CLIPPED, ratio_level="sequence")
WIDE = replace(CLIPPED, clip_low=0.999999, clip_high=1e6)
"""A clip so wide that nothing is clipped here."""

POLICY_LOSSES = [name for name, spec in LOSSES.items() if spec.uses_rewards]


def batch_of(*advantages: Sequence[float], weight: float = 1.0, sampled: float = -2.0) -> MicroBatch:
    """Return one micro-batch in float64, with one sequence per row of advantages."""
    rows = [
        Sample(
            prompt_token_ids=(1,) * (100 - index - len(row)),  # keeps the order, since the longest comes first
            token_ids=(2,) * len(row),
            sampled_logprobs=(sampled,) * len(row),
            advantages=tuple(row),
            weight=weight,
        )
        for index, row in enumerate(advantages)
    ]
    (batch,) = packs(rows, max_tokens=10_000, device=CPU)
    exact_N = tensor(*(value for row in advantages for value in row))
    return replace(doubled(batch), advantages_N=exact_N)


def doubled(batch: MicroBatch) -> MicroBatch:
    return replace(
        batch,
        sampled_logprobs_N=batch.sampled_logprobs_N.double(),
        advantages_N=batch.advantages_N.double(),
        weights_N=batch.weights_N.double(),
    )


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def at(batch: MicroBatch, ratios: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities with these ratios to the old ones, and the old ones, which equal the sampled ones."""
    old_N = batch.sampled_logprobs_N
    return (old_N + tensor(*ratios).log()).requires_grad_(), old_N


def loss_and_gradient(batch: MicroBatch, spec: LossSpec, ratios: Sequence[float]) -> tuple[float, list[float]]:
    logprobs_N, old_N = at(batch, ratios)
    loss, _ = policy_loss(logprobs_N, old_N, batch, spec)
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    return loss.item(), gradient_N.tolist()


def clipped(shares: Mapping[str, float]) -> tuple[float, float]:
    return shares["clipped_low_share"], shares["clipped_high_share"]


# The settings behind each name


def spec_of(**choices: Any) -> LossSpec:
    return LossSpec.of(
        TrainConfig.model_validate({"model_name": "tiny", "mode": "lora_only", "mismatch": "none"} | choices).loss
    )


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_loss_follows_its_paper_unless_overridden(loss: str) -> None:
    assert spec_of(loss=loss) == replace(LOSSES[loss], correction=Correction(low=0.5))


def test_each_loss_choice_can_be_overridden_separately() -> None:
    gspo = spec_of(loss="gspo")
    parts: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.4, "ratio_level": "token", "advantage_scale": "none"}
    parts["clip_dual"] = 3.0
    for part, value in parts.items():
        assert spec_of(loss="gspo", **{part: value}) == replace(gspo, **{part: value})
    others = spec_of(loss="dapo", mask_truncated=True, kl_coef=0.25, mismatch="mask")
    assert (others.mask_truncated, others.kl_coef, others.correction) == (
        True,
        0.25,
        Correction(kind="mask", low=0.5, high=5.0),
    )


LENGTHS = (3, 1)
RATIOS = (1.1, 1.5, 0.5, 0.9)
"""Three tokens with reward 1 and one with reward 0; clipped by 0.2 on both sides: 1.1, 1.2, 0.5; 0.9."""


def group_of(lengths: Sequence[int], rewards: Sequence[float]) -> Group:
    completions = tuple(
        Completion(token_ids=(5,) * n, logprobs=(-1.0,) * n, text="", finish_reason="stop", versions=(0,) * n)
        for n in lengths
    )
    return Group(problem={"prompt": "?"}, prompt_token_ids=(1,), completions=completions, rewards=tuple(rewards))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # advantages 1 and -1; the mean over two completions of each one's mean
        ("grpo", -((1.1 + 1.2 + 0.5) / 3 - 0.9) / 2),
        # advantages 1/2 and -1/2; over two completions of at most 10 tokens
        ("dr_grpo", -((1.1 + 1.2 + 0.5) / 2 - 0.9 / 2) / (2 * 10)),
        # advantages 1 and -1; the mean over four tokens; the upper clip is 1.28
        ("dapo", -((1.1 + 1.28 + 0.5) - 0.9) / 4),
        # one ratio per completion: the cube root of 0.825 is below one, so the good completion is not clipped;
        # the bad one's, 0.9, is clipped to 1 - 3e-4
        ("gspo", -((1.1 * 1.5 * 0.5) ** (1 / 3) - (1 - 3e-4)) / 2),
        # advantages 1 - 0 and 0 - 1; over two completions of at most 10 tokens
        ("rloo", -((1.1 + 1.2 + 0.5) - 0.9) / (2 * 10)),
        # advantages 1 and -1; each ratio, none above 5, weighs the log-probability: that of the server is -1
        ("cispo", -(sum(r * (math.log(r) - 1) for r in (1.1, 1.5, 0.5)) - 0.9 * (math.log(0.9) - 1)) / 4),
    ],
)
def test_each_loss_matches_a_hand_computation(loss: str, expected: float) -> None:
    spec = spec_of(loss=loss)
    (batch,) = packs(samples([group_of(LENGTHS, (1, 0))], spec, max_new_tokens=10), max_tokens=100, device=CPU)
    logprobs_N, old_N = at(doubled(batch), RATIOS)
    assert policy_loss(logprobs_N, old_N, doubled(batch), spec)[0].item() == pytest.approx(expected, abs=1e-5)


# One token


@pytest.mark.parametrize("spec", [CLIPPED, BY_SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the policy gradient, which makes a good token more likely
        (1.0, -2.0, 2.0, 2.0),  # and a bad one less likely
        (1.1, 2.0, -2.2, -2.2),  # inside the clip the gradient is ratio * advantage
        (1.1, -2.0, 2.2, 2.2),
        (1.5, 2.0, -2.6, 0.0),  # good and already more likely than 1 + 0.3: no more push
        (1.5, -2.0, 3.0, 3.0),  # bad and more likely: never clipped, the full push back
        (0.5, 2.0, -1.0, -1.0),  # good and less likely: never clipped, the full push up
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely than 1 - 0.2: no more push
    ],
)
def test_loss_and_gradient_of_one_token_match_the_paper(
    spec: LossSpec, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    value, (slope,) = loss_and_gradient(batch_of([advantage]), spec, [ratio])
    assert (value, slope) == pytest.approx((loss, gradient), rel=1e-12)


@pytest.mark.parametrize(
    "spec",
    [CLIPPED, BY_SEQUENCE, replace(CLIPPED, clipped="weight", clip_low=1)],
    ids=["token", "sequence", "weight"],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_huge_ratio_gives_finite_numbers(spec: LossSpec, advantage: float, distance: float) -> None:
    batch = batch_of([advantage])
    logprobs_N = (batch.sampled_logprobs_N + distance).float().requires_grad_()
    loss, statistics = policy_loss(logprobs_N, batch.sampled_logprobs_N.float(), batch, spec)
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient_N).all()
    assert all(map(math.isfinite, means(statistics).values()))


@pytest.mark.parametrize("kind", ["none", "truncate", "mask"])
@pytest.mark.parametrize("server", [-2.0, -math.inf, math.nan])
@pytest.mark.parametrize("clipped", ["objective", "weight"])
def test_token_impossible_for_the_trainer_is_masked(kind: Any, server: float, clipped: Any) -> None:
    spec = replace(CLIPPED, clipped=clipped, correction=Correction(kind=kind, high=2.0), kl_coef=0.1)
    alone, batch = batch_of([1.0]), batch_of([1.0, 1.0])
    batch = replace(batch, sampled_logprobs_N=tensor(-2.0, server))
    gradients = []
    for micro_batch, logprobs in ((alone, [-2.1]), (batch, [-2.1, -math.inf])):
        logprobs_N = tensor(*logprobs).requires_grad_()
        reference_N = logprobs_N.detach() + 0.2  # a head that masks a word does so in both models
        loss, sums = policy_loss(logprobs_N, logprobs_N.detach(), micro_batch, spec, reference_N)
        gradients.append(torch.autograd.grad(loss, logprobs_N)[0].tolist())
        assert torch.isfinite(loss)
        assert all(map(math.isfinite, means(sums).values()))
    assert gradients[1] == [*gradients[0], 0.0]
    metrics = measure(logprobs_N.detach(), batch.sampled_logprobs_N, spec.correction).metrics()
    assert metrics["corrected_share"] == (0.0 if math.isnan(server) else 0.5)


def test_sequence_impossible_for_the_trainer_is_masked() -> None:
    spec = replace(CLIPPED, correction=Correction(kind="truncate", level="sequence", high=2.0))
    batch = replace(batch_of([1.0, 1.0, 1.0]), sampled_logprobs_N=tensor(-2.0, -math.inf, -2.0))
    logprobs_N = tensor(-2.1, -2.0, -math.inf).requires_grad_()
    loss, _ = policy_loss(logprobs_N, logprobs_N.detach(), batch, spec)
    assert loss == 0
    assert torch.autograd.grad(loss, logprobs_N)[0].tolist() == [0, 0, 0]


def test_float32_stays_float32() -> None:
    (batch,) = packs([Sample(**plain(2))], max_tokens=10, device=CPU)
    loss, _ = policy_loss(batch.sampled_logprobs_N, batch.sampled_logprobs_N, batch, LOSSES["gspo"])
    assert loss.dtype == torch.float32


def plain(length: int) -> dict[str, Any]:
    values = (1.0,) * length
    return {
        "prompt_token_ids": (1,),
        "token_ids": (2,) * length,
        "sampled_logprobs": values,
        "advantages": values,
        "weight": 0.5,
    }


@pytest.mark.parametrize("spec", [CLIPPED, BY_SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize(
    ("dual", "ratio", "advantage", "loss", "gradient"),
    [
        (3.0, 2.5, -2.0, 5.0, 5.0),  # bad and more likely, but not yet by 3: the full push back
        (3.0, 4.0, -2.0, 6.0, 0.0),  # past 3: bounded, and no more push
        (3.0, 4.0, 2.0, -2.6, 0.0),  # good: clipped at 1 + 0.3, as ever
        (3.0, 0.5, -2.0, 1.6, 0.0),  # bad and less likely: clipped at 1 - 0.2, as ever
        (1.1, 1.25, 2.0, -2.5, -2.5),  # a bound within the clips applies only to bad tokens
        (1.1, 1.25, -2.0, 2.2, 0.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(
    spec: LossSpec, dual: float, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    value, (slope,) = loss_and_gradient(batch_of([advantage]), replace(spec, clip_dual=dual), [ratio])
    assert (value, slope) == pytest.approx((loss, gradient), rel=1e-12)


def test_bad_tokens_past_the_dual_clip_count_as_clipped_high() -> None:
    batch = batch_of([-2.0, -2.0, 2.0, 2.0])
    logprobs_N, old_N = at(batch, [4.0, 2.5, 1.5, 1.1])
    shares = means(policy_loss(logprobs_N, old_N, batch, replace(CLIPPED, clip_dual=3.0))[1])
    assert clipped(shares) == (0, 2 / 4)


CISPO = replace(CLIPPED, clipped="weight")
"""CISPO's objective with the clips of `CLIPPED`; its own clips are 1 and 4."""


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (1.1, 2.0, 1.1),  # inside the clip the gradient is that of PPO
        (1.5, 2.0, 1.3),  # good and more likely than 1 + 0.3: PPO would have no gradient
        (1.5, -2.0, 1.3),  # bad and more likely: PPO would push back by 1.5
        (0.5, 2.0, 0.8),
        (0.5, -2.0, 0.8),  # bad and less likely than 1 - 0.2: PPO would have no gradient
    ],
)
def test_clipped_weight_is_a_constant_factor_of_the_logprob(ratio: float, advantage: float, weight: float) -> None:
    value, (slope,) = loss_and_gradient(batch_of([advantage]), CISPO, [ratio])
    assert value == pytest.approx(-weight * advantage * (math.log(ratio) - 2))  # the server's log-probability is -2
    assert slope == pytest.approx(-weight * advantage)


def test_clipped_share_ignores_the_sign_of_the_advantage() -> None:
    batch = batch_of([2.0, 2.0, -2.0, -2.0, 2.0])
    logprobs_N, old_N = at(batch, [1.1, 1.5, 1.5, 0.5, 1.4])
    shares = means(policy_loss(logprobs_N, old_N, batch, CISPO)[1])
    assert clipped(shares) == pytest.approx((1 / 5, 3 / 5))
    own = means(policy_loss(logprobs_N, old_N, batch, LOSSES["cispo"])[1])
    assert clipped(own) == (0, 0)


def test_cispo_has_no_lower_clip_and_an_upper_one_of_five() -> None:
    gradients = [
        loss_and_gradient(batch_of([-1.0]), LOSSES["cispo"], [ratio])[1][0] for ratio in (1e-3, 1.0, 4.9, 80.0)
    ]
    assert gradients == pytest.approx([1e-3, 1.0, 4.9, 5.0])


# Several tokens


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_on_policy_loss_has_the_policy_gradient(loss: str) -> None:
    torch.manual_seed(0)
    batch = batch_of([0.5] * 4, [-2.0] * 2, [1.0] * 3, weight=0.25)
    logits_NV = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    logprobs_N = logits_NV.log_softmax(-1)[:, 0]
    value, _ = policy_loss(logprobs_N, logprobs_N.detach(), batch, LOSSES[loss])
    gradient = torch.autograd.grad(value, logits_NV, retain_graph=True)[0]
    plainly = -(logprobs_N * batch.advantages_N * 0.25).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(plainly, logits_NV)[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("correction", [Correction(), Correction(kind="truncate", high=2.0)])
@pytest.mark.parametrize("spec", [CLIPPED, BY_SEQUENCE], ids=["token", "sequence"])
def test_gradient_matches_finite_differences(spec: LossSpec, correction: Correction) -> None:
    torch.manual_seed(3)
    batch = batch_of([1.5] * 3, [-0.5] * 2, [1.0] * 2, [-1.0] * 2, weight=0.2)
    old_N = batch.sampled_logprobs_N + (0.3 if spec.ratio_level == "token" and correction.kind != "none" else 0.0)
    steps_N = tensor(0.02, -0.05, 0.1, 0.03, 0.08, 0.9, 0.8, -0.9, -0.7)  # inside the clips, and past each of them
    reference_N = old_N + torch.randn(9, dtype=torch.float64) / 3
    spec_with_terms = replace(spec, kl_coef=0.4, correction=correction)

    def value(logprobs_N: Tensor) -> Tensor:
        return policy_loss(logprobs_N, old_N, batch, spec_with_terms, reference_N)[0]

    inputs_N = (old_N + steps_N).requires_grad_()
    if spec is CLIPPED:  # by sequence the gradient is detached from the mean on purpose, and gradcheck would fail
        assert torch.autograd.gradcheck(value, (inputs_N,))
    (gradient_N,) = torch.autograd.grad(value(inputs_N), inputs_N)
    torch.testing.assert_close(gradient_N, slopes(value, inputs_N.detach()), rtol=1e-6, atol=1e-8)


def slopes(function: Any, point_N: Tensor, step: float = 1e-6) -> Tensor:
    """Return central differences, computed from values only."""
    basis = torch.eye(len(point_N), dtype=torch.float64) * step
    return torch.stack([(function(point_N + shift) - function(point_N - shift)) / (2 * step) for shift in basis])


def test_completion_ratio_is_the_mean_over_its_tokens() -> None:
    # geometric means: sqrt(1.2 * 0.9) = 1.0392 and 1.1; advantage 1 and -2
    batch = batch_of([1.0, 1.0], [-2.0], weight=0.5)
    value, gradient_N = loss_and_gradient(batch, BY_SEQUENCE, [1.2, 0.9, 1.1])
    mean = math.sqrt(1.2 * 0.9)
    assert value == pytest.approx(-(2 * mean - 2 * 1.1) * 0.5)
    assert gradient_N == pytest.approx([-0.5 * mean, -0.5 * mean, 1.1])


def test_sequence_ratio_clips_the_full_completion() -> None:
    # only the first ratio is inside the clip; their mean, 1.8, is not
    value, gradient_N = loss_and_gradient(batch_of([1.0, 1.0]), BY_SEQUENCE, [1.2, 2.7])
    assert value == pytest.approx(-2.6)
    assert gradient_N == [0, 0]
    assert loss_and_gradient(batch_of([1.0, 1.0]), CLIPPED, [1.2, 2.7])[1] == pytest.approx([-1.2, 0])


def test_sequence_level_loss_does_not_depend_on_length() -> None:
    losses = set()
    for length in (1, 2, 4, 8):
        batch = batch_of([1.0] * length, weight=1 / length)
        value, gradient_N = loss_and_gradient(batch, BY_SEQUENCE, [1.25] * length)
        losses.add((round(value, 12), round(sum(gradient_N), 12)))
    assert losses == {(-1.25, -1.25)}


def test_sequence_level_gradient_matches_the_paper() -> None:
    torch.manual_seed(5)
    lengths, advantages = (3, 5, 1), (1.0, -0.7, 0.4)
    batch = batch_of(*([a] * n for a, n in zip(advantages, lengths, strict=True)))
    batch = replace(batch, weights_N=tensor(*(1 / (3 * n) for n in lengths for _ in range(n))))
    logprobs_N, old_N = at(batch, (0.9 + torch.rand(9) / 5).tolist())
    gradient = torch.autograd.grad(policy_loss(logprobs_N, old_N, batch, BY_SEQUENCE)[0], logprobs_N)[0]
    gains = []  # equation 5, with one ratio per completion and the gradient of its mean
    for part, a in zip((logprobs_N - old_N).split(lengths), advantages, strict=True):
        s = part.mean().exp()
        gains.append(torch.minimum(s * a, s.clamp(0.8, 1.3) * a))
    expected = torch.autograd.grad(-torch.stack(gains).mean(), logprobs_N)[0]
    assert (expected != 0).all()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_each_token_has_its_own_advantage() -> None:
    batch = batch_of([2.0, 0.0, -1.0])
    value, gradient_N = loss_and_gradient(batch, CLIPPED, [1.1, 1.1, 1.1])
    assert value == pytest.approx(-1.1)
    assert gradient_N == pytest.approx([-2.2, 0, 1.1])


def test_sequence_level_advantage_reaches_only_its_token() -> None:
    mean = (1.1 * 1.0 * 1.2) ** (1 / 3)
    value, gradient_N = loss_and_gradient(batch_of([2.0, 0.0, -1.0]), BY_SEQUENCE, [1.1, 1.0, 1.2])
    assert value == pytest.approx(-mean)
    assert gradient_N == pytest.approx([-2 * mean, 0, mean])


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("max_tokens", [1, 7, 12, 30, 1000])
def test_losses_of_micro_batches_add_up_for_any_cut(loss: str, max_tokens: int) -> None:
    torch.manual_seed(1)
    spec = spec_of(loss=loss, kl_coef=0.1, mismatch="truncate", clip_low=0.2, clip_high=0.28)
    lengths = (3, 5, 1, 2), (4, 4, 6, 1)
    groups = [unequal(group_of(n, torch.rand(4).tolist()), index) for index, n in enumerate(lengths)]
    whole = run(samples(groups, spec, max_new_tokens=10), spec, 1000)
    parts = run(samples(groups, spec, max_new_tokens=10), spec, max_tokens)
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-5, atol=1e-7)
    assert parts[2] == pytest.approx(whole[2], rel=1e-5)


def unequal(group: Group, index: int) -> Group:
    """Give every completion its own tokens."""
    completions = tuple(
        replace(one, token_ids=tuple(10 * (4 * index + position) + step for step in range(len(one.token_ids))))
        for position, one in enumerate(group.completions)
    )
    return replace(group, completions=completions)


def run(rows: Sequence[Sample], spec: LossSpec, max_tokens: int) -> tuple[float, Tensor, tuple[float, ...]]:
    """Return loss, gradient and statistics of a model with one free parameter per token id."""
    free_V = (torch.linspace(-1.0, 1.0, 100) ** 3 - 1).requires_grad_()
    total, met = 0.0, dict.fromkeys(spec.metrics, torch.zeros(2, dtype=torch.float64))
    for batch in packs(rows, max_tokens=max_tokens, device=CPU):
        logprobs_N = free_V[batch.targets_N]
        loss, statistics = policy_loss(
            logprobs_N, logprobs_N.detach() - 0.1 * batch.targets_N.sin(), batch, spec, logprobs_N.detach() * 0.9
        )
        loss.backward()
        total, met = total + loss.item(), {name: met[name] + pair for name, pair in statistics.items()}
    assert free_V.grad is not None
    shares = means(met)
    return total, free_V.grad, (met["kl"][1].item(), *shares.values())


# The KL divergence from the reference


def test_divergence_matches_the_paper_and_is_never_negative() -> None:
    found_N = divergence(tensor(-1.0, -1.0, -1.0), tensor(-1.0, -2.0, 0.0))
    assert found_N.tolist() == pytest.approx([0, math.exp(-1) + 1 - 1, math.e - 1 - 1])
    assert (divergence(torch.randn(1000), torch.randn(1000)) >= 0).all()


def test_small_divergence_is_computed_without_cancellation() -> None:
    torch.manual_seed(0)
    differences_N = torch.randn(100_000) * 10 ** (-7 * torch.rand(100_000))
    found_N = divergence(torch.zeros(()), differences_N)
    assert (found_N >= 0).all()
    exact_N = differences_N.double().expm1() - differences_N.double()
    seen_N = differences_N.abs() > 1e-3
    torch.testing.assert_close(found_N[seen_N].double(), exact_N[seen_N], rtol=1e-3, atol=0)


def test_divergence_pulls_towards_the_reference() -> None:
    batch = batch_of([0.0, 0.0, 0.0], weight=0.5)
    logprobs_N, old_N = at(batch, [1.0, 1.0, 1.0])
    reference_N = old_N + tensor(0.0, 1.0, -1.0)
    loss, statistics = policy_loss(logprobs_N, old_N, batch, replace(CLIPPED, kl_coef=0.1), reference_N)
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    assert loss.item() == pytest.approx(0.1 * 0.5 * (math.e - 2 + math.exp(-1)))
    # the slope of exp(d) - d - 1 with d = reference - log-probability is 1 - exp(d)
    assert gradient_N.tolist() == pytest.approx([0, 0.05 * (1 - math.e), 0.05 * (1 - math.exp(-1))])
    assert means(statistics)["kl"] == pytest.approx((math.e - 2 + math.exp(-1)) / 3)


IN_REWARD = replace(CLIPPED, kl_coef=0.1, kl_in_reward=True)


def test_kl_in_reward_is_subtracted_from_earlier_advantages() -> None:
    batch = batch_of([1.0, 1.0], [2.0], weight=0.5)
    logprobs_N, old_N = at(batch, [1.1, 1.1, 1.1])
    # log-ratios 0.5 and -0.2, and 1: from the first token on 0.3, from the second -0.2, and 1
    loss, statistics = policy_loss(logprobs_N, old_N, batch, IN_REWARD, old_N - tensor(0.5, -0.2, 1.0))
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    assert loss.item() == pytest.approx(-0.5 * 1.1 * (0.97 + 1.02 + 1.9))
    assert gradient_N.tolist() == pytest.approx([-0.5 * 1.1 * 0.97, -0.5 * 1.1 * 1.02, -0.5 * 1.1 * 1.9])
    measured_N = divergence(logprobs_N.detach(), old_N - tensor(0.5, -0.2, 1.0))
    assert means(statistics)["kl"] == pytest.approx(measured_N.mean().item())


def test_token_with_kl_in_reward_is_clipped_by_its_new_sign() -> None:
    batch = batch_of([0.05])
    logprobs_N, old_N = at(batch, [0.5])
    loss, statistics = policy_loss(logprobs_N, old_N, batch, IN_REWARD, old_N - 1.0)
    assert loss.item() == pytest.approx(0.8 * 0.05)
    assert means(statistics)["clipped_low_share"] == 1


@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_distant_reference_gives_finite_numbers(distance: float) -> None:
    batch = batch_of([1.0])
    logprobs_N, old_N = at(batch, [1.0])
    loss, _ = policy_loss(logprobs_N, old_N, batch, replace(CLIPPED, kl_coef=1.0), (old_N + distance).float())
    assert torch.isfinite(loss)
    assert torch.isfinite(torch.autograd.grad(loss, logprobs_N)[0]).all()


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.01, [1]),
        (0.2, [1]),
        (0.4, [1, 4]),  # 0.9 and 0.7
        (0.5, [1, 2, 4]),  # 2.5 tokens are at least 3
        (0.8, [1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_entropy_keeps_the_most_uncertain_tokens(share: float, kept: list[int]) -> None:
    entropies_N = tensor(0.1, 0.9, 0.5, 0.3, 0.7)
    found_N = entropies_N >= least_entropy(entropies_N, share)
    assert found_N.nonzero().flatten().tolist() == kept


def test_ties_at_the_entropy_threshold_are_kept() -> None:
    assert least_entropy(tensor(0.5, 0.9, 0.5, 0.1), 0.5) == 0.5


# Metrics


def test_tokens_clipped_to_zero_gradient_are_counted() -> None:
    batch = batch_of([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    logprobs_N, old_N = at(batch, [1.1, 1.5, 0.5, 1.5, 0.5, 0.6])
    _, statistics = policy_loss(logprobs_N, old_N, batch, CLIPPED)
    assert not any(value.requires_grad for value in statistics.values())
    shares = means(statistics)
    assert shares == pytest.approx({"kl": 0, "clipped_low_share": 2 / 6, "clipped_high_share": 1 / 6})


@pytest.mark.parametrize("spec", [CLIPPED, BY_SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask", "none"])
def test_policy_loss_does_not_wait_for_the_device(spec: LossSpec, kind: Any) -> None:
    """Tensors on the meta device have no values, so reading one would fail."""
    batch = batch_of([1.0, 1.0], [-1.0])
    on_meta: dict[str, Any] = {
        name: value.to("meta") for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    batch = replace(batch, **on_meta)
    logprobs_N = batch.sampled_logprobs_N.clone().requires_grad_()
    spec_with_terms = replace(spec, kl_coef=0.1, correction=Correction(kind=kind, low=0.5, high=2.0))
    loss, statistics = policy_loss(logprobs_N, logprobs_N.detach(), batch, spec_with_terms, logprobs_N.detach())
    torch.stack([loss, *(pair.sum() for pair in statistics.values())]).sum().backward()
    with pytest.raises((RuntimeError, NotImplementedError)):
        means(statistics)


def test_update_without_tokens_has_nan_metrics() -> None:
    assert math.isnan(means({"kl": torch.zeros(2, dtype=torch.float64)})["kl"])


# Samples from a policy other than the trained one


def bandit(sampled_V: Tensor, values: Sequence[float]) -> MicroBatch:
    """Return every action once, weighted by its probability of being sampled: an exact expectation."""
    batch = batch_of(*([value] for value in values))
    return replace(batch, sampled_logprobs_N=sampled_V.log(), weights_N=sampled_V)


VALUES = (1.0, -0.5, 2.0, 0.0)
STALE_V = tensor(0.4, 0.3, 0.2, 0.1)
OLD_LOGITS = tensor(0.3, -0.2, 0.9, 0.1)
NEW_LOGITS = tensor(0.5, -0.6, 1.3, 0.4)


def expected_gradient(logits: Tensor, values: Sequence[float]) -> Tensor:
    """Return the gradient of minus the expected value of a softmax policy."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(-(logits.softmax(0) * tensor(*values)).sum(), logits)[0]


def found_gradient(batch: MicroBatch, new: Tensor, old: Tensor, spec: LossSpec) -> Tensor:
    logits = new.clone().requires_grad_()
    loss, _ = policy_loss(logits.log_softmax(0), old.log_softmax(0), batch, spec)
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("new", [OLD_LOGITS, NEW_LOGITS], ids=["first update", "later update"])
@pytest.mark.parametrize("spec", [WIDE, replace(WIDE, ratio_level="sequence")], ids=["token", "sequence"])
def test_stale_samples_give_the_trained_policys_gradient(spec: LossSpec, new: Tensor) -> None:
    weighted = replace(spec, correction=Correction(kind="truncate", high=1e6))
    batch = bandit(STALE_V, VALUES)
    expected = expected_gradient(new, VALUES)
    torch.testing.assert_close(found_gradient(batch, new, OLD_LOGITS, weighted), expected, rtol=1e-10, atol=1e-12)
    unweighted = found_gradient(batch, new, OLD_LOGITS, spec)
    assert (unweighted - expected).abs().max() > 0.05  # without the weight it is not the gradient of any policy


def test_masked_stale_samples_give_the_kept_gradient() -> None:
    ratios_V = OLD_LOGITS.softmax(0) / STALE_V
    low, high = sorted(ratios_V.tolist())[1:3]
    kept_V = (ratios_V >= low) & (ratios_V <= high)
    assert kept_V.sum() == 2
    masked = replace(WIDE, correction=Correction(kind="mask", low=low - 1e-9, high=high + 1e-9))
    gradient = found_gradient(bandit(STALE_V, VALUES), OLD_LOGITS, OLD_LOGITS, masked)
    expected = expected_gradient(OLD_LOGITS, [v if kept else 0.0 for v, kept in zip(VALUES, kept_V, strict=True)])
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_truncated_stale_samples_give_the_bounded_gradient() -> None:
    high = 1.2
    shares_V = (STALE_V * high / OLD_LOGITS.softmax(0)).clamp(max=1)
    assert 0 < (shares_V < 1).sum() < 4
    gradient = found_gradient(
        bandit(STALE_V, VALUES),
        OLD_LOGITS,
        OLD_LOGITS,
        replace(WIDE, correction=Correction(kind="truncate", high=high)),
    )
    expected = expected_gradient(OLD_LOGITS, (tensor(*VALUES) * shares_V).tolist())
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_sequence_level_correction_is_exact_for_two_tokens() -> None:
    """Enumerate all pairs with the server's probabilities; the gradient must be that of the trainer's policy."""
    torch.manual_seed(2)
    stale_VV, values_VV = torch.rand(4, 4, dtype=torch.float64).softmax(1), torch.randn(4, 4, dtype=torch.float64)
    logits_VV = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    first_logits_V = OLD_LOGITS.clone().requires_grad_()
    pairs = [(first, second) for first in range(4) for second in range(4)]
    batch = batch_of(*([values_VV[pair].item()] * 2 for pair in pairs))
    likely = [(STALE_V[first] * stale_VV[first, second]).item() for first, second in pairs]
    sampled = [value.log().item() for first, second in pairs for value in (STALE_V[first], stale_VV[first, second])]
    batch = replace(batch, sampled_logprobs_N=tensor(*sampled), weights_N=tensor(*likely).repeat_interleave(2))
    first_N = first_logits_V.log_softmax(0)[[first for first, _ in pairs]]
    second_N = torch.stack([logits_VV.log_softmax(1)[pair] for pair in pairs])
    logprobs_N = torch.stack([first_N, second_N], dim=1).flatten()
    spec = replace(WIDE, ratio_level="sequence", correction=Correction(kind="truncate", high=1e6))
    loss, _ = policy_loss(logprobs_N, logprobs_N.detach(), batch, spec)
    gradients = torch.autograd.grad(loss, [first_logits_V, logits_VV])
    gain = (first_logits_V.softmax(0)[:, None] * logits_VV.softmax(1) * values_VV).sum()
    for one, other in zip(gradients, torch.autograd.grad(-gain, [first_logits_V, logits_VV]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_kl_in_reward_has_the_gradient_of_whole_completions() -> None:
    """Enumerate all pairs; the gradient must be that of the expected value minus the pairs' divergence."""
    torch.manual_seed(4)
    values_VV, reference_VV = torch.randn(4, 4, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    logits_V = OLD_LOGITS.clone().requires_grad_()
    logits_VV = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    reference_V, reference_VV = NEW_LOGITS.log_softmax(0), reference_VV.view(4, 4).log_softmax(1)
    pairs = [(first, second) for first in range(4) for second in range(4)]
    pairs_VV = logits_V.log_softmax(0)[:, None] + logits_VV.log_softmax(1)
    batch = batch_of(*([values_VV[pair].item()] * 2 for pair in pairs))
    batch = replace(batch, weights_N=pairs_VV.detach().exp().flatten().repeat_interleave(2))

    def rows(first_V: Tensor, second_VV: Tensor) -> Tensor:
        return torch.stack([value for pair in pairs for value in (first_V[pair[0]], second_VV[pair])])

    logprobs_N = rows(logits_V.log_softmax(0), logits_VV.log_softmax(1))
    spec = replace(WIDE, kl_coef=0.3, kl_in_reward=True)
    loss, _ = policy_loss(logprobs_N, logprobs_N.detach(), batch, spec, rows(reference_V, reference_VV))
    gradients = torch.autograd.grad(loss, [logits_V, logits_VV], retain_graph=True)
    penalised_VV = values_VV - 0.3 * (pairs_VV - reference_V[:, None] - reference_VV)
    expected = torch.autograd.grad(-(pairs_VV.exp() * penalised_VV).sum(), [logits_V, logits_VV])
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_gspo_truncates_one_weight_per_completion() -> None:
    # the server's log-probabilities are lower: weights 1.5 * 1.5 = 2.25, truncated to 2, and 0.9
    batch = batch_of([1.0, 1.0], [1.0], weight=0.5)
    old_N = batch.sampled_logprobs_N + tensor(1.5, 1.5, 0.9).log()
    spec = spec_of(loss="gspo", mismatch="truncate")
    logprobs_N = old_N.clone().requires_grad_()
    (gradient_N,) = torch.autograd.grad(policy_loss(logprobs_N, old_N, batch, spec)[0], logprobs_N)
    assert gradient_N.tolist() == pytest.approx([-1.0, -1.0, -0.45])


@pytest.mark.parametrize(
    ("choices", "weights"),
    [
        ({}, (2, 2, 0.25, 2)),  # of each token, truncated at 2
        ({"mismatch_level": "sequence"}, (2, 2, 1, 1)),  # 3 * 3 = 9, truncated, and 0.25 * 4 = 1
        ({"mismatch": "mask"}, (3, 3, 0, 4)),  # from 0.5 to 5
        ({"mismatch": "mask", "mismatch_level": "sequence"}, (0, 0, 1, 1)),
        ({"loss": "gspo"}, (2, 2, 1, 1)),
        ({"loss": "gspo", "mismatch_level": "token"}, (2, 2, 0.25, 2)),
        ({"loss": "gspo", "mismatch": "mask"}, (3, 3, 0, 4)),
        ({"loss": "gspo", "mismatch": "mask", "mismatch_level": "sequence"}, (0, 0, 1, 1)),
    ],
)
def test_default_correction_level_depends_on_the_loss(choices: dict[str, Any], weights: Sequence[float]) -> None:
    batch = batch_of([1.0, 1.0], [1.0, 1.0])
    old_N = batch.sampled_logprobs_N + tensor(3.0, 3.0, 0.25, 4.0).log()
    logprobs_N = old_N.clone().requires_grad_()
    spec = spec_of(**{"mismatch": "truncate"} | choices)
    (gradient_N,) = torch.autograd.grad(policy_loss(logprobs_N, old_N, batch, spec)[0], logprobs_N)
    assert (-gradient_N).tolist() == pytest.approx(list(weights))


def test_token_level_correction_is_exact_given_the_prefix() -> None:
    """Enumerate all pairs; prefixes have the server's probabilities, each next choice the trainer's."""
    torch.manual_seed(2)
    stale_VV, values_VV = torch.rand(4, 4, dtype=torch.float64).softmax(1), torch.randn(4, 4, dtype=torch.float64)
    logits_VV = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)  # the second choice, given the first
    pairs = [(first, second) for first in range(4) for second in range(4)]
    batch = batch_of(*([0.0, values_VV[pair].item()] for pair in pairs))
    likely = [(STALE_V[first] * stale_VV[first, second]).item() for first, second in pairs]
    sampled = [value.log().item() for first, second in pairs for value in (STALE_V[first], stale_VV[first, second])]
    batch = replace(batch, sampled_logprobs_N=tensor(*sampled), weights_N=tensor(*likely).repeat_interleave(2))
    second_N = torch.stack([logits_VV.log_softmax(1)[pair] for pair in pairs])
    first_N = STALE_V.log()[[first for first, _ in pairs]]
    logprobs_N = torch.stack([first_N, second_N], dim=1).flatten()
    spec = replace(WIDE, correction=Correction(kind="truncate", high=1e6))
    loss, _ = policy_loss(logprobs_N, logprobs_N.detach(), batch, spec)
    gradient = torch.autograd.grad(loss, logits_VV, retain_graph=True)[0]
    exact = -(STALE_V.unsqueeze(1) * logits_VV.softmax(1) * values_VV).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits_VV)[0], rtol=1e-10, atol=1e-12)


def test_importance_weight_also_multiplies_the_divergence() -> None:
    """Then the estimate is for the trained policy, whichever policy sampled."""
    batch = bandit(STALE_V, (0.0,) * 4)
    spec = replace(WIDE, kl_coef=1.0, correction=Correction(kind="truncate", high=1e6))
    old_V, reference_V = OLD_LOGITS.log_softmax(0), NEW_LOGITS.log_softmax(0)
    loss, _ = policy_loss(old_V, old_V, batch, spec, reference_V)
    assert loss.item() == pytest.approx((old_V.exp() * (old_V - reference_V)).sum().item(), rel=1e-10)


@pytest.mark.parametrize(("kind", "weights"), [("none", (1, 1, 1)), ("truncate", (0.25, 1, 2)), ("mask", (0, 1, 0))])
def test_term_of_a_token_is_multiplied_by_its_weight(kind: Any, weights: Sequence[float]) -> None:
    spec = replace(CLIPPED, correction=Correction(kind=kind, low=0.5, high=2.0))
    batch = batch_of([1.0, -1.0, 2.0])
    old_N = batch.sampled_logprobs_N + tensor(0.25, 1.0, 8.0).log()
    logprobs_N = old_N.clone().requires_grad_()
    (gradient_N,) = torch.autograd.grad(policy_loss(logprobs_N, old_N, batch, spec)[0], logprobs_N)
    assert gradient_N.tolist() == pytest.approx([-weights[0], weights[1], -2 * weights[2]])


def test_sequence_level_masked_token_gets_no_gradient() -> None:
    spec = replace(BY_SEQUENCE, correction=Correction(kind="mask", low=0.5, high=2.0))
    batch = batch_of([1.0, 1.0])
    old_N = batch.sampled_logprobs_N + tensor(1.0, 8.0).log()
    logprobs_N = old_N.clone().requires_grad_()
    (gradient_N,) = torch.autograd.grad(policy_loss(logprobs_N, old_N, batch, spec)[0], logprobs_N)
    assert gradient_N.tolist() == pytest.approx([-1.0, 0.0])


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_unsampled_tokens_change_neither_loss_nor_gradient(loss: str) -> None:
    spec = spec_of(loss=loss)
    plain = Completion(token_ids=(5, 6), logprobs=(-2.0, -2.0), text="", finish_reason="stop", versions=(0, 0))
    spoken = replace(
        plain, token_ids=(5, 9, 9, 6), logprobs=(-2.0, math.nan, math.nan, -2.0), sampled=(True, False, False, True)
    )
    results = []
    for completion in (plain, spoken):
        group = Group(
            problem={"prompt": ""}, prompt_token_ids=(1,), completions=(completion, plain), rewards=(1.0, 0.0)
        )
        (batch,) = packs(samples([group], spec, max_new_tokens=10), max_tokens=100, device=CPU)
        assert batch.sequences_N.tolist() == [0, 0, 1, 1]
        results.append(sorted(zip(*_by_row(doubled(batch), spec), strict=True)))
    assert results[0] == results[1]


def _by_row(batch: MicroBatch, spec: LossSpec) -> tuple[list[float], list[float]]:
    """Return each row's advantage and its gradient, at ratios that depend only on the row's token."""
    logprobs_N, old_N = at(batch, [1.0 if target == 5 else 1.1 for target in batch.targets_N.tolist()])
    loss, _ = policy_loss(logprobs_N, old_N, batch, spec)
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    return batch.advantages_N.tolist(), gradient_N.tolist()
