"""AdamW with its state on the weights' device, stepped after a backward pass or during one.

Shape suffixes: R blocks, B elements of a block.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bridge.errors import UsageError
from bridge.optimizers.gradient_hooks import NOTHING, Replicated, each_gradient, each_group
from bridge.optimizers.moments import key
from bridge.optimizers.sharded import ShardedOptimizer
from bridge.optimizers.slabs import Piece, Slab, hyperparameters
from bridge.optimizers.split_master import KINDS, Coefficients, Kind, Update, compiled, update
from bridge.ranks.world import ALONE, Ranks

_Waiting = dict[Tensor, list[tuple[Piece, Sequence[Tensor]]]]
"""The pieces of each parameter that is stepped during a backward pass, with their scalars."""


class SplitMasterAdamW(ShardedOptimizer):
    """AdamW that by default loses no update to bf16 rounding; on a GPU `allocate` compiles the update."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        kind: Kind = KINDS["adamw"],
        seed: int = 0,
        compiles: bool | None = None,
        ranks: Ranks = ALONE,
        replicated: Replicated = NOTHING,
        **hyperparameters: Any,
    ) -> None:
        super().__init__(params, kind=kind, ranks=ranks, replicated=replicated, **hyperparameters)
        self.flags = f"--optimizer {kind.name} --no-offload-optimizer"
        self._seed = seed
        self._compiles = self._device.type == "cuda" if compiles is None else compiles
        self._released: list[Tensor] = []
        """Norms of the gradients that were released since the last step."""

    def allocate(self) -> None:
        super().allocate()
        for slab in self._slabs:
            weight = slab.members[0].parameter
            several = self._ranks.world_size > 1  # several ranks sum in float32
            self._update(weight.dtype, torch.float32 if several else weight.grad_dtype or weight.dtype)

    def expect(self, gradients: torch.dtype) -> None:
        for slab in self._slabs:
            self._update(slab.members[0].parameter.dtype, gradients)

    @contextmanager
    def releasing(self, *, max_norm: float = math.inf) -> Iterator[None]:
        """Step each parameter as soon as its gradient is complete, then drop the gradient.

        One backward pass is one update. The global norm is not known yet, so each gradient is clipped to `max_norm`
        individually.
        """
        self.allocate()
        self._num_changed = []
        self._released = []
        self._gathered = None
        pieces = [piece for slab, index in self._slots.values() for piece in slab.pieces([index], self._steps)]
        waiting: _Waiting = {}
        for piece, scalars in zip(pieces, self._scalars(pieces, max_norm), strict=True):
            waiting.setdefault(piece.members[0].parameter, []).append((piece, scalars))
        with self._released_by_one(waiting) if self._ranks.world_size == 1 else self._released_by_several(waiting):
            yield
        norms = torch.stack(self._released).tolist() if self._released else []
        if num_bad := sum(not math.isfinite(norm) for norm in norms):
            raise UsageError(
                f"{num_bad} of {len(norms)} gradients were not finite; only the other parameters were updated",
                hint="resume from the last checkpoint with a lower --lr",
            )

    def _released_by_one(self, waiting: _Waiting) -> AbstractContextManager[None]:
        """Step each parameter once its gradient is complete."""

        def take(parameter: Tensor) -> None:
            assert parameter in waiting, "a parameter got a second gradient: one backward pass is one update"
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            self._released.append(norm * self._factors[parameter])
            for piece, scalars in waiting.pop(parameter):
                self._step_piece(piece, self._released[-1], scalars)
            self._steps[parameter] += 1

        return each_gradient(self._steps, take)

    @contextmanager
    def _released_by_several(self, waiting: _Waiting) -> Iterator[None]:
        """Exchange, step and gather each slab once its gradients, and those of all slabs before it, are complete.

        A rank that has exchanged a slab's gradients no longer needs its weights in this backward pass. The last layers
        come first. A rank without a gradient sends zeros; parameters without a gradient on any rank stay unchanged.
        """
        assert self._world is self._ranks, "each part of a parameter would be clipped by a different norm"
        numbers = {parameter: number for number, parameter in enumerate(self._steps)}
        firsts = {slab: min(numbers[member.parameter] for member in slab.members) for slab in self._slabs}
        last_first = sorted(self._slabs, key=lambda slab: -firsts[slab])
        norms = list[Tensor]()
        ready = list[Tensor]()

        def take(number: int) -> None:
            slab = last_first[number]
            has_gradient = [member.parameter.grad is not None for member in slab.members]
            sum_RB = self._sums[slab] = self._sum(slab, slab.members[0].parameter.dtype)
            own = [sum_RB[slab.held(slab.own(member))].square().sum(dtype=torch.float64) for member in slab.members]
            counts = _on_device(has_gradient, torch.float64, self._device)
            squares, num_gradients = self._ranks.all_reduce(torch.stack([torch.stack(own), counts]))
            norms.append((squares.sqrt() * self._factors[slab.members[0].parameter]).float())
            ready.append(num_gradients > 0)
            bounds = torch.where(ready[-1], norms[-1], math.nan)  # a NaN norm leaves parameters unchanged
            pieces = [
                (*pair, bound)
                for member, bound in zip(slab.members, bounds, strict=True)
                for pair in waiting[member.parameter]
            ]
            self._step_own_rows(slab, pieces)
            del self._sums[slab]

        with each_group([[member.parameter for member in slab.members] for slab in last_first], take):
            yield
        members = [member for slab in last_first for member in slab.members]
        for member, norm, is_ready in zip(members, torch.cat(norms), torch.cat(ready).tolist(), strict=True):
            if is_ready:
                self._released.append(norm)
                self._steps[member.parameter] += 1

    def global_norm(self) -> float:
        if self._released:
            return float(torch.linalg.vector_norm(torch.stack(self._released)))
        return super().global_norm()

    def _step(self, norm: float, max_norm: float) -> None:
        if self._released:  # parameters were stepped as gradients completed
            self._released = []
            return
        self._num_changed = []
        self._gathered = None
        ready = self._ready()
        if not ready:
            return
        self.allocate()
        pieces = [piece for slab, indices in ready for piece in slab.pieces(indices, self._steps)]
        norm_on_device = _on_device([norm], torch.float32, self._device)[0]
        with_scalars = zip(pieces, self._scalars(pieces, max_norm), strict=True)
        if self._ranks.world_size > 1:
            for slab, of_slab in groupby(with_scalars, key=lambda pair: pair[0].slab):
                self._step_own_rows(slab, ((*pair, norm_on_device) for pair in of_slab))
        else:
            for piece, scalars in with_scalars:
                self._step_piece(piece, norm_on_device, scalars)
        self._count(ready)

    def _scalars(self, pieces: Sequence[Piece], max_norm: float) -> Iterator[Sequence[Tensor]]:
        """Yield each piece's coefficients and counter on the device, copied in one transfer."""
        coefficients = []
        counters = []
        for piece in pieces:
            group = piece.members[0].group
            assert len({hyperparameters(member.group) for member in piece.members}) == 1, "hyperparameters changed"
            coefficients.append(Coefficients.of(group, piece.step, max_norm))
            counters.append((key(self._seed, piece.slab.number, piece.step), piece.rows.start))
        columns = (coefficients, torch.float32), (counters, torch.int32)
        yield from zip(*(_on_device(rows, dtype, self._device) for rows, dtype in columns), strict=True)

    def _step_piece(self, piece: Piece, norm: Tensor, scalars: Sequence[Tensor]) -> None:
        weight_RB = piece.blocks(_bits)
        gradient_RB = piece.blocks(_gradient)
        step = self._update(piece.members[0].parameter.dtype, gradient_RB.dtype)
        num_changed_R = step(weight_RB, gradient_RB, piece.state, scalars[0], norm, scalars[1])
        self._num_changed.append(num_changed_R.sum())  # outside the kernel, which would sum them in one block
        piece.put_back(weight_RB, _bits)

    def _step_own_rows(self, slab: Slab, pieces: Iterable[tuple[Piece, Sequence[Tensor], Tensor]]) -> None:
        """Update this rank's rows of a slab, each piece with its norm, and gather the rows of all ranks."""
        sum_RB = self._sums[slab]
        mine = slab.mine
        step = self._update(slab.members[0].parameter.dtype, sum_RB.dtype)
        with self._rows_of_all(slab, _bits) as weight_RB:
            for piece, (coefficients, first), norm in pieces:
                rows = range(max(piece.rows.start, mine.start), min(piece.rows.stop, mine.stop))
                if not rows:
                    continue
                own = slab.held(rows)
                state = {name: tensor[own] for name, tensor in slab.state.items()}
                random_place = first.clone()
                random_place[1] += rows.start - piece.rows.start
                weight = weight_RB[rows.start : rows.stop]
                self._num_changed.append(step(weight, sum_RB[own], state, coefficients, norm, random_place).sum())

    def _update(self, weight: torch.dtype, gradient: torch.dtype) -> Update:
        if not self._compiles:
            return partial(update, self.kind)
        return compiled(self.kind, weight, gradient, self._device, single=self._ranks.world_size > 1)


def _bits(parameter: Tensor) -> Tensor:
    weight = parameter.detach()
    return weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, tuple(parameter.shape)
    return parameter.grad


def _on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values to the device without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
