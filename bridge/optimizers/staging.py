"""Copies between a device and the host's memory by way of a few pinned buffers, under way while the host works.

Pinned memory is what a device copies from and to by itself. torch rounds each piece of it up to a power of two, so the
buffers are that, and nothing larger is pinned.

Not covered: what is copied, in which chunks (`offload.py`).
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""Most elements of one copy: a buffer takes 16 MiB, and what the host makes of it comes from memory it has at hand."""
IN_FLIGHT = 3
"""Copies that may be under way while the host works on what came before."""
WIDEST_BYTES = 4
"""Of an element."""


class ToHost:
    """Copies from the device, some of them under way while the host uses what came before."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers: list[Tensor] = []
        self._under_way: deque[tuple[torch.cuda.Event, Tensor, Callable[[Tensor], object]]] = deque()

    def take(self, tensor: Tensor, use: Callable[[Tensor], object]) -> None:
        """Copy a flat tensor and call `use` with the copy, before `finish` returns; the tensor itself may go."""
        if not self._is_cuda:
            use(tensor)
            return
        if len(self._under_way) == IN_FLIGHT:
            self._use_oldest()
        buffer = self._buffers.pop() if self._buffers else _pinned()
        copy = buffer.view(tensor.dtype)[: tensor.numel()]
        copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way.append((event, buffer, lambda _: use(copy)))

    def finish(self) -> None:
        """Wait for everything that is under way, and use it."""
        while self._under_way:
            self._use_oldest()

    def _use_oldest(self) -> None:
        event, buffer, use = self._under_way.popleft()
        event.synchronize()
        use(buffer)
        self._buffers.append(buffer)


class ToDevice:
    """Copies to the device, from one of two buffers while the host fills the other."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._sent: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def send(self, tensor: Tensor, target: Tensor) -> None:
        """Write a flat tensor into `target` on the device, in the order of its stream."""
        if not self._is_cuda:
            target.copy_(tensor)
            return
        buffer = _pinned() if len(self._sent) < 2 else self._free()
        staged = buffer.view(tensor.dtype)[: tensor.numel()].copy_(tensor)
        target.copy_(staged, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._sent.append((event, buffer))

    def _free(self) -> Tensor:
        event, buffer = self._sent.popleft()
        event.synchronize()
        return buffer


def _pinned() -> Tensor:
    return torch.empty(CHUNK_ELEMENTS * WIDEST_BYTES, dtype=torch.uint8, pin_memory=True)
