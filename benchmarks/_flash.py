"""FlashAttention for TRL with torch's own kernel, without the flash-attn package or a kernel from the hub.

`register` adds it to transformers under `NAME`, for `attn_implementation`. transformers then does the same as for
FlashAttention 2: it removes the padding, calls these functions, which have the names and arguments of flash-attn, and
restores the padding. Only the kernel differs. AsyncGRPO calls `flash_attn_varlen_func` itself. Without a GPU,
for trials, the same is computed span by span.

vLLM's copy of FlashAttention 3 cannot be used because it is built without a backward pass.

Source: transformers 5.17 and 5.19, `modeling_flash_attention_utils.py`; TRL 1.16.0, `async_grpo/packing.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from bridge.passes import kernels

NAME = "flash_of_torch"
"""The value of `attn_implementation`; transformers treats a name with "flash" in it as FlashAttention."""
NO_WINDOW = (-1, -1)


class Calls:
    """Counts calls of the kernel; in compiled layers, only those that the compiler traced."""

    number = 0


def register() -> None:
    """Add `NAME` to transformers."""
    inner: Callable[..., Any] = modeling_flash_attention_utils._lazy_imports

    def lazy_imports(implementation: str | None, *others: Any, **named: Any) -> Any:
        if implementation != NAME:
            return inner(implementation, *others, **named)
        padding = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
        return flash_attn_func, flash_attn_varlen_func, None, *padding

    modeling_flash_attention_utils._lazy_imports = lazy_imports
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attend(
    _: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attend like transformers' `flash_attention_forward`, but without the layer index.

    torch.compile would compile each layer separately for that unused index, and stop compiling after eight layers.
    """
    output = modeling_flash_attention_utils._flash_attention_forward(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)), attention_mask, query_length=query.shape[2],
        is_causal=True, softmax_scale=scaling, sliding_window=sliding_window, attn_implementation=NAME,
    )  # fmt: skip
    return output, None


def check_used() -> None:
    """Raise SystemExit if the kernel was never called, because then something else computed attention."""
    if not Calls.number:
        raise SystemExit("error: a step was trained without a call of FlashAttention: check --attention")


def flash_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
) -> Tensor:
    """Attend causally within each row; all rows have the same length.

    Shapes: [rows, tokens, heads, size of a head] x 3.
    """
    batch, length, longest = len(query), query.shape[1], key.shape[1]
    if query.is_cuda and length == longest and window_size == NO_WINDOW:
        _count()
        assert causal, "only causal attention is measured"
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # fails instead of falling back
            q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True)
        return output.transpose(1, 2)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    q, k, v = (tensor.flatten(0, 1) for tensor in (query, key, value))
    starts_q, starts_k = starts * length, starts * longest
    output = flash_attn_varlen_func(
        q, k, v, starts_q, starts_k, length, longest, softmax_scale, causal=causal, window_size=window_size
    )
    rows: Tensor = output.unflatten(0, (batch, length))
    return rows


def flash_attn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
) -> Tensor:
    """Attend causally within spans; a span's queries are its last tokens.

    Shapes: [tokens, heads, size of a head] x 3, [spans + 1] x 2.
    """
    _count()
    assert causal, "only causal attention is measured"
    window = None if window_size[0] < 0 else window_size[0] + 1
    if query.is_cuda:
        spans, longest = (cu_seqlens_q, cu_seqlens_k), (int(max_seqlen_q), int(max_seqlen_k))
        return kernels.by_varlen(query, key, value, spans, longest, scale=softmax_scale, window=window)
    ends = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    parts = [_attend_one(query[a:b], key[c:d], value[c:d], softmax_scale, window) for a, b, c, d in ends]
    return torch.cat(parts)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _count() -> bool:
    """Count a call; in compiled code this runs once, while tracing."""
    Calls.number += 1
    return True


def _attend_one(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    behind = len(key) - len(query)
    mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(behind)
    if window is not None:
        mask = mask.triu(behind - window + 1)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
