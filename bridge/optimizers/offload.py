"""AdamW with a float32 master and its moments in host memory, for models whose state does not fit beside them.

    gradient, on the device ---> staging, pinned ---> float32, summed or one chunk of it
    weight, on the device   <--- staging, pinned <--- float32 master, stepped by torch's fused AdamW

Chunk by chunk, so that neither side needs a second copy.

Not covered: the copies (`staging.py`), moments of fewer bits (`split_adamw.py` has them).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bridge.optimizers.in_place import EPS, InPlaceOptimizer, StateBytes, norm_of
from bridge.optimizers.release import each_gradient
from bridge.optimizers.staging import CHUNK_ELEMENTS, ToDevice, ToHost

PARTS = "master", "exp_avg", "exp_avg_sq"


class OffloadedAdamW(InPlaceOptimizer):
    """AdamW with a float32 master in host memory: bit for bit what torch's fused AdamW makes of float32 weights.

    With `streams` gradients are added up in host memory as soon as they are there.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = EPS,
        weight_decay: float = 0.0,
        *,
        streams: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.flags = "--optimizer adamw --offload-optimizer"
        self._streams = streams
        self._held: dict[Tensor, dict[str, Tensor]] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._steps = dict.fromkeys(self._parameters(), 0)
        self._is_summed: set[Tensor] = set()
        device = next(self._parameters()).device
        self._to_host, self._to_device = ToHost(device), ToDevice(device)

    def allocate(self) -> None:
        """Take all memory that the state needs, unless that was done."""
        for parameter in self._steps if not self._held else ():
            self._held[parameter] = {name: _zeros(parameter) for name in PARTS}
            if self._streams:
                self._sums[parameter] = _zeros(parameter)

    @contextmanager
    def releasing(self, *, max_norm: float = math.inf) -> Iterator[None]:
        """Add each gradient to its sum in host memory as soon as it is there, and drop it.

        The sums begin with zero and are of all backward passes inside; `step` scales them down, as one.
        """
        del max_norm
        assert self._streams, "made without sums"
        self.allocate()
        self._is_summed.clear()
        try:
            with each_gradient(self._parameters(), self._add):
                yield
        finally:
            self._to_host.finish()

    def global_norm(self) -> float:
        """Return the L2 norm of all gradients together, or of their sums (waits for the device)."""
        if self._is_summed:
            summed = (parameter for parameter in self._steps if parameter in self._is_summed)
            return norm_of((self._sums[parameter], self._factors[parameter]) for parameter in summed)
        return super().global_norm()

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of `parameter`, allocated and as it is held, to be read or written."""
        self.allocate()
        return {name: tensor.view(parameter.shape) for name, tensor in self._held[parameter].items()}

    def described_parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return what `parts` returns, without memory."""
        return {name: torch.empty(parameter.shape, dtype=torch.float32, device="meta") for name in PARTS}

    def num_updates(self, parameter: Tensor) -> int:
        """Return how many updates `parameter` had."""
        return self._steps[parameter]

    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        """Set every state to zero, and the numbers of updates to these; a master begins with its first update."""
        self._steps = {parameter: num_updates.get(parameter, 0) for parameter in self._steps}
        for tensors in self._held.values():
            for tensor in tensors.values():
                tensor.zero_()

    @property
    def state_bytes(self) -> StateBytes:
        """Return what it holds now."""
        tensors = [tensor for held in self._held.values() for tensor in held.values()]
        return StateBytes(device=0, host=sum(tensor.nbytes for tensor in (*tensors, *self._sums.values())))

    def _step(self, norm: float, max_norm: float) -> None:
        self.allocate()
        self._num_changed = []
        factor = max_norm / norm if norm > max_norm else 1.0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._is_summed or parameter.grad is not None:
                    self._step_parameter(parameter, group, factor)
        self._to_host.finish()
        self._is_summed.clear()

    def _step_parameter(self, parameter: Tensor, group: Mapping[str, Any], factor: float) -> None:
        held, weight = self._held[parameter], parameter.detach().view(-1)
        if not self._steps[parameter]:
            held["master"].copy_(weight)
        self._steps[parameter] += 1
        is_summed = parameter in self._is_summed
        source = self._sums[parameter] if is_summed else parameter.grad
        assert source is not None
        for chunk in _chunks(weight, held["master"], held["exp_avg"], held["exp_avg_sq"], source.reshape(-1)):
            step = partial(self._step_chunk, chunk[:-1], group, self._steps[parameter], factor)
            if is_summed:
                step(chunk[-1])
            else:
                self._to_host.take(chunk[-1], step)

    def _step_chunk(
        self, state: Sequence[Tensor], group: Mapping[str, Any], number: int, factor: float, gradient: Tensor
    ) -> None:
        """Step one chunk of the master by a gradient in host memory, and send the weight on its way."""
        weight, master, first, second = state
        gradient, before = gradient.float() * factor, master.to(weight.dtype, copy=True)
        beta1, beta2 = group["betas"]
        adamw(
            [master], [gradient], [first], [second], [], [torch.tensor(number - 1.0)], fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip
        after = master.to(weight.dtype)
        self._num_changed.append((_words(after) != _words(before)).sum())
        self._to_device.send(after, weight)

    def _add(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        is_first = parameter not in self._is_summed
        self._is_summed.add(parameter)
        for total, gradient in _chunks(self._sums[parameter], parameter.grad.reshape(-1)):
            self._to_host.take(gradient, total.copy_ if is_first else total.add_)


def _zeros(parameter: Tensor) -> Tensor:
    """Return float32 zeros in host memory that is taken at once, not when it is first written."""
    return torch.empty(parameter.numel(), dtype=torch.float32).zero_()


def _chunks(*flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK_ELEMENTS) for tensor in flat), strict=True)


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
