"""The loss of one micro-batch: clipped probability ratios, importance weights, and an optional KL divergence.

Completions that were given instead of sampled have a supervised or a preference loss, without ratios and weights.

It is a pure function. The tokens' weights (`samples.py`) define the aggregation, so that the losses and gradients of an
update's micro-batches add up to those of a single pass, however the update is cut.

Shape suffixes: S sequences, N rows (positions that predict a sampled token), P pairs of a chosen and a rejected
sequence.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from bridge.config import AdvantageScale, LossConfig
from bridge.learn import own_loss
from bridge.learn.mismatch import Correction, share
from bridge.learn.own_loss import LossTensors, OwnLoss
from bridge.passes.divergence import Divergence
from bridge.passes.packing import MicroBatch

CLIPPED = ("clipped_low_share", "clipped_high_share")
"""Metrics of the policy losses besides `kl`: the shares of tokens that clipping left without a gradient or, if the
weight is clipped, whose weight is outside the bounds."""
PREFERENCES = ("margin", "preference_accuracy")
"""Metrics of the preference loss: means over pairs."""
DIVERGENCE = "divergence"
"""Metric of the divergence from a teacher."""
MAX_LOG_RATIO = 20.0
"""Bound for log ratios before exponentiation: beyond it the gradient is 0 instead of inf * 0, which is NaN."""


LOSS_PARTS = ("aggregation", "ratio_level", "advantage_scale", "clip_low", "clip_high", "clip_dual")
"""Choices whose default depends on the loss."""


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The choices that distinguish losses."""

    aggregation: Literal["token_mean", "sequence_mean", "constant"]
    """Mean over all tokens, mean over completions of each one's token mean, or sum divided by a constant."""
    advantage_scale: AdvantageScale
    """Scope of the standard deviation that divides advantages; `leave_one_out`: a different baseline, no division."""
    clip_low: float
    """The ratio's lower clip is 1 - clip_low."""
    clip_high: float
    """The ratio's upper clip is 1 + clip_high."""
    clip_dual: float = math.inf
    """The ratio's upper clip if the advantage is negative."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Ratio and clipping per token, or per completion."""
    clipped: Literal["objective", "weight"] = "objective"
    """`objective`: a token whose ratio is past its clip has no gradient, as in PPO. `weight`: the clipped ratio is a
    constant factor of the gradient, so that every token keeps its gradient, as in CISPO."""
    mask_truncated: bool = False
    top_entropy: float = 1.0
    """Share of an update's tokens that keep their advantage: the ones with the highest entropy."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_in_reward: bool = False
    """Whether the KL divergence is subtracted from advantages instead of added to the loss."""
    teacher_weight: float = 0.0
    divergence: Divergence | None = None
    """The divergence from a teacher that is added to the loss; None with a teacher: it changes advantages instead."""
    correction: Correction = field(default_factory=Correction)
    own: OwnLoss | None = None
    """The user's function (`--loss file.py:function`), which replaces the clipped ratios."""
    objective: Literal["policy", "distillation", "supervised", "preference"] = "policy"
    """`policy`: what is described above. `distillation`: the same without rewards, only with a teacher. `supervised`:
    the negative log-likelihood of every sampled token, whatever its advantage. `preference`: for each pair of samples,
    the one with the positive advantage is preferred."""
    dpo_beta: float = 0.1
    """Scale of the log-probability ratios to the reference that a preference loss compares."""

    @property
    def needs_reference(self) -> bool:
        """Whether `policy_loss` needs the log-probabilities of the reference."""
        return self.kl_coef > 0 or self.objective == "preference"

    @property
    def parts(self) -> tuple[str, ...]:
        """Return those of `LOSS_PARTS` that have an effect."""
        if self.objective in ("supervised", "preference"):
            return ()
        if not self.uses_advantages:
            return ("aggregation",)
        return LOSS_PARTS if self.uses_rewards else tuple(part for part in LOSS_PARTS if part != "advantage_scale")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics of `policy_loss`."""
        if self.objective == "preference":
            return PREFERENCES
        of_teacher = (DIVERGENCE,) if self.teacher_weight > 0 else ()
        return ("kl", *of_teacher, *self.own_metrics)

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that only this loss has."""
        if self.own is not None:
            return self.own.metrics or ()
        return CLIPPED if self.uses_advantages else ()

    @property
    def uses_rewards(self) -> bool:
        """Whether advantages come from rewards."""
        return self.objective == "policy"

    @property
    def uses_advantages(self) -> bool:
        """Whether a term depends on advantages: those of rewards, or of sampled tokens under a frozen model."""
        of_sampled = self.kl_in_reward or (self.teacher_weight > 0 and self.divergence is None)
        return self.uses_rewards or (self.objective == "distillation" and of_sampled)

    def weighted_sequences(self, batch: MicroBatch) -> Tensor | None:
        """Return each row's sequence if importance weights are per sequence; None: they are per token.

        By default they are per sequence if the ratio is per sequence and weights are truncated. Masking is per token by
        default.

        Shapes: -> [N] int64.
        """
        default_level = self.ratio_level if self.correction.kind == "truncate" else "token"
        return batch.sequences_N if (self.correction.level or default_level) == "sequence" else None

    @classmethod
    def of(cls, config: LossConfig) -> "LossSpec":
        """Return the loss that the configuration names, with the parts that it overrides.

        Raises:
            UsageError: the user's file or function cannot be used, or the choices of a teacher do not fit together.
        """
        config.check_teacher()
        own = own_loss.load(config.name, has_reference=config.kl_coef > 0) if config.is_own else None
        exact = config.exact_divergence
        weight = 1.0 if config.teacher_weight is None else config.teacher_weight
        return replace(
            (LOSSES | ROW_LOSSES)["dapo" if config.is_own else config.name],
            own=own,
            mask_truncated=config.mask_truncated,
            top_entropy=config.top_entropy,
            entropy_coef=config.entropy_coef,
            kl_coef=config.kl_coef,
            kl_in_reward=config.kl_in_reward,
            dpo_beta=config.dpo_beta,
            teacher_weight=0.0 if config.teacher is None else weight,
            divergence=None if exact is None else Divergence(kind=exact, beta=config.jsd_beta),
            correction=Correction.of(config),
            **{part: getattr(config, part) for part in LOSS_PARTS if getattr(config, part) is not None},
        )


LOSSES: dict[str, LossSpec] = {
    # DeepSeekMath, arXiv 2402.03300, equations 3 and 21; clip: PPO, arXiv 1707.06347, section 6.1
    "grpo": LossSpec(aggregation="sequence_mean", advantage_scale="group", clip_low=0.2, clip_high=0.2),
    # Dr. GRPO, arXiv 2503.20783, section 3.2: divides neither by a length nor by a standard deviation
    "dr_grpo": LossSpec(aggregation="constant", advantage_scale="none", clip_low=0.2, clip_high=0.2),
    # DAPO, arXiv 2503.14476, equation 8 and section 4.1; its mask of truncated completions is mask_truncated
    "dapo": LossSpec(aggregation="token_mean", advantage_scale="group", clip_low=0.2, clip_high=0.28),
    # GSPO, arXiv 2507.18071, equations 5 to 7 and section 5.1
    "gspo": LossSpec(
        aggregation="sequence_mean", advantage_scale="group", clip_low=3e-4, clip_high=4e-4, ratio_level="sequence"
    ),
    # CISPO, in MiniMax-M1, arXiv 2506.13585, section 3.1: no lower clip; upper clip 5 as in ScaleRL, 2510.13786
    "cispo": LossSpec(aggregation="token_mean", advantage_scale="group", clip_low=1, clip_high=4, clipped="weight"),
    # RLOO, arXiv 2402.14740, divided by a constant; RLOO does not clip, but later updates need PPO's clip
    "rloo": LossSpec(aggregation="constant", advantage_scale="leave_one_out", clip_low=0.2, clip_high=0.2),
    # A divergence from a teacher at every token, as in GKD, arXiv 2306.13649; if it is that of the sampled token, the
    # token's advantage, clipped as in DAPO: "On-Policy Distillation", Lu and Thinking Machines Lab 2025
    "distill": LossSpec(
        aggregation="token_mean", advantage_scale="none", clip_low=0.2, clip_high=0.28, objective="distillation"
    ),
}
"""The choices of each policy loss's paper, by name."""
ROW_LOSSES: dict[str, LossSpec] = {
    "sft": LossSpec(
        aggregation="token_mean", advantage_scale="none", objective="supervised", clip_low=math.inf, clip_high=math.inf
    ),
    # DPO, arXiv 2305.18290, equation 7
    "dpo": LossSpec(
        aggregation="sequence_mean",
        advantage_scale="none",
        objective="preference",
        clip_low=math.inf,
        clip_high=math.inf,
    ),
}
"""The choices of the losses of given completions, by name."""


Sums = Mapping[str, Tensor]
"""For each metric by name, its sum over some tokens and their number, float64. Sums of an update's parts add up."""


def means(sums: Sums) -> dict[str, float]:
    """Return each metric's mean over the tokens; NaN if there are none. This waits for the device."""
    return {name: share(*pair.tolist()) for name, pair in sums.items()}


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    batch: MicroBatch,
    spec: LossSpec,
    reference_logprobs_N: Tensor | None = None,
    entropies_N: Tensor | None = None,
    divergences_N: Tensor | None = None,
    teacher_logprobs_N: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """Return the micro-batch's part of the update's loss, and the sums of the metrics in `spec.metrics`.

    `old_logprobs_N` are the trainer's from before the first update of the batch. `reference_logprobs_N` are required if
    `spec.kl_coef` is not 0, and `entropies_N` if `spec.entropy_coef` is not: the bonus is subtracted from the loss. The
    importance weight multiplies a token's full term, KL divergence and entropy included: all are means over the
    trainer's policy, and a masked token counts in none. With `spec.kl_in_reward`, the divergence of
    the sequence from a token on is subtracted from that token's advantage; the token has no influence on what precedes
    it. A token with probability 0 under the trainer gets weight 0, so it is masked. A custom loss replaces only the
    clipped ratios. So does a supervised loss, which also has no importance weights: nobody sampled its completions. A
    preference loss replaces everything.

    A teacher needs either `divergences_N`, exact ones, which are added to the loss without an importance weight, since
    they do not depend on which token was sampled; or `teacher_logprobs_N` of the sampled tokens, whose log ratio to the
    policy is added to the advantages.

    Shapes: [N] float32 x 2, [N] float32 x 4 -> [], [2] float64 of each metric.
    Source: PPO (arXiv 1707.06347), equation 7, for the clip; dual-clip PPO (Ye et al. 2020, arXiv 1912.09729), for
    the clip of negative advantages; MiniMax-M1 (arXiv 2506.13585), section 3.1, for the clipped weight; REINFORCE++
        (arXiv 2501.03262), as PPO does for human feedback, for the divergence in the reward; the losses' own papers are
        named in `LOSSES`.
    """
    assert not old_logprobs_N.requires_grad
    assert spec.needs_reference == (reference_logprobs_N is not None), spec.kl_coef
    if spec.objective == "preference":
        assert reference_logprobs_N is not None
        return preference_loss(logprobs_N, reference_logprobs_N, batch, spec.dpo_beta)
    is_supervised = spec.objective == "supervised"
    sampled_logprobs_N = torch.full_like(old_logprobs_N, math.nan) if is_supervised else batch.sampled_logprobs_N
    sequences_N = spec.weighted_sequences(batch)
    weights_N = spec.correction.weights(old_logprobs_N, sampled_logprobs_N, sequences_N) * batch.weights_N
    impossible_N = old_logprobs_N == -math.inf  # a term that is not finite would be NaN even with weight 0
    logprobs_N, old_logprobs_N = (logprobs.masked_fill(impossible_N, 0.0) for logprobs in (logprobs_N, old_logprobs_N))
    kl_N = torch.zeros_like(logprobs_N)
    advantages_N = batch.advantages_N if spec.uses_rewards else torch.zeros_like(batch.advantages_N)
    kl_coef = spec.kl_coef
    if reference_logprobs_N is not None:
        reference_logprobs_N = reference_logprobs_N.masked_fill(impossible_N, 0.0)
        kl_N = divergence(logprobs_N, reference_logprobs_N)
        if spec.kl_in_reward:
            of_reward_N = _sums_to_end(old_logprobs_N - reference_logprobs_N, batch)
            advantages_N = advantages_N - kl_coef * of_reward_N
            kl_coef = 0.0
    penalty_N = kl_coef * kl_N
    if spec.entropy_coef > 0:
        assert entropies_N is not None, "there is an entropy bonus"
        penalty_N = penalty_N - spec.entropy_coef * entropies_N
    measured: dict[str, Any] = {"kl": (kl_N.detach(), len(kl_N))}
    exact_term: Tensor | float = 0.0
    if spec.teacher_weight > 0 and divergences_N is not None:
        exact_term = spec.teacher_weight * (divergences_N * batch.weights_N).sum()
        measured[DIVERGENCE] = (divergences_N.detach(), len(divergences_N))
    elif spec.teacher_weight > 0:
        assert teacher_logprobs_N is not None, "there is a teacher"
        gaps_N = (old_logprobs_N - teacher_logprobs_N).masked_fill(impossible_N, 0.0)
        gaps_N = gaps_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages_N = advantages_N - spec.teacher_weight * gaps_N
        measured[DIVERGENCE] = (gaps_N, len(gaps_N))
    if is_supervised:
        own_terms = -logprobs_N
    elif spec.own is None and not spec.uses_advantages:
        own_terms = torch.zeros_like(logprobs_N)
    elif spec.own is None:
        ratios_N = _log_ratios(logprobs_N, old_logprobs_N, batch, spec).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        own_terms = -_objective_terms(logprobs_N, ratios_N, advantages_N, spec)
        clipped = zip(CLIPPED, _clipped(ratios_N.detach(), advantages_N, spec), strict=True)
        measured |= {name: (clipped_N, len(clipped_N)) for name, clipped_N in clipped}
    else:
        own_terms, own_metrics = spec.own(
            LossTensors(
                logprobs=logprobs_N, old_logprobs=old_logprobs_N, sampled_logprobs=batch.sampled_logprobs_N,
                reference_logprobs=reference_logprobs_N, advantages=advantages_N, weights=weights_N,
                mask=weights_N != 0, sequences=batch.sequences_N,
                lengths=batch.sequences_N.bincount(minlength=batch.num_sequences),
            )
        )  # fmt: skip
        measured |= own_metrics
    sums = {name: _pair(total, count, like=kl_N) for name, (total, count) in measured.items()}
    if own_terms.dim() == 0 and spec.own is not None:  # the function applied the weights itself
        return own_terms + (penalty_N * weights_N).sum() + exact_term, sums
    return ((penalty_N + own_terms) * weights_N).sum() + exact_term, sums


def preference_loss(
    logprobs_N: Tensor, reference_logprobs_N: Tensor, batch: MicroBatch, beta: float
) -> tuple[Tensor, Sums]:
    """Return the micro-batch's part of the preference loss, and the sums of its metrics over the pairs.

    A sequence's implicit reward is `beta` times its log-probability ratio to the reference. The loss is -log sigmoid of
    the margin, the chosen sequence's reward minus the rejected one's. Tokens with probability 0 are left out.

    Shapes: [N] float32 x 2 -> [], [2] float64 of each metric.
    Source: DPO (arXiv 2305.18290), equation 7.
    """
    assert batch.pairs_P2 is not None, "the samples of a preference loss are pairs"
    impossible_N = (logprobs_N == -math.inf) | (reference_logprobs_N == -math.inf)
    log_ratios_N = logprobs_N.masked_fill(impossible_N, 0.0) - reference_logprobs_N.masked_fill(impossible_N, 0.0)
    rewards_S = beta * log_ratios_N.new_zeros(batch.num_sequences).index_add(0, batch.sequences_N, log_ratios_N)
    chosen_P, rejected_P = rewards_S[batch.pairs_P2].unbind(1)
    margins_P = chosen_P - rejected_P
    weights_S = batch.weights_N.new_zeros(batch.num_sequences).scatter(0, batch.sequences_N, batch.weights_N)
    loss = -(functional.logsigmoid(margins_P) * weights_S[batch.pairs_P2[:, 0]]).sum()
    measured = margins_P.detach(), margins_P.detach() > 0
    return loss, {
        name: _pair(values_P, len(margins_P), like=margins_P)
        for name, values_P in zip(PREFERENCES, measured, strict=True)
    }


def _pair(total: Tensor, count: Any, *, like: Tensor) -> Tensor:
    """Return a metric's total and token count as one tensor, without waiting for the device."""
    number = count.double().sum() if isinstance(count, Tensor) else like.new_full((), count, dtype=torch.float64)
    return torch.stack([total.sum(dtype=torch.float64), number.detach()])


def _objective_terms(logprobs_N: Tensor, ratios_N: Tensor, advantages_N: Tensor, spec: LossSpec) -> Tensor:
    """Return each token's term of the objective."""
    limits_N = torch.full_like(ratios_N, math.inf).masked_fill(advantages_N < 0, spec.clip_dual)
    ratios_N = ratios_N.clamp(max=limits_N)
    clipped_N = ratios_N.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    if spec.clipped == "weight":
        return clipped_N.detach() * advantages_N * logprobs_N
    return torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)


def _clipped(ratios_N: Tensor, advantages_N: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Return which tokens are clipped from below, and which from above."""
    low_N = ratios_N < 1 - spec.clip_low
    high_N = ratios_N > 1 + spec.clip_high
    if spec.clipped == "weight":
        return low_N, high_N
    is_bad_N = advantages_N < 0
    is_good_N = advantages_N > 0
    return low_N & is_bad_N, (high_N & is_good_N) | ((ratios_N > spec.clip_dual) & is_bad_N)


def _sums_to_end(values_N: Tensor, batch: MicroBatch) -> Tensor:
    """Return for each token the sum of values from it to the end of its sequence; a sequence's rows are contiguous."""
    exact_N = values_N.double()
    ends_S = exact_N.new_zeros(batch.num_sequences).index_add(0, batch.sequences_N, exact_N).cumsum(0)
    return (ends_S[batch.sequences_N] - exact_N.cumsum(0) + exact_N).to(values_N.dtype)


def least_entropy(entropies_N: Tensor, least_share: float) -> Tensor:
    """Return the threshold that at least this share of entropies reach, to select the most uncertain tokens.

    Shapes: [N] -> [].
    Source: "Beyond the 80/20 Rule" (arXiv 2506.01939), section 5, whose share is 0.2. The other tokens count in every
        mean, as there.
    """
    return entropies_N.topk(math.ceil(least_share * len(entropies_N))).values[-1]


def divergence(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Return each token's estimate of the KL divergence from the reference; it is never negative.

    Shapes: [N], [N] -> [N].
    Source: DeepSeekMath (arXiv 2402.03300), equation 4.
    """
    log_ratios_N = (reference_logprobs_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return log_ratios_N.expm1() - log_ratios_N  # exp(x) - 1 - x would cancel, and be negative for small x


def _log_ratios(logprobs_N: Tensor, old_logprobs_N: Tensor, batch: MicroBatch, spec: LossSpec) -> Tensor:
    """Return each token's log ratio, or its completion's mean log ratio with the token's gradient (GSPO-token).

    If all tokens of a completion have the same advantage and weight, their gradients add up to the mean's. Otherwise
    each token's advantage reaches only that token, and a masked token gets no gradient through the others.

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
