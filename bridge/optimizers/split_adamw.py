"""AdamW with its state beside the weights, stepped after a backward pass or in the middle of one.

Not covered: the elementwise update (`split_master.py`), which parameters are stepped together (`slabs.py`), states in
host memory (`offload.py`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bridge.errors import UsageError
from bridge.optimizers.compiled import Update, compiled, eager
from bridge.optimizers.in_place import EPS, InPlaceOptimizer, StateBytes
from bridge.optimizers.release import each_gradient
from bridge.optimizers.rounding import key
from bridge.optimizers.slabs import Piece, hyperparameters, slabs
from bridge.optimizers.split_master import KINDS, Coefficients, Kind


class SplitMasterAdamW(InPlaceOptimizer):
    """AdamW that by default loses no update to bf16; on a GPU its update is compiled by `allocate`.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-6,
        betas: tuple[float, float] | None = None,
        eps: float = EPS,
        weight_decay: float = 0.0,
        *,
        kind: Kind = KINDS["adamw"],
        seed: int = 0,
        compiles: bool | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas or (0.9, kind.beta2), eps=eps, weight_decay=weight_decay)
        self.flags = f"--optimizer {kind.name} --no-offload-optimizer"
        self._kind, self._seed = kind, seed
        self._device = next(self._parameters()).device
        self._compiles = self._device.type == "cuda" if compiles is None else compiles
        self._slabs = slabs(kind, self.param_groups)
        self._places = {
            member.parameter: (slab, index) for slab in self._slabs for index, member in enumerate(slab.members)
        }
        self._released: list[Tensor] = []
        """Norms of the gradients that were released since the last step."""

    def allocate(self) -> None:
        """Take all memory that the state needs, and compile, unless that was done."""
        for slab in self._slabs:
            slab.allocate()
            weight = slab.members[0].parameter
            self._update(weight.dtype, weight.grad_dtype or weight.dtype)

    def expect(self, gradients: torch.dtype) -> None:
        """Compile for gradients of this type, unless that was done or nothing is compiled."""
        for slab in self._slabs:
            self._update(slab.members[0].parameter.dtype, gradients)

    @contextmanager
    def releasing(self, *, max_norm: float = math.inf) -> Iterator[None]:
        """Step each parameter as soon as its gradient is there, and drop the gradient: one backward pass is one update.

        The norm of all gradients is not known by then: each one is scaled down to `max_norm` on its own.

        Raises:
            UsageError: some gradients were not finite; their parameters were not touched, others were.
        """
        self.allocate()
        self._num_changed, self._released = [], []
        waiting: dict[Tensor, list[tuple[Piece, Sequence[Tensor]]]] = {}
        pieces = [piece for slab, index in self._places.values() for piece in slab.pieces([index])]
        for piece, scalars in zip(pieces, self._scalars(pieces, max_norm), strict=True):
            waiting.setdefault(piece.members[0].parameter, []).append((piece, scalars))

        def take(parameter: Tensor) -> None:
            assert parameter in waiting, "a second gradient: one backward pass is one update"
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            self._released.append(norm * self._factors[parameter])
            for piece, scalars in waiting.pop(parameter):
                self._step_piece(piece, self._released[-1], scalars)
            self._count([parameter])

        with each_gradient(self._parameters(), take):
            yield
        self._check_released()

    def global_norm(self) -> float:
        """Return the L2 norm of all gradients together, or of those that were released (waits for the device)."""
        if self._released:
            return float(torch.linalg.vector_norm(torch.stack(self._released)))
        return super().global_norm()

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of `parameter`, allocated and as it is held, to be read or written."""
        slab, index = self._places[parameter]
        slab.allocate()
        return slab.parts(slab.members[index])

    def described_parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return what `parts` returns, without memory."""
        return self._kind.described_parts(parameter)

    def num_updates(self, parameter: Tensor) -> int:
        """Return how many updates `parameter` had."""
        slab, index = self._places[parameter]
        return slab.steps[index]

    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        """Set every state to zero, and the numbers of updates to these."""
        for slab in self._slabs:
            slab.steps = [num_updates.get(member.parameter, 0) for member in slab.members]
            for tensor in slab.state.values():
                tensor.zero_()

    @property
    def state_bytes(self) -> StateBytes:
        """Return what it holds now; on a CPU that is the device."""
        tensors = [tensor for slab in self._slabs for tensor in slab.state.values()]
        return StateBytes(device=sum(tensor.nbytes for tensor in tensors), host=0)

    def _step(self, norm: float, max_norm: float) -> None:
        if self._released:  # every parameter was stepped when its gradient was there
            self._released = []
            return
        self._num_changed = []
        ready = [parameter for parameter in self._places if parameter.grad is not None]
        if not ready:
            return
        self.allocate()
        pieces = list(self._pieces(ready))
        norm_on_device = _on_device([norm], torch.float32, self._device)[0]
        for piece, scalars in zip(pieces, self._scalars(pieces, max_norm), strict=True):
            self._step_piece(piece, norm_on_device, scalars)
        self._count(ready)

    def _pieces(self, parameters: Iterable[Tensor]) -> Iterator[Piece]:
        ready: dict[int, list[int]] = {}
        for slab, index in (self._places[parameter] for parameter in parameters):
            ready.setdefault(slab.number, []).append(index)
        for number, indices in ready.items():
            yield from self._slabs[number].pieces(indices)

    def _scalars(self, pieces: Sequence[Piece], max_norm: float) -> Iterator[Sequence[Tensor]]:
        """Yield each piece's coefficients and place on the device, copied there all at once."""
        coefficients, places = [], []
        for piece in pieces:
            group = piece.members[0].group
            assert len({hyperparameters(member.group) for member in piece.members}) == 1, "they were alike before"
            coefficients.append(Coefficients.of(group, piece.step, max_norm).values())
            places.append((key(self._seed, piece.slab.number, piece.step), piece.rows.start))
        columns = (coefficients, torch.float32), (places, torch.int32)
        yield from zip(*(_on_device(rows, dtype, self._device) for rows, dtype in columns), strict=True)

    def _step_piece(self, piece: Piece, norm: Tensor, scalars: Sequence[Tensor]) -> None:
        coefficients, place = scalars
        weight_RB, gradient_RB = piece.blocks(_bits), piece.blocks(_gradient)
        update = self._update(piece.members[0].parameter.dtype, gradient_RB.dtype)
        num_changed_R = update(weight_RB, gradient_RB, piece.state, coefficients, norm, place)
        self._num_changed.append(num_changed_R.sum())  # out of the kernel, which would add them up in one block
        piece.put_back(weight_RB, _bits)

    def _update(self, weight: torch.dtype, gradient: torch.dtype) -> Update:
        return compiled(self._kind, weight, gradient, self._device) if self._compiles else eager(self._kind)

    def _count(self, parameters: Iterable[Tensor]) -> None:
        for slab, index in (self._places[parameter] for parameter in parameters):
            slab.steps[index] += 1

    def _check_released(self) -> None:
        norms = torch.stack(self._released).tolist() if self._released else []
        num_bad = sum(not math.isfinite(norm) for norm in norms)
        if num_bad:
            raise UsageError(
                f"{num_bad} of {len(norms)} gradients were not finite: the parameters of all others were stepped",
                remedy="go on from the last checkpoint with a lower --lr",
            )


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
