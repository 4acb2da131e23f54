"""Advantages and the clipped loss, against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from bridge.training.grpo import clipped_loss, group_advantages


def loss_of(ratio: float, advantage: float) -> tuple[float, float]:
    """Return the loss of one token and its gradient with respect to the log-probability."""
    logprobs_BT = torch.tensor([[math.log(0.1 * ratio)]], requires_grad=True)
    loss = clip(logprobs_BT, torch.tensor([[math.log(0.1)]]), torch.tensor([advantage]), torch.tensor([[True]]), 1)
    loss.backward()
    assert logprobs_BT.grad is not None
    return float(loss.detach()), float(logprobs_BT.grad)


def clip(logprobs_BT: Tensor, sampled_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, num_tokens: int) -> Tensor:
    return clipped_loss(
        logprobs_BT, sampled_BT, advantages_B, mask_BT, clip_low=0.2, clip_high=0.3, num_tokens=num_tokens
    )


def test_advantages_are_the_rewards_standardised_within_their_group() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 2.0, 4.0]]))
    # first group: mean 1/4, variance 3/16, so 3/4 over sqrt(3)/4 = sqrt(3), and -1/sqrt(3) for the rest
    expected = torch.tensor([[3**0.5, *[-(3**-0.5)] * 3], [-1.0, 1.0, -1.0, 1.0]])
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6, 1 / 3])
def test_a_group_of_equal_rewards_has_exactly_no_advantage(reward: float, dtype: torch.dtype) -> None:
    for size in range(2, 12):  # the mean of some of these differs from the reward by a rounding
        assert torch.equal(group_advantages(torch.full((2, size), reward, dtype=dtype)), torch.zeros(2, size))


def test_rewards_that_differ_by_rounding_alone_have_next_to_no_advantage() -> None:
    rewards = torch.tensor([[0.1 + 0.2, 0.3, 0.3, 0.3]], dtype=torch.float64)
    assert group_advantages(rewards).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the policy gradient, which makes a good token likelier
        (1.0, -2.0, 2.0, 2.0),  # and a bad one less likely
        (1.1, 2.0, -2.2, -2.2),  # inside the clip the gradient is ratio * advantage
        (1.1, -2.0, 2.2, 2.2),
        (1.5, 2.0, -2.6, 0.0),  # good and already likelier than 1 + 0.3: no more push
        (1.5, -2.0, 3.0, 3.0),  # bad and likelier: never clipped, the full push back
        (0.5, 2.0, -1.0, -1.0),  # good and less likely: never clipped, the full push up
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely than 1 - 0.2: no more push
    ],
)
def test_one_token_has_the_loss_and_the_gradient_of_the_paper(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    assert list(loss_of(ratio, advantage)) == pytest.approx([loss, gradient], rel=1e-5)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 5, requires_grad=True)
    logprobs_BT = logits.log_softmax(-1)[..., 0]
    advantages_B, mask_BT = torch.tensor([1.0, -0.5, 2.0]), torch.rand(3, 4) > 0.3
    by_clip = torch.autograd.grad(clip(logprobs_BT, logprobs_BT.detach(), advantages_B, mask_BT, 9), logits)[0]
    logprobs_BT = logits.log_softmax(-1)[..., 0]
    policy_gradient = torch.autograd.grad(-(logprobs_BT * advantages_B[:, None] * mask_BT).sum() / 9, logits)[0]
    torch.testing.assert_close(by_clip, policy_gradient)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    torch.manual_seed(1)
    logprobs_BT = torch.randn(5, 7, requires_grad=True)
    sampled_BT, advantages_B, mask_BT = torch.randn(5, 7), torch.randn(5), torch.rand(5, 7) > 0.5
    num_tokens = int(mask_BT.sum())
    whole = clip(logprobs_BT, sampled_BT, advantages_B, mask_BT, num_tokens)
    gradient = torch.autograd.grad(whole, logprobs_BT)[0]
    for rows in (slice(0, 1), slice(1, 4), slice(4, 5)):
        clip(logprobs_BT[rows], sampled_BT[rows], advantages_B[rows], mask_BT[rows], num_tokens).backward()
    assert logprobs_BT.grad is not None
    torch.testing.assert_close(logprobs_BT.grad, gradient)


def test_what_is_masked_reaches_neither_the_loss_nor_the_gradient() -> None:
    logprobs_BT = torch.tensor([[-1.0, float("nan")], [-1.0, -float("inf")]], requires_grad=True)
    mask_BT = torch.tensor([[True, False], [True, False]])
    loss = clip(logprobs_BT, torch.full((2, 2), -1.0), torch.tensor([1.0, -3.0]), mask_BT, 2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1.0)
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [[-0.5, 0.0], [1.5, 0.0]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_enormous_ratio_gives_finite_numbers(advantage: float) -> None:
    logprobs_BT = torch.tensor([[0.0]], requires_grad=True)
    clip(logprobs_BT, torch.tensor([[-1e4]]), torch.tensor([advantage]), torch.tensor([[True]]), 1).backward()
    assert logprobs_BT.grad is not None
    assert torch.isfinite(logprobs_BT.grad).all()


def test_bf16_log_probabilities_are_compared_in_float32() -> None:
    logprobs_BT = torch.tensor([[-3.0]], dtype=torch.bfloat16)
    loss = clip(logprobs_BT, torch.tensor([[-3.001]]), torch.tensor([1.0]), torch.tensor([[True]]), 1)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(-math.exp(0.001), rel=1e-6)
