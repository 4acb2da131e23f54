"""What one replica trains on in a step: its samples of the batch, what is computed for them, and the step's figures.

Several replicas distribute the samples of an update so that each has about the same number of tokens. A rank has the
bytes of the images that it sampled with, and gets those that it trains on.

Shape suffixes: N rows (positions that predict a sampled token).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.config import OptimizerConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.learn import samples
from bridge.learn.mismatch import Tally
from bridge.learn.policy_loss import LossSpec, means
from bridge.passes import routing
from bridge.passes.flops import Flops
from bridge.passes.packing import MicroBatch, Sample
from bridge.ranks.world import Ranks
from bridge.types import Array, Group, Images

BALANCE_TOLERANCE = 1.05
"""Tokens of the busiest replica over the mean above which completions, not whole groups, are distributed."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one step: those of this rank's share, unless noted otherwise."""

    mini_batches: Sequence[list[Sample]] = ()
    """For each update, the samples to train on."""
    only_ranked: Sequence[list[Sample]] = ()
    """For each update, the samples without a gradient whose tokens are ranked by entropy with the others."""
    num_tokens: int = 0
    """Sampled tokens of all shares."""
    balance: float = math.nan
    """Tokens of the largest share over the mean; NaN for one."""
    num_before: int = 0
    """Planned updates of all steps before."""

    @classmethod
    def of(
        cls, groups: Sequence[Group], spec: LossSpec, ranks: Ranks, choices: OptimizerConfig, *, longest: int, step: int
    ) -> Self:
        """Turn groups into samples, cut them into updates, and keep this rank's share, with the bytes of its images.

        UsageError: as `samples`.
        """
        updates = samples.mini_batches(groups, spec, num_updates=choices.updates_per_batch, max_new_tokens=longest)
        trained = [mini_batch for mini_batch, _ in updates]
        distributed = [distribute(mini_batch, ranks.num_shares) for update in updates for mini_batch in update]
        own = [shares[ranks.share] for shares in distributed]
        if ranks.world_size > 1:
            arrays = exchanged_images(groups, distributed, ranks)
            own = [[_with_images(sample, arrays) for sample in mini_batch] for mini_batch in own]
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
    """The trainer's."""
    reference_logprobs_N: Tensor | None = None
    """The frozen reference's."""
    entropies_N: Tensor | None = None
    """The trainer's entropies, with `--top-entropy`."""

    @property
    def entropies(self) -> Tensor:
        assert self.entropies_N is not None, "it looked ahead"
        return self.entropies_N


@dataclass(kw_only=True)
class Computed:
    """What was computed for a batch so far."""

    entropy: Tensor
    """Sum of the entropies of the policy before the first update."""
    loss_sums: Tensor
    """For each metric of the loss, its sum over tokens and their number."""
    tally: Tally
    passes: list[list[Pass]] = field(default_factory=list)
    """For each update."""
    losses: list[Tensor] = field(default_factory=list)
    """Of every update, and of one that was skipped."""
    norms: list[float] = field(default_factory=list)
    """The same of the gradients' norms."""
    num_updates: int = 0
    """Updates that were taken."""
    is_prepared: bool = False
    is_written: bool = False

    @classmethod
    def nothing(cls, device: torch.device, num_metrics: int) -> Self:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        loss_sums = torch.zeros(num_metrics, 2, dtype=torch.float64, device=device)
        return cls(entropy=zero, loss_sums=loss_sums, tally=Tally.zero(device))

    def figures(
        self, batch: Batch, ranks: Ranks, lr: float, loss_metrics: Sequence[str], model: PreTrainedModel
    ) -> dict[str, Any]:
        """Wait for the device, and return the step's metrics over all ranks; the loss has metrics of these names.

        Those of the policy and of the mismatch are from before the first update.
        """
        num_rerouted, num_replayed = ranks.all_reduce(routing.rerouted(model).double()).tolist()  # also of slices
        tokens_LE = routing.expert_tokens(model).double()
        num_taken = self.num_updates or len(self.norms)  # if the first was skipped: the figures that show why
        losses = ranks.all_reduce_shares(torch.stack(self.losses[:num_taken] or [torch.zeros(())]))
        of_ranks = ranks.all_gather_object((self.tally.cpu(), self._flops(Flops.of(model, ranks.tp_size))))
        entropy = ranks.all_reduce_shares(self.entropy).item()
        tallies = (tally for tally, _ in ranks.one_per_share(of_ranks))
        return {
            "loss": sum(losses.tolist()) / max(num_taken, 1),
            "grad_norm": sum(self.norms[:num_taken]) / max(num_taken, 1),
            "lr": lr,
            "updates": self.num_updates,
            "skipped_updates": sum(not math.isfinite(norm) for norm in self.norms),
            **({"entropy": entropy / batch.num_tokens} if batch.num_tokens else {}),
            **sum(tallies, Tally.zero(torch.device("cpu"))).metrics(),
            "rerouted_share": num_rerouted / num_replayed if num_replayed else None,
            **routing.balance(ranks.all_reduce(tokens_LE) if num_replayed else tokens_LE[:0]),
            **means(dict(zip(loss_metrics, ranks.all_reduce_shares(self.loss_sums), strict=True))),
            "tokens_trained": batch.num_tokens,
            "train_flops": sum(of_rank for _, of_rank in of_ranks) / ranks.cp_size,  # each counts all slices
            "rank_token_balance": batch.balance,
        }

    def _flops(self, flops: Flops) -> float:
        """Return the operations of this rank's forward and backward passes of every update."""
        of_updates = [sum(flops.of_batch(model_pass.batch) for model_pass in passes) for passes in self.passes]
        return sum(of_updates[number % len(of_updates)] for number in range(len(self.norms)))


def distribute(mini_batch: list[Sample], size: int) -> list[list[Sample]]:
    """Return the samples of each of `size` shares, in their order; every rank computes the same.

    The samples of one prompt, which follow each other, stay together if the shares' tokens then differ little: their
    prompt is computed once.
    """
    if size == 1:
        return [mini_batch]
    return [[mini_batch[index] for index in sorted(indices)] for indices in _shares(mini_batch, size)]


def exchanged_images(
    groups: Sequence[Group], shares_of_updates: Sequence[list[list[Sample]]], ranks: Ranks
) -> dict[str, tuple[Array, ...]]:
    """Return, by digest, the images of this rank and those that it trains on: another rank that has one sends it.

    Where they are in a prompt is each sample's own: prompts with other texts have the same images.

    Ranks of a pass that is cut have no images, so a share is a rank's. All ranks derive the same routes.
    """
    here = {group.images.digest: group.images.arrays for group in groups if group.images and group.images.is_here}
    needed = [
        {
            sample.images.digest: sample.images
            for shares in shares_of_updates
            for sample in shares[number]
            if sample.images
        }
        for number in range(ranks.num_shares)
    ]
    if not any(needed):
        return here
    with deferred_interrupt():  # in the midst of an exchange the other ranks would wait for this one
        held = ranks.all_gather_object([*here])
        senders = {digest: rank for rank, digests in reversed([*enumerate(held)]) for digest in digests}
        routes = [
            (senders[digest], receiver, images)
            for receiver, of_share in enumerate(needed)
            for digest, images in of_share.items()
            if digest not in held[receiver]
        ]
        return here | (_sent_along(routes, here, ranks) if routes else {})


def _sent_along(
    routes: Sequence[tuple[int, int, Images]], here: Mapping[str, tuple[Array, ...]], ranks: Ranks
) -> dict[str, tuple[Array, ...]]:
    """Send images from rank to rank, and return those that came to this one."""
    sent, lengths = [bytearray() for _ in range(ranks.world_size)], [0] * ranks.world_size
    for sender, receiver, images in routes:
        if sender == ranks.rank:
            sent[receiver] += b"".join(array.content for array in here[images.digest])
        if receiver == ranks.rank:
            lengths[sender] += sum(map(_num_bytes, images.arrays))
    received = [*map(BytesIO, ranks.all_to_all(sent, lengths))]
    return {
        images.digest: tuple(
            replace(array, content=received[sender].read(_num_bytes(array))) for array in images.arrays
        )
        for sender, receiver, images in routes
        if receiver == ranks.rank
    }


def _num_bytes(array: Array) -> int:
    itemsize: int = getattr(torch, array.dtype).itemsize
    return itemsize * math.prod(array.shape)


def _with_images(sample: Sample, arrays: Mapping[str, tuple[Array, ...]]) -> Sample:
    images = sample.images
    return sample if images is None else replace(sample, images=replace(images, arrays=arrays[images.digest]))


def busiest(shares_of_updates: Sequence[Sequence[Sequence[Sample]]]) -> float:
    """Return the tokens of the largest share over the mean, in every mini-batch; NaN for one share."""
    loads = [[sum(sample.num_tokens for sample in share) for share in shares] for shares in shares_of_updates]
    size = max(map(len, loads), default=1)
    return math.nan if size == 1 else size * sum(map(max, loads)) / sum(map(sum, loads))


def _shares(mini_batch: Sequence[Sample], size: int) -> list[list[int]]:
    """Return the indices of each share's samples."""
    runs = groupby(range(len(mini_batch)), key=lambda index: mini_batch[index].prompt)
    shares = _longest_first([[*run] for _, run in runs], mini_batch, size)
    loads = [_load(indices, mini_batch) for indices in shares]
    if max(loads) * size > BALANCE_TOLERANCE * sum(loads):
        return _longest_first([[index] for index in range(len(mini_batch))], mini_batch, size)
    return shares


def _load(indices: Sequence[int], mini_batch: Sequence[Sample]) -> int:
    return sum(mini_batch[index].num_tokens for index in indices)


def _longest_first(units: Sequence[list[int]], mini_batch: Sequence[Sample], size: int) -> list[list[int]]:
    """Assign each unit, longest first, to the share with the fewest tokens so far."""
    tokens = [_load(unit, mini_batch) for unit in units]
    loads, shares = [0] * size, [list[int]() for _ in range(size)]
    for number in sorted(range(len(units)), key=lambda number: (-tokens[number], number)):
        least = min(range(size), key=lambda number: (loads[number], number))
        loads[least] += tokens[number]
        shares[least] += units[number]
    return shares
