"""Attach: point every parameter of a meta-device model at the server's own memory.

Plan, validate, then apply: nothing is opened before layout and model agree in full, and no parameter
is left without memory.

Not covered: finding the manifest (`manifest.py`), when writing is allowed (`fence.py`), tensor parallelism.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from bridge.errors import AttachError, ManifestError
from bridge.server.manifest import Manifest
from bridge.server.shard import AnyHandle, CudaHandle, Handle, SharedMemoryHandle, View
from bridge.weights import cuda_ipc, layout, rope, shared_memory, skeleton
from bridge.weights.layout import Shape


@dataclass(frozen=True, kw_only=True)
class AttachedModel:
    """A transformers model whose parameters are the server's."""

    model: PreTrainedModel
    """The model, in evaluation mode; its parameters require gradients."""
    parameters: Mapping[str, nn.Parameter]
    """Its parameters by the names that they had when it was attached: adapters put into it later rename them."""
    manifest: Manifest
    """What it was attached by."""
    device: torch.device
    """Where the weights lie."""
    server_tensors: Mapping[str, torch.Tensor]
    """vLLM's parameters by vLLM's name, whole, as this process maps them."""
    attach_s: float
    """Seconds from the built model to the last attached parameter: opening handles and making views."""
    allocated_bytes: int
    """Bytes by which the GPU allocator grew meanwhile; 0 on the CPU, where it does not count."""

    def unshared_parameters(self) -> list[str]:
        """Return the parameters that do not lie in the server's storages; none is the whole point."""
        storages = [tensor.untyped_storage() for tensor in self.server_tensors.values()]
        spans = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}
        return [
            name
            for name, parameter in self.model.named_parameters()
            if not any(start <= parameter.data_ptr() < end for start, end in spans)
        ]

    def weight_bytes(self) -> int:
        """Return the bytes of weights that this process holds beside the server's: measured, 0 with one copy."""
        unshared = sum(int(self.model.get_parameter(name).nbytes) for name in self.unshared_parameters())
        return max(unshared, self.allocated_bytes)


def attach(manifest: Manifest, *, trust_remote_code: bool = False) -> AttachedModel:
    """Build the manifest's model and attach all of its parameters.

    Raises:
        ManifestError: the manifest is of another degree or model than this process can attach to.
        UnsupportedModelError: a parameter of either side has no partner, or the two compute positions differently.
        AttachError: the memory cannot be opened.
    """
    _refuse_other_shapes_of_servers(manifest)
    dtype: torch.dtype = getattr(torch, manifest.dtype)
    model = skeleton.build(manifest.model, dtype, trust_remote_code=trust_remote_code)
    _check_layout(manifest, skeleton.shapes(model))
    rope.follow_server(model, manifest.max_model_len, server_class=manifest.model_class)
    device = leave_a_core() if manifest.gpu_uuid is None else cuda_ipc.device_of(manifest.gpu_uuid)
    before, start = _allocated_bytes(device), time.perf_counter()
    tensors = open_handles(manifest.ipc_handles, device)
    _refuse_overlaps(tensors)
    _assign(model, _views(manifest, tensors))
    attach_s, after = time.perf_counter() - start, _allocated_bytes(device)
    _move_buffers(model, device)
    return AttachedModel(
        model=model.eval(),
        parameters=dict(model.named_parameters()),
        manifest=manifest,
        device=device,
        server_tensors=tensors,
        attach_s=attach_s,
        allocated_bytes=after - before,
    )


def attach_again(attached: AttachedModel, manifest: Manifest) -> AttachedModel:
    """Point the parameters of an attached model at another server of the same model; they stay the same objects.

    Raises:
        ManifestError: as `attach` does.
        AttachError: the memory cannot be opened; the model is attached as it was.
    """
    start = time.perf_counter()
    _refuse_other_shapes_of_servers(manifest)
    _refuse_other_gpu(attached.manifest, manifest)
    _check_layout(manifest, {name: tuple(parameter.shape) for name, parameter in attached.parameters.items()})
    tensors = open_handles(manifest.ipc_handles, attached.device)
    _refuse_overlaps(tensors)
    rope.follow_server(attached.model, manifest.max_model_len, server_class=manifest.model_class)
    for name, view in _views(manifest, tensors).items():
        attached.parameters[name].data = view
    return replace(
        attached, manifest=manifest, server_tensors=tensors, attach_s=time.perf_counter() - start, allocated_bytes=0
    )


def leave_a_core() -> torch.device:
    """Use one core less than there are, unless OMP_NUM_THREADS says otherwise, and return the CPU.

    vLLM's worker spins for a second after each request; a trainer on every core then waits for it at each barrier of
    its own threads: on 2 cores a step took ten times as long.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    return torch.device("cpu")


def _allocated_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.init()  # the driver's context is no part of attaching
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _refuse_other_shapes_of_servers(manifest: Manifest) -> None:
    if manifest.tp_degree != 1 or manifest.dp_shard_degree != 1:
        raise ManifestError(
            f"the server has tensor-parallel size {manifest.tp_degree} and {manifest.dp_shard_degree} data-parallel"
            " shards; this trainer is one process: expected 1 and 1",
            remedy="restart it with: bridge serve-vllm --tensor-parallel-size 1",
        )
    if not (manifest.shared_weights_enabled and manifest.single_copy_enabled):
        raise ManifestError("the manifest says that weights are not shared", remedy="restart with bridge serve-vllm")


def _refuse_other_gpu(before: Manifest, now: Manifest) -> None:
    if now.gpu_uuid != before.gpu_uuid:
        raise ManifestError(
            f"the server came back on {now.gpu_uuid or 'the CPU'}, the trainer is on {before.gpu_uuid or 'the CPU'}",
            remedy=f"CUDA_VISIBLE_DEVICES={before.gpu_uuid or ''} in front of the command",
        )


def _check_layout(manifest: Manifest, shapes: Mapping[str, Shape]) -> None:
    held = {name: handle.shape for name, handle in manifest.ipc_handles.items()}
    layout.check_coverage(shapes, held, manifest.param_mappings, manifest.padding)
    odd = [name for name, handle in manifest.ipc_handles.items() if handle.dtype != manifest.dtype]
    bent = [n for n, h in manifest.ipc_handles.items() if h.stride != layout.contiguous_stride(h.shape)]
    if odd or bent:
        raise ManifestError(
            f"{len(odd)} parameters are not {manifest.dtype}, {len(bent)} not contiguous, the first: {(odd + bent)[0]}",
            remedy="restart the server, which writes the manifest anew",
        )


def open_handles(handles: Mapping[str, AnyHandle], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a tensor per handle, each in the server's own memory.

    Raises:
        AttachError: it cannot be opened, or is smaller than the handle says.
    """
    files: dict[tuple[str, int], torch.UntypedStorage] = {}
    tensors = {}
    for name, handle in handles.items():
        if isinstance(handle, CudaHandle):
            storage = cuda_ipc.open_storage(handle, device)
        else:
            assert isinstance(handle, SharedMemoryHandle)
            key = handle.path, handle.storage_size
            storage = files[key] if key in files else shared_memory.open_storage(*key)
            files[key] = storage
        tensors[name] = _tensor(name, handle, storage, getattr(torch, handle.dtype), device)
    return tensors


def _refuse_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse two of vLLM's parameters in one place: a step of the one would write into the other."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
    for (_, end, before), (start, _, after) in pairwise(spans):
        if start < end:
            raise AttachError(
                f"{before} and {after} overlap in the server's memory by {end - start} bytes",
                remedy="the manifest was edited: restart the server, which writes it anew",
            )


def _tensor(
    name: str, handle: Handle, storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=device)
    try:
        return empty.set_(storage, handle.tensor_offset, handle.shape, handle.stride)
    except (RuntimeError, ValueError) as error:  # the latter: a number of more than 64 bits
        raise AttachError(
            f"{name} does not fit into its storage of {handle.storage_size} bytes: shape {handle.shape} from element "
            f"{handle.tensor_offset}",
            remedy="the manifest was edited: restart the server, which writes it anew",
        ) from error


def _views(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _view(tensors[view.parameter], view) for name, view in manifest.param_mappings.items()}


def _view(tensor: torch.Tensor, view: View) -> torch.Tensor:
    # .data: a version of its own, or autograd takes a step of the one half of a fused tensor for one of the other
    return tensor.as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset).data


def _assign(model: PreTrainedModel, views: Mapping[str, torch.Tensor]) -> None:
    """Give every parameter of `model` its view; a tied parameter is replaced wherever it is used."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, leaf))
    for name, old in list(model.named_parameters()):
        parameter = nn.Parameter(views[name])
        for module, leaf in places[id(old)]:
            setattr(module, leaf, parameter)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, left


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    for module in model.modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            assert not buffer.is_meta, f"buffer {leaf} was left on the meta device"
            setattr(module, leaf, buffer.to(device))
