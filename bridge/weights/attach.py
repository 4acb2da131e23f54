"""Attach: point every parameter and stored buffer of a meta-device model at the server's own memory.

No handle is opened until the layout and the model agree completely.

Not covered: finding the manifest (`bridge/server/manifest.py`), when writing is allowed (`bridge/server/fence.py`).
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack
from transformers import PreTrainedModel

from bridge.errors import AttachError, ManifestError
from bridge.server.manifest import AnyHandle, CudaHandle, Handle, Manifest, Shard, View
from bridge.weights import cuda_ipc, layout, rope, shared_memory, skeleton
from bridge.weights.copy_recorder import is_exact
from bridge.weights.layout import Shape
from bridge.weights.model_folder import state
from bridge.weights.rank_parts import Cut

if TYPE_CHECKING:
    from bridge.weights.adapter import Adapter

SAME_FLAGS = "start it with the same flags as before"
SPARE_BYTES = 2**30
"""Memory for a few short passes through a stand-in model; the same amount is left free for vLLM's CUDA context."""
RESTART = "restart the server, which rewrites its manifest: bridge serve-vllm"


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """The model to train, and where its weights are."""

    model: PreTrainedModel
    """The model in evaluation mode; only trained parameters require gradients."""
    device: torch.device
    """Device of the weights."""
    lr_factors: Mapping[str, float]
    """Name of each trained parameter in the model -> its learning-rate factor."""
    cuts: Sequence[Mapping[str, Cut]] = ()
    """Each tensor-parallel rank's share of every parameter; empty if one rank holds the entire model."""
    adapter: "Adapter | None" = None
    """The adapter, if one is trained instead of the full weights."""
    open_s: float
    """Seconds it took to attach or load the weights."""
    weight_bytes: int
    """Bytes of weights that this process holds in addition to the server's; 0 with one copy."""


@dataclass(frozen=True, kw_only=True)
class AttachedModel:
    """A transformers model whose parameters are the server's."""

    model: PreTrainedModel  # in evaluation mode; its language model's parameters require gradients
    parameters: Mapping[str, Tensor]  # and stored buffers, by name at attach time: adding an adapter renames them
    shard: Shard  # from the server's manifest
    cuts: Sequence[Mapping[str, Cut]]  # each server rank's share of every parameter
    device: torch.device
    server_tensors: Mapping[str, torch.Tensor]  # vLLM's full parameters by vLLM's names, as mapped into this process
    attach_s: float  # seconds to open the handles and create the views, without building the model
    allocated_bytes: int  # growth of the GPU allocator while attaching; always 0 on the CPU

    def named(self) -> dict[str, Tensor]:
        """Return the model's parameters and stored buffers by their names at attach time, without an adapter's."""
        tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in state(self.model).items()}
        return {name: tensor for name, tensor in tensors.items() if name in self.parameters}

    def unshared_parameters(self, *, with_adapter: bool = True) -> list[str]:
        """Return the parameters and stored buffers outside the server's storages; normally none.

        The matrices of an adapter that the server loads from disk are, unless they are left out.
        """
        storages = [tensor.untyped_storage() for tensor in self.server_tensors.values()]
        spans = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}
        unshared = []
        for name, tensor in state(self.model).items():
            if not with_adapter and ".lora_" in name:
                continue
            is_in_slot = name.partition(".lora_")[0] in self.shard.lora_slots  # an adapter's parameters lie in slots
            if not is_in_slot and not any(start <= tensor.data_ptr() < end for start, end in spans):
                unshared.append(name)
        return unshared

    def weight_bytes(self, *, with_adapter: bool = True) -> int:
        """Measure the bytes of weights that this process holds in addition to the server's; 0 with one copy."""
        tensors = state(self.model)
        unshared = sum(tensors[name].nbytes for name in self.unshared_parameters(with_adapter=with_adapter))
        return max(unshared, self.allocated_bytes)

    def opened(self) -> OpenedModel:
        """Return the model to train, with all parameters of its language model trainable."""
        return OpenedModel(
            model=self.model,
            device=self.device,
            lr_factors={name: 1.0 for name, parameter in self.model.named_parameters() if parameter.requires_grad},
            cuts=self.cuts if len(self.cuts) > 1 else (),
            open_s=self.attach_s,
            weight_bytes=self.weight_bytes(),
        )


def attach(manifest: Manifest, rank: int = 0, *, num_parts: int = 1) -> AttachedModel:
    """Build the manifest's model, and attach all of its weights to the memory that the server's `rank` exports.

    The trainer has `num_parts` processes, one per server rank. If there is more than one, each parameter is only the
    part that this rank holds: see `AttachedModel.cuts`.
    """
    _refuse_other_servers(manifest, num_parts)
    shard = manifest.shards[rank]
    model = skeleton.build(manifest.model, getattr(torch, manifest.dtype))
    _check_layout(manifest, shard, skeleton.shapes(model))
    rope.follow_server(model, manifest.max_model_len, server_class=shard.model_class)
    device = leave_core_to_server() if shard.gpu_uuid is None else cuda_ipc.device_of(shard.gpu_uuid)
    before = _allocated_bytes(device)
    start = time.perf_counter()
    tensors = open_handles(shard.ipc_handles, device)
    _assign(model, _views(shard, tensors))
    attach_s = time.perf_counter() - start
    after = _allocated_bytes(device)
    _move_buffers(model, device)
    return AttachedModel(
        model=model.eval(),
        parameters=state(model),
        shard=shard,
        cuts=_cuts(manifest),
        device=device,
        server_tensors=tensors,
        attach_s=attach_s,
        allocated_bytes=after - before,
    )


def reattach(attached: AttachedModel, manifest: Manifest) -> AttachedModel:
    """Point the weights of an attached model at a restarted server; they remain the same Python objects."""
    start = time.perf_counter()
    _refuse_other_servers(manifest, len(attached.cuts))
    shard = manifest.shards[attached.shard.rank]
    before = attached.shard.gpu_uuid
    if shard.gpu_uuid != before:
        raise ManifestError(
            f"the restarted server is on {shard.gpu_uuid or 'the CPU'}, but the trainer is on {before or 'the CPU'}",
            hint=f"put CUDA_VISIBLE_DEVICES={before or ''} in front of the server's command",
        )
    if _cuts(manifest) != attached.cuts:
        raise ManifestError("the restarted server splits its weights across ranks differently", hint=SAME_FLAGS)
    _check_layout(manifest, shard, {name: cut.shape for name, cut in attached.cuts[shard.rank].items()})
    tensors = open_handles(shard.ipc_handles, attached.device)
    rope.follow_server(attached.model, manifest.max_model_len, server_class=shard.model_class)
    for name, view in _views(shard, tensors).items():
        held = attached.parameters[name]
        held.data = view if isinstance(held, nn.Parameter) else _in_own_storage(view)
    attach_s = time.perf_counter() - start
    return replace(attached, shard=shard, server_tensors=tensors, attach_s=attach_s, allocated_bytes=0)


def leave_core_to_server() -> torch.device:
    """Use all cores but one, unless OMP_NUM_THREADS is set, and return the CPU.

    vLLM's worker busy-waits for a second after each request. A trainer that used every core would wait for that worker
    at each barrier of its own threads: on 2 cores, a step took ten times as long.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    return torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until all writes on `device` are complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.init()  # before measuring, so that the CUDA context is not counted
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _refuse_other_servers(manifest: Manifest, num_parts: int) -> None:
    if manifest.tp_degree != num_parts or manifest.dp_shard_degree != 1:
        processes = "one process" if num_parts == 1 else f"{num_parts} processes"
        raise ManifestError(
            f"the server has tensor-parallel size {manifest.tp_degree} and {manifest.dp_shard_degree} data-parallel"
            f" shards, expected {num_parts} and 1: this trainer is {processes}",
            hint=f"bridge run --tensor-parallel-size {manifest.tp_degree} starts a server and a trainer process per"
            f" rank; or restart the server with: bridge serve-vllm --tensor-parallel-size {num_parts}",
        )
    if len(manifest.shards) != manifest.tp_degree:
        raise ManifestError(
            f"the manifest lists {len(manifest.shards)} ranks, expected {manifest.tp_degree}", hint=RESTART
        )
    if not (manifest.shared_weights_enabled and manifest.single_copy_enabled):
        raise ManifestError("the manifest says that the server does not share its weights", hint=RESTART)


def _cuts(manifest: Manifest) -> list[dict[str, Cut]]:
    return [{name: layout.cut_of(view) for name, view in shard.param_mappings.items()} for shard in manifest.shards]


def _check_layout(manifest: Manifest, shard: Shard, shapes: Mapping[str, Shape]) -> None:
    dtype = getattr(torch, manifest.dtype)
    layout.check_parts([other_shard.param_mappings for other_shard in manifest.shards])
    held = {name: handle.shape for name, handle in shard.ipc_handles.items()}
    layout.check_coverage(shapes, held, shard.param_mappings, shard.padding)
    inexact = [n for n, h in shard.ipc_handles.items() if not is_exact(dtype, getattr(torch, h.dtype))]
    strided = [n for n, h in shard.ipc_handles.items() if h.stride != layout.contiguous_stride(h.shape)]
    if inexact or strided:
        raise ManifestError(
            f"{len(inexact)} parameters are not {manifest.dtype}, {len(strided)} are not contiguous, the first:"
            f" {(inexact + strided)[0]}",
            hint=RESTART,
        )


def open_handles(handles: Mapping[str, AnyHandle], device: torch.device) -> dict[str, torch.Tensor]:
    """Return one tensor per handle, each in the server's own memory."""
    files: dict[tuple[str, int], torch.UntypedStorage] = {}
    tensors = {}
    for name, handle in handles.items():
        if isinstance(handle, CudaHandle):
            storage = cuda_ipc.open_storage(handle, device)
        else:
            key = handle.path, handle.storage_size
            if key not in files:
                files[key] = shared_memory.open_storage(*key)
            storage = files[key]
        tensors[name] = _tensor(name, handle, storage, device)
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
    for (_, end, before), (start, _, after) in pairwise(spans):
        if start < end:  # updating one parameter would overwrite the other
            raise AttachError(
                f"{before} and {after} overlap in the server's memory by {end - start} bytes: the manifest was edited",
                hint=RESTART,
            )
    return tensors


def _tensor(name: str, handle: Handle, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    empty = torch.empty(0, dtype=getattr(torch, handle.dtype), device=device)
    try:
        return empty.set_(storage, handle.tensor_offset, handle.shape, handle.stride)
    except (RuntimeError, ValueError) as error:  # ValueError: a number that does not fit into 64 bits
        raise AttachError(
            f"{name} does not fit into its storage of {handle.storage_size} bytes: shape {handle.shape} from element "
            f"{handle.tensor_offset}; the manifest was edited",
            hint=RESTART,
        ) from error


def _views(shard: Shard, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _view(tensors[view.parameter], view) for name, view in shard.param_mappings.items()}


def _view(tensor: torch.Tensor, view: View) -> torch.Tensor:
    # .data has its own version counter; without it, updating one part of a fused tensor would count as updating all
    return tensor.as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset).data


def stand_in(name: str, dtype: torch.dtype, device: torch.device, *, share: float) -> PreTrainedModel | None:
    """Return a stand-in for an attached model with random weights; those of the same shape share memory.

    Memory for it and its gradients is allocated immediately. Return None if it does not fit next to a vLLM server that
    uses this `share` of the GPU.
    """
    model = skeleton.build(name, dtype)
    tensors = state(model)
    kinds = {(tensor.shape, tensor.dtype) for tensor in tensors.values()}
    needed = SPARE_BYTES + sum(shape.numel() * dtype.itemsize for shape, dtype in kinds)
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        least = share * whole + 2 * needed
        if whole < least or torch.cuda.mem_get_info(device)[0] < least:  # creates a CUDA context: keep it last
            return None
    generator = torch.Generator(device)
    memory = {
        (shape, dtype): torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02, generator=generator)
        for shape, dtype in kinds
    }
    _assign(model, {name: memory[tensor.shape, tensor.dtype] for name, tensor in tensors.items()})
    _move_buffers(model, device)
    torch.empty(needed, dtype=torch.uint8, device=device)  # the allocator keeps this memory for the gradients
    return model.eval()


def _assign(model: PreTrainedModel, views: Mapping[str, Tensor]) -> None:
    """Replace every parameter and stored buffer of `model` with its view, in the server's dtype; tied ones stay so."""
    new = dict[int, Tensor]()
    for name, old in state(model).items():
        is_parameter = isinstance(old, nn.Parameter)
        new[id(old)] = nn.Parameter(views[name], old.requires_grad) if is_parameter else _in_own_storage(views[name])
    for module in model.modules():
        held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for leaf, old in held:
            setattr(module, leaf, new.get(id(old), old))
    left = [name for name, tensor in state(model).items() if tensor.is_meta]
    assert not left, left


def _in_own_storage(view: Tensor) -> Tensor:
    """Return the same memory as a tensor whose storage is not larger: a deep copy of a buffer copies its storage."""
    return from_dlpack(view)


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Move the buffers of `model` to `device`, where its parameters already are."""
    for module in model.modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            assert not buffer.is_meta, f"buffer {leaf} was left on the meta device"
            setattr(module, leaf, buffer.to(device))
