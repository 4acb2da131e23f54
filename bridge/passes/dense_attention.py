"""Causal attention over packed sequences by blocks of rows: exact for whatever a layer asks, on any device.

What the kernel for variable lengths lacks is done here: the CPU, float32, caps on scores, attention sinks.

Not covered: the kernel (`attention.py`).
Shape suffixes: S sequences, S1 one more, T tokens of all of them, L tokens of the longest of a block, A attention
heads, K key-value heads (A is a multiple of K), X either, D size of a head.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LEAST_FILLED = 0.7
"""No sequence of a block is shorter than this share of the longest."""
ENOUGH = 16
"""Sequences after which a block ends where the next is of another length: those of equal lengths need no filling."""


class Rule(NamedTuple):
    """How a layer weighs the tokens before one."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    window: int | None = None
    """Tokens that one sees, itself included; None: all before it."""
    cap: float | None = None
    """c in c * tanh(score / c), as in Gemma 2."""
    sinks_A: Tensor | None = None
    """Score of a token that all see and that has no value, as in gpt-oss."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_blocks(q_TAD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts_S1: Tensor, rule: Rule) -> Tensor:
    """Attend by blocks of neighbours of similar length; a pack has its sequences in the order of their lengths.

    Shapes: [T, A, D], [T, K, D] x 2, [S + 1] -> [T, A, D].
    """
    lengths = list(_similar([end - start for start, end in pairwise(starts_S1.tolist())]))
    sizes = [sum(block) for block in lengths]
    parts = zip(lengths, q_TAD.split(sizes), k_TKD.split(sizes), v_TKD.split(sizes), strict=True)
    return torch.cat([_block(*part, rule) for part in parts])


def _similar(lengths: Iterable[int]) -> Iterator[list[int]]:
    """Cut the lengths into blocks: of equal ones, or of few that differ little."""
    block: list[int] = []
    shortest = longest = 0
    for length in lengths:
        shortest, longest = (min(shortest, length), max(longest, length)) if block else (length, length)
        if block and (shortest < LEAST_FILLED * longest or (len(block) >= ENOUGH and length != block[-1])):
            yield block
            block, shortest, longest = [], length, length
        block.append(length)
    yield block


def _block(lengths: Sequence[int], q_TAD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
    """Attend in rows as long as the longest; causally, what fills a row behind its sequence is seen by none of it."""
    shape = len(lengths), max(lengths)
    if len(q_TAD) == shape[0] * shape[1]:
        rows = (x_TXD.unflatten(0, shape).transpose(1, 2) for x_TXD in (q_TAD, k_TKD, v_TKD))
        return in_rows(*rows, rule=rule).transpose(1, 2).flatten(0, 1)
    lengths_S1 = torch.tensor(lengths, device=q_TAD.device).unsqueeze(1)
    within_1L = torch.arange(shape[1], device=q_TAD.device).unsqueeze(0)
    filled_SL = within_1L < lengths_S1
    places = (lengths_S1.cumsum(0) - lengths_S1 + torch.minimum(within_1L, lengths_S1 - 1)).flatten()
    rows = (x_TXD.index_select(0, places).unflatten(0, shape).transpose(1, 2) for x_TXD in (q_TAD, k_TKD, v_TKD))
    output = in_rows(*rows, rule=rule).transpose(1, 2).flatten(0, 1)
    return output.index_select(0, filled_SL.flatten().nonzero().squeeze(1))


def in_rows(q_SALD: Tensor, k_SKLD: Tensor, v_SKLD: Tensor, *, rule: Rule) -> Tensor:
    """Attend in each row on its own, causally; in float32 on the CPU, whose bf16 kernels take ten times as long.

    Shapes: [S, A, L, D], [S, K, L, D] x 2 -> [S, A, L, D].
    """
    if not q_SALD.is_cuda and q_SALD.dtype != torch.float32:
        rows = (x_SXLD.float() for x_SXLD in (q_SALD, k_SKLD, v_SKLD))
        return in_rows(*rows, rule=rule).to(q_SALD.dtype)
    groups = q_SALD.shape[1] // k_SKLD.shape[1]
    if rule.cap is not None or rule.sinks_A is not None:
        k_SALD, v_SALD = (x_SKLD.repeat_interleave(groups, dim=1) for x_SKLD in (k_SKLD, v_SKLD))
        return _spelt_out(q_SALD, k_SALD, v_SALD, rule)
    window = None if rule.window is None or rule.window >= q_SALD.shape[2] else _seen(q_SALD, rule)
    return scaled_dot_product_attention(
        q_SALD, k_SKLD, v_SKLD, attn_mask=window, is_causal=window is None, scale=rule.scale, enable_gqa=groups > 1
    )


def _spelt_out(q_SALD: Tensor, k_SALD: Tensor, v_SALD: Tensor, rule: Rule) -> Tensor:
    scale = q_SALD.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores_SALL = (q_SALD @ k_SALD.transpose(2, 3)).float() * scale
    if rule.cap is not None:
        scores_SALL = rule.cap * torch.tanh(scores_SALL / rule.cap)
    scores_SALL = scores_SALL.masked_fill(~_seen(q_SALD, rule), -torch.inf)
    if rule.sinks_A is None:
        return scores_SALL.softmax(-1).to(v_SALD.dtype) @ v_SALD
    sinks_SAL1 = rule.sinks_A.float().reshape(1, -1, 1, 1).expand(*scores_SALL.shape[:3], 1)
    return torch.cat([scores_SALL, sinks_SAL1], dim=-1).softmax(-1)[..., :-1].to(v_SALD.dtype) @ v_SALD


def _seen(q_SALD: Tensor, rule: Rule) -> Tensor:
    length = q_SALD.shape[2]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=q_SALD.device).tril()
    return causal_LL if rule.window is None else causal_LL.triu(1 - rule.window)
