"""Causal attention over packed sequences: tokens attend within their sequence, without a mask of tokens x tokens.

It is registered with transformers as `NAME`, for every model that looks up its attention in that registry. The
boundaries of the sequences are keyword arguments of the decoder's call (transformers' `FlashAttentionKwargs`, and
`seen`), so that recomputed and compiled layers receive them, too.

Completions may share their prompt: it is computed once, and each completion attends to the prompt's keys and values
before its own. Everything except attention treats each token independently and needs no change.

Where the variable-length kernel does not apply (the CPU, float32, capped scores, attention sinks), attention is
computed in blocks of rows, exactly and on any device.

Not covered: how an attention is chosen and checked (`preparation.py`), and its kernels (`kernels.py`).
Shape suffixes: S spans, S1 spans + 1, T tokens of all spans, U keys of all spans (span after span), L tokens of the
longest span of a block, M most keys of a span of that block, A attention heads, K key-value heads (A is a multiple of
K), X either kind of heads, D head size, H hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge.errors import UnsupportedModelError
from bridge.passes import kernels

NAME = "bridge_packed"
"""The name in transformers' registry. Masks have a separate registry; a name that is missing there gets no mask."""
KERNEL_HEAD_SIZE = 256
"""Largest head size that the kernel supports."""
LEAST_FILLED = 0.7
"""The shortest sequence in a block has at least this share of the longest one's keys."""
ENOUGH = 16
"""A block with this many sequences ends where the length changes next, since equal lengths need no padding."""

Span = tuple[int, int]
"""Number of tokens, and number of keys: the span's own tokens and the ones before it that it attends to."""


class Attended(NamedTuple):
    """The keys that packed spans attend to if they share prompts; one object, which a model cannot pass on in part."""

    keys_U: Tensor
    """int64: indices in T."""
    starts_S1: Tensor
    """int32: where each span's keys begin in U, then U itself."""
    longest: int
    """The largest number of keys of a span."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Consecutive runs of tokens: a whole sequence, a shared prompt, or one of its completions.

    A span attends causally to itself, and a completion also to its prompt: a span's own tokens are its last keys.
    """

    starts_S1: Tensor
    """int32: where each span begins in T, then T itself, as variable-length attention takes them."""
    longest: int
    """Tokens of the longest span."""
    seen: Attended | None = None
    """The keys of each span, earlier spans included; None: each span attends only to itself."""


class Rule(NamedTuple):
    """Parameters of a layer's attention."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    window: int | None = None
    """How many tokens a token attends to, itself included; None: all preceding ones."""
    cap: float | None = None
    """c in c * tanh(score / c), as in Gemma 2."""
    sinks_A: Tensor | None = None
    """Score of an extra token that has no value and that all tokens attend to, as in gpt-oss."""


def choose(model: PreTrainedModel, name: str) -> None:
    """Set the attention of `model`'s decoder, if the decoder lets its attention be set."""
    decoder = model.get_decoder()
    if decoder._can_set_attn_implementation():
        decoder.set_attn_implementation(name)


def chosen(model: PreTrainedModel) -> str:
    """Return the name of the attention that `model`'s decoder uses."""
    return str(model.get_decoder().config._attn_implementation)


def boundaries(spans: Spans, slices: Any = None) -> dict[str, Any]:
    """Return the arguments that a decoder passes on to `attend`: the spans of a full pack, and its slicing."""
    return {
        "cu_seq_lens_q": spans.starts_S1, "cu_seq_lens_k": spans.starts_S1,
        "max_length_q": spans.longest, "max_length_k": spans.longest, "seen": spans.seen, "slices": slices,
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
    seen: Attended | None = None,
    slices: Any = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence, with transformers' signature; without boundaries, each row is one sequence.

    With `slices`, this rank's heads attend over the full pack.
    Shapes: [1, A, T, D], [1, K, T, D] x 2 -> [1, T, A, D].
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and position_bias is None and not dropout and causal
    if not plain or query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(
            f"the attention of {type(module).__name__} needs a mask, a bias, a cache, dropout or future tokens",
            hint="train another model, or report this one",
        )
    rule = Rule(scale=scaling, window=sliding_window, cap=softcap, sinks_A=s_aux)
    if cu_seq_lens_q is None or max_length_q is None:
        return in_rows(query, key, value, rule=rule).transpose(1, 2), None
    spans = cu_seq_lens_q, max_length_q, seen
    if slices is None:
        return _in_spans(query, key, value, rule, *spans), None
    query, key, value = slices.to_heads(query, key, value)
    rule = rule if s_aux is None else rule._replace(sinks_A=slices.own_heads(s_aux))
    return slices.to_tokens(_in_spans(query, key, value, rule, *spans)), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def _in_spans(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, starts_S1: Tensor, most: int, seen: Attended | None
) -> Tensor:
    """Attend within a pack's spans of at most `most` tokens: [1, A, T, D], [1, K, T, D] x 2 -> [1, T, A, D]."""
    if starts_S1.shape[0] == 2 and (seen is None or seen.longest == most) and _fits_one(query, value, rule):
        return kernels.by_cudnn(query, key, value, rule.scale).transpose(1, 2)
    q_TAD, k_UKD, v_UKD = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    starts = (starts_S1, starts_S1)
    longest = (most, most)
    if seen is not None:
        k_UKD = _gathered(k_UKD, seen.keys_U)
        v_UKD = _gathered(v_UKD, seen.keys_U)
        starts = (starts_S1, seen.starts_S1)
        longest = (most, seen.longest)
    if _fits_kernel(q_TAD, v_UKD, rule):
        packed = kernels.by_varlen(q_TAD, k_UKD, v_UKD, starts, longest, scale=rule.scale, window=rule.window)
        return packed.unsqueeze(0)
    return by_blocks(q_TAD, k_UKD, v_UKD, starts, rule).unsqueeze(0)  # type: ignore[no-any-return]


def _gathered(x_TKD: Tensor, keys_U: Tensor) -> Tensor:
    """Return the keys or values of all spans. The gradients of completions that share a prompt add up in float32."""
    return x_TKD.float().index_select(0, keys_U).to(x_TKD.dtype)


def _fits_kernel(q_TAD: Tensor, v_UKD: Tensor, rule: Rule) -> bool:
    size = q_TAD.shape[-1]
    is_half = q_TAD.is_cuda and q_TAD.dtype in (torch.bfloat16, torch.float16)
    is_plain = rule.cap is None and rule.sinks_A is None
    fits = size == v_UKD.shape[-1] and size <= KERNEL_HEAD_SIZE and size % 8 == 0
    return is_half and is_plain and fits


def _fits_one(query: Tensor, value: Tensor, rule: Rule) -> bool:
    """Whether the kernel for one long sequence applies: [1, A, T, D], [1, K, T, D]."""
    num_tokens, size = query.shape[2:]
    sees_all = rule.window is None or rule.window >= num_tokens
    return kernels.is_long(num_tokens, size) and sees_all and _fits_kernel(query[0], value[0], rule)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_blocks(q_TAD: Tensor, k_UKD: Tensor, v_UKD: Tensor, starts: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
    """Attend in blocks of neighboring spans of similar length; a pack is sorted by the lengths of its sequences.

    Shapes: [T, A, D], [U, K, D] x 2, [S + 1] x 2 (of T, of U) -> [T, A, D].
    """
    num_queries, num_keys = ([end - start for start, end in pairwise(starts_S1.tolist())] for starts_S1 in starts)
    blocks = list(similar(zip(num_queries, num_keys, strict=True)))
    queries, keys = ([sum(span[side] for span in block) for block in blocks] for side in (0, 1))
    parts = zip(blocks, q_TAD.split(queries), k_UKD.split(keys), v_UKD.split(keys), strict=True)
    return torch.cat([_block(*part, rule) for part in parts])


def similar(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Divide consecutive spans into blocks: many spans with the same number of keys, or a few with similar numbers."""
    block: list[Span] = []
    shortest = longest = 0
    for span in spans:
        shortest, longest = (min(shortest, span[1]), max(longest, span[1])) if block else (span[1], span[1])
        if block and (shortest < LEAST_FILLED * longest or (len(block) >= ENOUGH and span != block[-1])):
            yield block
            block = []
            shortest = span[1]
            longest = span[1]
        block.append(span)
    yield block


def _block(spans: Sequence[Span], q_TAD: Tensor, k_UKD: Tensor, v_UKD: Tensor, rule: Rule) -> Tensor:
    """Attend in rows as long as the block's longest span. Spans do not attend to the padding that follows them."""
    queries, keys = (Rows([span[side] for span in spans], q_TAD.device) for side in (0, 1))
    seen = None
    if any(span != spans[0] for span in spans) and any(few < many for few, many in spans):
        before_S1 = keys.lengths_S1 - queries.lengths_S1
        last_SL = torch.minimum(before_S1 + queries.within_1L, keys.lengths_S1 - 1)  # a padding row needs a key
        seen = _up_to(last_SL, keys.num_columns, rule).unsqueeze(1)
    rows = queries.of(q_TAD), keys.of(k_UKD), keys.of(v_UKD)
    return queries.back(in_rows(*rows, rule=rule, seen_SLM=seen))


class Rows:
    """Spans of different lengths as rows of one length."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.num_columns = max(lengths)
        self.lengths_S1 = torch.tensor(lengths, device=device).unsqueeze(1)
        self.within_1L = torch.arange(self.num_columns, device=device).unsqueeze(0)
        self._shape = len(lengths), self.num_columns
        self._is_full = min(lengths) == self.num_columns

    def of(self, x_TXD: Tensor) -> Tensor:
        """Return [S, X, L, D]; a short row is padded with its last token."""
        if not self._is_full:
            firsts_S1 = self.lengths_S1.cumsum(0) - self.lengths_S1
            places_SL = firsts_S1 + torch.minimum(self.within_1L, self.lengths_S1 - 1)
            x_TXD = x_TXD.index_select(0, places_SL.flatten())
        rows_SLXD: Tensor = x_TXD.unflatten(0, self._shape)
        return rows_SLXD.transpose(1, 2)

    def back(self, x_SXLD: Tensor) -> Tensor:
        """Return [T, X, D], without the padding."""
        x_TXD = x_SXLD.transpose(1, 2).flatten(0, 1)
        if self._is_full:
            return x_TXD
        kept = (self.within_1L < self.lengths_S1).flatten().nonzero().squeeze(1)
        return x_TXD.index_select(0, kept)


def in_rows(q_SALD: Tensor, k_SKMD: Tensor, v_SKMD: Tensor, *, rule: Rule, seen_SLM: Tensor | None = None) -> Tensor:
    """Attend causally in each row; on the CPU in float32, since bf16 kernels take ten times as long there.

    The queries are the last tokens of their rows, unless `seen_SLM` marks the keys that each query attends to.

    Shapes: [S, A, L, D], [S, K, M, D] x 2, [S, 1, L, M] bool -> [S, A, L, D].
    """
    if not q_SALD.is_cuda and q_SALD.dtype != torch.float32:
        rows = (x_SXLD.float() for x_SXLD in (q_SALD, k_SKMD, v_SKMD))
        return in_rows(*rows, rule=rule, seen_SLM=seen_SLM).to(q_SALD.dtype)
    groups = q_SALD.shape[1] // k_SKMD.shape[1]
    num_queries = q_SALD.shape[2]
    num_keys = k_SKMD.shape[2]
    is_eager = rule.cap is not None or rule.sinks_A is not None
    is_whole = seen_SLM is None and num_queries == num_keys and (rule.window is None or rule.window >= num_keys)
    if seen_SLM is None and (is_eager or not is_whole):
        last_L = torch.arange(num_keys - num_queries, num_keys, device=q_SALD.device)
        seen_SLM = _up_to(last_L, num_keys, rule)
    if is_eager:
        assert seen_SLM is not None
        k_SAMD, v_SAMD = (x_SKMD.repeat_interleave(groups, dim=1) for x_SKMD in (k_SKMD, v_SKMD))
        return _eager(q_SALD, k_SAMD, v_SAMD, seen_SLM, rule)
    return scaled_dot_product_attention(
        q_SALD, k_SKMD, v_SKMD, attn_mask=seen_SLM, is_causal=is_whole, scale=rule.scale, enable_gqa=groups > 1
    )


def _eager(q_SALD: Tensor, k_SAMD: Tensor, v_SAMD: Tensor, seen_SLM: Tensor, rule: Rule) -> Tensor:
    scale = q_SALD.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores_SALM = (q_SALD @ k_SAMD.transpose(2, 3)).float() * scale
    if rule.cap is not None:
        scores_SALM = rule.cap * torch.tanh(scores_SALM / rule.cap)
    scores_SALM = scores_SALM.masked_fill(~seen_SLM, -torch.inf)
    if rule.sinks_A is None:
        return scores_SALM.softmax(-1).to(v_SAMD.dtype) @ v_SAMD
    sinks_SAL1 = rule.sinks_A.float().reshape(1, -1, 1, 1).expand(*scores_SALM.shape[:3], 1)
    return torch.cat([scores_SALM, sinks_SAL1], dim=-1).softmax(-1)[..., :-1].to(v_SAMD.dtype) @ v_SAMD


def _up_to(last_L: Tensor, num_keys: int, rule: Rule) -> Tensor:
    """Mark the keys that each token attends to, given the last one: [..., L] -> [..., L, M]."""
    keys_M = torch.arange(num_keys, device=last_L.device)
    seen_LM = keys_M <= last_L.unsqueeze(-1)
    return seen_LM if rule.window is None else seen_LM & (keys_M > last_L.unsqueeze(-1) - rule.window)
