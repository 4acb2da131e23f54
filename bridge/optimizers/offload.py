"""AdamW with a float32 master and its moments in host memory, for models whose state does not fit beside the weights.

    gradient, on the device ---> pinned buffer ---> float32 sum, or one chunk
    weight, on the device   <--- pinned buffer <--- float32 master, stepped by torch's fused AdamW

It works chunk by chunk, so that neither side needs a second copy. torch rounds pinned memory up to a power of two, so
the buffers have such a size, and nothing larger is pinned.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bridge.optimizers.in_place import InPlaceOptimizer, norm_of
from bridge.optimizers.release import each_gradient

PARTS = "master", "exp_avg", "exp_avg_sq"
CHUNK_ELEMENTS = 2**22
"""Elements of a copy: a buffer takes 16 MiB, and the host's temporaries reuse memory that the allocator keeps."""
BUFFER_BYTES = 4 * CHUNK_ELEMENTS
IN_FLIGHT = 3
"""Copies to the host that may be in flight while it works on earlier ones."""


class OffloadedAdamW(InPlaceOptimizer):
    """AdamW with a float32 master in host memory: bit for bit torch's fused AdamW on float32 weights.

    With `streams`, gradients are summed in host memory as soon as they are complete.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """

    flags = "--optimizer adamw --offload-optimizer"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        streams: bool = False,
        **hyperparameters: Any,
    ) -> None:
        super().__init__(params, **hyperparameters)
        self._streams = streams
        self._held: dict[Tensor, dict[str, Tensor]] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._is_summed: set[Tensor] = set()
        device = next(iter(self._steps)).device
        self._to_host, self._to_device = _ToHost(device), _ToDevice(device)

    def allocate(self) -> None:
        for parameter in self._steps if not self._held else ():
            self._held[parameter] = {name: _zeros(parameter) for name in PARTS}
            if self._streams:
                self._sums[parameter] = _zeros(parameter)

    @contextmanager
    def releasing(self, *, max_norm: float = math.inf) -> Iterator[None]:
        """Add each gradient to its sum in host memory as soon as it is complete, then drop it.

        The sums start at zero and cover all backward passes inside; `step` clips them by their global norm.
        """
        del max_norm
        assert self._streams, "made without sums"
        self.allocate()
        self._is_summed.clear()
        try:
            with each_gradient(self._steps, self._add):
                yield
        finally:
            self._to_host.finish()

    def global_norm(self) -> float:
        if self._is_summed:
            summed = (parameter for parameter in self._steps if parameter in self._is_summed)
            return norm_of((self._sums[parameter], self._factors[parameter]) for parameter in summed)
        return super().global_norm()

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        self.allocate()
        return {name: tensor.view(parameter.shape) for name, tensor in self._held[parameter].items()}

    def _state(self) -> Iterable[Tensor]:
        return [*(tensor for held in self._held.values() for tensor in held.values()), *self._sums.values()]

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
        if not self._steps[parameter]:  # not in `allocate`: a checkpoint may be loaded into the weights after it
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
        """Step one chunk of the master by a gradient in host memory, and start sending the weight."""
        weight, master, first, second = state
        gradient, before = gradient.float() * factor, master.to(weight.dtype, copy=True)
        beta1, beta2 = group["betas"]
        adamw(
            [master], [gradient], [first], [second], [], [torch.tensor(number - 1.0)], fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip
        after = master.to(weight.dtype)
        words = torch.int16 if weight.dtype == torch.bfloat16 else torch.int32
        self._num_changed.append((after.view(words) != before.view(words)).sum())
        self._to_device.send(after, weight)

    def _add(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        is_first = parameter not in self._is_summed
        self._is_summed.add(parameter)
        for total, gradient in _chunks(self._sums[parameter], parameter.grad.reshape(-1)):
            self._to_host.take(gradient, total.copy_ if is_first else total.add_)


class _ToHost:
    """Copies from the device, some of them in flight while the host uses earlier ones."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._free: list[Tensor] = []
        self._in_flight: deque[tuple[torch.cuda.Event, Tensor, Tensor, Callable[[Tensor], object]]] = deque()

    def take(self, tensor: Tensor, use: Callable[[Tensor], object]) -> None:
        """Copy a flat tensor and, at the latest in `finish`, call `use` with the copy; the tensor may be freed."""
        if not self._is_cuda:
            use(tensor)
            return
        if len(self._in_flight) == IN_FLIGHT:
            self._use_oldest()
        buffer = self._free.pop() if self._free else _pinned()
        copy = buffer.view(tensor.dtype)[: tensor.numel()]
        copy.copy_(tensor, non_blocking=True)
        self._in_flight.append((_recorded(), buffer, copy, use))

    def finish(self) -> None:
        while self._in_flight:
            self._use_oldest()

    def _use_oldest(self) -> None:
        event, buffer, copy, use = self._in_flight.popleft()
        event.synchronize()
        use(copy)
        self._free.append(buffer)


class _ToDevice:
    """Copies to the device, from one of two buffers while the host fills the other."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._sent: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def send(self, tensor: Tensor, target: Tensor) -> None:
        """Write a flat tensor into `target` on the device, in stream order."""
        if not self._is_cuda:
            target.copy_(tensor)
            return
        if len(self._sent) < 2:
            buffer = _pinned()
        else:
            event, buffer = self._sent.popleft()
            event.synchronize()
        staged = buffer.view(tensor.dtype)[: tensor.numel()].copy_(tensor)
        target.copy_(staged, non_blocking=True)
        self._sent.append((_recorded(), buffer))


def _pinned() -> Tensor:
    return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _zeros(parameter: Tensor) -> Tensor:
    """Return float32 zeros in host memory that is committed now, not on the first write."""
    return torch.empty(parameter.numel(), dtype=torch.float32).zero_()


def _chunks(*flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK_ELEMENTS) for tensor in flat), strict=True)
