"""What layers keep for the backward pass, in host memory: copied there while later layers compute, and back in time.

Recomputed layers keep their inputs, and those that are compiled also what attention returned. Each of these is copied
to pinned memory on a stream of its own, and its memory on the GPU is free once that is done. In the backward pass
the tensors of the layer before are on their way back while a layer computes.

Not covered: when it is worth it (`budget.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

AHEAD = 2
"""Tensors that are copied back before they are needed: as many as one layer keeps."""
LEAST_SHARE = 0.5
"""A tensor is moved if it has at least this share of a layer's input; what is smaller, such as RoPE's, is shared."""

_offloaded: WeakSet[nn.Module] = WeakSet()
"""Models whose layers keep their tensors in host memory."""


def use(model: nn.Module, *, on_host: bool) -> None:
    """Keep in host memory what the layers of `model` keep for the backward pass, from now on, or no longer."""
    (_offloaded.add if on_host else _offloaded.discard)(model)


@contextmanager
def keeping(model: nn.Module, num_elements: int) -> Iterator[None]:
    """Run a forward pass whose layers have inputs of `num_elements`, and keep in host memory what they keep."""
    if model not in _offloaded or not torch.is_grad_enabled():
        yield
        return
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = _Kept(weights, num_elements, next(model.parameters()).dtype)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        yield


class _Moved(NamedTuple):
    """Where a tensor that was moved is: the number of its move."""

    number: int


class _Kept:
    """The tensors of one forward pass, in the order in which its layers kept them."""

    def __init__(self, weights: set[int], num_elements: int, dtype: torch.dtype) -> None:
        self._weights = weights
        self._least = LEAST_SHARE * num_elements
        self._dtype = dtype
        self._on_host = list[Tensor]()
        self._devices = list[torch.device]()
        self._back: dict[int, tuple[Tensor, Any]] = {}
        """Those on their way back, and the event after which they are there; of the rest none has memory on a GPU."""
        self._was_used = set[int]()
        self._stream: torch.cuda.Stream | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Moved:
        """Move a tensor if it is large, no weight, and not a part of something larger, which would stay."""
        is_large = tensor.dtype == self._dtype and tensor.numel() >= self._least
        storage = tensor.untyped_storage()
        if not is_large or storage.data_ptr() in self._weights or storage.nbytes() != tensor.nbytes:
            return tensor
        self._devices.append(tensor.device)
        self._on_host.append(self._to_host(tensor.detach()))
        return _Moved(len(self._on_host) - 1)

    def unpack(self, packed: Tensor | _Moved) -> Tensor:
        """Return the tensor on its device, and start to copy those that are needed next."""
        if isinstance(packed, Tensor):
            return packed
        self._was_used.add(packed.number)
        self._fetch(packed.number)
        tensor, event = self._back.pop(packed.number)
        if event is not None:
            current = torch.cuda.current_stream(tensor.device)
            current.wait_event(event)
            tensor.record_stream(current)
        for number in range(max(packed.number - AHEAD, 0), packed.number):
            if number not in self._was_used:
                self._fetch(number)
        return tensor

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return on_host

    def _fetch(self, number: int) -> None:
        """Start to copy a tensor back, unless it is on its way."""
        if number in self._back:
            return
        on_host, device = self._on_host[number], self._devices[number]
        if self._stream is None:
            self._back[number] = on_host, None
            return
        with torch.cuda.stream(self._stream):
            tensor = on_host.to(device, non_blocking=True)
            self._back[number] = tensor, self._stream.record_event()
