"""The training data of one replica in a step: its samples of the batch, their results, and the step's metrics.

Shape suffixes: N rows (positions that predict a sampled token).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from bridge.config import OptimizerConfig
from bridge.engine.sharing import busiest, distribute, exchanged_images, with_images
from bridge.learn import samples
from bridge.learn.mismatch import Tally
from bridge.learn.policy_loss import LossSpec, means
from bridge.passes import routing
from bridge.passes.flops import Flops
from bridge.passes.packing import MicroBatch, Sample
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import Ranks
from bridge.types import Group


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one step: this rank's share, unless noted otherwise."""

    mini_batches: Sequence[list[Sample]] = ()
    """Samples to train on, per update."""
    only_ranked: Sequence[list[Sample]] = ()
    """For each update, the samples without a gradient, whose tokens are only ranked by entropy with the others."""
    num_tokens: int = 0
    """Number of sampled tokens in all shares."""
    balance: float = math.nan
    """Ratio of the largest share's tokens to the mean; NaN for a single share."""
    num_before: int = 0
    """Number of planned updates in all earlier steps."""

    @classmethod
    def of(
        cls, groups: Sequence[Group], spec: LossSpec, ranks: Ranks, choices: OptimizerConfig, *, longest: int, step: int
    ) -> Self:
        """Turn groups into samples, cut them into updates, and keep this rank's share, with the bytes of its images.

        UsageError: a group's given advantages are invalid.
        """
        updates = samples.mini_batches(groups, spec, num_updates=choices.updates_per_batch, max_new_tokens=longest)
        trained = [mini_batch for mini_batch, _ in updates]
        distributed = [distribute(mini_batch, ranks.num_shares) for update in updates for mini_batch in update]
        own = [shares[ranks.share] for shares in distributed]
        if ranks.world_size > 1:
            arrays = exchanged_images(groups, distributed, ranks)
            own = [[with_images(sample, arrays) for sample in mini_batch] for mini_batch in own]
        return cls(
            mini_batches=own[::2],
            only_ranked=own[1::2],
            num_tokens=sum(sample.num_trained for mini_batch in trained for sample in mini_batch),
            balance=busiest(distributed[::2]),
            num_before=(step - 1) * choices.updates_per_step,
        )


@dataclass(kw_only=True)
class Pass:
    """One micro-batch, and its log-probabilities from before the first update of the batch, once they are computed."""

    batch: MicroBatch
    old_logprobs_N: Tensor | None = None
    """The trainer's log-probabilities."""
    reference_logprobs_N: Tensor | None = None
    """The frozen reference's log-probabilities."""
    teacher_logprobs_N: Tensor | None = None
    """The teacher's log-probabilities of the sampled tokens, if advantages depend on them."""
    entropies_N: Tensor | None = None
    """The trainer's entropies, with `--top-entropy`."""

    @property
    def entropies(self) -> Tensor:
        assert self.entropies_N is not None, "not computed yet"
        return self.entropies_N


@dataclass(kw_only=True)
class Computed:
    """The results that have been computed for a batch so far."""

    entropy: Tensor
    """Sum of the policy's entropies before the first update."""
    loss_sums: Tensor
    """For each metric of the loss, its sum over tokens and the number of tokens."""
    tally: Tally
    passes: list[list[Pass]] = field(default_factory=list)
    """The passes of each update."""
    losses: list[Tensor] = field(default_factory=list)
    """Loss per update, including a skipped one."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm per update."""
    num_updates: int = 0
    """Number of updates that were taken."""
    is_prepared: bool = False
    is_written: bool = False

    @classmethod
    def nothing(cls, device: torch.device, num_metrics: int) -> Self:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        loss_sums = torch.zeros(num_metrics, 2, dtype=torch.float64, device=device)
        return cls(entropy=zero, loss_sums=loss_sums, tally=Tally.zero(device))

    def figures(
        self, batch: Batch, ranks: Ranks, lr: float, loss_metrics: Sequence[str], prepared: PreparedModel
    ) -> dict[str, Any]:
        """Wait for the device, and return the step's metrics over all ranks.

        `loss_metrics` are the names of the loss's metrics. The metrics of the policy and of the mismatch
        are from before the first update.
        """
        model = prepared.model
        rerouted_2 = torch.zeros(2, dtype=torch.float64, device=model.device)
        tokens_LE = torch.zeros(0, 0, dtype=torch.float64)
        if prepared.replay is not None:
            rerouted_2 = prepared.replay.rerouted().double()
            tokens_LE = prepared.replay.expert_tokens().double()
        num_rerouted, num_replayed = ranks.all_reduce(rerouted_2).tolist()  # summed over slices, too
        tokens_LE = ranks.all_reduce(tokens_LE) if num_replayed else tokens_LE[:0]
        num_taken = self.num_updates or len(self.norms)  # if the first update was skipped, its metrics show why
        losses = ranks.all_reduce_shares(torch.stack(self.losses[:num_taken] or [torch.zeros(())]))
        of_ranks = ranks.all_gather_object((self.tally.cpu(), self._flops(Flops.of(model, ranks.tp_size))))
        entropy = ranks.all_reduce_shares(self.entropy).item()
        tally = sum((tally for tally, _ in ranks.one_per_share(of_ranks)), Tally.zero(torch.device("cpu")))
        loss_sums = ranks.all_reduce_shares(self.loss_sums)
        return {
            "loss": sum(losses.tolist()) / max(num_taken, 1),
            "grad_norm": sum(self.norms[:num_taken]) / max(num_taken, 1),
            "lr": lr,
            "updates": self.num_updates,
            "skipped_updates": sum(not math.isfinite(norm) for norm in self.norms),
            **({"entropy": entropy / batch.num_tokens} if batch.num_tokens else {}),
            **tally.metrics(),
            "rerouted_share": num_rerouted / num_replayed if num_replayed else None,
            **routing.balance(tokens_LE),
            **means(dict(zip(loss_metrics, loss_sums, strict=True))),
            "tokens_trained": batch.num_tokens,
            "train_flops": sum(of_rank for _, of_rank in of_ranks) / ranks.cp_size,  # each rank counts all slices
            "rank_token_balance": batch.balance,
        }

    def _flops(self, flops: Flops) -> float:
        """Return the operations of this rank's forward and backward passes in all updates."""
        of_updates = [sum(flops.of_batch(model_pass.batch) for model_pass in passes) for passes in self.passes]
        return sum(of_updates[number % len(of_updates)] for number in range(len(self.norms)))
