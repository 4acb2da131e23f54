"""Micro-batches: from groups and advantages to padded tensors of bounded size.

Not covered: packing without padding, and the model's forward pass (`logprobs.py`).
Shape suffixes: G groups, N completions of a group, B sequences, T tokens of the longest one.

Alignment, for a prompt `p p p` with completion `a b` in a row padded to six tokens:

    t                    0  1  2  3  4  5
    tokens_BT            p  p  p  a  b  -
    attention_mask_BT    1  1  1  1  1  0
    mask_BT              0  0  1  1  0  0     position t predicts token t + 1, so the last column is always 0
    sampled_logprobs_BT  0  0  a  b  0  0     the server's log-probability of token t + 1
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bridge.types import Completion, Group


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward and backward pass holds."""

    tokens_BT: Tensor
    """int64: prompt, completion, then padding."""
    attention_mask_BT: Tensor
    """bool: True where there is a token."""
    mask_BT: Tensor
    """bool: True where token t + 1 was sampled."""
    sampled_logprobs_BT: Tensor
    """float32, nats: the server's log-probability of token t + 1 where `mask_BT`, 0 elsewhere."""
    advantages_B: Tensor
    """float32: one advantage per sequence."""


def count_tokens(groups: Sequence[Group]) -> int:
    """Return the sampled tokens of all completions, the `num_tokens` of `grpo.clipped_loss`.

    Completions with a zero advantage count too, though `micro_batches` leaves them out: the loss is then the one that
    a pass over everything gives, and a batch with few useful groups takes a smaller step, not a steeper one.
    """
    return sum(len(completion.token_ids) for group in groups for completion in group.completions)


def micro_batches(
    groups: Sequence[Group], advantages_GN: Tensor, *, max_tokens: int, pad_token_id: int, device: torch.device
) -> list[MicroBatch]:
    """Cut the batch into micro-batches of at most `max_tokens` padded tokens, longest sequences first.

    Sequences without a sampled token or with a zero advantage have no gradient and are left out; the list is empty
    when that leaves none. A sequence longer than `max_tokens` gets a micro-batch of its own. The result does
    not depend on the order of groups and completions. (Longest first: what does not fit in memory fails at once.)
    """
    sequences = sorted(_sequences(groups, advantages_GN), key=_order, reverse=True)
    return [_pad(rows, pad_token_id, device) for rows in _cut(sequences, max_tokens)]


class _Sequence(NamedTuple):
    prompt: tuple[int, ...]
    completion: Completion
    advantage: float

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.completion.token_ids


def _order(sequence: _Sequence) -> tuple[object, ...]:
    """Order by length, and by everything else that is trained on, so that no tie is left to the order of arrival."""
    return len(sequence.tokens), sequence.tokens, sequence.completion.logprobs, sequence.advantage


def _sequences(groups: Sequence[Group], advantages_GN: Tensor) -> Iterator[_Sequence]:
    assert len(groups) == len(advantages_GN), (len(groups), advantages_GN.shape)
    for group, advantages in zip(groups, advantages_GN.tolist(), strict=True):
        assert group.prompt_token_ids, "a prompt without tokens: nothing predicts the first sampled one"
        for completion, advantage in zip(group.completions, advantages, strict=True):
            assert len(completion.token_ids) == len(completion.logprobs), (completion.token_ids, completion.logprobs)
            if completion.token_ids and advantage != 0:
                yield _Sequence(group.prompt_token_ids, completion, advantage)


def _cut(sequences: Sequence[_Sequence], max_tokens: int) -> Iterator[list[_Sequence]]:
    start = 0
    while start < len(sequences):  # the first of a micro-batch is its longest
        num_rows = max(1, max_tokens // len(sequences[start].tokens))
        yield list(sequences[start : start + num_rows])
        start += num_rows


def _pad(rows: Sequence[_Sequence], pad_token_id: int, device: torch.device) -> MicroBatch:
    shape = len(rows), len(rows[0].tokens)
    tokens_BT = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask_BT, mask_BT = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    sampled_logprobs_BT = torch.zeros(shape, dtype=torch.float32)
    for row, sequence in enumerate(rows):
        end = len(sequence.tokens)
        sampled = slice(len(sequence.prompt) - 1, end - 1)
        tokens_BT[row, :end] = torch.tensor(sequence.tokens)
        attention_mask_BT[row, :end] = True
        mask_BT[row, sampled] = True
        sampled_logprobs_BT[row, sampled] = torch.tensor(sequence.completion.logprobs)
    return MicroBatch(
        tokens_BT=tokens_BT.to(device),
        attention_mask_BT=attention_mask_BT.to(device),
        mask_BT=mask_BT.to(device),
        sampled_logprobs_BT=sampled_logprobs_BT.to(device),
        advantages_B=torch.tensor([sequence.advantage for sequence in rows], dtype=torch.float32, device=device),
    )
