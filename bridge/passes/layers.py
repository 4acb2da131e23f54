"""How a model's decoder layers run: recomputed in the backward pass, compiled, or with liger-kernel's parts.

None of it moves or replaces a parameter: they are vLLM's memory.

Not covered: attention (`attention.py`), whether what comes out is still right (`preparation.py`).
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bridge.errors import UnsupportedModelError, UsageError

COMPILER: str | Callable[..., Callable[..., Any]] = "inductor"
"""What torch.compile hands the layers' graphs to."""
COMPILED_FORMS = 64
"""Compiled forms of one layer's code that torch keeps: kinds of layers, with and without gradients, recomputed or not.
Its own limit, 8, would quietly end in uncompiled layers."""


def call_again(model: PreTrainedModel) -> None:
    """Keep each layer's input alone for the backward pass, and call the layer again there.

    The layers ask whether they are in training mode before they do so; they alone are told that they are, so that
    dropout stays as it was, an adapter's on and the model's off.

    Raises:
        UnsupportedModelError: the model cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot recompute its activations",
            remedy="leave --gradient-checkpointing out, or lower --micro-batch-tokens",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
            _without_dropout(module)


def _without_dropout(module: nn.Module) -> None:
    for name, value in vars(module).items():
        if name.endswith("dropout") and isinstance(value, float):  # StarCoder2's layers call the function themselves
            setattr(module, name, 0.0)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's layers, first to last."""
    return [module for module in model.get_decoder().modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: PreTrainedModel, *, recomputed: bool = False) -> None:
    """Have every layer compiled when it is first called, for any number of tokens; layers of one kind share the code.

    Layers and not the model: there is less to compile by the number of layers, and it says what is recomputed.
    With `recomputed`, the code keeps its inputs alone for the backward pass, and computes again there what gradients
    need: not a layer's last product, which a layer that is called again computes for nothing.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_FORMS)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend=_keeping_inputs if recomputed else COMPILER)


def are_compiled(model: PreTrainedModel) -> bool:
    """Tell whether the model's layers are to be compiled, or are already."""
    return any(layer._compiled_call_impl is not None for layer in decoder_layers(model))


def num_breaks() -> int:
    """Return how often compiling has met what no graph can hold, so that a layer became several."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _keeping_inputs(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    with torch._functorch.config.patch(activation_memory_budget=0):
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(COMPILER)(graph, inputs)
        return compiled


def uncompile_layers(model: PreTrainedModel) -> None:
    """Let every layer run as it was written again."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None  # where torch.nn.Module.compile (torch 2.2 to 2.14) keeps the compiled call


def use_liger_kernel(model: PreTrainedModel) -> None:
    """Put liger-kernel's layers into the model, without its losses: ours is none of them.

    Raises:
        UsageError: there is no GPU, it is not installed, or has nothing for this family.
    """
    if model.device.type != "cuda":
        raise _no_liger("its kernels run on a GPU alone", "leave --liger-kernel out")
    if importlib.util.find_spec("liger_kernel") is None:
        raise _no_liger("it is not installed", "pip install liger-kernel, or leave --liger-kernel out")
    families = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if model.config.model_type not in families:
        raise _no_liger(f"it has nothing for models of the type {model.config.model_type}", "leave --liger-kernel out")
    apply = importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def _no_liger(reason: str, remedy: str) -> UsageError:
    return UsageError(f"--liger-kernel was asked for, and {reason}", remedy=remedy)
