"""The policy loss of one micro-batch: clipped probability ratios, importance weights, and a KL divergence if asked for.

A pure function. The aggregation lies in the weights of the tokens (`advantages.py`): the losses of an update's
micro-batches, and their gradients, add up to those of one pass over everything, however it was cut.

Not covered: advantages and weights (`advantages.py`), the model's forward pass (`bridge/passes/logprobs.py`).
Shape suffixes: S sequences, N rows (positions that predict a sampled token).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

from bridge.config import TrainConfig
from bridge.learn.mismatch import Correction, share
from bridge.passes.packing import MicroBatch

MAX_LOG_RATIO = 20.0
"""Bound of a log ratio before it is exponentiated: past it the gradient is zero instead of inf * 0, not a number."""


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """What makes one policy loss another."""

    ratio_level: Literal["token", "sequence"]
    """What has a probability ratio and is clipped: each token, or each completion."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"]
    """Mean over all tokens, mean over completions of the mean over each one's tokens, or sum over a constant."""
    advantage_scale: Literal["group", "batch", "none"]
    """Whose standard deviation advantages are divided by."""
    clip_low: float
    """Lower clip of the ratio, as 1 - clip_low."""
    clip_high: float
    """Upper clip of the ratio, as 1 + clip_high."""
    mask_truncated: bool = False
    """Whether completions that were cut off are left out."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference."""
    correction: Correction = field(default_factory=Correction)
    """What is done where the server and the trainer differ."""

    def weighted_sequences(self, batch: MicroBatch) -> Tensor | None:
        """Return the sequence of each row where each sequence has one importance weight; None: each token has its own.

        Masking leaves single tokens out, whatever has the ratio.

        Shapes: -> [N] int64.
        """
        by_sequence = self.ratio_level == "sequence" and self.correction.kind == "truncate"
        return batch.sequences_N if by_sequence else None

    @classmethod
    def of(cls, config: TrainConfig) -> "LossSpec":
        """Return the loss that the configuration names, with what it overrules in its place."""
        parts = ("ratio_level", "advantage_scale", "clip_low", "clip_high")
        return replace(
            LOSSES[config.loss.name],
            mask_truncated=config.loss.mask_truncated,
            kl_coef=config.loss.kl_coef,
            correction=Correction.of(config),
            **{part: getattr(config.loss, part) for part in parts if getattr(config.loss, part) is not None},
        )


LOSSES: Mapping[str, LossSpec] = {
    # DeepSeekMath, arXiv 2402.03300, equations 3 and 21; its clip is not told: PPO's own, arXiv 1707.06347, section 6.1
    "grpo": LossSpec(
        ratio_level="token", aggregation="sequence_mean", advantage_scale="group", clip_low=0.2, clip_high=0.2
    ),
    # Dr. GRPO, arXiv 2503.20783, section 3.2: neither a length nor a standard deviation divides
    "dr_grpo": LossSpec(
        ratio_level="token", aggregation="constant", advantage_scale="none", clip_low=0.2, clip_high=0.2
    ),
    # DAPO, arXiv 2503.14476, equation 8 and section 4.1; its mask of truncated completions is mask_truncated
    "dapo": LossSpec(
        ratio_level="token", aggregation="token_mean", advantage_scale="group", clip_low=0.2, clip_high=0.28
    ),
    # GSPO, arXiv 2507.18071, equations 5 to 7 and section 5.1
    "gspo": LossSpec(
        ratio_level="sequence", aggregation="sequence_mean", advantage_scale="group", clip_low=3e-4, clip_high=4e-4
    ),
}
"""Name of a loss -> its paper's choices."""


@dataclass(frozen=True, kw_only=True)
class LossShares:
    """What an update's loss met; not a number where there was no token."""

    clip_low: float
    """Share of the tokens without a gradient because they were bad, and already less likely than 1 - clip_low."""
    clip_high: float
    """Share of the tokens without a gradient because they were good, and already likelier than 1 + clip_high."""
    kl: float
    """Mean over the tokens of the KL divergence from the reference, in nats; 0 without one."""


@dataclass(frozen=True, kw_only=True)
class LossStatistics:
    """Sums over the tokens of a micro-batch, without gradient and on its device; those of several add up."""

    num_tokens: Tensor
    """Tokens that were trained on."""
    num_clipped_low: Tensor
    """Tokens that the lower clip left without a gradient."""
    num_clipped_high: Tensor
    """Tokens that the upper clip left without a gradient."""
    kl_sum: Tensor
    """Sum of the KL divergence's estimates, in nats."""

    @classmethod
    def zero(cls, device: torch.device) -> "LossStatistics":
        """Return that of no tokens."""
        return cls(**{part.name: torch.zeros((), dtype=torch.float64, device=device) for part in fields(cls)})

    def __add__(self, other: "LossStatistics") -> "LossStatistics":
        return LossStatistics(
            **{part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)}
        )

    def read(self) -> LossShares:
        """Wait for the device and return what was met."""
        sums = torch.stack([self.num_tokens, self.num_clipped_low, self.num_clipped_high, self.kl_sum])
        num_tokens, low, high, kl = sums.tolist()
        return LossShares(clip_low=share(low, num_tokens), clip_high=share(high, num_tokens), kl=share(kl, num_tokens))


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    batch: MicroBatch,
    spec: LossSpec,
    reference_logprobs_N: Tensor | None = None,
) -> tuple[Tensor, LossStatistics]:
    """Return the micro-batch's part of the update's loss, and what it met.

    `old_logprobs_N` are the trainer's at the beginning of the batch. `reference_logprobs_N` are given where
    `spec.kl_coef` asks for them. The importance weight multiplies the whole term of a token, KL divergence included:
    both are means over the trainer's policy, and a token that is left out is left out of both.

    Shapes: [N] float32 x 2, [N] float32 -> [].
    Source: PPO (arXiv 1707.06347), equation 7, for the clip; the losses' own papers are named in `LOSSES`.
    """
    assert not old_logprobs_N.requires_grad
    assert (spec.kl_coef > 0) == (reference_logprobs_N is not None), spec.kl_coef
    ratios_N = _log_ratios(logprobs_N, old_logprobs_N, batch, spec).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_N = ratios_N.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    kl_N = torch.zeros_like(ratios_N) if reference_logprobs_N is None else divergence(logprobs_N, reference_logprobs_N)
    advantages_N = batch.advantages_N
    terms_N = spec.kl_coef * kl_N - torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)
    sequences_N = spec.weighted_sequences(batch)
    weights_N = spec.correction.weights(old_logprobs_N, batch.sampled_logprobs_N, sequences_N) * batch.weights_N
    return (terms_N * weights_N).sum(), _statistics(ratios_N.detach(), kl_N.detach(), advantages_N, spec)


def divergence(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Return each token's estimate of the KL divergence from the reference, which is never negative.

    Shapes: [N], [N] -> [N].
    Source: DeepSeekMath (arXiv 2402.03300), equation 4.
    """
    log_ratios_N = (reference_logprobs_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return log_ratios_N.expm1() - log_ratios_N  # exp(x) - 1 - x would cancel: negative where x is small


def _log_ratios(logprobs_N: Tensor, old_logprobs_N: Tensor, batch: MicroBatch, spec: LossSpec) -> Tensor:
    """Return each token's log ratio: its own, or the mean of its completion with a gradient of its own.

    Where all tokens of a completion share one advantage and weight, that gradient is the mean's. Where they do not,
    each token's advantage reaches that token alone, and one that is left out gets no gradient through the others.

    Source: GSPO (arXiv 2507.18071), equations 7 and, for the gradient, 14 (GSPO-token).
    """
    log_ratios_N = logprobs_N - old_logprobs_N
    if spec.ratio_level == "token":
        return log_ratios_N
    values_N = log_ratios_N.detach()
    empty_S = values_N.new_zeros(batch.num_sequences)
    sums_S = empty_S.index_add(0, batch.sequences_N, values_N)
    lengths_S = empty_S.index_add(0, batch.sequences_N, torch.ones_like(values_N))
    return (sums_S / lengths_S)[batch.sequences_N] + (logprobs_N - logprobs_N.detach())


def _statistics(ratios_N: Tensor, kl_N: Tensor, advantages_N: Tensor, spec: LossSpec) -> LossStatistics:
    too_low_N = (ratios_N < 1 - spec.clip_low) & (advantages_N < 0)
    too_high_N = (ratios_N > 1 + spec.clip_high) & (advantages_N > 0)
    return LossStatistics(
        num_tokens=torch.ones_like(ratios_N).sum(dtype=torch.float64),
        num_clipped_low=too_low_N.sum(dtype=torch.float64),
        num_clipped_high=too_high_N.sum(dtype=torch.float64),
        kl_sum=kl_N.sum(dtype=torch.float64),
    )
