"""Share the samples of an update out among replicas, so that each has about the same number of tokens.

A rank has the bytes of the images that it sampled with, and gets those that it trains on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import groupby

import torch

from bridge.core.interrupt import deferred_interrupt
from bridge.passes.packing import Sample
from bridge.ranks.world import Ranks
from bridge.types import Array, Group, Images

BALANCE_TOLERANCE = 1.05
"""Tokens of the busiest replica over the mean above which completions, not whole groups, are distributed."""


def distribute(mini_batch: list[Sample], size: int) -> list[list[Sample]]:
    """Return the samples of each of `size` shares, in their order; every rank computes the same.

    The samples of one prompt, which follow each other, stay together if the shares' tokens then differ little: their
    prompt is computed once.
    """
    if size == 1:
        return [mini_batch]
    return [[mini_batch[index] for index in indices] for indices in shares_of(mini_batch, size)]


def shares_of(samples: Sequence[Sample], size: int) -> list[list[int]]:
    """Return the indices of each share's samples as `distribute` does, in their order."""
    if size == 1:
        return [[*range(len(samples))]]
    return [sorted(indices) for indices in _shares(samples, size)] if samples else [[] for _ in range(size)]


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


def with_images(sample: Sample, arrays: Mapping[str, tuple[Array, ...]]) -> Sample:
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
