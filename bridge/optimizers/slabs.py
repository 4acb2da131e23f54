"""How an optimizer's state is laid out in rows, so that parameters are stepped together and ranks share the work.

A *slab* is the state of one large parameter, or of many consecutive small ones. Each row is one block, and each
parameter starts a new row, so that the results do not depend on which parameters share a slab. A *piece* is a range of
a slab's rows that is stepped in one call. A large parameter is stepped in its own memory. Small ones are gathered into
a copy and scattered back, because hundreds of small kernels take longer to launch than to run.

If there are several ranks, each has the state for some rows of every slab.

Shape suffixes: R blocks, B elements of a block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from bridge.optimizers.gradient_hooks import Replicated
from bridge.optimizers.split_master import Kind
from bridge.ranks.world import ALONE, Ranks

SMALL_ELEMENTS = {"cuda": 2**24, "cpu": 2**22}
"""Parameters up to this size are gathered: copying and stepping one takes a GPU less time than launching a kernel."""
SLAB_ELEMENTS = {"cuda": 2**26, "cpu": 2**18}
"""Maximum number of elements in a slab of gathered parameters, whose weights and gradients are briefly copied."""
PIECE_ELEMENTS = {"cuda": 2**28, "cpu": 2**18}
"""Maximum elements of a large parameter per call. On a GPU a kernel needs no temporaries; on a CPU they should fit the
caches."""
LEAST_ROWS = 2
"""Minimum number of rows of a parameter or a piece, since torch specializes on tensors with a single row."""


@dataclass(frozen=True)
class Member:
    """The rows of one parameter in a slab."""

    parameter: Tensor
    """The parameter; its memory may move between steps."""
    group: Mapping[str, Any]
    """Hyperparameters of the parameter."""
    rows: range
    """Rows (blocks) of the parameter; the last one may be partly filled."""


@dataclass(eq=False)
class Slab:
    """The state of parameters with the same dtype and hyperparameters."""

    kind: Kind
    number: int
    """Index among the optimizer's slabs."""
    members: Sequence[Member]
    """Parameters in the slab, in row order."""
    device: torch.device
    """Device of the state."""
    ranks: Ranks = ALONE
    state: dict[str, Tensor] = field(default_factory=dict)
    """Tensors [R, elements per block] of this rank's rows, by name; empty before `allocate`."""

    @property
    def num_rows(self) -> int:
        return self.members[-1].rows.stop

    @property
    def mine(self) -> range:
        """This rank's rows. All ranks have the same number; the last ones may lie beyond the slab's end."""
        num_rows = -(-self.num_rows // self.ranks.world_size)
        num_rows += num_rows % LEAST_ROWS if self.ranks.world_size > 1 else 0
        return range(self.ranks.rank * num_rows, (self.ranks.rank + 1) * num_rows)

    def allocate(self) -> None:
        """Allocate the state, filled with zeros, unless it is allocated already."""
        if self.state:
            return
        made = {}
        for name, part in self.kind.parts(self.members[0].parameter.dtype).items():
            shape = len(self.mine), self.kind.moments.block // part.elements
            empty = torch.empty(shape, dtype=part.dtype, device=self.device)
            made[name] = empty.zero_()  # commits host memory now, not on the first write
        self.state.update(made)  # either all tensors or, if memory ran out, none

    def own(self, member: Member) -> range:
        """Return this rank's rows of a member."""
        first = max(self.mine.start, member.rows.start)
        return range(first, max(first, min(self.mine.stop, member.rows.stop)))

    def held(self, rows: range) -> slice:
        """Return the position of these rows of this rank in its state tensors."""
        return slice(rows.start - self.mine.start, rows.stop - self.mine.start)

    def parts(self, member: Member, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of one member's part of the full slab's `state`, without the padding in its last block."""
        rows = slice(member.rows.start, member.rows.stop)
        made = {}
        for name, part in self.kind.parts(member.parameter.dtype).items():
            entries = state[name][rows].view(-1)[: -(-member.parameter.numel() // part.elements)]
            made[name] = entries.view(member.parameter.shape) if part.elements == 1 else entries
        return made

    def put(self, member: Member, name: str, part: Tensor) -> None:
        """Copy one tensor of a member's full state into this rank's rows."""
        width = self.state[name].shape[1]
        rows = self.own(member)
        flat = part.reshape(-1)[(rows.start - member.rows.start) * width :]
        own = self.state[name][self.held(rows)].view(-1)
        own[: len(flat)].copy_(flat[: len(own)])

    def whole(self, tensor_of: Callable[[Tensor], Tensor]) -> tuple["Piece", Tensor]:
        """Return all rows as a piece, and the members' tensors, chosen by `tensor_of`, as [ranks * rows per rank, B].

        The tensor is a view of the members' memory if possible, otherwise a copy that is padded with zeros.
        """
        piece = Piece(self, self.members, slice(0, self.num_rows), 0)
        blocks_RB = piece.blocks(tensor_of)
        missing = len(self.mine) * self.ranks.world_size - self.num_rows
        if missing:
            blocks_RB = torch.cat([blocks_RB, blocks_RB.new_zeros(missing, blocks_RB.shape[1])])
        return piece, blocks_RB

    def pieces(self, indices: Iterable[int], steps: Mapping[Tensor, int]) -> Iterator["Piece"]:
        """Yield the pieces of these members, in order; neighbors with the same number of `steps` share a piece."""
        runs = groupby(enumerate(indices), key=lambda pair: (pair[1] - pair[0], steps[self.members[pair[1]].parameter]))
        for (_, step), run in runs:
            members = [self.members[index] for _, index in run]
            first = members[0].rows.start
            num_rows = members[-1].rows.stop - members[0].rows.start
            most_rows = PIECE_ELEMENTS[members[0].parameter.device.type] // self.kind.moments.block
            num_pieces = -(-num_rows // most_rows) if len(members) == 1 else 1
            bounds = [first + number * num_rows // num_pieces for number in range(num_pieces + 1)]
            for start, end in pairwise(bounds):
                yield Piece(self, members, slice(start, end), step + 1)


@dataclass(frozen=True)
class Piece:
    """Rows of a slab: some rows of one member, or all rows of several members."""

    slab: Slab
    members: Sequence[Member]
    rows: slice
    step: int
    """Number of this update for these members, counted from 1."""

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: tensor[self.rows] for name, tensor in self.slab.state.items()}

    def blocks(self, tensor_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the members' tensors, chosen by `tensor_of`, as [R, B]: a view, or a copy padded with zeros."""
        flat, lengths = self._spans(tensor_of)
        block = self.slab.kind.moments.block
        if len(flat) == 1 and flat[0].numel() == lengths[0]:
            return flat[0].view(-1, block)
        zeros = flat[0].new_zeros(LEAST_ROWS * block)
        filled = ((tensor, zeros[: length - tensor.numel()]) for tensor, length in zip(flat, lengths, strict=True))
        return torch.cat([part for pair in filled for part in pair]).view(-1, block)

    def put_back(self, blocks_RB: Tensor, tensor_of: Callable[[Tensor], Tensor]) -> None:
        """Write the result of `blocks` back into the members, unless it is a view of them."""
        flat, lengths = self._spans(tensor_of)
        if blocks_RB.data_ptr() != flat[0].data_ptr():
            spans = blocks_RB.view(-1).split(lengths)
            torch._foreach_copy_(flat, [span[: tensor.numel()] for span, tensor in zip(spans, flat, strict=True)])

    def _spans(self, tensor_of: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[int]]:
        """Return each member's elements in these rows, flattened, and the sizes of these rows."""
        block = self.slab.kind.moments.block
        flat = [tensor_of(member.parameter).reshape(-1) for member in self.members]
        if len(self.members) > 1:
            return flat, [len(member.rows) * block for member in self.members]
        start, end = (row - self.members[0].rows.start for row in (self.rows.start, self.rows.stop))
        return [flat[0][start * block : end * block]], [(end - start) * block]


def slabs(
    kind: Kind,
    groups: Iterable[Mapping[str, Any]],
    *,
    ranks: Ranks,
    replicated: Replicated,
    device: torch.device | None,
) -> list[Slab]:
    """Assign the parameters of all groups to slabs, with state on `device`; None: on the weights' device.

    Parameters that several tensor-parallel ranks hold come first, in separate slabs, because random bits depend on the
    slab and the row.
    """
    divided: list[list[Member]] = []
    open_slabs: dict[tuple[object, ...], list[Member]] = {}
    pairs = [(parameter, group) for group in groups for parameter in group["params"]]
    for parameter, group in sorted(pairs, key=lambda pair: pair[0] not in replicated):
        key = (parameter in replicated, parameter.dtype, parameter.device, *hyperparameters(group))
        is_small = parameter.numel() <= SMALL_ELEMENTS[parameter.device.type]
        num_rows = max(LEAST_ROWS, -(-parameter.numel() // kind.moments.block))
        most_rows = SLAB_ELEMENTS[parameter.device.type] // kind.moments.block
        members = open_slabs.get(key) if is_small else None
        if members is None or members[-1].rows.stop + num_rows > most_rows:
            members = []
            divided.append(members)
            if is_small:
                open_slabs[key] = members
        start = members[-1].rows.stop if members else 0
        members.append(Member(parameter, group, range(start, start + num_rows)))
    return [
        Slab(kind, number, members, device or members[0].parameter.device, ranks)
        for number, members in enumerate(divided)
    ]


def hyperparameters(group: Mapping[str, Any]) -> tuple[float, ...]:
    values = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    return tuple(map(float, values))  # sets compare tensors by identity
