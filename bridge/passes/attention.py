"""Causal attention over packed sequences: each token attends to its own sequence, without a mask of tokens x tokens.

Registered with transformers under Bridge's own name, for every model that looks up its attention there. The boundaries
of the sequences are keyword arguments of the decoder's call (transformers' `FlashAttentionKwargs`, and `seen`), so that
recomputed and compiled layers get them, too.

Completions may share their prompt: it is computed once, and each completion attends to the prompt's keys and values
before its own. Everything but attention treats each token on its own and needs no change.

Not covered: what the kernel lacks (`dense_attention.py`), how an attention is chosen and checked (`preparation.py`).
Shape suffixes: S spans, S1 one more, T tokens of all of them, U tokens that each span attends to (span after span), A
attention heads, K key-value heads (A is a multiple of K), D size of a head, H hidden size.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge.errors import UnsupportedModelError
from bridge.passes import dense_attention
from bridge.passes.dense_attention import Rule

NAME = "bridge_packed"
"""The name in transformers' registry. Masks have a registry of their own: a name that is not in it gets no mask."""
KERNEL_HEAD_SIZE = 256
"""Largest head that the kernel supports."""
_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Not in torch 2.11."""


class Seen(NamedTuple):
    """What each span attends to, with shared prompts. One object: a model that drops it drops all of it."""

    keys_U: Tensor
    """int64: places in T."""
    starts_S1: Tensor
    """int32: where each span's keys begin in U, and U itself."""
    longest: int
    """Most keys of one span."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Consecutive runs of tokens: a whole sequence, a shared prompt, or one of its completions.

    A span attends causally to itself, and a completion first to its prompt: a span is the end of what it attends to.
    """

    starts_S1: Tensor
    """int32: where each span begins in T, and T itself: what variable-length attention takes."""
    longest: int
    """Tokens of the longest span."""
    seen: Seen | None = None
    """What each span attends to; None: only itself."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Return the spans of whole sequences."""
        starts_S1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(starts_S1=starts_S1, longest=max(lengths))


def choose(model: PreTrainedModel, name: str) -> None:
    """Set the attention of `model`, if the model allows it."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def packed_hidden(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, spans: Spans) -> Tensor:
    """Return the last hidden states of packed sequences.

    Other attention functions find the sequences by their positions, from which transformers makes a mask; they cannot
    share prompts.

    Shapes: [T], [T] -> [T, H].
    """
    hidden_1TH: Tensor = (
        model.get_decoder()(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            **_boundaries(model, spans),
        )
        .last_hidden_state
    )  # fmt: skip
    return hidden_1TH[0]


def _boundaries(model: PreTrainedModel, spans: Spans) -> dict[str, Any]:
    if model.config._attn_implementation != NAME:
        assert spans.seen is None, "only Bridge's attention can share a prompt"
        return {}
    return {
        "cu_seq_lens_q": spans.starts_S1, "cu_seq_lens_k": spans.starts_S1,
        "max_length_q": spans.longest, "max_length_k": spans.longest, "seen": spans.seen,
    }  # fmt: skip


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    seen: Seen | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence, with transformers' signature; without boundaries, each row is one sequence.

    Shapes: [1, A, T, D], [1, K, T, D] x 2 -> [1, T, A, D].

    Raises:
        UnsupportedModelError: the layer needs what this attention does not support.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and position_bias is None and not dropout and causal
    if not plain or query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(
            f"the attention of {type(module).__name__} needs a mask, a bias, a cache, dropout or future tokens",
            remedy="train another model, or report this one",
        )
    rule = Rule(scale=scaling, window=sliding_window, cap=softcap, sinks_A=s_aux)
    if cu_seq_lens_q is None or max_length_q is None:
        return dense_attention.in_rows(query, key, value, rule=rule).transpose(1, 2), None
    q_TAD, k_UKD, v_UKD = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    starts, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    if seen is not None:
        k_UKD, v_UKD = _gathered(k_UKD, seen.keys_U), _gathered(v_UKD, seen.keys_U)
        starts, longest = (cu_seq_lens_q, seen.starts_S1), (max_length_q, seen.longest)
    if _fits_kernel(q_TAD, v_UKD, rule):
        return _kernel(q_TAD, k_UKD, v_UKD, starts, longest, rule).unsqueeze(0), None
    return dense_attention.by_blocks(q_TAD, k_UKD, v_UKD, starts, rule).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def _gathered(x_TKD: Tensor, keys_U: Tensor) -> Tensor:
    """Return the keys or values of all spans; in float32, in which the gradients of all completions then add up."""
    return x_TKD.float().index_select(0, keys_U).to(x_TKD.dtype)


def _fits_kernel(q_TAD: Tensor, v_UKD: Tensor, rule: Rule) -> bool:
    size = q_TAD.shape[-1]
    is_half = q_TAD.is_cuda and q_TAD.dtype in (torch.bfloat16, torch.float16)
    is_plain = rule.cap is None and rule.sinks_A is None
    return is_half and is_plain and size == v_UKD.shape[-1] and size <= KERNEL_HEAD_SIZE and size % 8 == 0


def _kernel(
    q_TAD: Tensor, k_UKD: Tensor, v_UKD: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int], rule: Rule
) -> Tensor:
    options: dict[str, Any] = {"window_size": (-1 if rule.window is None else rule.window - 1, 0)}
    if _GROUPS_HEADS:
        options["enable_gqa"] = True
    else:
        groups = q_TAD.shape[1] // k_UKD.shape[1]
        k_UKD, v_UKD = k_UKD.repeat_interleave(groups, dim=1), v_UKD.repeat_interleave(groups, dim=1)
    output_TAD = varlen_attn(q_TAD, k_UKD, v_UKD, *starts, *longest, scale=rule.scale, **options)
    assert isinstance(output_TAD, Tensor), "only the output was requested"
    return output_TAD
