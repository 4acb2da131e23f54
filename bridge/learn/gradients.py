"""Forward and backward passes over the micro-batches of one update, and what they are measured by.

Not covered: which micro-batches there are (`bridge/passes`), the loss (`bridge/learn`), what is done with the gradients
(`learner.py`).
Shape suffixes: N rows (positions that predict a sampled token).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.learn.mismatch import Mismatch, Tally, measure, share
from bridge.learn.policy_loss import LossShares, LossSpec, LossStatistics, policy_loss
from bridge.learn.reference import Reference
from bridge.passes.logprobs import model_logprobs
from bridge.passes.packing import MicroBatch


@dataclass(kw_only=True)
class Part:
    """One micro-batch, and what is known of it since before the first update of its batch."""

    batch: MicroBatch
    """The samples."""
    old_logprobs_N: Tensor | None = None
    """The trainer's own log-probabilities at that time; None: not computed yet."""
    reference_logprobs_N: Tensor | None = None
    """The frozen reference's; None: not computed yet, or not needed."""


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What the updates of one batch came to."""

    loss: float
    """Mean over the updates."""
    grad_norm: float
    """Global norm of the gradient before it is scaled down, mean over the updates."""
    entropy: float
    """Mean entropy of the policy where a token was sampled, before the first update, in nats."""
    mismatch: Mismatch
    """How far the server and the trainer were apart before the first update."""
    shares: LossShares
    """How much was clipped, and how far the policy is from its reference."""
    num_tokens: int
    """Sampled tokens that were trained on."""
    num_updates: int
    """Optimizer steps that were taken."""
    num_skipped: int
    """Updates that were left out because their gradient was not finite: the first of them ends its batch."""


class Sums:
    """What is measured of one batch, on its device: only `read` waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.norms: list[float] = []
        """Of the gradients of each update, and of one that was skipped."""
        self.num_updates = 0
        """Updates that were taken."""
        self.losses: list[Tensor] = []
        """Of the same updates as the norms."""
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)
        """Sum over the tokens."""
        self.tally, self.statistics = Tally.zero(device), LossStatistics.zero(device)

    def read(self, num_tokens: int) -> Learnt:
        """Return what `num_tokens` sampled tokens came to."""
        num_taken = self.num_updates or len(self.norms)  # of a step that was skipped: what made it so
        return Learnt(
            loss=sum(loss.item() for loss in self.losses[:num_taken]) / max(num_taken, 1),
            grad_norm=sum(self.norms[:num_taken]) / max(num_taken, 1),
            entropy=share(self.entropy.item(), num_tokens),
            mismatch=self.tally.read(),
            shares=self.statistics.read(),
            num_tokens=num_tokens,
            num_updates=self.num_updates,
            num_skipped=sum(not math.isfinite(norm) for norm in self.norms),
        )


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """A model, and how it is differentiated."""

    model: PreTrainedModel
    """What is trained."""
    spec: LossSpec
    """The loss."""
    temperature: float
    """Of the rollouts."""
    reference: Reference | None
    """The frozen reference, where there is a KL divergence."""

    def look_back(self, part: Part, sums: Sums) -> None:
        """Remember the log-probabilities from before the first update, which the ratios of later ones are to.

        With gradients enabled, as in training: without, compiled layers are another graph, which rounds otherwise. In
        bf16 the two differ by 0.01 nats a token, and GSPO clips at 0.0003.
        """
        with torch.enable_grad():
            logprobs_N, entropies_N = model_logprobs(self.model, part.batch, self.temperature)
        self._remember(part, logprobs_N.detach(), entropies_N, sums)

    def backward(self, parts: Iterable[Part], sums: Sums, *, checks_loss: bool = False) -> bool:
        """Add the gradients of one update to those that the model's parameters have.

        A part that was not looked back at takes its own log-probabilities for those from before the first update.
        With `checks_loss`, return False before the backward pass of a loss that is not finite (waits for the device).
        """
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        sums.losses.append(total)
        for part in parts:
            logprobs_N, entropies_N = model_logprobs(self.model, part.batch, self.temperature)
            if part.old_logprobs_N is None:
                self._remember(part, logprobs_N.detach(), entropies_N, sums)
            if self.reference is not None and part.reference_logprobs_N is None:
                part.reference_logprobs_N = self.reference.logprobs(part.batch, self.temperature)
            assert part.old_logprobs_N is not None
            loss, statistics = policy_loss(
                logprobs_N, part.old_logprobs_N, part.batch, self.spec, part.reference_logprobs_N
            )
            total += loss.detach()
            sums.statistics += statistics
            if checks_loss and not math.isfinite(loss.item()):
                return False
            loss.backward()
        return True

    def _remember(self, part: Part, logprobs_N: Tensor, entropies_N: Tensor, sums: Sums) -> None:
        part.old_logprobs_N = logprobs_N
        sums.entropy += entropies_N.sum(dtype=torch.float64)
        batch, spec = part.batch, self.spec
        sums.tally += measure(logprobs_N, batch.sampled_logprobs_N, spec.correction, spec.weighted_sequences(batch))
