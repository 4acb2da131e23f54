"""CUDA IPC: export and open handles to GPU memory.

Not covered: shared memory on the CPU (`shared_memory.py`), where each parameter is (`bridge/server/manifest.py`).
Source: `torch.multiprocessing.reductions.reduce_tensor` of torch 2.11: the tuple of eight items.
"""

import base64
import os
from typing import Any

import torch

from bridge.errors import AttachError, first_line
from bridge.server.manifest import CudaHandle

EXPANDABLE = "expandable_segments:True"


def export(tensor: torch.Tensor) -> CudaHandle:
    """Describe `tensor`'s storage so that another process can open it.

    The exporter must keep the tensor alive. CUDA does not let the exporting process open its own handle.
    """
    assert tensor.is_cuda, tensor.device
    storage: Any = tensor.untyped_storage()
    try:
        device, handle, size, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    except RuntimeError as error:
        setting = next(
            (n for n in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if EXPANDABLE in os.getenv(n, "")), ""
        )
        unset = f"start the server without {EXPANDABLE}: unset {setting}"
        doctor = "bridge doctor tests CUDA IPC between two processes and names the cause"
        raise AttachError(
            f"the GPU memory of a weight cannot be exported ({first_line(error)})", hint=unset if setting else doctor
        ) from error
    return CudaHandle(
        device_index=device,
        ipc_handle_b64=_encode(handle),
        storage_size=size,
        storage_offset=offset,
        ref_counter_handle_b64=_encode(counter),
        ref_counter_offset=counter_offset,
        event_handle_b64=_encode(event),
        event_sync_required=event_sync,
        tensor_offset=int(tensor.storage_offset()),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def open_storage(handle: CudaHandle, device: torch.device) -> torch.UntypedStorage:
    """Map the exporter's memory into this process, on `device`; nothing is copied or allocated."""
    opener: Any = torch.UntypedStorage
    try:
        storage: torch.UntypedStorage = opener._new_shared_cuda(
            device.index,
            base64.b64decode(handle.ipc_handle_b64),
            handle.storage_size,
            handle.storage_offset,
            base64.b64decode(handle.ref_counter_handle_b64),
            handle.ref_counter_offset,
            base64.b64decode(handle.event_handle_b64),
            handle.event_sync_required,
        )
    except (RuntimeError, ValueError) as error:
        raise AttachError(
            f"CUDA cannot open the server's memory ({first_line(error)})",
            hint="in containers, share the namespaces (docker run --ipc=container:NAME --pid=container:NAME); "
            "bridge doctor tests CUDA IPC and names the cause",
        ) from error
    return storage


def gpu_uuid(device: torch.device) -> str:
    """Return the GPU's UUID as nvidia-smi prints it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def device_of(uuid: str) -> torch.device:
    """Return this process's device for the GPU `uuid`."""
    visible = {gpu_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    if uuid not in visible:
        raise AttachError(
            f"the server's weights are on {uuid}, but this process sees {', '.join(visible) or 'no GPU'}",
            hint=f"CUDA_VISIBLE_DEVICES={uuid} bridge train ... (the trainer must run on the server's GPU)",
        )
    return torch.device("cuda", visible[uuid])


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
