"""Let experts on the CPU read the weights that are shared.

Symptom: a mixture of experts on the CPU cannot be shared: its experts are rewritten.
Cause: vLLM packs them for its grouped products, and keeps the packed copy alone.
Why this is safe: the same products are done by plain linear layers, an expert at a time, in the rounding that linear
layers have here anyway (`model_runner.py`). Activations that are not known here are left as they are, and refused.
To torch.compile, which compiles the model around them unless --enforce-eager is given, they are one operator: which
experts are computed depends on the values of `topk_ids`, which no graph can hold.
Seen in vLLM 0.30 to 0.33, `vllm/model_executor/layers/fused_moe/experts/cpu_moe.py`; before, where they choose the
experts of a token themselves or are elsewhere, they are refused by name (`loading.py`).

Not covered: GPUs, where `--moe-backend triton` reads them as they are.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bridge.passes import wide_linear

MODULE = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
MODULAR = "finalize_weight_and_reduce_impl"
"""Method of experts that are told which of them are chosen for a token."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}
"""vLLM's names of what is done to the first half of the first product."""


def patch() -> None:
    """Replace what packs the experts and what reads the packed ones; once per process."""
    experts: Any = getattr(import_module(MODULE), "CPUUnquantizedExperts", None) if find_spec(MODULE) else None
    if experts is None or MODULAR not in vars(experts) or hasattr(experts, "bridge"):
        return
    pack, apply_packed = experts.process_weights_after_loading, experts.apply

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        self.bridge_plain = is_known(layer)
        if not self.bridge_plain:
            pack(self, layer)

    def apply(self: Any, **given: Any) -> None:
        (_apply_operator if self.bridge_plain else partial(apply_packed, self))(**given)

    experts.process_weights_after_loading, experts.apply, experts.bridge = process_weights_after_loading, apply, True


def is_known(layer: Any) -> bool:
    """Tell whether `apply_plain` computes what vLLM's experts of `layer` do."""
    return layer.activation.value in ACTIVATIONS and layer.expert_map is None and not hasattr(layer, "w13_bias")


def _apply_operator(*, activation: Any, **given: Any) -> None:
    names = ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "apply_router_weight_on_input")
    apply_plain(**{name: given[name] for name in names}, activation=activation.value)


@torch.library.custom_op("bridge::cpu_experts", mutates_args=("output",))
def apply_plain(
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
) -> None:
    """Write what the chosen experts make of each token into `output`, weighed unless the inputs were.

    Shapes: [T, H], [E, 2I, H], [E, H, I], [T, K], [T, K] -> [T, H].
    """
    linear = wide_linear.linear if wide_linear.is_wanted() else functional.linear
    weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
    total = torch.zeros_like(output, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
        made = linear(ACTIVATIONS[activation](gate) * up, w2[expert])
        total.index_add_(0, tokens, made.float() * weights[tokens, places].float().unsqueeze(1))
    output.copy_(total)
