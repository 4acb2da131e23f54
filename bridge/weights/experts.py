"""LoRA on routed experts: an A and a B for every expert, next to the stacked weights, which do not change.

For each token, its expert computes W x + B A x: three grouped matrix products over the tokens sorted by expert. No
temporary has the size of a weight, whereas PEFT's own layer for stacked weights computes W + B A in every pass.

A checkpoint stores the matrices of each expert separately, such as `experts.7.gate_proj.lora_A`. Stock vLLM loads this
format, and PEFT stacks the matrices on load.

Not covered: shared experts, and models whose checkpoints store experts as stacks.
Source: `FusedMoEWithLoRA` in vLLM 0.26 to 0.33; `grouped_mm_experts_forward` of transformers 5.
Shape suffixes: T tokens, K experts per token, S = T * K, E experts, R rank, H hidden size, I width of an expert, O
either H or I.
"""

from types import MethodType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN as PATTERNS
from transformers.integrations.moe import _grouped_linear as grouped_linear

from bridge.errors import UsageError
from bridge.weights.stored_tensors import EXPERTS, PROJECTIONS

STORED = f"{EXPERTS}.N.gate_proj"
"""Checkpoint name of expert N's weights, from which vLLM and PEFT derive the name of its adapter."""
STORED_BY_EXPERT = "qwen2_moe"
"""transformers' conversion pattern for checkpoints with `experts.7.gate_proj` etc.; PEFT uses it for adapters, too."""


class _Stack(nn.Module):
    """One LoRA matrix (A or B) for every expert, stacked."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, rows_SO: Tensor, ends_E: Tensor) -> Tensor:
        product_SO: Tensor = grouped_linear(rows_SO, self.weight, ends_E)
        return product_SO


class Projection(nn.Module, BaseTunerLayer):  # type: ignore[misc]
    """The adapter of one projection for all experts: A random, as PEFT initializes it, and B zero."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, name: str, like: Tensor, shape: tuple[int, int], rank: int) -> None:
        """Create adapter `name` with the dtype and device of `like`; `shape` is the shape of one expert's weight."""
        super().__init__()
        (outputs, inputs), num_experts = shape, len(like)
        a_ERI = like.new_empty(num_experts, rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5)
        self.lora_A = nn.ModuleDict({name: _Stack(a_ERI)})
        self.lora_B = nn.ModuleDict({name: _Stack(like.new_zeros(num_experts, outputs, rank))})

    def forward(self, rows_SO: Tensor, ends_E: Tensor) -> Tensor:
        added_SO = rows_SO
        for stacks in (self.lora_A, self.lora_B):
            for stack in stacks.values():
                added_SO = stack(added_SO, ends_E)
        return added_SO


def adapt(model: PreTrainedModel, name: str, rank: int) -> None:
    """Add an adapter `name` with rank `rank` to the routed experts of every layer.

    Raises:
        UsageError: the model has no routed experts, or stores them in a format in which stock vLLM or PEFT would not
            find their adapter.
    """
    stacks = [(path, module) for path, module in model.named_modules() if path.endswith(f".{EXPERTS}")]
    kind = model.config.model_type
    if not stacks or not stores_each(kind) or not all(_is_plain(module) for _, module in stacks):
        raise UsageError(
            f"--lora-target-modules {EXPERTS}: checkpoints of a {kind} model have no {STORED}",
            hint=f"leave out {EXPERTS}",
        )
    for _, module in stacks:
        experts: Any = module
        hidden, width = experts.down_proj.shape[1:]
        shapes = dict(zip(PROJECTIONS, ((width, hidden), (width, hidden), (hidden, width)), strict=True))
        experts.lora = nn.ModuleDict(
            {key: Projection(name, experts.down_proj.detach(), shape, rank) for key, shape in shapes.items()}
        )
        experts.forward = MethodType(_forward, experts)


def stores_each(model_type: str) -> bool:
    """Return whether checkpoints of this model type store each expert separately, under names that PEFT knows."""
    return bool(PATTERNS.get(model_type) == STORED_BY_EXPERT)


def _is_plain(experts: Any) -> bool:
    """Return whether experts are gated, with gate and up in a single stack, and have no biases.

    LongCat-Flash does not set these attributes: some of its experts have no weights and return their input.
    """
    kind = [getattr(experts, name, None) for name in ("has_gate", "is_concatenated", "is_transposed", "has_bias")]
    return kind == [True, True, False, False]


def _forward(experts: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute the layer with its adapter, or without it while adapters are disabled."""
    gate, up, down = (experts.lora[name] for name in PROJECTIONS)
    if down.disable_adapters:
        base_TH: Tensor = type(experts).forward(experts, hidden_TH, experts_TK, weights_TK)
        return base_TH
    expert_S, order_S = experts_TK.flatten().sort()
    all_E = torch.arange(len(experts.down_proj), device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, all_E, right=True, out_int32=True)
    rows_SH = hidden_TH[order_S // experts_TK.shape[1]]
    added_SI = torch.cat([gate(rows_SH, ends_E), up(rows_SH, ends_E)], dim=1)
    inner_SI = experts._apply_gate(grouped_linear(rows_SH, experts.gate_up_proj, ends_E) + added_SI)
    outer_SH = grouped_linear(inner_SI, experts.down_proj, ends_E) + down(inner_SI, ends_E)
    weighted_SH = outer_SH * weights_TK.flatten()[order_S].unsqueeze(1)
    sums_TH: Tensor = weighted_SH[order_S.argsort()].view(*experts_TK.shape, -1).sum(1)
    return sums_TH.to(hidden_TH.dtype)
