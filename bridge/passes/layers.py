"""How a model's layers run: recomputed in the backward pass, compiled, with Liger kernels, or multiplied in float32.

Nothing here moves or replaces a parameter, since parameters are vLLM's memory.

Not covered: attention (`attention.py`), and checking that the result is still correct (`preparation.py`).
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import varlen as _varlen  # noqa: F401  defines torch_attn's operators
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bridge.errors import UnsupportedModelError, UsageError
from bridge.passes.cut_layers import RowLinear

OPERATORS = frozenset({
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
})  # fmt: skip
"""The attention operators, as in torch's examples of selective checkpointing."""
COMPILER: str | Callable[..., Callable[..., Any]] = "inductor"
"""Backend of torch.compile."""
COMPILED_FORMS = 64
"""How many compiled forms of a layer's code torch keeps: one per kind of layer, with and without gradients, recomputed
or not. With torch's default limit of 8, some layers would silently run uncompiled."""


class Kept(NamedTuple):
    """Activations that layers keep for the backward pass; they recompute the rest."""

    all: bool = False
    """Keep everything; nothing is recomputed."""
    attention: bool = False
    """Keep the attention output in addition to the layer's input."""
    on_host: bool = False
    """Keep these activations in host memory."""


ALL = Kept(all=True)
ATTENTION = Kept(attention=True)
INPUTS = Kept()
HOST_ATTENTION = Kept(attention=True, on_host=True)
HOST_INPUTS = Kept(on_host=True)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.get_decoder().modules() if isinstance(module, GradientCheckpointingLayer)]


def first_trained(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained parameters of the first layer that has any: their gradients need the full backward pass."""
    candidates = ([p for p in part.parameters() if p.requires_grad] for part in (*decoder_layers(model), model))
    return next((trained for trained in candidates if trained), [])


def call_again(model: PreTrainedModel, *, keeps_attention: bool = False) -> None:
    """Have each layer keep only its input, and optionally attention's output, and run again in the backward pass.

    transformers' layers recompute only in training mode. Only these modules are switched to it, so that dropout stays
    unchanged: on in an adapter, off in the model.
    """
    if not model.supports_gradient_checkpointing:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot recompute its activations",
            hint="leave --gradient-checkpointing out, or lower --micro-batch-tokens",
        )
    options = {"use_reentrant": False, **({"context_fn": _keeping_attention} if keeps_attention else {})}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
            for name, value in vars(module).items():
                if name.endswith("dropout") and isinstance(value, float):  # StarCoder2 applies dropout as a function
                    setattr(module, name, 0.0)


def compile_layers(model: PreTrainedModel, *, recomputed: bool = False, keeps_attention: bool = False) -> None:
    """Have every layer compiled at its first call, for any number of tokens; layers of one kind share the code.

    Compiling layers instead of the model leaves less to compile, and sets the unit that is recomputed.
    With `recomputed`, the compiled code keeps only its inputs for the backward pass and recomputes only what gradients
    need; a layer that is called again would also recompute its last product, in vain. With `keeps_attention` as well,
    it keeps attention's output in addition to its inputs.

    A module's numbers, such as an epsilon or the attention scale, are constants if layers share them. With only
    `dynamic=True` they would become inputs, and torch would trace a layer again when an operator needs the number
    itself. If every layer has different numbers, as in DiffLlama, they stay inputs: as constants, each layer would be
    compiled separately and exceed torch's limit.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_FORMS)
    if keeps_attention:  # torch warns about in-place operators even if a layer has none
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    backend = _keeping_inputs if recomputed and not keeps_attention else COMPILER
    is_shared = 2 * _num_kinds(model) <= len(decoder_layers(model))
    for layer in decoder_layers(model):
        call = MethodType(_called_again, layer) if recomputed and keeps_attention else layer._call_impl
        compiled = torch.compile(call, dynamic=True, backend=backend)
        layer._compiled_call_impl = torch._dynamo.config.patch(specialize_float=is_shared)(compiled)


def _num_kinds(model: PreTrainedModel) -> int:
    """Return how many distinct sets of module constants the layers have."""
    return len(
        {
            tuple(
                (path, name, value)
                for path, module in layer.named_modules()
                for name, value in vars(module).items()
                if isinstance(value, float)
            )
            for layer in decoder_layers(model)
        }
    )


def let_inputs_need_gradients(model: PreTrainedModel) -> RemovableHandle:
    """Make the first layer's input require a gradient in training passes, as the inputs of all other layers do.

    With an adapter it would not, and the compiler would generate separate code for that layer, a third of all code.
    Removing the returned handle undoes this.
    """

    def need_gradient(_embeddings: nn.Module, _args: Any, embedded: Tensor) -> Tensor:
        return embedded.requires_grad_() if torch.is_grad_enabled() else embedded

    handle: RemovableHandle = model.get_input_embeddings().register_forward_hook(need_gradient)
    return handle


def _called_again(layer: nn.Module, *args: Any, **options: Any) -> Any:
    """Call a layer whose backward pass calls it again except for attention; this call is compiled as a unit."""
    if not torch.is_grad_enabled():
        return layer._call_impl(*args, **options)
    call = partial(layer._call_impl, **options)
    return checkpoint(call, *args, use_reentrant=False, context_fn=_keeping_attention)


def _keeping_attention() -> tuple[Any, Any]:
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_of_attention)
    return contexts


def _of_attention(_context: object, operator: object, *_args: Any, **_options: Any) -> CheckpointPolicy:
    """Keep the outputs of attention kernels, including the softmax normalizers; recompute everything else."""
    return CheckpointPolicy.MUST_SAVE if operator in OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def uncompile_layers(model: PreTrainedModel) -> None:
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None  # where torch.nn.Module.compile (torch 2.2 to 2.14) keeps the compiled call


def are_compiled(model: PreTrainedModel) -> bool:
    """Whether the model's layers are compiled, or will be at their first call."""
    return any(layer._compiled_call_impl is not None for layer in decoder_layers(model))


def _keeping_inputs(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    with torch._functorch.config.patch(activation_memory_budget=0):
        return torch._dynamo.lookup_backend(COMPILER)(graph, inputs)


def use_liger_kernel(model: PreTrainedModel) -> None:
    """Use Liger kernels in the model's layers, without Liger's losses."""
    if model.device.type != "cuda":
        raise _no_liger("Liger kernels run only on a GPU", "leave --liger-kernel out")
    if importlib.util.find_spec("liger_kernel") is None:
        raise _no_liger("liger-kernel is not installed", "pip install liger-kernel, or leave --liger-kernel out")
    families = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if model.config.model_type not in families:
        raise _no_liger(f"Liger does not support {model.config.model_type} models", "leave --liger-kernel out")
    apply = importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def _no_liger(reason: str, hint: str) -> UsageError:
    return UsageError(f"--liger-kernel cannot be used: {reason}", hint=hint)


@cache
def bf16_is_emulated() -> bool:
    """Whether this machine's CPU multiplies bf16 in software."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def wide_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute torch.nn.functional.linear without a gradient, and bf16 in float32, which is 10 to 40 times as fast.

    This is for CPUs that emulate bf16. Products of bf16 numbers are exact in float32, and the result is rounded to bf16
    once, so it is what bf16 kernels compute, up to the order of summation.
    """
    if rows.dtype != torch.bfloat16:
        return functional.linear(rows, weight, bias)
    wide = functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(rows.dtype)


def widen(model: nn.Module) -> None:
    """Make a CPU model's bf16 linear layers, an adapter's included, multiply in float32; no parameter changes."""
    for module in model.modules():
        if type(module) not in (nn.Linear, RowLinear):
            continue
        if (module.weight.device.type, module.weight.dtype) == ("cpu", torch.bfloat16):
            module.forward = MethodType(_wide_forward, module)


def _wide_forward(module: nn.Linear, rows: Tensor) -> Tensor:
    bias = None if isinstance(module, RowLinear) else module.bias
    widened: Tensor = _WideLinear.apply(rows, module.weight, bias)  # type: ignore[no-untyped-call]
    return widened


class _WideLinear(torch.autograd.Function):
    """Saves the bf16 tensors for the backward pass, not their float32 copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return wide_linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        wide = gradient.float().flatten(0, -2)
        of_rows = (wide @ weight.float()).view(rows.shape).to(rows.dtype) if needs_rows else None
        of_weight = (wide.T @ rows.float().flatten(0, -2)).to(weight.dtype) if needs_weight else None
        return of_rows, of_weight, wide.sum(0).to(weight.dtype) if needs_bias else None
