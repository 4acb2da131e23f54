"""Group-relative policy optimisation: advantages and the clipped loss, pure functions in float32.

Not covered: a KL penalty against a reference model, and the model's forward pass (`logprobs.py`).
Shape suffixes: G groups, N completions of a group, B sequences, T tokens of the longest one.
"""

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a group's standard deviation: rewards that differ by rounding alone get no advantage."""
MAX_LOG_RATIO = 20.0
"""Bound of |log ratio| before it is exponentiated: past it the gradient is zero instead of inf * 0."""


def group_advantages(rewards_GN: Tensor) -> Tensor:
    """Return (reward - mean) / (std + STD_EPSILON) within each group, exactly zero where all rewards are equal.

    The standard deviation is the population's, so that the mean square of a group's advantages is one.

    Shapes: [G, N] -> [G, N] float32.
    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.
    """
    rewards_GN = rewards_GN.double()  # a float32 mean of equal rewards may differ from them by a rounding
    centred_GN = rewards_GN - rewards_GN.mean(dim=1, keepdim=True)
    std_G1 = rewards_GN.std(dim=1, correction=0, keepdim=True)
    uniform_G1 = rewards_GN.amax(dim=1, keepdim=True) == rewards_GN.amin(dim=1, keepdim=True)
    return torch.where(uniform_G1, 0.0, centred_GN / (std_G1 + STD_EPSILON)).float()


def clipped_loss(
    logprobs_BT: Tensor,
    sampled_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: int,
) -> Tensor:
    """Return this micro-batch's part of the whole batch's loss: -min(ratio A, clip(ratio) A), summed over num_tokens.

    `num_tokens` counts the sampled tokens of the whole batch (`batch.count_tokens`): the parts of all micro-batches,
    and their gradients, then add up to those of one pass over everything.

    Shapes: [B, T] x 2, [B], [B, T] bool -> [] float32.
    Source: PPO (arXiv 1707.06347), equation 7; two clips and the mean over tokens: DAPO (arXiv 2503.14476), equation 8.
    """
    assert num_tokens > 0, num_tokens
    log_ratio_BT = torch.where(mask_BT, logprobs_BT.float() - sampled_logprobs_BT.float(), 0.0)
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages_B1 = advantages_B.float().unsqueeze(1)
    gain_BT = torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_B1)
    return -torch.where(mask_BT, gain_BT, 0.0).sum() / num_tokens
