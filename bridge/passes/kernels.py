"""Attention kernels on a GPU: which ones exist, whether they compute correctly here, and which one a model uses.

    flash    torch's variable-length kernel, FlashAttention 2, for any micro-batch
    cudnn    cuDNN's kernel for a micro-batch that is one long sequence without a window, and `flash` for all others

cuDNN's kernel is chosen per head size, once its results on a small example, forward and backward, match float32 on this
GPU.

Not covered: attention without a kernel, and when a kernel applies to a layer (`attention.py`).
Shape suffixes: S spans, T tokens of all spans, U keys of all spans (span after span), A attention heads, K key-value
heads, D head size, X either number of heads.
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PretrainedConfig, PreTrainedModel

from bridge.errors import UsageError, with_class

GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's kernel has `enable_gqa`; torch 2.11 does not."""
LONG_TOKENS = 8_192
"""cuDNN's kernel is used from this sequence length on; for shorter sequences it gains little."""
LENGTH_STEP = 512
"""Sequences are padded to a multiple of this: cuDNN plans once per length, and there are thousands of lengths."""
CUDNN_HEAD_SIZE = 128
"""Largest head size for which cuDNN computes gradients on every GPU."""
FLASH = "FlashAttention 2"
EXAMPLE_TOKENS = 640
EXAMPLE_ERROR = 0.02
"""Largest relative error allowed in the example's output and gradients; bf16 rounding explains 0.004 to 0.01."""


class _Choice:
    """The kernels chosen in this process; all its models share them, a frozen reference included."""

    head_sizes = frozenset[int]()
    """Head sizes for which long sequences use cuDNN."""


def choose(model: PreTrainedModel, wanted: str) -> str:
    """Choose the kernels for `model` and return a log line about the choice; `wanted` is `flash`, `cudnn` or `auto`.

    UsageError: the wanted kernel cannot be used, or computes wrong results on this GPU.
    """
    if model.device.type != "cuda":
        if wanted != "auto":
            raise _unusable(wanted, "the model is on the CPU, and this kernel runs only on a GPU")
        return "attention: by blocks of rows"
    size = head_size(model.config.get_text_config())
    _Choice.head_sizes -= {size}
    if wanted == "flash":
        return f"attention: {FLASH}"
    if reason := _against_cudnn(model, size):
        if wanted != "auto":
            raise _unusable(wanted, reason)
        return f"attention: {FLASH}; cudnn is not used: {reason}"
    _Choice.head_sizes |= {size}
    return f"attention: cuDNN for single sequences of at least {LONG_TOKENS:,} tokens, otherwise {FLASH}"


def is_long(num_tokens: int, head_size: int) -> bool:
    """Return whether cuDNN's kernel is used for a single sequence of this length."""
    return num_tokens >= LONG_TOKENS and head_size in _Choice.head_sizes


def by_varlen(
    q_TAD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend causally within each span; a span's queries are its last tokens.

    `starts` are the offsets of each span's queries and keys, and `longest` the most queries and keys of one span.

    Shapes: [T, A, D], [U, K, D] x 2, [S + 1] x 2 (of T, of U) -> [T, A, D].
    """
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if GROUPS_HEADS:
        options["enable_gqa"] = True
    else:
        groups = q_TAD.shape[1] // k_UKD.shape[1]
        k_UKD = k_UKD.repeat_interleave(groups, dim=1)
        v_UKD = v_UKD.repeat_interleave(groups, dim=1)
    output_TAD = varlen_attn(q_TAD, k_UKD, v_UKD, *starts, *longest, **options)
    assert isinstance(output_TAD, Tensor), "only the output was requested"
    return output_TAD


def by_cudnn(q_1ATD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, scale: float | None) -> Tensor:
    """Attend causally within one sequence.

    Shapes: [1, A, T, D], [1, K, T, D] x 2 -> [1, A, T, D].
    """
    num_tokens = q_1ATD.shape[2]
    more = -num_tokens % LENGTH_STEP  # padding at the end, which no token attends to
    q, k, v = (pad(x_1XTD, (0, 0, 0, more)) for x_1XTD in (q_1ATD, k_1KTD, v_1KTD))
    has_groups = q_1ATD.shape[1] != k_1KTD.shape[1]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output_1ATD = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=has_groups)
    return output_1ATD[:, :, :num_tokens]


def _against_cudnn(model: PreTrainedModel, size: int) -> str:
    """Return why cuDNN's kernel cannot be used for this head size; empty if it can."""
    if size > CUDNN_HEAD_SIZE:
        return f"a head has {size} elements, expected at most {CUDNN_HEAD_SIZE}"
    try:
        error = _error(model)
    except Exception as problem:  # noqa: BLE001  whatever cuDNN raises on this GPU
        return with_class(problem)
    return "" if error <= EXAMPLE_ERROR else f"its error is {error:.1%}, expected at most {EXAMPLE_ERROR:.0%}"


def head_size(config: PretrainedConfig) -> int:
    """Return the attention head size in a language model's configuration, or the largest one if layers differ."""
    if getattr(config, "is_heterogeneous", False):
        return max(map(head_size, config.per_layer_config))
    size: int = getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)
    return size


def _error(model: PreTrainedModel) -> float:
    """Return the largest relative error of cuDNN's output and gradients on an example with the model's head shapes."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    size = head_size(config)
    generator = torch.Generator(model.device).manual_seed(0)
    shapes = [(1, count, EXAMPLE_TOKENS, size) for count in (groups * 2, 2, 2, groups * 2)]
    *rows, weights = (torch.randn(shape, device=model.device, generator=generator).bfloat16() for shape in shapes)
    leaves = [row.requires_grad_() for row in rows]
    exact = [row.detach().float().requires_grad_() for row in rows]
    query, key, value = exact[0], *(row.repeat_interleave(groups, dim=1) for row in exact[1:])
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(query, key, value, is_causal=True)
        gradients = torch.autograd.grad((expected * weights.float()).sum(), exact)
    with torch.enable_grad():
        ours = by_cudnn(leaves[0], leaves[1], leaves[2], None)
        own = torch.autograd.grad((ours * weights).float().sum(), leaves)
    pairs = zip((ours.detach(), *own), (expected.detach(), *gradients), strict=True)
    errors = [float((one.float() - other).norm() / other.norm()) for one, other in pairs]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _unusable(name: str, reason: str) -> UsageError:
    return UsageError(f"--attention {name} cannot be used: {reason}", hint="leave --attention out")
