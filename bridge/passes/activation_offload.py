"""Activation offloading: keep tensors that layers save for the backward pass in host memory.

Recomputed layers keep their inputs, and compiled ones may also keep attention's output. Each of these tensors is copied
to pinned memory on a separate stream while the next layer computes; then its GPU memory is freed. In the backward pass,
the tensors of the preceding layer are copied back while a layer computes.

Not covered: when offloading is worth it (`budget.py`).
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from bridge.weights.model_folder import state

AHEAD = 2
"""How many tensors are on the device while they are copied in either direction: as many as one layer keeps."""
LEAST_SHARE = 0.5
"""A tensor is offloaded if it has at least this share of the elements of a layer's input. Smaller ones, such as RoPE's,
are shared by all layers."""


def on_host(model: nn.Module, num_elements: int) -> AbstractContextManager[Any]:
    """Keep in host memory what layers save for the backward pass. Their inputs have `num_elements`."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in state(model).values()}
    kept = _Kept(weights, num_elements, next(model.parameters()).dtype)
    return torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack)


class _Kept:
    """The tensors of one forward pass, in the order in which its layers kept them."""

    def __init__(self, weights: set[int], num_elements: int, dtype: torch.dtype) -> None:
        self._weights = weights
        self._least = LEAST_SHARE * num_elements
        self._dtype = dtype
        self._on_host = list[Tensor]()
        self._devices = list[torch.device]()
        self._here: dict[int, tuple[Tensor, Any]] = {}
        """Tensors on the device, each with the event that marks the end of its copy."""
        self._was_used = set[int]()
        self._stream: torch.cuda.Stream | None = None

    def __del__(self) -> None:
        """Make the computing stream wait for pending copies, so that their tensors' memory is not reused too early."""
        for tensor, event in self._here.values():
            _wait(tensor, event)

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Offload a tensor if it is large and neither a weight nor a view of a larger tensor, which would stay.

        Return the number of the offloaded tensor, or the tensor itself if it stays.
        """
        is_large = tensor.dtype == self._dtype and tensor.numel() >= self._least
        storage = tensor.untyped_storage()
        if not is_large or storage.data_ptr() in self._weights or storage.nbytes() != tensor.nbytes:
            return tensor
        number = len(self._on_host)
        self._devices.append(tensor.device)
        on_host, event = self._to_host(tensor.detach())
        self._on_host.append(on_host)
        self._here[number] = tensor, event
        if number >= AHEAD:
            _wait(*self._here.pop(number - AHEAD))
        return number

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Return the tensor on its device, and start copying back the ones that are needed next."""
        if isinstance(packed, Tensor):
            return packed
        self._was_used.add(packed)
        self._fetch(packed)
        tensor, event = self._here.pop(packed)
        _wait(tensor, event)
        for number in range(max(packed - AHEAD, 0), packed):
            if number not in self._was_used:
                self._fetch(number)
        return tensor

    def _to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start copying a tensor to the host. Return the copy, and the event that marks its end."""
        if not tensor.is_cuda:
            return tensor.clone(), None
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            on_host.copy_(tensor, non_blocking=True)
            return on_host, self._stream.record_event()

    def _fetch(self, number: int) -> None:
        """Start copying a tensor back to the device, unless that copy has already started."""
        if number in self._here:
            return
        on_host = self._on_host[number]
        device = self._devices[number]
        if self._stream is None:
            self._here[number] = on_host, None
            return
        tensor = torch.empty_like(on_host, device=device)  # allocated on the stream that computes with it
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(on_host, non_blocking=True)
            self._here[number] = tensor, self._stream.record_event()


def _wait(tensor: Tensor, event: Any) -> None:
    """Make the computing stream wait for the copy, so that the tensor's memory may be freed and reused in stream order.

    With `record_stream` the memory would be free only once the device got there. The host runs many layers ahead of
    the device, and the tensors of all these layers would take memory at the same time.
    """
    if event is not None:
        torch.cuda.current_stream(tensor.device).wait_event(event)
