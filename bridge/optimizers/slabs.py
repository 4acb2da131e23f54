"""Which parameters are stepped together, where their state lies, and how they are brought into one piece and back.

A *slab* is the state of a large parameter, or of many small ones behind one another: a row is one block, and every
parameter begins with a row of its own, so that it comes out the same beside others as alone. A *piece* is a range of a
slab's rows that is stepped at once. A large parameter is stepped where it lies; small ones are gathered into a copy and
scattered back, because hundreds of small kernels take longer to launch than to run.

Not covered: the update itself (`split_master.py`), when it is taken (`factory.py`).
Shape suffixes: R blocks, B elements of a block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from bridge.optimizers.split_master import Kind

SMALL_ELEMENTS = {"cuda": 2**24, "cpu": 2**22}
"""Up to this size a parameter is gathered with others: a GPU is done with it, copies included, before another kernel is
launched."""
SLAB_ELEMENTS = {"cuda": 2**26, "cpu": 2**18}
"""Elements of the parameters that are gathered, at most: a copy of their weights and gradients is made for a moment."""
PIECE_ELEMENTS = {"cuda": 2**28, "cpu": 2**18}
"""Elements that are stepped at once where they lie: by one kernel without temporaries on a GPU; those that fit a CPU's
caches."""

LEAST_ROWS = 2
"""Of a parameter, and of any piece of one: torch compiles tensors of one row for themselves."""


@dataclass(frozen=True)
class Member:
    """One parameter's place in a slab."""

    parameter: Tensor
    """It; its memory may move between steps."""
    group: Mapping[str, Any]
    """Its hyperparameters."""
    rows: range
    """Its blocks; the last ones may be longer than what is left of it."""


@dataclass(eq=False)
class Slab:
    """The state of parameters of one type and the same hyperparameters."""

    kind: Kind
    """How it is held."""
    number: int
    """Its place among the optimizer's."""
    members: Sequence[Member]
    """In the order of their rows."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Tensors [R, elements of a block] by name; none before `allocate`."""
    steps: list[int] = field(default_factory=list)
    """Updates that each member had."""

    def allocate(self) -> None:
        """Make the state, all zero, unless it is there."""
        weight = self.members[0].parameter
        for name, part in self.kind.parts(weight.dtype).items() if not self.state else ():
            shape = self.members[-1].rows.stop, self.kind.moments.block // part.elements
            self.state[name] = torch.zeros(shape, dtype=part.dtype, device=weight.device)

    def parts(self, member: Member) -> dict[str, Tensor]:
        """Return one member's state without what fills its last block up, as views."""
        rows, made = slice(member.rows.start, member.rows.stop), {}
        for name, part in self.kind.parts(member.parameter.dtype).items():
            entries = self.state[name][rows].view(-1)[: -(-member.parameter.numel() // part.elements)]
            made[name] = entries.view(member.parameter.shape) if part.elements == 1 else entries
        return made

    def pieces(self, indices: Iterable[int]) -> Iterator["Piece"]:
        """Yield what holds these members, in order: neighbours together that had as many updates."""
        runs = groupby(enumerate(indices), key=lambda each: (each[1] - each[0], self.steps[each[1]]))
        for (_, step), run in runs:
            members = [self.members[index] for _, index in run]
            first, num_rows = members[0].rows.start, members[-1].rows.stop - members[0].rows.start
            most_rows = PIECE_ELEMENTS[members[0].parameter.device.type] // self.kind.moments.block
            num_pieces = -(-num_rows // most_rows) if len(members) == 1 else 1
            bounds = [first + number * num_rows // num_pieces for number in range(num_pieces + 1)]
            for start, end in pairwise(bounds):
                yield Piece(self, members, slice(start, end), step + 1)


@dataclass(frozen=True)
class Piece:
    """Rows of a slab: some of one member's, or all of several members'."""

    slab: Slab
    members: Sequence[Member]
    rows: slice
    step: int
    """The update's number for its members, from 1."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the rows' state."""
        return {name: tensor[self.rows] for name, tensor in self.slab.state.items()}

    def blocks(self, tensor_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what `tensor_of` makes of the members, [R, B]: where it lies if that can be, else a copy.

        The copy's last blocks are filled up with zeros.
        """
        flat, lengths = self._spans(tensor_of)
        block = self.slab.kind.moments.block
        if len(flat) == 1 and flat[0].numel() == lengths[0]:
            return flat[0].view(-1, block)
        zeros = flat[0].new_zeros(LEAST_ROWS * block)
        filled = ((tensor, zeros[: length - tensor.numel()]) for tensor, length in zip(flat, lengths, strict=True))
        return torch.cat([part for pair in filled for part in pair]).view(-1, block)

    def put_back(self, blocks_RB: Tensor, tensor_of: Callable[[Tensor], Tensor]) -> None:
        """Write what `blocks` returned into the members, unless it is their own memory."""
        flat, lengths = self._spans(tensor_of)
        if blocks_RB.data_ptr() != flat[0].data_ptr():
            spans = blocks_RB.view(-1).split(lengths)
            torch._foreach_copy_(flat, [span[: tensor.numel()] for span, tensor in zip(spans, flat, strict=True)])

    def _spans(self, tensor_of: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[int]]:
        """Return the elements of each member's tensor that belong to the rows, and how many fill those rows."""
        block = self.slab.kind.moments.block
        flat = [tensor_of(member.parameter).reshape(-1) for member in self.members]
        if len(self.members) > 1:
            return flat, [len(member.rows) * block for member in self.members]
        start, end = (row - self.members[0].rows.start for row in (self.rows.start, self.rows.stop))
        return [flat[0][start * block : end * block]], [(end - start) * block]


def slabs(kind: Kind, groups: Iterable[Mapping[str, Any]]) -> list[Slab]:
    """Deal the parameters of all groups out to slabs."""
    dealt: list[list[Member]] = []
    open_slabs: dict[tuple[object, ...], list[Member]] = {}
    for group in groups:
        for parameter in group["params"]:
            key = (parameter.dtype, parameter.device, *hyperparameters(group))
            is_small = parameter.numel() <= SMALL_ELEMENTS[parameter.device.type]
            members = open_slabs.get(key, []) if is_small else []
            num_rows = max(LEAST_ROWS, -(-parameter.numel() // kind.moments.block))
            start = members[-1].rows.stop if members else 0
            if (start + num_rows) * kind.moments.block > SLAB_ELEMENTS[parameter.device.type]:
                members, start = [], 0
            if not members:
                dealt.append(members)
            if is_small:
                open_slabs[key] = members
            members.append(Member(parameter, group, range(start, start + num_rows)))
    return [Slab(kind, number, members, steps=[0] * len(members)) for number, members in enumerate(dealt)]


def hyperparameters(group: Mapping[str, Any]) -> tuple[float, ...]:
    """Return what an update depends on."""
    return (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
