"""Micro-batches: samples packed behind one another, without padding, up to a bounded number of tokens.

Not covered: the bound (`budget.py`), attention that keeps them apart (`attention.py`), the loss (`bridge/loss`).
Shape suffixes: S sequences, S1 one more, T tokens of all of them, N rows (positions that predict a sampled token).

Alignment, for a prompt `p p p` with completion `a b`, and a prompt `q` with completion `c`:

    t            0  1  2  3  4 | 5  6
    tokens_T     p  p  p  a  b | q  c
    positions_T  0  1  2  3  4 | 0  1
    rows_N             2  3      5          position t predicts token t + 1
    targets_N          a  b      c
    sequences_N        0  0      1
    starts_S1    0               5      7   the last one is T

A token of a completion that was not sampled, such as a tool's answer, is in tokens_T and has no row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise

import torch
from torch import Tensor

from bridge.passes.samples import Sample


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences behind one another: what one forward and backward pass holds."""

    tokens_T: Tensor
    """int64: prompt, completion, prompt, completion, ..."""
    positions_T: Tensor
    """int64: 0, 1, 2, ... from each sequence's first token."""
    starts_S1: Tensor
    """int32: where each sequence begins in T, and T itself: what variable-length attention takes."""
    ends_S: tuple[int, ...]
    """Where each sequence ends in T, on the host."""
    rows_N: Tensor
    """int64: positions of T that predict a sampled token, ascending."""
    targets_N: Tensor
    """int64: the token that was sampled there."""
    sequences_N: Tensor
    """int64: 0 to S - 1, the sequence that a row is of."""
    sampled_logprobs_N: Tensor
    """float32, nats: where it was sampled; not a number where unknown."""
    advantages_N: Tensor
    """float32."""
    weights_N: Tensor
    """float32: factor of the row's term in the loss, which is their sum."""

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return self.ends_S[-1]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence."""
        return max(end - start for start, end in pairwise((0, *self.ends_S)))


def packs(samples: Sequence[Sample], *, max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Pack the samples into as few micro-batches of at most `max_tokens` as first-fit decreasing finds.

    A sample longer than `max_tokens` gets a micro-batch of its own. The longest come first, so that what does not
    fit in memory fails at once. The result does not depend on the order of the samples.
    """
    bins: list[list[Sample]] = []
    free: list[int] = []
    for sample in sorted(samples, key=_order, reverse=True):
        index = next((index for index, room in enumerate(free) if room >= sample.num_tokens), len(bins))
        if index == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[index].append(sample)
        free[index] -= sample.num_tokens
    return _move([_lay_out(packed) for packed in bins], device)


def _order(sample: Sample) -> tuple[object, ...]:
    """Order by length, and by everything else that is trained on, so that no tie is left to the order of arrival."""
    tokens = sample.prompt_token_ids, sample.token_ids, sample.sampled or ()
    known = sample.sampled_logprobs
    if math.isnan(sum(known)):  # one of them is, and has no order
        known = tuple(0.0 if math.isnan(value) else value for value in known)
    return sample.num_tokens, *tokens, known, sample.advantages, sample.weight


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """One micro-batch on the host: all of its integers behind one another, and all of its floats."""

    ends: tuple[int, ...]
    integers: Tensor
    floats: Tensor
    num_rows: int


def _lay_out(samples: Sequence[Sample]) -> _Layout:
    for sample in samples:
        assert sample.prompt_token_ids, "a prompt without tokens: nothing predicts the first sampled one"
        num_sampled = len(sample.token_ids) if sample.sampled is None else sum(sample.sampled)
        counts = {num_sampled, len(sample.sampled_logprobs), len(sample.advantages)}
        assert len(counts) == 1, counts
        assert sample.sampled is None or len(sample.sampled) == len(sample.token_ids), sample.sampled
    ends = tuple(accumulate(sample.num_tokens for sample in samples))
    starts = 0, *ends[:-1]
    integers = [
        _joined(samples, lambda sample: sample.prompt_token_ids + sample.token_ids),
        _joined(samples, lambda sample: range(sample.num_tokens)),
        torch.tensor((0, *ends)),
        torch.cat([_rows(sample, start) for sample, start in zip(samples, starts, strict=True)]),
        _joined(samples, _targets),
        torch.arange(len(samples)).repeat_interleave(torch.tensor([sample.num_trained for sample in samples])),
    ]
    floats = [
        _joined(samples, lambda sample: sample.sampled_logprobs, torch.float32),
        _joined(samples, lambda sample: sample.advantages, torch.float32),
        _joined(samples, lambda sample: (sample.weight,) * sample.num_trained, torch.float32),
    ]
    return _Layout(ends=ends, integers=torch.cat(integers), floats=torch.cat(floats), num_rows=len(floats[0]))


def _joined(
    samples: Sequence[Sample], values: Callable[[Sample], Sequence[float]], dtype: torch.dtype = torch.int64
) -> Tensor:
    return torch.tensor([value for sample in samples for value in values(sample)], dtype=dtype)


def _rows(sample: Sample, start: int) -> Tensor:
    first = start + len(sample.prompt_token_ids) - 1
    rows = torch.arange(first, first + len(sample.token_ids))
    return rows if sample.sampled is None else rows[torch.tensor(sample.sampled)]


def _targets(sample: Sample) -> Sequence[int]:
    return sample.token_ids if sample.sampled is None else tuple(compress(sample.token_ids, sample.sampled))


def _move(layouts: Sequence[_Layout], device: torch.device) -> list[MicroBatch]:
    """Copy all micro-batches to the device at once, and cut them there."""
    if not layouts:
        return []
    integers = _copy(torch.cat([layout.integers for layout in layouts]), device)
    floats = _copy(torch.cat([layout.floats for layout in layouts]), device)
    parts = zip(
        layouts,
        integers.split([len(layout.integers) for layout in layouts]),
        floats.split([len(layout.floats) for layout in layouts]),
        strict=True,
    )
    return [_cut(*part) for part in parts]


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _cut(layout: _Layout, integers: Tensor, floats: Tensor) -> MicroBatch:
    num_tokens, num_starts, num_rows = layout.ends[-1], len(layout.ends) + 1, layout.num_rows
    sizes = [num_tokens, num_tokens, num_starts, num_rows, num_rows, num_rows]
    tokens_T, positions_T, starts_S1, rows_N, targets_N, sequences_N = integers.split(sizes)
    sampled_logprobs_N, advantages_N, weights_N = floats.split(num_rows)
    return MicroBatch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        starts_S1=starts_S1.int(),
        ends_S=layout.ends,
        rows_N=rows_N,
        targets_N=targets_N,
        sequences_N=sequences_N,
        sampled_logprobs_N=sampled_logprobs_N,
        advantages_N=advantages_N,
        weights_N=weights_N,
    )
