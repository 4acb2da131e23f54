"""Wrap the model runners' `load_model`: afterwards the weights lie where they can be exported, and stay there.

On a GPU the weights are where vLLM put them, and their addresses are remembered, so that every fence
can prove that nothing moved. On the CPU they are moved into a shared-memory file, and vLLM's repacking
of linear layers, which would leave the trainer with a dead copy, is switched off. LoRA's slots, which vLLM
makes at the end of the load, are treated as the weights are.

Not covered: exporting (`worker.py`). Seen in vLLM 0.26 to 0.33: runners V1 and V2, and the CPU's own.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from bridge.passes import wide_linear
from bridge.weights import shared_memory
from bridge.weights.shared_memory import SharedBlock
from patches import cpu_experts, cpu_lora, cpu_seeds, lora_slots

_blocks: dict[int, SharedBlock] = {}
"""The shared files that this process exports, by the id of their model; they live as long as the process."""


def patch() -> None:
    """Wrap `load_model` of every runner of this vLLM; once per process."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        _wrap(CPUModelRunner, _move_to_shared_memory)
        _keep_plain_linear()
        cpu_experts.patch()
        cpu_lora.patch()
        cpu_seeds.patch()
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

    _wrap(GPUModelRunner, _no_change)
    _wrap(GPUModelRunnerV2, _no_change)


def shared_block(model: nn.Module) -> SharedBlock | None:
    """Return the shared file that holds `model`'s parameters; None on a GPU."""
    return _blocks.get(id(model))


class Places:
    """Where each parameter and LoRA slot of a model lay when this was made; quick enough to be asked at every fence."""

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
        return [
            *(name for name, module, leaf, address in self._known if _left(module._parameters.get(leaf), address)),
            *self._moved_slots(),
        ]

    def _moved_slots(self) -> list[str]:
        now = lora_slots.tensors(self._model) if self._slots else {}
        return [name for name, address in self._slots.items() if _left(now.get(name), address)]


def _left(tensor: torch.Tensor | None, address: int) -> bool:
    return tensor is None or tensor.data_ptr() != address


def _wrap(runner: type[Any], after: Callable[[nn.Module], None]) -> None:
    original = runner.load_model
    if hasattr(original, "__wrapped__") and hasattr(original, "bridge"):
        return

    @wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after(self.get_model())
        self.bridge_places = Places(self.get_model())

    load_model.bridge = True  # type: ignore[attr-defined]
    runner.load_model = load_model


def _no_change(model: nn.Module) -> None:
    """Leave the weights where vLLM put them."""


def _move_to_shared_memory(model: nn.Module) -> None:
    """Copy every storage of `model`'s parameters and LoRA slots into one shared file, and point the tensors at it.

    The tensors stay the objects that they are, so that vLLM's layers and their tuples of slots see the new memory.
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


def _keep_plain_linear() -> None:
    """Stop vLLM from repacking linear layers on the CPU (oneDNN, SGL, zentorch) and dropping their weights."""
    from vllm.model_executor.layers import utils

    def plain_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001  vLLM's signature
        layer.cpu_linear = wide_linear.linear if wide_linear.is_wanted() else nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear
