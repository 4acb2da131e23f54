"""Keep weights and LoRA slots in memory that can be exported, from loading on.

On a GPU, the addresses are recorded, so that every update can prove that nothing has moved. On the CPU, the weights are
moved into a shared-memory file. LoRA slots, which vLLM creates at the end of loading, are treated the same way.

A LoRA layer holds one pair of tensors per fused module, with room for every slot: A of shape (slots, 1, largest rank,
input) and B of shape (slots, 1, output, largest rank). vLLM writes them when it loads an adapter into a slot, and reads
them at every step, so writing a slot changes that adapter. With tensor parallelism, a rank's A has the same columns,
and its B the same rows, as the rank's part of the weight. Slots with other layouts are not exported: those of
`--fully-sharded-loras` and of embeddings.

Experts get slots only on request (`--lora-experts`): vLLM holds A and B for each expert, 1.5 GiB for Qwen3-30B-A3B at
rank 16, and calls their kernels for every token. The second axis of these slots is the expert.

Symptom: with `--enable-sleep-mode`, no weight can be exported, and since 0.33 no LoRA slot either.
Cause: vLLM allocates all of these in its cuMem pool, whose memory has no legacy CUDA IPC handle.
Why this is safe: what stays out of the pool is allocated as without sleep mode. vLLM uses the tag `runtime` for memory
that a sleep must preserve.
Seen in vLLM 0.26 to 0.33: runners V1 and V2, and the CPU's own; `vllm/lora/layers`, `vllm/device_allocator/cumem.py`.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn

from bridge.server.manifest import View
from bridge.weights import shared_memory
from bridge.weights.layout import Shape
from bridge.weights.shared_memory import SharedBlock
from bridge.weights.stored_tensors import EXPERTS, PROJECTIONS
from bridge_patches import cpu_backend, quantized, wrap

PINS = """
vllm.platforms: current_platform
vllm.platforms.interface: call Platform.is_cpu()
vllm.device_allocator.cumem: replace CuMemAllocator.use_memory_pool(tag)
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
vllm.lora.layers.base_linear: BaseLinearLayerWithLoRA: base_layer, lora_a_stacked, lora_b_stacked
# q/k/v and gate/up: a tuple of slots, in the order of the fused parts.
vllm.lora.layers.column_parallel_linear: MergedColumnParallelLinearWithLoRA: lora_a_stacked, lora_b_stacked
# The slots of the head; the head itself is not wrapped.
vllm.lora.layers.logits_processor: LogitsProcessorWithLoRA: base_layer, lora_a_stacked, lora_b_stacked
# Routed experts: tuples of slots for gate and up, and for down.
vllm.lora.layers.fused_moe
    FusedMoEWithLoRA: base_layer, w13_lora_a_stacked, w13_lora_b_stacked, w2_lora_a_stacked, w2_lora_b_stacked
    call FusedMoEWithLoRA.set_lora(index, lora_a, lora_b)  # writes a slot: gate, down and up, in this order
vllm.lora.lora_weights: call LoRALayerWeights.optimize()  # multiplies the scaling into B before a slot gets it
vllm.lora.model_manager
    LoRAModelManager: model, modules, packed_modules_mapping  # as model.lora_manager
vllm.lora.utils: wrap get_supported_lora_modules(model)  # imported by vllm.lora.model_manager
vllm.model_executor.layers.fused_moe.runner.moe_runner: MoERunner
"""
SIDES = ("lora_a_stacked", "lora_b_stacked")
EXPERT_SIDES = tuple((f"w13_{side}", f"w2_{side}") for side in SIDES)
EXPERT_SLOTS = "BRIDGE_LORA_EXPERTS"
OUTSIDE = ("weights", "runtime")
"""vLLM's tags for memory that stays while the KV cache sleeps; LoRA slots have `runtime` since 0.33."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""A and B for one Hugging Face module."""
_blocks: dict[int, SharedBlock] = {}
"""The shared files that this process exports, by the `id` of their model; they live as long as the process."""


def patch() -> None:
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.lora import model_manager
    from vllm.platforms import current_platform

    wrap(CuMemAllocator, "use_memory_pool")(_use_memory_pool)
    wrap(model_manager, "get_supported_lora_modules")(_without_experts)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        wrap(CPUModelRunner, "load_model")(_load_model)
        cpu_backend.patch()
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner, "load_model")(_load_model)
    wrap(GPUModelRunnerV2, "load_model")(_load_model)


def shared_block(model: nn.Module) -> SharedBlock | None:
    """Return the shared file that holds `model`'s parameters; None on a GPU."""
    return _blocks.get(id(model))


class Addresses:
    """The addresses of a model's parameters and LoRA slots, fast enough to be checked at every update."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._slots = {name: tensor.data_ptr() for name, tensor in slot_tensors(model).items()}
        self._parameters = [
            (f"{prefix}.{leaf}", module, leaf, parameter.data_ptr())
            for prefix, module in model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
        ]

    def moved(self) -> list[str]:
        """Return the parameters and slots whose address has changed, or that no longer exist."""
        slots = slot_tensors(self._model) if self._slots else {}
        now = [(name, module._parameters.get(leaf), address) for name, module, leaf, address in self._parameters]
        now += [(name, slots.get(name), address) for name, address in self._slots.items()]
        return [name for name, tensor, address in now if tensor is None or tensor.data_ptr() != address]


def slot_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every four-dimensional LoRA slot tensor, by a name for messages; empty without LoRA.

    An embedding's A has three dimensions, and vLLM keeps a second view of it, so it must not be moved.
    """
    return {
        f"{name}.{side}.{index}": piece
        for name, layer in _lora_layers(model).items()
        for side in (*SIDES, *chain(*EXPERT_SIDES))
        for index, piece in enumerate(_pieces(layer, side))
        if piece.dim() == 4
    }


def lora_slots(model: nn.Module, views: Mapping[str, View]) -> dict[str, Pair]:
    """Return the LoRA slots of each Hugging Face module whose slots have the standard layout.

    `views` has the names that vLLM's parameters have without LoRA.
    """
    fused: dict[str, list[str]] = {}  # vLLM's parameter -> the Hugging Face parameters in it, in order
    for name, view in sorted(views.items(), key=lambda item: item[1].offset):
        fused.setdefault(view.parameter, []).append(name)
    layers = _lora_layers(model)
    pairs: dict[str, Pair] = {}
    for parameter, names in fused.items():
        lora_a, lora_b = (_pieces(layers.get(parameter.removesuffix(".weight")), side) for side in SIDES)
        if len(lora_a) == len(lora_b) == len(names):  # otherwise one slot serves several modules, or there is none
            for name, a, b in zip(names, lora_a, lora_b, strict=True):
                if _is_plain(a, b, views[name].shape):
                    pairs[name.removesuffix(".weight")] = (a, b)
    of_experts = {view.parameter: name.rpartition(".")[0] for name, view in views.items() if f".{EXPERTS}." in name}
    for path, layer in layers.items():
        owner = next((owner for parameter, owner in of_experts.items() if parameter.startswith(f"{path}.")), "")
        stacks = zip(*([*chain(*(_pieces(layer, side) for side in sides))] for sides in EXPERT_SIDES), strict=True)
        pairs |= _of_experts(owner, [*stacks])
    return pairs


def _of_experts(owner: str, stacks: list[Pair]) -> dict[str, Pair]:
    """Return the slots of experts by projection; empty if gate and up share one slot."""
    if len(stacks) != len(PROJECTIONS) or not owner.endswith(f".{EXPERTS}"):
        return {}
    return {f"{owner}.lora.{name}": pair for name, pair in zip(PROJECTIONS, stacks, strict=True)}


def _lora_layers(model: nn.Module) -> Mapping[str, Any]:
    """Return vLLM's LoRA layers by the names of the layers that they wrap."""
    return getattr(getattr(model, "lora_manager", None), "modules", {})


def _pieces(layer: Any, side: str) -> tuple[torch.Tensor, ...]:
    stacked = getattr(layer, side, ())
    if isinstance(stacked, torch.Tensor):
        return (stacked,)
    return stacked if isinstance(stacked, tuple) else ()


def _is_plain(a: torch.Tensor, b: torch.Tensor, shape: Shape) -> bool:
    if a.dim() != 4 or len(shape) != 2 or not (a.is_contiguous() and b.is_contiguous()):
        return False
    num_slots, _, rank, _ = a.shape
    return tuple(a.shape) == (num_slots, 1, rank, shape[1]) and tuple(b.shape) == (num_slots, 1, shape[0], rank)


def _use_memory_pool(
    original: Callable[..., AbstractContextManager[None]], allocator: Any, tag: str | None = None
) -> AbstractContextManager[None]:
    return nullcontext() if tag in OUTSIDE else original(allocator, tag)


def _without_experts(original: Callable[..., list[str]], model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Return the last name components of the modules that get a LoRA slot; experts are included only on request."""
    if os.environ.get(EXPERT_SLOTS) == "1":
        return original(model, *args, **kwargs)
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    experts = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, MoERunner)}
    return [name for name in original(model, *args, **kwargs) if name not in experts]


def _load_model(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    original(runner, *args, **kwargs)
    model = runner.get_model()
    if all(parameter.is_cpu for parameter in model.parameters()):
        _move_to_shared_memory(model)
    runner.bridge_addresses = Addresses(model)


def _move_to_shared_memory(model: nn.Module) -> None:
    """Copy the storages of trainable parameters and LoRA slots into one shared file, and point the tensors at it.

    They remain the same objects, so vLLM's layers and their tuples of slots see the new memory.
    """
    tensors = [*quantized.parameters(model).values(), *slot_tensors(model).values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    unit = shared_memory.ALIGNMENT_BYTES
    sizes = [-(-storage.nbytes() // unit) * unit for storage in storages.values()]
    offsets = dict(zip(storages, accumulate(sizes, initial=0), strict=False))  # the last sum is the total size
    block = shared_memory.allocate(sum(sizes))
    shared = torch.empty(0, dtype=torch.uint8).set_(block.storage)
    for address, storage in storages.items():
        source = torch.empty(0, dtype=torch.uint8).set_(storage)
        shared[offsets[address] : offsets[address] + storage.nbytes()].copy_(source)
    for tensor in tensors:
        offset = offsets[tensor.untyped_storage().data_ptr()] // tensor.element_size()
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            block.storage, offset + tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    _blocks[id(model)] = block
