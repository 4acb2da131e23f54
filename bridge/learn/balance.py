"""Who trains on what: groups dealt out to the replicas so that each has about as many tokens.

Every rank computes the same; nothing is sent.
"""

import math
from collections.abc import Sequence
from itertools import groupby

from bridge.passes.packing import Sample
from bridge.ranks.world import Ranks

TOLERANCE = 1.05
"""Tokens of the busiest replica over the mean above which completions are dealt out instead of whole groups."""


def dealt(samples: Sequence[Sample], ranks: Ranks) -> list[int]:
    """Return the indices of the samples that this rank's replica trains on, in their order.

    The samples of one prompt, which follow each other, stay together if the replicas' tokens then differ little: their
    prompt is computed once.
    """
    if ranks.dp_size == 1:
        return [*range(len(samples))]
    return sorted(_parts(samples, ranks.dp_size)[ranks.dp_rank])


def busiest(mini_batches: Sequence[Sequence[Sample]], size: int) -> float:
    """Return the tokens of the busiest of `size` replicas over their mean, in every mini-batch; NaN for one."""
    if size == 1 or not mini_batches:
        return math.nan
    loads = [[_load(part, each) for part in _parts(each, size)] for each in mini_batches]
    return size * sum(map(max, loads)) / sum(map(sum, loads))


def _parts(samples: Sequence[Sample], size: int) -> list[list[int]]:
    """Return the indices of each replica's samples."""
    runs = groupby(range(len(samples)), key=lambda index: samples[index].prompt_token_ids)
    groups = [[*run] for _, run in runs]
    parts = _longest_first(groups, samples, size)
    loads = [_load(part, samples) for part in parts]
    if max(loads) * size > TOLERANCE * sum(loads):
        parts = _longest_first([[index] for index in range(len(samples))], samples, size)
    return parts


def _load(part: Sequence[int], samples: Sequence[Sample]) -> int:
    return sum(samples[index].num_tokens for index in part)


def _longest_first(units: Sequence[list[int]], samples: Sequence[Sample], size: int) -> list[list[int]]:
    """Deal out each unit, longest first, to the replica with the fewest tokens so far; the first of several."""
    tokens = [_load(unit, samples) for unit in units]
    loads, parts = [0] * size, [list[int]() for _ in range(size)]
    for number in sorted(range(len(units)), key=lambda number: (-tokens[number], number)):
        replica = min(range(size), key=lambda replica: (loads[replica], replica))
        loads[replica] += tokens[number]
        parts[replica] += units[number]
    return parts
