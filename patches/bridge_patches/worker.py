"""The worker extension, which exports and inspects one rank's weights, and puts the rank's KV cache to sleep.

vLLM mixes this class into its own worker (`--worker-extension-cls`), and the API server calls the methods through
`collective_rpc`. They return JSON strings or plain values, which every executor can transport.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError, UnsupportedModelError
from bridge.server.manifest import AnyHandle, LoraSlot, Shard, SharedMemoryHandle
from bridge.server.protocol import Element
from bridge.weights import cuda_ipc, fp8, layout
from bridge.weights.copy_recorder import is_exact
from bridge.weights.layout import OTHER_MODES
from bridge.weights.rank_parts import digest
from bridge.weights.shared_memory import SharedBlock
from bridge_patches import loading, placement, quantized, routed_experts

PINS = """
vllm.config.parallel: ParallelConfig: worker_extension_cls, tensor_parallel_size, data_parallel_size
vllm.v1.worker.worker_base
    wrap WorkerWrapperBase.init_worker(all_kwargs)  # mixes the extension into the worker
    WorkerBase: rank, vllm_config, model_runner
# From the runner (V1, V2 and CPU) to the manager that knows which adapter has which slot.
vllm.v1.worker.lora_model_runner_mixin: LoRAModelRunnerMixin: lora_manager
vllm.lora.worker_manager: WorkerLoRAManager: _adapter_manager
vllm.lora.model_manager: LoRAModelManager: lora_index_to_id
vllm.device_allocator.cumem
    CuMemAllocator: get_instance, pointer_to_data
    call unmap_and_release(allocation_handle)
vllm.device_allocator: AllocationData: handle, cpu_backup_tensor, is_asleep
# Not AsyncLLM's, whose sleep would pause again, and whose wake_up would resume too early.
vllm.v1.worker.gpu_worker
    call Worker.sleep(level)
    call Worker.wake_up(tags)
"""
CHUNK = 2**24
"""Number of elements that are checked for NaN and infinity at a time."""
SLEEP_LEVEL = 1
"""vLLM's sleep level that discards only the KV cache."""


class BridgeWorker:
    """Methods that Bridge adds to vLLM's worker; attributes without the prefix `bridge_` are the worker's own."""

    rank: int
    vllm_config: Any
    model_runner: Any
    sleep: Any
    wake_up: Any

    def bridge_export(self) -> str:
        """Return this rank's `Shard` as JSON, or `{"error": ..., "hint": ...}` if the model is refused."""
        try:
            return self._bridge_shard().model_dump_json()
        except BridgeError as error:
            return json.dumps({"error": error.message, "hint": error.hint})

    def bridge_experts(self) -> tuple[int, int] | None:
        """Return (layers, experts per layer) that this rank reports for a token; None if it does not report experts."""
        return routed_experts.reported(self.model_runner.kv_cache_config)

    def bridge_synchronize(self) -> list[str]:
        """Wait for all work on this rank's device, and return the parameters that have moved since loading."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return list(self.model_runner.bridge_addresses.moved())

    def bridge_sleep(self) -> None:
        """Free the memory of this rank's KV cache."""
        if not _sleeping():
            self.sleep(SLEEP_LEVEL)

    def bridge_wake(self) -> str | None:
        """Allocate the KV cache again, empty; if that fails, free all of it and return the reason.

        Symptom: a KV cache that once failed to wake up for lack of memory never wakes up, even when memory is free.
        Cause: at the next attempt, vLLM 0.26 to 0.33 maps again what the failed one mapped, which CUDA refuses.
        Why this is safe: what a failed attempt mapped is empty, and is unmapped as a sleep would do.
        """
        from vllm.device_allocator.cumem import unmap_and_release

        sleeping = _sleeping()
        empty = [data for data in sleeping if data.cpu_backup_tensor is None]
        try:
            if sleeping:
                self.wake_up()
        except RuntimeError as error:
            for data in [data for data in empty if not data.is_asleep]:
                unmap_and_release(data.handle)
                data.is_asleep = True
            needed = sum(data.handle[1] for data in sleeping) / 2**30
            free = torch.cuda.mem_get_info()[0] / 2**30
            return f"{needed:.2f} GiB are needed, and {free:.2f} GiB of the GPU are free ({error})"
        return None

    def bridge_requantize(self) -> None:
        """Quantize the current weights again into the FP8 tensors that this rank serves."""
        for weight in quantized.weights_of(self._bridge_model()).values():
            weight.refresh()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def bridge_digests(self) -> dict[str, str]:
        return {name: digest(parameter) for name, parameter in self._bridge_parameters().items()}

    def bridge_quantized_digests(self) -> dict[str, str]:
        """Return a digest of the served FP8 values and scales of each quantized weight."""
        weights = quantized.weights_of(self._bridge_model())
        return {name: fp8.digest(weight.values, weight.scales) for name, weight in weights.items()}

    def bridge_finiteness(self) -> tuple[int, list[str]]:
        """Return the number of parameters and adapter slot matrices, and the names of those with NaN or infinity."""
        tensors = {**self._bridge_parameters(), **placement.slot_tensors(self._bridge_model())}
        return len(tensors), [name for name, tensor in tensors.items() if not _is_finite(tensor.detach())]

    def bridge_read(self, elements: list[dict[str, Any]]) -> list[float]:
        """Return the values of those elements that are on this rank, in order."""
        parameters = self._bridge_parameters()
        return [float(_element(parameters, element)) for element in elements if element["part"] == self.rank]

    def bridge_write(self, elements: list[dict[str, Any]], values: list[float]) -> None:
        parameters = self._bridge_parameters()
        for element, value in zip(elements, values, strict=True):
            if element["part"] == self.rank:
                _element(parameters, element).fill_(value)
        self.bridge_synchronize()

    def bridge_adapter_slot(self, adapter_id: int) -> int | None:
        """Return the slot of the adapter with vLLM's id `adapter_id`; None if it has no slot."""
        holders: list[int | None] = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        return holders.index(adapter_id) if adapter_id in holders else None

    def _bridge_model(self) -> nn.Module:
        model: nn.Module = self.model_runner.get_model()
        return model

    def _bridge_parameters(self) -> dict[str, torch.Tensor]:
        return quantized.parameters(self._bridge_model())

    def _bridge_shard(self) -> Shard:
        model = self._bridge_model()
        parameters = self._bridge_parameters()
        _refuse_foreign_types(parameters, self.vllm_config.model_config.dtype)
        record = loading.record_of(model)
        names = loading.plain_names(model)
        block = placement.shared_block(model)
        slots = placement.lora_slots(model, record.views)
        device = next(model.parameters()).device
        shard = Shard(
            rank=self.rank,
            gpu_uuid=cuda_ipc.gpu_uuid(device) if device.type == "cuda" else None,
            model_class=type(model).__name__,
            ipc_handles={name: _handle(parameter.detach(), block) for name, parameter in parameters.items()},
            param_mappings={  # a parameter that no longer exists keeps its original name, and is refused later
                name: view.model_copy(update={"parameter": names.get(view.parameter, view.parameter)})
                for name, view in record.views.items()
            },
            padding=loading.padding(model),
            quantized={name: weight.how for name, weight in quantized.weights_of(model).items()},
            lora_slots={
                name: LoraSlot(lora_a=_handle(a, block), lora_b=_handle(b, block)) for name, (a, b) in slots.items()
            },
        )
        held = {name: handle.shape for name, handle in shard.ipc_handles.items()}
        layout.check_coverage(record.expected, held, shard.param_mappings, shard.padding)
        return shard


def _element(parameters: Mapping[str, torch.Tensor], document: dict[str, Any]) -> torch.Tensor:
    element = Element(**document)
    return parameters[element.parameter].detach().view(-1)[element.index]


def _refuse_foreign_types(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    types = {name: parameter.dtype for name, parameter in parameters.items()}
    others = [f"{name} ({own})" for name, own in types.items() if not is_exact(dtype, own)]
    if others:
        raise UnsupportedModelError(
            f"{len(others)} weights are not {dtype}, the first: {', '.join(others[:3])}: quantized or repacked",
            hint=f"serve the unquantized model; {OTHER_MODES}",
        )


def _sleeping() -> list[Any]:
    """Return vLLM's allocations that are asleep, without memory."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return [data for data in CuMemAllocator.get_instance().pointer_to_data.values() if data.is_asleep]


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(bool(chunk.isfinite().all()) for chunk in tensor.contiguous().view(-1).split(CHUNK))


def _handle(tensor: torch.Tensor, block: SharedBlock | None) -> AnyHandle:
    if block is None:
        return cuda_ipc.export(tensor)
    assert tensor.untyped_storage().data_ptr() == block.storage.data_ptr(), "a weight left the shared file"
    assert block.path.startswith(f"/proc/{os.getpid()}/"), block.path
    return SharedMemoryHandle(
        path=block.path,
        storage_size=block.storage.nbytes(),
        storage_offset=0,
        tensor_offset=int(tensor.storage_offset()),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
