"""Which part of a Hugging Face parameter each tensor-parallel rank holds, and how the parts are gathered.

The methods of `Parts` are collective: every rank of a replica calls them at the same time.

Not covered: where a part is in vLLM's memory (`View` in `bridge/server/manifest.py`), gradients
(`bridge/passes/parallel.py`).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor

from bridge.errors import RankError
from bridge.ranks.world import Ranks

CHUNK = 2**26
"""Number of elements of a part that are gathered at a time."""
CHUNK_WORDS = 2**22
"""Number of words of a tensor that are digested at a time."""
_MIX = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed word
Runs = tuple[tuple[int, int], ...]
"""Indices along one axis, as consecutive runs (start, length)."""


@dataclass(frozen=True)
class Cut:
    """The indices of a parameter that one rank holds, in the order in which the rank stores them."""

    shape: tuple[int, ...]
    """Shape of the full parameter."""
    runs: tuple[Runs, ...]
    """Runs along each axis; a full axis is `((0, n),)`."""

    @property
    def axis(self) -> int | None:
        """The first axis along which the part is incomplete; None if it holds the full parameter."""
        return next((axis for axis, size in enumerate(self.part_shape) if size != self.shape[axis]), None)

    @property
    def num_elements(self) -> int:
        """Number of elements in the part."""
        return math.prod(self.part_shape)

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, length in runs) for runs in self.runs)

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of the full parameter `whole`; a view if each axis has a single run."""
        assert tuple(whole.shape) == self.shape, (tuple(whole.shape), self.shape)
        for axis, runs in enumerate(self.runs):
            pieces = [whole.narrow(axis, start, length) for start, length in runs]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return whole

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Copy `part` into its position in the full parameter `whole`."""
        assert tuple(part.shape) == self.part_shape, (tuple(part.shape), self.part_shape)
        if (axis := self.axis) is None:
            whole.copy_(part)
            return
        lengths = [length for _, length in self.runs[axis]]
        for (start, length), piece in zip(self.runs[axis], part.split(lengths, axis), strict=True):
            whole.narrow(axis, start, length).copy_(piece)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Cut":
        """Return the cut that holds a full parameter of `shape`."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))


def held_by(parts: Sequence[Runs]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return all indices that the parts hold as runs (start, length, parts that hold it).

    Runs are split wherever a part's own run begins or ends, so that a part holds each returned run completely or not at
    all.
    """
    spans = [[(start, start + length) for start, length in runs] for runs in parts]
    edges = sorted({edge for runs in spans for span in runs for edge in span})
    cells = []
    for low, high in pairwise(edges):
        holders = [part for part, runs in enumerate(spans) if any(start <= low and high <= end for start, end in runs)]
        if holders:
            cells.append((low, high - low, tuple(holders)))
    return cells


@dataclass(frozen=True)
class Shared:
    """Elements of a parameter that more than one rank holds."""

    name: str
    """Name of the parameter."""
    axis: int | None
    """The axis along which the parameter is split; None if all ranks hold the full parameter."""
    start: int
    """The first index along the axis, counted in the full parameter."""
    length: int
    parts: tuple[int, ...]
    """The ranks that hold them."""
    adds_up: bool
    """Whether each rank computes a share of the gradient, as inside a block. Otherwise each rank computes the full
    gradient, and all use the first rank's, so that they stay bit-identical."""

    def of(self, tensor: Tensor, cut: Cut) -> Tensor:
        """Return a view of these elements in a rank's parameter or gradient."""
        if self.axis is None:
            return tensor
        before = 0
        for start, length in cut.runs[self.axis]:
            if start <= self.start < start + length:
                return tensor.narrow(self.axis, before + self.start - start, self.length)
            before += length
        raise AssertionError(f"this rank does not hold {self}")

    def num_elements(self, cut: Cut) -> int:
        """Return the number of elements; `cut` may be any rank's."""
        return math.prod(self.length if axis == self.axis else size for axis, size in enumerate(cut.shape))


def shared_elements(cuts: Sequence[Mapping[str, Cut]], adding_up: Collection[str] = ()) -> Iterator[Shared]:
    """Yield the elements that more than one rank holds, in the same order on every rank.

    `adding_up` names the parameters for whose shared elements each rank computes a share of the gradient.
    """
    for name in cuts[0]:
        held = [of_rank[name] for of_rank in cuts]
        axis = next((cut.axis for cut in held if cut.axis is not None), None)
        if axis is None:
            length = held[0].shape[0] if held[0].shape else 1
            yield Shared(name, None, 0, length, tuple(range(len(cuts))), name in adding_up)
            continue
        for start, length, ranks in held_by([cut.runs[axis] for cut in held]):
            if len(ranks) > 1:
                yield Shared(name, axis, start, length, ranks, name in adding_up)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Each tensor-parallel rank's share of every parameter, and the group of these ranks."""

    cuts: Sequence[Mapping[str, Cut]]
    """One mapping per tensor-parallel rank."""
    tp_group: Ranks

    @property
    def own(self) -> Mapping[str, Cut]:
        """The shares of this rank."""
        return self.cuts[self.tp_group.rank]

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """Gather a parameter, or another tensor of its shape, from all ranks into host memory.

        `mine` is this rank's part. The device holds `CHUNK` elements of each part at a time.
        """
        cuts = [cuts[name] for cuts in self.cuts]
        if all(cut.axis is None for cut in cuts):
            return mine.detach().cpu()
        own = mine.detach().reshape(-1)
        flat = [torch.empty(cut.num_elements, dtype=mine.dtype) for cut in cuts]
        most = max(map(len, flat))
        for start in range(0, most, CHUNK):
            row = own.new_zeros(1, min(CHUNK, most - start))
            chunk = own[start : start + CHUNK]
            row[0, : len(chunk)] = chunk
            for target, gathered in zip(flat, self.tp_group.all_gather(row), strict=True):
                target[start : start + CHUNK] = gathered[: len(target[start : start + CHUNK])]
        whole = torch.empty(cuts[0].shape, dtype=mine.dtype)
        for cut, part in zip(cuts, flat, strict=True):
            cut.put(whole, part.view(cut.part_shape))
        return whole

    def check_equal(self, parameters: Mapping[str, Tensor]) -> None:
        """Check that all ranks hold equal values in shared elements; RankError: the weights cannot be saved."""
        for name, (first, second) in self.differing(parameters).items():
            raise RankError(
                f"ranks {first} and {second} of a replica differ in {name}, expected equal values: the weights"
                " are not saved",
                hint="resume from the last checkpoint, and report this bug with the model and GPU names",
            )

    def differing(self, parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Return each parameter whose shared elements differ between two ranks, with the numbers of these ranks."""
        digests = {
            (shared.name, shared.start): digest(shared.of(parameters[shared.name], self.own[shared.name]))
            for shared in shared_elements(self.cuts)
            if self.tp_group.rank in shared.parts and shared.name in parameters
        }
        differing = dict[str, tuple[int, int]]()
        for (first, left), (second, right) in combinations(enumerate(self.tp_group.all_gather_object(digests)), 2):
            for key in sorted(left.keys() & right.keys()):
                if left[key] != right[key]:
                    differing.setdefault(key[0], (first, second))
        return differing


def digest(tensor: Tensor) -> str:
    """Return a non-cryptographic digest of the values and order of `tensor`'s elements, as 16 hexadecimal digits.

    Per chunk: the sum, modulo 2^64, of each word plus one times an odd factor that is a hash of the word's position.
    The sums are the coefficients of a polynomial, so that reordering words or chunks changes the digest. Temporaries
    stay under 0.2 GiB.
    """
    word = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)  # int64 would overflow
    words = tensor.detach().contiguous().view(-1).view(word)
    position = torch.arange(min(words.numel(), CHUNK_WORDS), dtype=torch.int64, device=tensor.device)
    factors = ((position + 1) * _MIX).bitwise_xor_((position * _MIX) >> 29).bitwise_or_(1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(CHUNK_WORDS):
        own = factors[: chunk.numel()]
        total = total * _MIX + torch.addcmul(own, own, chunk).sum()
    return f"{int(total) & (2**64 - 1):016x}"
