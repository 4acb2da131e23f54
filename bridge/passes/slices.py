"""Context parallelism: a pack is cut into slices of consecutive tokens, one slice per rank of a group.

Everything except attention treats each token independently. Attention needs full sequences, but treats each head
independently: before attention the ranks exchange all heads of a slice for some heads of all tokens, and afterwards
they exchange them back. A pack's gradient is the sum over these ranks; the optimizer sums it as it does for replicas.

Each rank computes the log-probabilities of its own tokens and receives those of all others, so that every rank has the
full pack's and computes its loss. In the backward pass each rank uses the gradient of its own tokens.

Not covered: attention itself (`attention.py`), checking a model (`parallel_proof.py`).
Source: the exchange as in DeepSpeed-Ulysses (arXiv 2309.14509).
Shape suffixes: C slices, T tokens of the pack, L tokens of a slice, N rows of the pack, M rows in this rank's slice, A
attention heads, K key-value heads or targets of a row, X any dimensions, D head size, H hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes.attention import Attended, Spans
from bridge.passes.logprobs import Scores
from bridge.passes.packing import MicroBatch
from bridge.passes.recurrence import is_stateful
from bridge.ranks.world import Ranks

gather: Callable[..., Any] = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
"""The functional all-gather, which torch 2.13 renamed."""
HINT = "leave out --context-parallel-size"


class Slices(NamedTuple):
    """The number of slices that packs are cut into, and this rank's slice.

    The last sequence of a pack is padded so that all slices have the same length; no other token attends to the
    padding.
    """

    group: str
    """The name of the ranks' process group."""
    is_own: tuple[bool, ...]
    """One-hot index of this rank's slice; a tuple, because torch.compile would specialize on an int."""

    @property
    def size(self) -> int:
        """Return the number of slices, C."""
        return len(self.is_own)

    @property
    def rank(self) -> int:
        """Return the index of this rank's slice."""
        return self.is_own.index(True)

    def length(self, num_tokens: int) -> int:
        """Return the number of tokens in each slice (L), given T in total."""
        return -(-num_tokens // self.size)

    def own(self, x_TX: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's slice, padded with zeros: [T, ...] -> [L, ...], along the dimension `dim`."""
        length = self.length(x_TX.shape[dim])
        return _padded(x_TX, self.size * length, dim).narrow(dim, self.rank * length, length)

    def padded(self, spans: Spans, num_tokens: int) -> Spans:
        """Return the spans of a pack, the last one extended by the padding."""
        lacking = self.size * self.length(num_tokens) - num_tokens
        if not lacking:
            return spans
        seen = spans.seen
        starts_S1 = _longer(spans.starts_S1, lacking)
        if seen is not None:
            keys_U = torch.cat([seen.keys_U, torch.arange(num_tokens, num_tokens + lacking, device=starts_S1.device)])
            seen = Attended(keys_U, _longer(seen.starts_S1, lacking), seen.longest + lacking)
        return Spans(starts_S1=starts_S1, longest=spans.longest + lacking, seen=seen)

    def joined(self, own_LX: Tensor, num_tokens: int) -> Tensor:
        """Gather the tokens of all slices: [L, ...] -> [T, ...]; backward takes this rank's slice of the gradient."""
        return _joined(own_LX, self)[:num_tokens]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's query heads for all tokens, and the key-value heads that they need.

        Key-value heads are repeated if they do not divide evenly.
        Shapes: [1, A, L, D], [1, K, L, D] x 2 -> [1, A / C, T, D], [1, some, T, D] x 2.
        """
        num_heads = query.shape[1]
        num_pairs = key.shape[1]
        together = num_heads // num_pairs  # query heads per key-value head
        repeats = together // math.gcd(together, num_heads // self.size)
        if repeats > 1:
            key, value = (x_1KLD.repeat_interleave(repeats, dim=1) for x_1KLD in (key, value))
        own_query, own_key, own_value = map(self._of_own_heads, (query, key, value))
        return own_query, own_key, own_value

    def own_heads(self, of_heads_A: Tensor) -> Tensor:
        """Select the values of this rank's heads from one value per head: [A] -> [A / C]."""
        return of_heads_A.chunk(self.size)[self.rank]

    def to_tokens(self, output_1TAD: Tensor) -> Tensor:
        """Exchange this rank's heads of all tokens for all heads of its own: [1, T, A / C, D] -> [1, L, A, D]."""
        received_CLAD = _exchanged(output_1TAD[0].unflatten(0, (self.size, -1)), self.group)
        return received_CLAD.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _of_own_heads(self, x_1XLD: Tensor) -> Tensor:
        by_rank_CLXD = x_1XLD[0].unflatten(0, (self.size, -1)).transpose(1, 2)
        x_TXD = _exchanged(by_rank_CLXD, self.group).flatten(0, 1)
        return x_TXD.transpose(0, 1).unsqueeze(0)


class Rows:
    """The rows of a sliced pack (positions that predict a sampled token), grouped by slice."""

    def __init__(self, slices: Slices, batch: MicroBatch) -> None:
        """Group the rows; this waits for the device."""
        self._slices = slices
        length = slices.length(len(batch.tokens_T))
        slices_N = batch.rows_N // length
        self._counts: list[int] = slices_N.bincount(minlength=slices.size).tolist()
        self._order_N = slices_N.argsort(stable=True)
        self.own_M = self._order_N.split(self._counts)[slices.rank]
        """Indices of this rank's rows among all rows."""
        own = batch.of_rows(self.own_M)
        self.own = replace(own, rows_N=own.rows_N - slices.rank * length)
        """The pack with only the rows of this rank's slice, as indices in that slice."""

    def joined(self, of_own_MX: Tensor) -> Tensor:
        """Return the values of all ranks' rows: [M, X] -> [N, X].

        All ranks compute the same loss from the result, so in the backward pass each uses the gradient of its own rows.
        """
        most = max(self._counts)
        by_rank = zip(_joined(_padded(of_own_MX, most, 0), self._slices).split(most), self._counts, strict=True)
        return torch.cat([of_rank[:count] for of_rank, count in by_rank])[self._order_N.argsort()]

    def of_all(self, scores: Scores) -> Scores:
        """Return the scores of all ranks' rows, given those of this rank's; all in one exchange."""
        logprobs_MX, entropies_M, divergences_M = scores
        columns = [
            logprobs_MX if logprobs_MX.dim() > 1 else logprobs_MX.unsqueeze(1),
            entropies_M.unsqueeze(1),
            *([] if divergences_M is None else [divergences_M.unsqueeze(1)]),
        ]
        logprobs_NX, entropies_N1, *more = self.joined(torch.cat(columns, dim=1)).split(
            [column.shape[1] for column in columns], dim=1
        )
        entropies_N = entropies_N1[:, 0]
        return Scores(
            logprobs_NX if logprobs_MX.dim() > 1 else logprobs_NX[:, 0],
            entropies_N if entropies_M.requires_grad else entropies_N.detach(),
            more[0][:, 0] if more else None,
        )


def cut(model: PreTrainedModel, group: Ranks) -> Slices:
    """Return how the packs of `model` are sliced among the ranks of `group`, which all compute the same packs.

    Raises:
        UnsupportedModelError: the attention heads cannot be divided evenly, or a layer carries a state from token to
            token.
    """
    num_heads = model.config.get_text_config().num_attention_heads
    name = type(model).__name__
    if num_heads % group.world_size:
        raise UnsupportedModelError(
            f"--context-parallel-size {group.world_size} does not divide the {num_heads} attention heads of {name}",
            hint=HINT,
        )
    if any(map(is_stateful, model.get_decoder().modules())):
        raise UnsupportedModelError(
            f"{name} carries a state from token to token, which --context-parallel-size does not support", hint=HINT
        )
    is_own = tuple(number == group.rank for number in range(group.world_size))
    return Slices(group.process_group.group_name, is_own)


def _longer(starts_S1: Tensor, lacking: int) -> Tensor:
    """Return the starts of spans, with `lacking` tokens added to the last span."""
    return torch.cat([starts_S1[:-1], starts_S1[-1:] + lacking])


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    """Pad the tensor with zeros to `size` elements along `dim`."""
    lacking = size - x.shape[dim]
    return functional.pad(x, (0, 0) * (x.dim() - dim - 1) + (0, lacking)) if lacking else x


def _exchanged(blocks_CX: Tensor, group: str) -> Tensor:
    """Send each rank its block, and return the blocks that this rank received."""
    received: Tensor = _Exchange.apply(blocks_CX, group)  # type: ignore[no-untyped-call]
    return received


def _joined(own_LX: Tensor, slices: Slices) -> Tensor:
    """Concatenate the tensors of all ranks, which have the same shape."""
    received: Tensor = _Join.apply(own_LX, slices)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """Exchanges blocks; a block's gradient is on the rank that received it, so backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, blocks_CX: Tensor, group: str) -> Tensor:
        ctx.group = group
        received: Tensor = collectives.all_to_all_single(blocks_CX.contiguous(), None, None, group)  # type: ignore[arg-type]
        done: Tensor = collectives.wait_tensor(received)
        return done

    @staticmethod
    def backward(ctx: Any, gradient_CX: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient_CX, ctx.group), None


class _Join(torch.autograd.Function):
    """Gathers tensors. All ranks compute the same values from the result, so backward returns this rank's part."""

    @staticmethod
    def forward(ctx: Any, own_LX: Tensor, slices: Slices) -> Tensor:
        done: Tensor = collectives.wait_tensor(gather(own_LX.contiguous(), 0, slices.group))
        ctx.rank = slices.rank
        ctx.length = len(own_LX)
        return done

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(0, ctx.rank * ctx.length, ctx.length), None
