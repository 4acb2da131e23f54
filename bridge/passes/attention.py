"""Causal attention over packed sequences: each token sees its own sequence alone, and no tokens x tokens mask is made.

Registered with transformers under a name of our own, for any model that calls its attention through that registry.
Where a sequence begins travels as keyword arguments of the decoder's call (transformers' `FlashAttentionKwargs`, and
one of our own), so that what is recomputed under gradient checkpointing, and what is compiled, gets it too.

Completions of one prompt may share it: it is computed once, and each of them sees its keys and values before its own.
Everything but attention treats each token on its own, so that nothing else has to know.

Not covered: what the kernel lacks (`dense_attention.py`), choosing this attention for a model and checking the choice
(`preparation.py`), dropout inside attention.
Shape suffixes: S spans, S1 one more, T tokens of all of them, U tokens that each sees, span after span, A attention
heads, K key-value heads (A is a multiple of K), D size of a head, H hidden size.
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
"""The name in transformers' registry. Masks have a registry of their own; what is not in it gets none."""
KERNEL_HEAD_SIZE = 256
"""Largest head that the kernel takes."""
_KERNEL_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
"""Windows and grouped heads came to `varlen_attn` after torch 2.10."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Runs of tokens that lie behind one another, and which tokens each of them sees.

    A sequence is a span that sees itself. A prompt that is shared is one as well, and so is each of its completions,
    which sees the prompt and itself. A span is the end of what it sees, and sees it causally.
    """

    starts_S1: Tensor
    """int32: where each span begins in T, and T itself: what variable-length attention takes."""
    longest: int
    """Tokens of the longest span."""
    seen: "Seen | None" = None
    """What each span sees; None: itself alone."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Return the spans of whole sequences."""
        starts_S1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(starts_S1=starts_S1, longest=max(lengths))


class Seen(NamedTuple):
    """What each span sees where prompts are shared. One object: a model that loses it on its way loses all of it."""

    keys_U: Tensor
    """int64: places in T."""
    starts_S1: Tensor
    """int32: where what each span sees begins in U, and U itself."""
    longest: int
    """Most tokens that a span sees."""


def choose(model: PreTrainedModel, name: str) -> None:
    """Let `model` attend by what is registered as `name`, if it lets anybody choose."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def packed_hidden(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, spans: Spans) -> Tensor:
    """Return the last hidden states of packed sequences.

    Positions tell attention functions other than ours where sequences begin: transformers makes a mask of them. No
    shared prompt can be told that way.

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
        assert spans.seen is None, "a prompt is shared, and attention is not ours"
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
    """Attend within each sequence, as transformers calls it; a batch without boundaries is one sequence a row.

    Shapes: [1, A, T, D], [1, K, T, D] x 2 -> [1, T, A, D].

    Raises:
        UnsupportedModelError: the layer asks for what this attention has not.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and position_bias is None and not dropout and causal
    if not plain or query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(
            f"{type(module).__name__} wants a mask, a bias, a cache, dropout or future tokens in its attention",
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
    """Return what the spans see; in float32, so that the gradients of all completions add up in it."""
    return x_TKD.float().index_select(0, keys_U).to(x_TKD.dtype)


def _fits_kernel(q_TAD: Tensor, v_UKD: Tensor, rule: Rule) -> bool:
    size = q_TAD.shape[-1]
    return (
        q_TAD.is_cuda
        and q_TAD.dtype in (torch.bfloat16, torch.float16)
        and rule.cap is None
        and rule.sinks_A is None
        and size == v_UKD.shape[-1]
        and size <= KERNEL_HEAD_SIZE
        and size % 8 == 0
        and (rule.window is None or "window_size" in _KERNEL_OPTIONS)
    )


def _kernel(
    q_TAD: Tensor, k_UKD: Tensor, v_UKD: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int], rule: Rule
) -> Tensor:
    options: dict[str, Any] = {"scale": rule.scale}
    if "window_size" in _KERNEL_OPTIONS:
        options["window_size"] = (-1 if rule.window is None else rule.window - 1, 0)
    else:
        options["is_causal"] = True
    if "enable_gqa" in _KERNEL_OPTIONS:
        options["enable_gqa"] = True
    else:
        groups = q_TAD.shape[1] // k_UKD.shape[1]
        k_UKD, v_UKD = k_UKD.repeat_interleave(groups, dim=1), v_UKD.repeat_interleave(groups, dim=1)
    output_TAD = varlen_attn(q_TAD, k_UKD, v_UKD, *starts, *longest, **options)
    assert isinstance(output_TAD, Tensor), "nothing beside the output was asked for"
    return output_TAD
