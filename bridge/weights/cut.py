"""What one part of a replica holds of a Hugging Face parameter.

Not covered: where in vLLM's memory it lies (`View` in `bridge/server/manifest.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Runs = tuple[tuple[int, int], ...]
"""Indices along one axis: runs (start, length), one after the other."""


@dataclass(frozen=True)
class Cut:
    """A parameter's shape, and the indices of it that one part holds, in their order there."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    runs: tuple[Runs, ...]
    """Per axis; a whole axis is `((0, n),)`."""

    @property
    def axis(self) -> int | None:
        """The first axis of which the part lacks something; None: it holds the whole parameter."""
        return next((axis for axis, size in enumerate(self.part_shape) if size != self.shape[axis]), None)

    @property
    def num_elements(self) -> int:
        """Elements that the part holds."""
        return math.prod(self.part_shape)

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, length in runs) for runs in self.runs)

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of the whole parameter; a view if it is one run, or everything."""
        assert tuple(whole.shape) == self.shape, (tuple(whole.shape), self.shape)
        for axis, runs in enumerate(self.runs):
            pieces = [whole.narrow(axis, start, length) for start, length in runs]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return whole

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Copy this part to its place in the whole parameter."""
        assert tuple(part.shape) == self.part_shape, (tuple(part.shape), self.part_shape)
        if (axis := self.axis) is None:
            whole.copy_(part)
            return
        lengths = [length for _, length in self.runs[axis]]
        for (start, length), piece in zip(self.runs[axis], part.split(lengths, axis), strict=True):
            whole.narrow(axis, start, length).copy_(piece)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Cut":
        """Return the cut of a part that holds all of it."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))


def held_by(parts: Sequence[Runs]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the indices that any part holds as runs (start, length), each with the parts that hold all of it.

    A run ends where another part's begins or ends, so that no part holds a piece of one.
    """
    spans = [[(start, start + length) for start, length in runs] for runs in parts]
    edges = sorted({edge for runs in spans for span in runs for edge in span})
    cells = []
    for low, high in pairwise(edges):
        holders = [part for part, runs in enumerate(spans) if any(start <= low and high <= end for start, end in runs)]
        if holders:
            cells.append((low, high - low, tuple(holders)))
    return cells
