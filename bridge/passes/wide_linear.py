"""Linear layers in bf16 on a CPU without instructions for it: multiplied as float32, 10 to 40 times as fast.

Products of bf16 numbers are exact in float32, and the result is rounded to bf16 once: it is what bf16 kernels compute,
up to the order of a sum. Nothing changes on a GPU, nor on a CPU with bf16 instructions (AVX-512 and later).
"""

from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from bridge.passes.cut_layers import RowLinear


@cache
def is_wanted() -> bool:
    """Whether this machine's CPU multiplies bf16 in software."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute torch.nn.functional.linear, without a gradient."""
    if rows.dtype != torch.bfloat16:
        return functional.linear(rows, weight, bias)
    wide = functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(rows.dtype)


def widen(model: nn.Module) -> None:
    """Let the linear layers of a model on the CPU, an adapter's too, multiply as float32; no parameter changes."""
    for module in model.modules():
        if type(module) not in (nn.Linear, RowLinear):
            continue
        if (module.weight.device.type, module.weight.dtype) == ("cpu", torch.bfloat16):
            module.forward = MethodType(_forward, module)


def _forward(module: nn.Linear, rows: Tensor) -> Tensor:
    bias = None if isinstance(module, RowLinear) else module.bias
    if rows.dtype != torch.bfloat16:
        return functional.linear(rows, module.weight, bias)
    widened: Tensor = _Linear.apply(rows, module.weight, bias)  # type: ignore[no-untyped-call]
    return widened


class _Linear(torch.autograd.Function):
    """Keeps bf16 for the backward pass, not the float32 copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        wide = gradient.float().flatten(0, -2)
        of_rows = (wide @ weight.float()).view(rows.shape).to(rows.dtype) if needs_rows else None
        of_weight = (wide.T @ rows.float().flatten(0, -2)).to(weight.dtype) if needs_weight else None
        return of_rows, of_weight, wide.sum(0).to(weight.dtype) if needs_bias else None
