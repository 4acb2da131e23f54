"""The log-prob mismatch between the server and the trainer: its size, and its importance-sampling correction.

The server computes with different arithmetic and, if rollouts are stale, with older weights. The importance weight of a
token is the trainer's probability of it divided by the server's. It turns a mean over the server's samples into a mean
over the trainer's policy. Per token this is exact only given the preceding tokens, which are still the server's. Per
sequence, all tokens of a completion share one weight, the product of theirs, which also corrects for the prefixes.
Truncating or masking weights bounds the variance.

Shape suffixes: N rows (positions that predict a sampled token), K sums.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bridge.config import LossConfig
from bridge.types import HEALTHY_NATS, LOGPROB_DIFF_EDGES

DEFAULT_HIGH: Mapping[str, float] = {"truncate": 2.0, "mask": 5.0, "none": math.inf}
"""Default for the largest importance weight, by kind of correction."""

MOST_NATS = 1e6
"""Cap for differences of log-probabilities: its exponential is infinite, and its sum with -inf is not NaN."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The importance-sampling correction."""

    kind: Literal["truncate", "mask", "none"] = "none"
    """`truncate` limits the weight to `high`, `mask` sets it to 0 outside `low` to `high`, `none` sets it to 1."""
    level: Literal["token", "sequence"] | None = None
    """Whether each token or each sequence has one importance weight; None: the loss decides."""
    low: float = 0.0
    high: float = math.inf

    @classmethod
    def of(cls, config: LossConfig) -> Self:
        high = DEFAULT_HIGH[config.mismatch] if config.mismatch_high is None else config.mismatch_high
        return cls(kind=config.mismatch, level=config.mismatch_level, low=config.mismatch_low, high=high)

    def weights(self, old_logprobs_N: Tensor, sampled_logprobs_N: Tensor, sequences_N: Tensor | None = None) -> Tensor:
        """Return each token's importance weight, without gradient; with `sequences_N`, the weight of its sequence.

        `old_logprobs_N` are the trainer's from before the first update of the batch. The weight covers the difference
        between these and the server's, staleness included; the loss's ratio covers the rest. The weight is 1 if the
        server's log-probability is unknown, and 0 if the trainer's probability is 0.

        Shapes: [N], [N], [N] int64 -> [N].
        Source: truncated: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
            after IMPALA (arXiv 1802.01561), section 4.1; masked: IcePop, in Ring-1T (arXiv 2510.18855); both apart from
            the loss's ratio: decoupled PPO, in AReaL (arXiv 2505.24298); of a sequence: the product of its tokens',
            Liu, Li et al. 2025, "When Speed Kills Stability", as in verl's `rollout_is: sequence` and TRL's
            `sequence_truncate` and `sequence_mask`; a geometric mean would be biased.
        """
        ratios_N = _ratios(old_logprobs_N, sampled_logprobs_N, sequences_N)
        if self.kind == "none":
            return torch.ones_like(ratios_N).masked_fill(old_logprobs_N == -math.inf, 0.0)
        if self.kind == "truncate":
            return ratios_N.clamp(max=self.high)
        return torch.where(self.changed(old_logprobs_N, sampled_logprobs_N, sequences_N), 0.0, ratios_N)

    def changed(self, old_logprobs_N: Tensor, sampled_logprobs_N: Tensor, sequences_N: Tensor | None = None) -> Tensor:
        """Return for each token whether its weight was truncated or masked.

        Shapes: [N], [N], [N] int64 -> [N] bool.
        """
        ratios_N = _ratios(old_logprobs_N, sampled_logprobs_N, sequences_N)
        changed_N = (ratios_N > (math.inf if self.kind == "none" else self.high)) | (old_logprobs_N == -math.inf)
        return changed_N | (ratios_N < self.low) if self.kind == "mask" else changed_N


def _ratios(old_logprobs_N: Tensor, sampled_logprobs_N: Tensor, sequences_N: Tensor | None) -> Tensor:
    differences_N = (old_logprobs_N - sampled_logprobs_N).detach()
    differences_N = torch.where(sampled_logprobs_N.isnan(), 0.0, differences_N).clamp(max=MOST_NATS)
    differences_N = differences_N.masked_fill(old_logprobs_N == -math.inf, -math.inf)
    if sequences_N is not None:  # sized by rows: there are never more sequences
        differences_N = torch.zeros_like(differences_N).index_add(0, sequences_N, differences_N)[sequences_N]
    return differences_N.exp()


@dataclass(frozen=True)
class Tally:
    """Sums over the tokens of micro-batches, on their device."""

    sums_K: Tensor
    """float64 sums: tokens, differences, KL, weights, squared weights, changed tokens, tokens at or above each edge."""
    max: Tensor
    """float64: the largest difference of a token."""

    @classmethod
    def zero(cls, device: torch.device) -> Self:
        empty = torch.zeros(6 + len(LOGPROB_DIFF_EDGES), dtype=torch.float64, device=device)
        return cls(empty, empty[0])

    def cpu(self) -> "Tally":
        return Tally(self.sums_K.cpu(), self.max.cpu())

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.sums_K + other.sums_K, torch.maximum(self.max, other.max))

    def metrics(self) -> dict[str, Any]:
        """Wait for the device, and return the metrics by name; NaN if the server reported no log-probabilities."""
        *sums, largest = torch.cat([self.sums_K, self.max.unsqueeze(0)]).tolist()
        num_tokens, difference, kl, weight, squared_weight, changed, *at_or_above = sums
        in_bins = [above - beyond for above, beyond in pairwise([num_tokens, *at_or_above, 0.0])]
        return {
            "logprob_diff_mean": share(difference, num_tokens),
            "logprob_diff_max": largest if num_tokens else math.nan,
            "logprob_diff_histogram": tuple(share(count, num_tokens) for count in in_bins),
            "mismatch_kl": share(kl, num_tokens),
            "corrected_share": share(changed, num_tokens),
            "importance_weight": share(weight, num_tokens),
            "effective_share": share(weight * weight, num_tokens * squared_weight),
        }


@torch.no_grad()
def measure(
    old_logprobs_N: Tensor, sampled_logprobs_N: Tensor, correction: Correction, sequences_N: Tensor | None = None
) -> Tally:
    """Compare the trainer's log-probabilities with the server's, without waiting for the device.

    Shapes: [N], [N] float32, [N] int64.
    Source: k3, the estimator of the KL divergence, Schulman 2020, "Approximating KL Divergence".
    """
    known_N = ~sampled_logprobs_N.isnan()
    differ_N = known_N & (old_logprobs_N != sampled_logprobs_N)  # both may be -inf
    log_ratios_N = torch.where(differ_N, old_logprobs_N - sampled_logprobs_N, 0.0)
    differences_N = log_ratios_N.abs()
    weights_N = correction.weights(old_logprobs_N, sampled_logprobs_N, sequences_N) * known_N
    terms = (
        known_N,
        differences_N,
        log_ratios_N.double().expm1() - log_ratios_N.clamp(max=MOST_NATS),
        weights_N,
        weights_N.square(),
        correction.changed(old_logprobs_N, sampled_logprobs_N, sequences_N) & known_N,
        *(differences_N >= edge for edge in LOGPROB_DIFF_EDGES),
    )
    sums_K = torch.stack([term_N.sum(dtype=torch.float64) for term_N in terms])
    largest = torch.cat([differences_N, differences_N.new_zeros(1)]).max()  # in case there are no tokens
    return Tally(sums_K, largest.double())


def alarm(metrics: Mapping[str, Any], threshold: float) -> str | None:
    """Return one line with the likely causes if the mean mismatch is at least `threshold`, in nats."""
    mean = metrics["logprob_diff_mean"]
    largest = metrics["logprob_diff_max"]
    if not mean >= threshold:
        return None
    low, high = HEALTHY_NATS
    return (
        f"the log-probs of vLLM and the trainer differ by {mean:.3g} nats on average, up to {largest:.3g}"
        f"; {low} to {high} is healthy in bf16. Likely causes: a stale prefix cache, rollouts from older weights,"
        " another temperature, --logprobs-mode or dtype, or top-p sampling without processed log-probs"
    )


def share(part: float, whole: float) -> float:
    """Return part / whole, or NaN if `whole` is 0."""
    return part / whole if whole else math.nan
