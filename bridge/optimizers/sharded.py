"""The base of both AdamWs, with state on the GPU (`split_adamw.py`) or in host memory (`offloaded_adamw.py`).

Several ranks share the work (ZeRO, in place): each has the state for some rows of every slab. `exchange` gives a rank
the summed gradients of its rows; `step` updates these rows, and gathers the rows of all ranks into every rank's
weights. Each element is computed once and copied, so replicas are equal by construction. Ranks that share the work hold
the same part of the weights.

Shape suffixes: R blocks, B elements of a block.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from bridge.optimizers.gradient_hooks import NOTHING, Replicated, counted, norm_of
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.slabs import Slab, slabs
from bridge.optimizers.split_master import Kind
from bridge.ranks.world import ALONE, Ranks


class ShardedOptimizer(InPlaceOptimizer):
    """An optimizer whose state is stored in slabs; if there are several ranks, each has some rows of every slab."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        kind: Kind,
        ranks: Ranks = ALONE,
        replicated: Replicated = NOTHING,
        state_device: torch.device | None = None,
        **hyperparameters: Any,
    ) -> None:
        """Lay out the state on `state_device`, by default the device of the weights."""
        super().__init__(params, **hyperparameters)
        self._world = ranks
        self._ranks = ranks.dp_group
        self.kind = kind
        self._replicated = replicated
        self._device = next(iter(self._steps)).device
        self._slabs = slabs(kind, self.param_groups, ranks=self._ranks, replicated=replicated, device=state_device)
        self._slots = {
            member.parameter: (slab, index) for slab in self._slabs for index, member in enumerate(slab.members)
        }
        self._sums: dict[Slab, Tensor] = {}
        """Summed gradients [R, B] of this rank's rows, set by `exchange` if there are several ranks."""
        self._summed: set[Tensor] = set()
        """Parameters that had a gradient on any rank."""
        self._gathered: tuple[Slab, dict[str, Tensor]] | None = None
        """The full state of the slab whose parts were read last."""

    def allocate(self) -> None:
        for slab in self._slabs:
            slab.allocate()

    def global_norm(self) -> float:
        if self._world.world_size == 1:
            return super().global_norm()
        return math.sqrt(float(self._world.all_reduce(self._squares())))

    def _squares(self) -> Tensor:
        """Return the sum of squares of this rank's gradients, without elements that another rank counts."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._ranks.world_size == 1:
            own = [(p, p.grad, factor) for p, factor in self._factors.items() if p.grad is not None]
            norm = norm_of((counted(grad, self._replicated.get(p, ())), factor) for p, grad, factor in own)
            return squares + norm**2
        for slab, sum_RB in self._sums.items():
            factors = {self._factors[member.parameter] for member in slab.members}
            assert len(factors) == 1, factors
            squares_of_slab = self._counted(slab, sum_RB).square().sum(dtype=torch.float64)
            squares += (squares_of_slab * factors.pop() ** 2).to(self._device)
        return squares

    def _counted(self, slab: Slab, sum_RB: Tensor) -> Tensor:
        """Return this rank's summed gradients of a slab, with zeros at elements that another rank counts."""
        block = slab.kind.moments.block
        for member in slab.members:
            rows = slab.own(member)
            others = self._replicated.get(member.parameter)
            if rows and others:
                held = slab.held(rows)
                kept_RB = counted(sum_RB[held], others, (rows.start - member.rows.start) * block)
                sum_RB = torch.cat([sum_RB[: held.start], kept_RB, sum_RB[held.stop :]])
        return sum_RB

    @torch.no_grad()
    def exchange(self) -> None:
        """Give each rank the float32 sum of all ranks' gradients for its rows, and drop the gradients.

        A parameter without a gradient on this rank contributes zeros.
        """
        if self._ranks.world_size == 1:
            return
        self._drop_sums()
        widths = {None: 0, torch.bfloat16: 1, torch.float32: 2}
        own = [widths[None if parameter.grad is None else parameter.grad.dtype] for parameter in self._slots]
        of_ranks = self._ranks.all_gather_object(own)
        dtypes = {parameter: max(of_all) for parameter, *of_all in zip(self._slots, *of_ranks, strict=True)}
        for slab in self._slabs:
            width = max(dtypes[member.parameter] for member in slab.members)
            if width == 0:
                continue
            dtype = torch.float32 if width == widths[torch.float32] else torch.bfloat16
            self._sums[slab] = self._sum(slab, dtype)
        self._summed = {parameter for parameter, width in dtypes.items() if width}

    def _sum(self, slab: Slab, dtype: torch.dtype) -> Tensor:
        """Return the sum [R, B] of all ranks' gradients for this rank's rows, sent as `dtype`; drop the gradients."""

        def gradient(parameter: Tensor) -> Tensor:
            if parameter.grad is None:
                return torch.zeros_like(parameter, dtype=dtype)
            return parameter.grad.to(dtype)

        sum_RB = self._ranks.reduce_scatter(slab.whole(gradient)[1])
        for member in slab.members:
            member.parameter.grad = None
        return sum_RB

    def _drop_sums(self) -> None:
        self._sums = {}
        self._summed = set()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._drop_sums()
        super().zero_grad(set_to_none)

    @property
    def changed_weight_share(self) -> float:
        if self._world.world_size == 1:
            return super().changed_weight_share
        changed = self._changed().to(self._device)
        held = changed.new_tensor(sum(parameter.numel() for parameter in self._steps))
        return int(self._world.all_reduce(changed)) / int(self._world.tp_group.all_reduce(held))

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        slab, index = self._slots[parameter]
        slab.allocate()
        if self._ranks.world_size == 1:
            return slab.parts(slab.members[index], slab.state)
        if self._gathered is None or self._gathered[0] is not slab:
            self._gathered = None
            self._gathered = slab, {name: self._ranks.all_gather(part) for name, part in slab.state.items()}
        parts = slab.parts(slab.members[index], self._gathered[1])
        later = [member.parameter for member in slab.members[index + 1 :]]
        if not later or (self._steps[parameter] and not any(self._steps[member] for member in later)):
            self._gathered = None  # large, and later members do not need it
        return parts

    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        self._gathered = None
        super().reset(num_updates)

    def put(self, parameter: Tensor, parts: Mapping[str, Tensor]) -> None:
        slab, index = self._slots[parameter]
        slab.allocate()
        self._gathered = None
        for name, part in parts.items():
            slab.put(slab.members[index], name, part)

    def _state(self) -> Iterable[Tensor]:
        return [tensor for slab in self._slabs for tensor in slab.state.values()]

    def _ready(self) -> list[tuple[Slab, list[int]]]:
        """Return the members that have a gradient on any rank, by slab."""
        slots = [self._slots[parameter] for parameter in self._slots if self._has_gradient(parameter)]
        return [(slab, [index for _, index in run]) for slab, run in groupby(slots, key=itemgetter(0))]

    def _has_gradient(self, parameter: Tensor) -> bool:
        return parameter in self._summed if self._ranks.world_size > 1 else parameter.grad is not None

    def _count(self, stepped: Iterable[tuple[Slab, Sequence[int]]]) -> None:
        """Count an update of these members, and drop the summed gradients."""
        for slab, indices in stepped:
            for index in indices:
                self._steps[slab.members[index].parameter] += 1
        self._drop_sums()

    @contextmanager
    def _rows_of_all(self, slab: Slab, tensor_of: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Yield a slab's weights [ranks * rows per rank, B]; then gather every rank's rows into all ranks' weights."""
        whole, weight_RB = slab.whole(tensor_of)
        yield weight_RB
        self._ranks.all_gather_into(weight_RB)
        whole.put_back(weight_RB[: slab.num_rows], tensor_of)
