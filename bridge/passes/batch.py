"""Micro-batches: samples behind one another, without padding, as tensors.

Not covered: which samples are put together (`packing.py`), attention that keeps them apart (`attention.py`), the loss
(`bridge/learn`).
Shape suffixes: S1 spans and one more, T tokens of all of them, U tokens that each sees, N rows (positions that predict
a sampled token).

Alignment, for a prompt `p p p` with completion `a b`, and a prompt `q` with completion `c`:

    t            0  1  2  3  4 | 5  6
    tokens_T     p  p  p  a  b | q  c
    positions_T  0  1  2  3  4 | 0  1
    rows_N             2  3      5          position t predicts token t + 1
    targets_N          a  b      c
    sequences_N        0  0      1
    starts_S1    0               5      7   the last one is T

The same where prompts may be shared, and a third sample has the prompt `p p p` with completion `d`:

    t            0  1  2 | 3  4 | 5 | 6  7
    tokens_T     p  p  p | a  b | d | q  c
    positions_T  0  1  2 | 3  4 | 3 | 0  1
    rows_N             2    3     2   6     the prompt's last token predicts the first of every completion
    seen.keys_U  0 1 2 | 0 1 2 3 4 | 0 1 2 5 | 6 7

A token of a completion that was not sampled, such as a tool's answer, is in tokens_T and has no row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from bridge.passes.attention import Seen, Spans
from bridge.passes.samples import Sample

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences behind one another: what one forward and backward pass holds."""

    tokens_T: Tensor
    """int64: prompt, completion, prompt, completion, ..., or a prompt and all of its completions."""
    positions_T: Tensor
    """int64: 0, 1, 2, ... from each sequence's first token."""
    spans: Spans
    """Which tokens see which."""
    num_sequences: int
    """Samples."""
    rows_N: Tensor
    """int64: positions of T that predict a sampled token, sample after sample."""
    targets_N: Tensor
    """int64: the token that was sampled there."""
    sequences_N: Tensor
    """int64: 0 to num_sequences - 1, the sample that a row is of."""
    sampled_logprobs_N: Tensor
    """float32, nats: where it was sampled; not a number where unknown."""
    advantages_N: Tensor
    """float32."""
    weights_N: Tensor
    """float32: factor of the row's term in the loss, which is their sum."""


@dataclass
class _Places:
    """Where tokens lie, span after span."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    key_starts: list[int] = field(default_factory=lambda: [0])

    def add(self, tokens: Tokens, before: range = range(0)) -> range:
        """Put a span behind the others that sees the places `before` it and itself; return its places."""
        places = range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens
        self.positions += range(len(before), len(before) + len(tokens))
        self.keys += (*before, *places)
        self.starts.append(len(self.tokens))
        self.key_starts.append(len(self.keys))
        return places


def _place(groups: Sequence[Sequence[Sample]]) -> tuple[_Places, list[Sequence[int]]]:
    """Return where everything lies, and per sample the places that predict the tokens of its completion.

    The prompts that are shared come first: spans of one length are then neighbours, and attended to at once.
    """
    places, predicting = _Places(), list[Sequence[int]]()
    shared = [places.add(group[0].prompt_token_ids) if len(group) > 1 else None for group in groups]
    for group, prompt in zip(groups, shared, strict=True):
        for sample in group:
            if prompt is None:
                whole = places.add(sample.prompt_token_ids + sample.token_ids)
                predicting.append(whole[len(sample.prompt_token_ids) - 1 : -1])
            else:
                predicting.append([prompt[-1], *places.add(sample.token_ids, prompt)[:-1]])
    return places, predicting


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """One micro-batch on the host: all of its integers behind one another, and all of its floats."""

    integers: Tensor
    sizes: tuple[int, ...]
    floats: Tensor
    longest: int
    longest_keys: int
    num_sequences: int


def _lay_out(groups: Sequence[Sequence[Sample]]) -> _Layout:
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        assert sample.prompt_token_ids, "a prompt without tokens: nothing predicts the first sampled one"
        num_sampled = len(sample.token_ids) if sample.sampled is None else sum(sample.sampled)
        counts = {num_sampled, len(sample.sampled_logprobs), len(sample.advantages)}
        assert len(counts) == 1, counts
        assert sample.sampled is None or len(sample.sampled) == len(sample.token_ids), sample.sampled
    places, predicting = _place(groups)
    integers = [
        _tensor(places.tokens),
        _tensor(places.positions),
        _tensor(places.starts),
        _tensor(places.key_starts),
        _tensor(places.keys if len(groups) < len(samples) else []),
        _tensor([row for rows, sample in zip(predicting, samples, strict=True) for row in _sampled(rows, sample)]),
        _joined(samples, lambda sample: _sampled(sample.token_ids, sample)),
        torch.arange(len(samples)).repeat_interleave(_tensor([sample.num_trained for sample in samples])),
    ]
    floats = [
        _joined(samples, lambda sample: sample.sampled_logprobs, np.float32),
        _joined(samples, lambda sample: sample.advantages, np.float32),
        _joined(samples, lambda sample: (sample.weight,) * sample.num_trained, np.float32),
    ]
    return _Layout(
        integers=torch.cat(integers),
        sizes=tuple(map(len, integers)),
        floats=torch.cat(floats),
        longest=max(end - start for start, end in pairwise(places.starts)),
        longest_keys=max(end - start for start, end in pairwise(places.key_starts)),
        num_sequences=len(samples),
    )


def _joined(
    samples: Sequence[Sample], values: Callable[[Sample], Sequence[float]], dtype: DTypeLike = np.int64
) -> Tensor:
    return _tensor([value for sample in samples for value in values(sample)], dtype)


def _tensor(values: Sequence[float], dtype: DTypeLike = np.int64) -> Tensor:
    """Return a tensor of many numbers: torch's own way to one takes four times as long."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _sampled(of_completion: Sequence[int], sample: Sample) -> Sequence[int]:
    """Leave out what belongs to tokens of the completion that were not sampled."""
    return of_completion if sample.sampled is None else tuple(compress(of_completion, sample.sampled))


def lay_out(batches: Iterable[Sequence[Sequence[Sample]]], device: torch.device) -> list[MicroBatch]:
    """Return a micro-batch for each list of groups; samples of a group share their prompt.

    All are copied to the device at once, and cut there.
    """
    layouts = [_lay_out(groups) for groups in batches]
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
    tokens_T, positions_T, starts_S1, key_starts_S1, keys_U, rows_N, targets_N, sequences_N = integers.split(
        layout.sizes
    )
    sampled_logprobs_N, advantages_N, weights_N = floats.split(len(rows_N))
    seen = Seen(keys_U, key_starts_S1.int(), layout.longest_keys) if len(keys_U) else None
    return MicroBatch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        spans=Spans(starts_S1=starts_S1.int(), longest=layout.longest, seen=seen),
        num_sequences=layout.num_sequences,
        rows_N=rows_N,
        targets_N=targets_N,
        sequences_N=sequences_N,
        sampled_logprobs_N=sampled_logprobs_N,
        advantages_N=advantages_N,
        weights_N=weights_N,
    )
