"""Distribute the samples of an update among replicas, so that each gets about the same number of tokens.

A rank has the image bytes of the prompts that it sampled, and receives those of the other samples it trains on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import chain, groupby

import torch

from bridge.core.interrupt import deferred_interrupt
from bridge.passes.packing import Sample, units
from bridge.ranks.world import Ranks
from bridge.types import Array, Group, Images

BALANCE_TOLERANCE = 1.05
"""Above this ratio of the busiest replica's tokens to the mean, single completions are distributed, not groups."""


def distribute(mini_batch: list[Sample], size: int) -> list[list[Sample]]:
    """Divide samples into `size` shares, keeping their order; every rank computes the same shares.

    The samples of a prompt, which are consecutive, stay together if the shares then have similar numbers of tokens,
    so that their prompt is computed once. The two samples of a pair always stay together.
    """
    if size == 1:
        return [mini_batch]
    return [[mini_batch[index] for index in indices] for indices in shares_of(mini_batch, size)]


def shares_of(samples: Sequence[Sample], size: int) -> list[list[int]]:
    """Return the indices of the samples in each share of `distribute`, in order."""
    if size == 1:
        return [[*range(len(samples))]]
    return [sorted(indices) for indices in _shares(samples, size)] if samples else [[] for _ in range(size)]


def exchanged_images(
    groups: Sequence[Group], shares_of_updates: Sequence[list[list[Sample]]], ranks: Ranks
) -> dict[str, tuple[Array, ...]]:
    """Return this rank's images and those that it trains on, by digest; other ranks send the ones that it lacks.

    The positions of images in a prompt are stored per sample, since different prompts may have the same images.

    Packs with images are never sliced, so each share belongs to one rank. All ranks derive the same routes.
    """
    here = {group.images.digest: group.images.arrays for group in groups if group.images and group.images.is_here}
    needed: list[dict[str, Images]] = [{} for _ in range(ranks.num_shares)]
    for shares in shares_of_updates:
        for of_share, share in zip(needed, shares, strict=True):
            of_share |= {sample.images.digest: sample.images for sample in share if sample.images}
    if not any(needed):
        return here
    with deferred_interrupt():  # an interrupted exchange would leave the other ranks waiting
        held = ranks.all_gather_object([*here])
        senders: dict[str, int] = {}  # by digest: the first rank that has the image
        for rank, digests in enumerate(held):
            for digest in digests:
                senders.setdefault(digest, rank)
        routes = []
        for receiver, of_share in enumerate(needed):
            missing = [digest for digest in of_share if digest not in held[receiver]]
            routes += [(senders[digest], receiver, of_share[digest]) for digest in missing]
        if not routes:
            return here
        return here | _exchanged_images(routes, here, ranks)


def _exchanged_images(
    routes: Sequence[tuple[int, int, Images]], here: Mapping[str, tuple[Array, ...]], ranks: Ranks
) -> dict[str, tuple[Array, ...]]:
    """Send images between ranks, and return the ones that this rank received."""
    sent = [bytearray() for _ in range(ranks.world_size)]
    lengths = [0] * ranks.world_size
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


def with_images(sample: Sample, arrays: Mapping[str, tuple[Array, ...]]) -> Sample:
    images = sample.images
    return sample if images is None else replace(sample, images=replace(images, arrays=arrays[images.digest]))


def busiest(shares_of_updates: Sequence[Sequence[Sequence[Sample]]]) -> float:
    """Return the ratio of the largest share's tokens to the mean, over all mini-batches; NaN for one share."""
    loads = [[sum(sample.num_tokens for sample in share) for share in shares] for shares in shares_of_updates]
    size = max(map(len, loads), default=1)
    if size == 1:
        return math.nan
    of_largest = sum(max(of_shares) for of_shares in loads)
    of_all = sum(sum(of_shares) for of_shares in loads)
    return size * of_largest / of_all


def _shares(mini_batch: Sequence[Sample], size: int) -> list[list[int]]:
    """Return the indices of each share's samples."""
    smallest = units(mini_batch)
    runs = groupby(smallest, key=lambda unit: mini_batch[unit[0]].prompt)
    shares = _longest_first([[*chain.from_iterable(run)] for _, run in runs], mini_batch, size)
    loads = [_load(indices, mini_batch) for indices in shares]
    if max(loads) * size > BALANCE_TOLERANCE * sum(loads):
        return _longest_first(smallest, mini_batch, size)
    return shares


def _load(indices: Sequence[int], mini_batch: Sequence[Sample]) -> int:
    return sum(mini_batch[index].num_tokens for index in indices)


def _longest_first(units: Sequence[list[int]], mini_batch: Sequence[Sample], size: int) -> list[list[int]]:
    """Assign each unit, longest first, to the share with the fewest tokens so far."""
    tokens = [_load(unit, mini_batch) for unit in units]
    loads = [0] * size
    shares = [list[int]() for _ in range(size)]
    for number in sorted(range(len(units)), key=lambda number: (-tokens[number], number)):
        least = min(range(size), key=lambda number: (loads[number], number))
        loads[least] += tokens[number]
        shares[least] += units[number]
    return shares
