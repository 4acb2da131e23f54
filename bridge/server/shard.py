"""What one rank of a server exports: its handles, and which view of them is which Hugging Face parameter.

Not covered: the server around it, and the file that all of it is written to (`manifest.py`).
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Annotated[str, Field(pattern="^(bfloat16|float16|float32|float64)$")]
"""torch's name of an element type that weights are trained in."""


class Record(BaseModel):
    """A frozen record that refuses unknown keys and documents every field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class View(Record):
    """One Hugging Face parameter, or a slice of a fused one, inside one of vLLM's parameters."""

    parameter: str
    """vLLM's name of the parameter that holds it."""
    offset: int = Field(ge=0)
    """Elements between the parameter's first element and the view's."""
    shape: tuple[int, ...]
    """Shape in elements."""
    stride: tuple[int, ...]
    """Stride in elements."""


class Handle(Record):
    """One of vLLM's parameters inside one storage that another process can open."""

    storage_size: int = Field(gt=0)
    """Size of the storage in bytes."""
    storage_offset: int = Field(ge=0)
    """Bytes between the start of the opened allocation and the storage."""
    tensor_offset: int = Field(default=0, ge=0)
    """Elements between the start of the storage and the parameter's first element."""
    shape: tuple[int, ...]
    """Shape in elements."""
    stride: tuple[int, ...]
    """Stride in elements."""
    dtype: Dtype
    """torch's name of the element type, such as `bfloat16`."""


class CudaHandle(Handle):
    """A parameter in GPU memory: the eight items of torch's IPC tuple, and its place in the storage."""

    kind: Literal["cuda_ipc"] = "cuda_ipc"
    """Tells this handle from the others."""
    device_index: int
    """The GPU's index in the exporting process; meaningless elsewhere: see the shard's `gpu_uuid`."""
    ipc_handle_b64: str
    """The CUDA IPC memory handle, with torch's prefix."""
    ref_counter_handle_b64: str
    """Name of torch's shared reference counter."""
    ref_counter_offset: int
    """Place in that counter's file."""
    event_handle_b64: str
    """The CUDA IPC event handle, empty when there is nothing to wait for."""
    event_sync_required: bool
    """Whether the importer has to wait for the event."""


class SharedMemoryHandle(Handle):
    """A parameter in a shared-memory file of the server."""

    kind: Literal["shared_memory"] = "shared_memory"
    """Tells this handle from the others."""
    path: str = Field(pattern=r"^/[^\x00]+$")
    """The file to map."""


AnyHandle = Annotated[CudaHandle | SharedMemoryHandle, Field(discriminator="kind")]


class LoraSlot(Record):
    """All of vLLM's LoRA slots of one Hugging Face module; an adapter in slot `i` is `[i]` of both tensors."""

    lora_a: AnyHandle
    """Shape (slots, 1, largest rank, input): the adapter's A in its first rows, zeros below."""
    lora_b: AnyHandle
    """Shape (slots, 1, output, largest rank): the adapter's B in its first columns, zeros beside it. The scaling
    alpha / rank is already multiplied into it, as vLLM's `LoRALayerWeights.optimize` does."""


class Shard(Record):
    """What one tensor-parallel rank exports."""

    rank: int
    """Tensor-parallel rank."""
    gpu_uuid: str | None
    """UUID of the GPU that holds it; None on the CPU."""
    model_class: str = ""
    """vLLM's class of the model; empty where a manifest of before does not say."""
    ipc_handles: dict[str, AnyHandle]
    """vLLM's parameters by vLLM's name."""
    param_mappings: dict[str, View]
    """Hugging Face parameter -> where it lies."""
    padding: dict[str, Annotated[int, Field(ge=0)]]
    """vLLM's parameter -> elements at its end that no Hugging Face parameter owns (padded vocabulary)."""
    lora_slots: dict[str, LoraSlot] = {}
    """Hugging Face module, such as `model.layers.0.self_attn.q_proj` -> its slots; empty when the server serves no
    adapters. A module whose slots have another layout is left out."""
