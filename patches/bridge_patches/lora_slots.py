"""The LoRA slots of a vLLM: which of its tensors they are, and which Hugging Face module each of them serves.

A LoRA layer holds one pair of tensors per module that it fuses, with room for every slot: A of shape (slots, 1, largest
rank, input) and B of shape (slots, 1, output, largest rank). vLLM writes them when it loads an adapter into a slot, and
reads them at every step, so writing a slot changes that adapter. With tensor parallelism a rank's A has the columns,
and its B the rows, that the rank has of the weight. Slots of other shapes are left out: those of
`--fully-sharded-loras`, of experts, and of embeddings.
Seen in vLLM 0.26 to 0.33, `vllm/lora/layers`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bridge.server.manifest import View
from bridge.weights.layout import Shape

PINS = """
vllm.lora.layers.base_linear: BaseLinearLayerWithLoRA: base_layer, lora_a_stacked, lora_b_stacked
# q/k/v and gate/up: a tuple of slots in the order of the parts.
vllm.lora.layers.column_parallel_linear: MergedColumnParallelLinearWithLoRA: lora_a_stacked, lora_b_stacked
# The slots of the head, which itself is not wrapped.
vllm.lora.layers.logits_processor: LogitsProcessorWithLoRA: base_layer, lora_a_stacked, lora_b_stacked
vllm.lora.lora_weights: call LoRALayerWeights.optimize()  # multiplies the scaling into B before a slot gets it
vllm.lora.model_manager: LoRAModelManager: model, modules, packed_modules_mapping  # as model.lora_manager
"""
SIDES = ("lora_a_stacked", "lora_b_stacked")
Pair = tuple[torch.Tensor, torch.Tensor]
"""A and B of one Hugging Face module."""


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every four-dimensional tensor of slots, by a name for messages; none without LoRA.

    The A of an embedding has three dimensions and a second view that vLLM keeps: it must not be moved.
    """
    return {
        f"{name}.{side}.{index}": piece
        for name, layer in _layers(model).items()
        for side in SIDES
        for index, piece in enumerate(_pieces(layer, side))
        if piece.dim() == 4
    }


def find(model: nn.Module, views: Mapping[str, View]) -> dict[str, Pair]:
    """Return the slots of each Hugging Face module whose slots have the plain layout.

    `views` name vLLM's parameters as they would be without LoRA.
    """
    parts: dict[str, list[str]] = {}  # parameter of vLLM -> the Hugging Face parameters in it, in order
    for name, view in sorted(views.items(), key=lambda item: item[1].offset):
        parts.setdefault(view.parameter, []).append(name)
    layers, found = _layers(model), {}
    for parameter, names in parts.items():
        layer = layers.get(parameter.removesuffix(".weight"))
        sides = [] if layer is None else [_pieces(layer, side) for side in SIDES]
        if not sides or {len(side) for side in sides} != {len(names)}:  # one adapter's part of several, or none
            continue
        for name, lora_a, lora_b in zip(names, *sides, strict=True):
            if _is_plain(lora_a, lora_b, views[name].shape):
                found[name.removesuffix(".weight")] = lora_a, lora_b
    return found


def _layers(model: nn.Module) -> Mapping[str, Any]:
    """Return vLLM's LoRA layers by the plain names of the layers they stand for."""
    modules: Mapping[str, Any] = getattr(getattr(model, "lora_manager", None), "modules", {})
    return modules


def _pieces(layer: Any, side: str) -> tuple[torch.Tensor, ...]:
    stacked = getattr(layer, side, ())
    return (stacked,) if isinstance(stacked, torch.Tensor) else stacked if isinstance(stacked, tuple) else ()


def _is_plain(a: torch.Tensor, b: torch.Tensor, shape: Shape) -> bool:
    if a.dim() != 4 or len(shape) != 2 or not (a.is_contiguous() and b.is_contiguous()):
        return False
    num_slots, _, rank, _ = a.shape
    return tuple(a.shape) == (num_slots, 1, rank, shape[1]) and tuple(b.shape) == (num_slots, 1, shape[0], rank)
