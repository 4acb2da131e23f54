"""AdamW with its state beside the weights, stepped after a backward pass or in the middle of one.

A *slab* is the state of one large parameter, or of many small ones in a row. Each row is one block, and each parameter
starts a new row, so that it gets the same result together with others as alone. A *piece* is a range of a slab's rows
that is stepped in one call. A large parameter is stepped in its own memory. Small ones are gathered into a copy and
scattered back, because hundreds of small kernels take longer to launch than to run.

Several ranks share the work (ZeRO, in place): each has the state of its part of every slab's rows. `exchange` gives it
the sum of all gradients for them; `step` updates them, and gathers everybody's rows into everybody's weights. So each
element is computed once and copied, and replicas are equal by construction. The ranks that share are peers: they hold
the same part of the weights.

Shape suffixes: R blocks, B elements of a block.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from bridge.errors import UsageError
from bridge.optimizers.alike import NOTHING, Alike, counted
from bridge.optimizers.in_place import InPlaceOptimizer, norm_of
from bridge.optimizers.release import each_gradient
from bridge.optimizers.rounding import key
from bridge.optimizers.split_master import KINDS, Coefficients, Kind, Update, compiled, update
from bridge.ranks.world import ALONE, Ranks

SMALL_ELEMENTS = {"cuda": 2**24, "cpu": 2**22}
"""Parameters up to this size are gathered: a GPU finishes one, copies included, before another kernel is launched."""
SLAB_ELEMENTS = {"cuda": 2**26, "cpu": 2**18}
"""Most elements of parameters that are gathered; their weights and gradients are copied for a moment."""
PIECE_ELEMENTS = {"cuda": 2**28, "cpu": 2**18}
"""Most elements of a large parameter per call: a GPU's one kernel has no temporaries; a CPU's should fit its caches."""
LEAST_ROWS = 2
"""Fewest rows of a parameter, and of a piece of one: torch specializes on tensors of one row."""


@dataclass(frozen=True)
class Member:
    """One parameter's place in a slab."""

    parameter: Tensor
    """Its memory may move between steps."""
    group: Mapping[str, Any]
    """Its hyperparameters."""
    rows: range
    """Its blocks; the last ones may be partly filled."""


@dataclass(eq=False)
class Slab:
    """The state of parameters with the same dtype and hyperparameters."""

    kind: Kind
    number: int
    """Its index among the optimizer's slabs."""
    members: Sequence[Member]
    """In the order of their rows."""
    ranks: Ranks = ALONE
    state: dict[str, Tensor] = field(default_factory=dict)
    """Tensors [R, elements of a block] by name, of this rank's rows; empty before `allocate`."""

    @property
    def num_rows(self) -> int:
        return self.members[-1].rows.stop

    @property
    def mine(self) -> range:
        """This rank's rows: all ranks have as many, the last ones beyond the slab's end."""
        each = -(-self.num_rows // self.ranks.size)
        each += each % LEAST_ROWS if self.ranks.size > 1 else 0
        return range(self.ranks.rank * each, (self.ranks.rank + 1) * each)

    def allocate(self) -> None:
        """Allocate the state, zeroed, unless that is done."""
        weight = self.members[0].parameter
        for name, part in self.kind.parts(weight.dtype).items() if not self.state else ():
            shape = len(self.mine), self.kind.moments.block // part.elements
            self.state[name] = torch.zeros(shape, dtype=part.dtype, device=weight.device)

    def parts(self, member: Member, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of one member's part of the whole slab's `state`, without the padding of its last block."""
        rows, made = slice(member.rows.start, member.rows.stop), {}
        for name, part in self.kind.parts(member.parameter.dtype).items():
            entries = state[name][rows].view(-1)[: -(-member.parameter.numel() // part.elements)]
            made[name] = entries.view(member.parameter.shape) if part.elements == 1 else entries
        return made

    def put(self, member: Member, name: str, part: Tensor) -> None:
        """Copy one part of a member's whole state into this rank's rows."""
        width = self.state[name].shape[1]
        first, last = (max(self.mine.start, member.rows.start), min(self.mine.stop, member.rows.stop))
        if first >= last:
            return
        start, stop = ((row - member.rows.start) * width for row in (first, last))
        flat = part.reshape(-1)[start:stop]
        own = self.state[name][first - self.mine.start : last - self.mine.start].view(-1)
        own[: len(flat)].copy_(flat)

    def whole(self, tensor_of: Callable[[Tensor], Tensor]) -> tuple["Piece", Tensor]:
        """Return all rows as a piece, and `tensor_of` the members as [ranks * rows of each, B].

        The latter is where they lie if it can be, else a copy that is filled up with zeros.
        """
        piece = Piece(self, self.members, slice(0, self.num_rows), 0)
        blocks_RB = piece.blocks(tensor_of)
        missing = len(self.mine) * self.ranks.size - self.num_rows
        if missing:
            blocks_RB = torch.cat([blocks_RB, blocks_RB.new_zeros(missing, blocks_RB.shape[1])])
        return piece, blocks_RB

    def pieces(self, indices: Iterable[int], steps: Mapping[Tensor, int]) -> Iterator["Piece"]:
        """Yield the pieces of these members, in order; neighbors with as many `steps` so far share one."""
        runs = groupby(enumerate(indices), key=lambda each: (each[1] - each[0], steps[self.members[each[1]].parameter]))
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
    """Number of the update for its members, from 1."""

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: tensor[self.rows] for name, tensor in self.slab.state.items()}

    def blocks(self, tensor_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `tensor_of` the members as [R, B]: a view if possible, else a copy padded with zeros."""
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
        """Return each member's elements in these rows, flat, and the sizes of those rows."""
        block = self.slab.kind.moments.block
        flat = [tensor_of(member.parameter).reshape(-1) for member in self.members]
        if len(self.members) > 1:
            return flat, [len(member.rows) * block for member in self.members]
        start, end = (row - self.members[0].rows.start for row in (self.rows.start, self.rows.stop))
        return [flat[0][start * block : end * block]], [(end - start) * block]


class SplitMasterAdamW(InPlaceOptimizer):
    """AdamW that by default loses no update to bf16; on a GPU `allocate` compiles its update.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        kind: Kind = KINDS["adamw"],
        seed: int = 0,
        compiles: bool | None = None,
        ranks: Ranks = ALONE,
        alike: Alike = NOTHING,
        **hyperparameters: Any,
    ) -> None:
        super().__init__(params, **{"betas": (0.9, kind.beta2), **hyperparameters})
        self._world, self._ranks = ranks, ranks.peers
        self._alike = alike
        self.flags = f"--optimizer {kind.name} --no-offload-optimizer"
        self.kind, self._seed = kind, seed
        self._device = next(iter(self._steps)).device
        self._compiles = self._device.type == "cuda" if compiles is None else compiles
        self._slabs = _slabs(kind, self.param_groups, self._ranks, alike)
        self._places = {
            member.parameter: (slab, index) for slab in self._slabs for index, member in enumerate(slab.members)
        }
        self._released: list[Tensor] = []
        """Norms of the gradients released since the last step."""
        self._sums: dict[Slab, Tensor] = {}
        """Of several ranks: the summed gradients [R, B] of this rank's rows, since `exchange`."""
        self._summed: set[Tensor] = set()
        """Parameters that had a gradient on any rank."""
        self._gathered: tuple[Slab, dict[str, Tensor]] | None = None
        """The whole state of the slab whose parts were read last."""

    def allocate(self) -> None:
        for slab in self._slabs:
            slab.allocate()
            weight = slab.members[0].parameter
            several = self._ranks.size > 1  # sum in float32
            self._update(weight.dtype, torch.float32 if several else weight.grad_dtype or weight.dtype)

    def expect(self, gradients: torch.dtype) -> None:
        for slab in self._slabs:
            self._update(slab.members[0].parameter.dtype, gradients)

    @contextmanager
    def releasing(self, *, max_norm: float = math.inf) -> Iterator[None]:
        """Step each parameter as soon as its gradient is complete, then drop the gradient.

        One backward pass is one update. The global norm is not known by then, so each gradient is clipped to `max_norm`
        by itself.

        Raises:
            UsageError: some gradients were not finite; their parameters were left unchanged, the others were stepped.
        """
        self.allocate()
        self._num_changed, self._released = [], []
        waiting: dict[Tensor, list[tuple[Piece, Sequence[Tensor]]]] = {}
        pieces = [piece for slab, index in self._places.values() for piece in slab.pieces([index], self._steps)]
        for piece, scalars in zip(pieces, self._scalars(pieces, max_norm), strict=True):
            waiting.setdefault(piece.members[0].parameter, []).append((piece, scalars))

        def take(parameter: Tensor) -> None:
            assert parameter in waiting, "a second gradient: one backward pass is one update"
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            self._released.append(norm * self._factors[parameter])
            for piece, scalars in waiting.pop(parameter):
                self._step_piece(piece, self._released[-1], scalars)
            self._steps[parameter] += 1

        with each_gradient(self._steps, take):
            yield
        norms = torch.stack(self._released).tolist() if self._released else []
        if num_bad := sum(not math.isfinite(norm) for norm in norms):
            raise UsageError(
                f"{num_bad} of {len(norms)} gradients were not finite: the parameters of all others were stepped",
                remedy="resume from the last checkpoint with a lower --lr",
            )

    def global_norm(self) -> float:
        if self._released:
            return float(torch.linalg.vector_norm(torch.stack(self._released)))
        if self._world.size == 1:
            return super().global_norm()
        return math.sqrt(float(self._world.total(self._squares())))

    def _squares(self) -> Tensor:
        """Return the sum of the squares of this rank's gradients, without those that another part counts."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._ranks.size == 1:
            own = [(each.grad, each, factor) for each, factor in self._factors.items() if each.grad is not None]
            norm = norm_of((counted(grad, self._alike.get(each, ())), factor) for grad, each, factor in own)
            return squares + norm**2
        for slab, sum_RB in self._sums.items():
            factors = {self._factors[member.parameter] for member in slab.members}
            assert len(factors) == 1, factors
            squares_of_slab = self._counted(slab, sum_RB).square().sum(dtype=torch.float64)
            squares += (squares_of_slab * factors.pop() ** 2).to(self._device)
        return squares

    def _counted(self, slab: Slab, sum_RB: Tensor) -> Tensor:
        """Return this rank's summed gradients of a slab with zeros where another part counts them."""
        block = slab.kind.moments.block
        for member in slab.members:
            first, last = (max(slab.mine.start, member.rows.start), min(slab.mine.stop, member.rows.stop))
            if first >= last or not self._alike.get(member.parameter):
                continue
            start, stop = first - slab.mine.start, last - slab.mine.start
            begin = (first - member.rows.start) * block
            kept_RB = counted(sum_RB[start:stop], self._alike[member.parameter], begin)
            sum_RB = torch.cat([sum_RB[:start], kept_RB, sum_RB[stop:]])
        return sum_RB

    @torch.no_grad()
    def exchange(self) -> None:
        """Give each rank the sum of its peers' gradients of its rows, in float32, and drop the gradients.

        A parameter without a gradient on this rank has zeros.
        """
        if self._ranks.size == 1:
            return
        self._sums, self._summed = {}, set()
        widths = {None: 0, torch.bfloat16: 1, torch.float32: 2}
        own = [widths[None if each.grad is None else each.grad.dtype] for each in self._places]
        dtypes = dict(zip(self._places, self._ranks.most(own), strict=True))
        for slab in self._slabs:
            width = max(dtypes[member.parameter] for member in slab.members)
            if width == 0:
                continue
            dtype = torch.float32 if width == widths[torch.float32] else torch.bfloat16

            def gradient(parameter: Tensor, dtype: torch.dtype = dtype) -> Tensor:
                if parameter.grad is None:
                    return torch.zeros_like(parameter, dtype=dtype)
                return parameter.grad.to(dtype)

            self._sums[slab] = self._ranks.summed(slab.whole(gradient)[1])
            for member in slab.members:
                member.parameter.grad = None
        self._summed = {parameter for parameter, width in dtypes.items() if width}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sums, self._summed = {}, set()
        super().zero_grad(set_to_none)

    @property
    def changed_weight_share(self) -> float:
        if self._world.size == 1:
            return super().changed_weight_share
        counts = torch.stack([torch.zeros((), dtype=torch.int64, device=self._device), *self._num_changed])
        held = counts.new_tensor(sum(parameter.numel() for parameter in self._steps))
        return int(self._world.total(counts.sum())) / int(self._world.total_of_parts(held))

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        slab, index = self._places[parameter]
        slab.allocate()
        if self._ranks.size == 1:
            return slab.parts(slab.members[index], slab.state)
        if self._gathered is None or self._gathered[0] is not slab:
            self._gathered = None
            self._gathered = slab, {name: self._ranks.gathered(part) for name, part in slab.state.items()}
        parts = slab.parts(slab.members[index], self._gathered[1])
        if index == len(slab.members) - 1:
            self._gathered = None  # as large as the state of several ranks
        return parts

    def put(self, parameter: Tensor, parts: Mapping[str, Tensor]) -> None:
        slab, index = self._places[parameter]
        slab.allocate()
        self._gathered = None
        for name, part in parts.items():
            slab.put(slab.members[index], name, part)

    def _state(self) -> Iterable[Tensor]:
        return [tensor for slab in self._slabs for tensor in slab.state.values()]

    def _step(self, norm: float, max_norm: float) -> None:
        if self._released:  # every parameter was stepped when its gradient was complete
            self._released = []
            return
        self._num_changed, self._gathered = [], None
        several = self._ranks.size > 1
        ready = [each for each in self._places if (each in self._summed if several else each.grad is not None)]
        if not ready:
            return
        self.allocate()
        members: dict[Slab, list[int]] = {}
        for slab, index in (self._places[parameter] for parameter in ready):
            members.setdefault(slab, []).append(index)
        pieces = [piece for slab, indices in members.items() for piece in slab.pieces(indices, self._steps)]
        norm_on_device = _on_device([norm], torch.float32, self._device)[0]
        each = zip(pieces, self._scalars(pieces, max_norm), strict=True)
        if several:
            for slab, of_slab in groupby(each, key=lambda pair: pair[0].slab):
                self._step_own_rows(slab, [*of_slab], norm_on_device)
            self._sums, self._summed = {}, set()
        else:
            for piece, scalars in each:
                self._step_piece(piece, norm_on_device, scalars)
        for parameter in ready:
            self._steps[parameter] += 1

    def _scalars(self, pieces: Sequence[Piece], max_norm: float) -> Iterator[Sequence[Tensor]]:
        """Yield each piece's coefficients and place on the device, copied in one go."""
        coefficients, places = [], []
        for piece in pieces:
            group = piece.members[0].group
            assert len({_hyperparameters(member.group) for member in piece.members}) == 1, "changed since then"
            coefficients.append(Coefficients.of(group, piece.step, max_norm))
            places.append((key(self._seed, piece.slab.number, piece.step), piece.rows.start))
        columns = (coefficients, torch.float32), (places, torch.int32)
        yield from zip(*(_on_device(rows, dtype, self._device) for rows, dtype in columns), strict=True)

    def _step_piece(self, piece: Piece, norm: Tensor, scalars: Sequence[Tensor]) -> None:
        weight_RB, gradient_RB = piece.blocks(_bits), piece.blocks(_gradient)
        step = self._update(piece.members[0].parameter.dtype, gradient_RB.dtype)
        num_changed_R = step(weight_RB, gradient_RB, piece.state, scalars[0], norm, scalars[1])
        self._num_changed.append(num_changed_R.sum())  # outside the kernel, which would sum them in one block
        piece.put_back(weight_RB, _bits)

    def _step_own_rows(self, slab: Slab, pieces: Iterable[tuple[Piece, Sequence[Tensor]]], norm: Tensor) -> None:
        """Update this rank's rows of a slab, and gather those of all ranks."""
        whole, weight_RB = slab.whole(_bits)
        sum_RB, begin = self._sums[slab], slab.mine.start
        step = self._update(slab.members[0].parameter.dtype, sum_RB.dtype)
        for piece, (coefficients, first) in pieces:
            start, stop = max(piece.rows.start, begin), min(piece.rows.stop, slab.mine.stop)
            if start >= stop:
                continue
            own = slice(start - begin, stop - begin)
            state = {name: tensor[own] for name, tensor in slab.state.items()}
            place = first.clone()
            place[1] += start - piece.rows.start
            num_changed_R = step(weight_RB[start:stop], sum_RB[own], state, coefficients, norm, place)
            self._num_changed.append(num_changed_R.sum())
        self._ranks.gather_into(weight_RB)
        whole.put_back(weight_RB[: slab.num_rows], _bits)

    def _update(self, weight: torch.dtype, gradient: torch.dtype) -> Update:
        return compiled(self.kind, weight, gradient, self._device) if self._compiles else partial(update, self.kind)


def _slabs(kind: Kind, groups: Iterable[Mapping[str, Any]], ranks: Ranks = ALONE, alike: Alike = NOTHING) -> list[Slab]:
    """Assign the parameters of all groups to slabs.

    What parts hold alike comes first, by itself: random bits depend on the slab and the row.
    """
    dealt: list[list[Member]] = []
    open_slabs: dict[tuple[object, ...], list[Member]] = {}
    pairs = [(parameter, group) for group in groups for parameter in group["params"]]
    for parameter, group in sorted(pairs, key=lambda pair: pair[0] not in alike):
        key = (parameter in alike, parameter.dtype, parameter.device, *_hyperparameters(group))
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
    return [Slab(kind, number, members, ranks) for number, members in enumerate(dealt)]


def _hyperparameters(group: Mapping[str, Any]) -> tuple[float, ...]:
    return (group["lr"], *group["betas"], group["eps"], group["weight_decay"])


def _bits(parameter: Tensor) -> Tensor:
    weight = parameter.detach()
    return weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, tuple(parameter.shape)
    return parameter.grad


def _on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
