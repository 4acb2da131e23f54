"""Wrap the model runners' `load_model`: afterwards the weights are where they can be exported, and stay there.

On a GPU the addresses are remembered, so that every update can prove that nothing has moved. On the CPU the weights are
moved into a shared-memory file. LoRA's slots, which vLLM creates at the end of the load, are treated the same way.
Seen in vLLM 0.26 to 0.33: runners V1 and V2, and the CPU's own.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from bridge.weights import shared_memory
from bridge.weights.shared_memory import SharedBlock
from bridge_patches import cpu_backend, lora_slots

PINS = """
vllm.platforms: current_platform
vllm.platforms.interface: call Platform.is_cpu()
# V1; since 0.32 load_model also takes the keyword `model`.
vllm.v1.worker.gpu_model_runner
    wrap GPUModelRunner.load_model(load_dummy_weights)
    call GPUModelRunner.get_model()  # without its wrappers
    GPUModelRunner: model, device, model_config, vllm_config
# V2, on the GPU and the CPU.
vllm.v1.worker.gpu.model_runner
    wrap GPUModelRunner.load_model(load_dummy_weights)
    call GPUModelRunner.get_model()
    GPUModelRunner: model, device, model_config, vllm_config
# V1 on the CPU overrides load_model without calling the GPU's.
vllm.v1.worker.cpu_model_runner
    wrap CPUModelRunner.load_model(load_dummy_weights)
    call CPUModelRunner.get_model()
    CPUModelRunner: model
"""
_blocks: dict[int, SharedBlock] = {}
"""The shared files that this process exports, by the id of their model; they live as long as the process."""


def patch() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        _wrap(CPUModelRunner, _move_to_shared_memory)
        cpu_backend.patch()
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

    _wrap(GPUModelRunner)
    _wrap(GPUModelRunnerV2)


def shared_block(model: nn.Module) -> SharedBlock | None:
    """Return the shared file that holds `model`'s parameters; None on a GPU."""
    return _blocks.get(id(model))


class Places:
    """The addresses of a model's parameters and LoRA slots, fast enough to check at every update."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._slots = {name: tensor.data_ptr() for name, tensor in lora_slots.tensors(model).items()}
        self._known = [
            (f"{prefix}.{leaf}", module, leaf, parameter.data_ptr())
            for prefix, module in model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
        ]

    def moved(self) -> list[str]:
        """Return the parameters and slots that have another address now, or are gone."""
        slots = lora_slots.tensors(self._model) if self._slots else {}
        now = [(name, module._parameters.get(leaf), address) for name, module, leaf, address in self._known]
        now += [(name, slots.get(name), address) for name, address in self._slots.items()]
        return [name for name, tensor, address in now if tensor is None or tensor.data_ptr() != address]


def _wrap(runner: type[Any], after: Callable[[nn.Module], None] = lambda _: None) -> None:
    original = runner.load_model

    @wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after(self.get_model())
        self.bridge_places = Places(self.get_model())

    runner.load_model = load_model


def _move_to_shared_memory(model: nn.Module) -> None:
    """Copy every storage of `model`'s parameters and LoRA slots into one shared file, and point the tensors at it.

    They stay the same objects, so vLLM's layers and their tuples of slots see the new memory.
    """
    tensors = [*model.parameters(), *lora_slots.tensors(model).values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    offsets, end = {}, 0
    for address, storage in storages.items():
        offsets[address] = end
        end += -(-storage.nbytes() // shared_memory.ALIGNMENT_BYTES) * shared_memory.ALIGNMENT_BYTES
    block = shared_memory.allocate(end)
    room = torch.empty(0, dtype=torch.uint8).set_(block.storage)
    for address, storage in storages.items():
        source = torch.empty(0, dtype=torch.uint8).set_(storage)
        room[offsets[address] : offsets[address] + storage.nbytes()].copy_(source)
    for tensor in tensors:
        offset = offsets[tensor.untyped_storage().data_ptr()] // tensor.element_size()
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            block.storage, offset + tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    _blocks[id(model)] = block
