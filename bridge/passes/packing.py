"""Pack samples into micro-batches: sequences one after another, without padding, as tensors.

Shape suffixes: S1 spans + 1, T tokens, U keys of all spans (span after span), N rows (positions that predict a sampled
token), K targets of a row, P pairs.

A prompt `p p p` with completion `a b`, and a prompt `q` with completion `c`:

    t            0  1  2  3  4 | 5  6
    tokens_T     p  p  p  a  b | q  c
    positions_T  0  1  2  3  4 | 0  1
    rows_N             2  3      5          position t predicts token t + 1
    targets_N          a  b      c
    sequences_N        0  0      1
    starts_S1    0               5      7   the last one is T

The same with shared prompts, and a third sample: prompt `p p p` with completion `d`:

    t            0  1  2 | 3  4 | 5 | 6  7
    tokens_T     p  p  p | a  b | d | q  c
    positions_T  0  1  2 | 3  4 | 3 | 0  1
    rows_N             2    3     2   6     the prompt's last token predicts the first token of every completion
    seen.keys_U  0 1 2 | 0 1 2 3 4 | 0 1 2 5 | 6 7

A token that was not sampled, such as one of a tool's answer, is in tokens_T but has no row.

A sample may have its own targets, which are scored instead of the sampled tokens: one token per row, which is then in
targets_N, or K tokens per row, which are in `several`.

A sample may also have rows at its prompt's tokens. Samples that share the prompt then have some rows in common, each of
which is computed once (`distinct`).

Two samples may be a pair, whose loss needs the log-probabilities of both: they are always packed into the same
micro-batch, even if they are together longer than the budget (`units`, `pairs_P2`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, islice, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridge.passes.attention import Attended, Span, Spans
from bridge.passes.image_embeddings import Gathered, PackedImages
from bridge.passes.routing import UNKNOWN
from bridge.types import Images

Value = TypeVar("Value", int, float, tuple[float, int])
KEEP_ALL = float(np.finfo(np.float32).min), 0
"""A threshold below every logit; the count has no effect."""
NUM_VALUES = 2**32
"""More than any column has that tells rows apart: token ids, counts, and float32 thresholds as bits."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion to train on: a prompt, and a completion of T tokens, N of which were sampled.

    prompt_token_ids    the prompt's token ids
    token_ids           T token ids of the completion
    sampled_logprobs    N log-probabilities from the server, in nats; NaN where unknown
    advantages          N numbers
    weight              factor of each token's term in the loss; for an average over all tokens, 1 / number of tokens
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The completion, with at least one sampled token."""
    sampled_logprobs: tuple[float, ...]
    """The server's log-probability of each sampled token, in nats; NaN where unknown."""
    advantages: tuple[float, ...]
    """One per sampled token."""
    weight: float
    """Factor of each sampled token's term in the loss. The loss is the sum of all terms of an update."""
    sampled: tuple[bool, ...] | None = None
    """Marks the sampled tokens of the completion; None: all. The others are context."""
    kept: tuple[tuple[float, int], ...] = ()
    """For each sampled token, the words that top-k, top-p and min-p kept, as a threshold and a count (see `Kept`)."""
    experts: bytes = b""
    """The experts of each token except the last, prompt included, encoded as in `Completion`; empty: unknown."""
    images: Images | None = None
    """The prompt's images."""
    targets: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    """Token ids to score instead of the sampled tokens, one or K for each; empty: the sampled tokens themselves."""
    target_weights: tuple[tuple[float, ...], ...] = ()
    """A factor for each of the K targets of a sampled token, such as a teacher's probability; empty: 1."""
    teacher_prompt_token_ids: tuple[int, ...] = ()
    """The prompt as a teacher sees it, for example with a hint; empty: the teacher sees the same prompt."""
    num_prompt_rows: int = 0
    """Number of the prompt's last tokens, the first token of the prompt excepted, that are scored like sampled ones;
    their values come before those of the sampled tokens."""
    pair: int | None = None
    """Number of the pair that the sample belongs to with one other; the preferred one has a positive advantage, the
    other one a negative one. None: it belongs to no pair."""

    @property
    def num_targets(self) -> int:
        """The number of targets per sampled token, K; 0: each token has a single target, or none."""
        return len(self.targets[0]) if self.targets and isinstance(self.targets[0], tuple) else 0

    @property
    def prompt(self) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
        """Return a key that samples with the same prompt share; equal tokens may stand for different images."""
        return self.prompt_token_ids, "" if self.images is None else self.images.digest, self.teacher_prompt_token_ids

    @property
    def as_taught(self) -> "Sample":
        """The sample as a teacher sees it: with its own prompt, and without what only the policy computes with."""
        prompt = self.teacher_prompt_token_ids or self.prompt_token_ids
        return replace(self, prompt_token_ids=prompt, teacher_prompt_token_ids=(), kept=(), experts=b"")

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the prompt and the completion together."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Number of rows: sampled tokens, and tokens of the prompt that are scored."""
        return len(self.advantages)


def of_sampled(values: Sequence[Value], sampled: tuple[bool, ...] | None) -> tuple[Value, ...]:
    """Select the values of the sampled tokens from one value per token of a completion."""
    return tuple(values if sampled is None else compress(values, sampled))


class Kept(NamedTuple):
    """The words (vocabulary entries) that top-k, top-p and min-p kept when each row's token was sampled."""

    thresholds_N: Tensor
    """A value between the last kept logit and the first dropped one, both divided by the temperature."""
    counts_N: Tensor
    """How many words were kept."""


class Targets(NamedTuple):
    """Several targets per row; rows with fewer targets are padded with targets of weight 0."""

    ids_NK: Tensor
    weights_NK: Tensor

    def rows(self, chosen_M: Tensor) -> "Targets":
        """Select the targets of some rows."""
        return Targets(self.ids_NK[chosen_M], self.weights_NK[chosen_M])


class Distinct(NamedTuple):
    """Which rows of a micro-batch to compute so that none is repeated, M <= N."""

    chosen_M: Tensor
    of_rows_N: Tensor
    """For each row, its index among the chosen ones."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Packed sequences: the input of one forward and backward pass; int64 indices, float32 values."""

    tokens_T: Tensor
    positions_T: Tensor
    spans: Spans
    lengths: Sequence[Span]
    """For each span, on the host: its number of tokens, and the number of keys that its last token attends to."""
    indices: Sequence[int]
    """For each sequence, on the host: its index among the samples packed together."""
    rows_N: Tensor
    targets_N: Tensor
    """The token that each row predicts, or the first one of its `several`."""
    sequences_N: Tensor
    """The sample of each row, from 0 to num_sequences - 1."""
    sampled_logprobs_N: Tensor
    """The server's log-probabilities, in nats; NaN where unknown."""
    advantages_N: Tensor
    weights_N: Tensor
    """Factor of the row's term in the loss."""
    kept: Kept | None = None
    """The words that were kept for each row; None: all of them."""
    experts_TX: Tensor | None = None
    """The experts of each token, layer by layer, as in `routing.py`; None: the routers choose."""
    images: PackedImages | None = None
    several: Targets | None = None
    """K targets per row; log-probabilities are then [N, K]. None: one target per row, and [N]. If any sample of those
    packed together has several, all of their micro-batches have."""
    distinct: Distinct | None = None
    """The rows to compute, if samples have rows of a shared prompt in common; None: all of them."""
    pairs_P2: Tensor | None = None
    """The two sequences of each pair, the preferred one first; None: no sample belongs to a pair."""
    taught: "MicroBatch | None" = None
    """The same rows after the prompts that a teacher sees; None: it sees the same prompts."""

    @property
    def num_sequences(self) -> int:
        return len(self.indices)

    @property
    def num_computed(self) -> int:
        """Number of rows to compute."""
        return len(self.rows_N if self.distinct is None else self.distinct.chosen_M)

    def of_rows(self, chosen_M: Tensor) -> "MicroBatch":
        """Return the same tokens with only some of the rows, in their order, to compute their log-probabilities."""
        return replace(
            self,
            rows_N=self.rows_N[chosen_M],
            targets_N=self.targets_N[chosen_M],
            kept=None if self.kept is None else Kept(*(of_rows_N[chosen_M] for of_rows_N in self.kept)),
            several=None if self.several is None else self.several.rows(chosen_M),
            distinct=None,
        )


def num_tokens(samples: Iterable[Sample], *, share_prompts: bool) -> int:
    """Return the number of tokens in a single micro-batch of all samples."""
    bin_ = _Bin(share_prompts=share_prompts)
    for index, sample in enumerate(samples):
        bin_.add(index, sample)
    return bin_.num_tokens


def units(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of the samples that must be in the same micro-batch: each pair, and each other sample alone.

    The order is that of the units' first samples.
    """
    by_pair: dict[tuple[str, int], list[int]] = {}
    for index, sample in enumerate(samples):
        key = ("sample", index) if sample.pair is None else ("pair", sample.pair)
        by_pair.setdefault(key, []).append(index)
    return [*by_pair.values()]


def longest_unit(samples: Sequence[Sample], *, share_prompts: bool) -> int:
    """Return the number of tokens of the longest sample, or of the longest pair."""
    return max(num_tokens([samples[index] for index in unit], share_prompts=share_prompts) for unit in units(samples))


def packs(
    samples: Sequence[Sample], *, max_tokens: int, device: torch.device, share_prompts: bool = False
) -> list[MicroBatch]:
    """Pack samples into micro-batches of at most `max_tokens`, by first-fit decreasing.

    With `share_prompts` a micro-batch holds each prompt once. If any micro-batch shares a prompt, all of them have
    `seen`, so that compiled layers need only one form. A sample or pair longer than `max_tokens` gets its own
    micro-batch. The longest come first, so that running out of memory shows early. The result does not depend on the
    order of the samples.
    """
    orders = [_order(sample) for sample in samples]
    ordered = [sorted(unit, key=lambda index: orders[index], reverse=True) for unit in units(samples)]
    ordered.sort(
        key=lambda unit: (sum(samples[index].num_tokens for index in unit), *(orders[index] for index in unit)),
        reverse=True,
    )
    if share_prompts:
        by_prompt: dict[object, list[list[int]]] = {}
        for unit in ordered:
            by_prompt.setdefault(samples[unit[0]].prompt, []).append(unit)
        ordered = list(chain.from_iterable(by_prompt.values()))
    bins: list[_Bin] = []
    for unit in ordered:
        together = [samples[index] for index in unit]
        chosen = next((pack for pack in bins if pack.num_tokens + pack.cost(together) <= max_tokens), None)
        if chosen is None:
            chosen = _Bin(share_prompts=share_prompts)
            bins.append(chosen)
        for index in unit:
            chosen.add(index, samples[index])
    shares = any(len(group) > 1 for pack in bins for group in pack.groups.values())
    has_several = any(sample.num_targets for sample in samples)
    layouts = [_Layout(samples, list(pack.groups.values()), shares=shares, has_several=has_several) for pack in bins]
    batches = _micro_batches(layouts, device)
    if not any(sample.teacher_prompt_token_ids for sample in samples):
        return batches
    taught = [sample.as_taught for sample in samples]
    layouts = [_Layout(taught, list(pack.groups.values()), shares=shares, has_several=has_several) for pack in bins]
    pairs = zip(batches, _micro_batches(layouts, device), strict=True)
    return [replace(batch, taught=of_teacher) for batch, of_teacher in pairs]


def _order(sample: Sample) -> tuple[object, ...]:
    """Return a sort key: the length, then all other training data, so that ties do not depend on the input order."""
    tokens = *sample.prompt, sample.token_ids, sample.sampled or ()
    logprobs = sample.sampled_logprobs
    if any(map(math.isnan, logprobs)):  # NaN cannot be sorted
        logprobs = tuple([0.0 if math.isnan(value) else value for value in logprobs])
    targets = sample.num_targets, sample.targets, sample.target_weights
    return (
        sample.num_tokens, *tokens, logprobs, sample.advantages, sample.weight, sample.kept, sample.experts, *targets,
        sample.num_prompt_rows,
    )  # fmt: skip


@dataclass
class _Bin:
    """The samples of one micro-batch; samples of a group share their prompt."""

    share_prompts: bool
    num_tokens: int = 0
    groups: dict[object, list[int]] = field(default_factory=dict)
    """Indices of the samples."""

    def cost(self, samples: Sequence[Sample]) -> int:
        """Return how many tokens the samples would add."""
        total = 0
        prompts = set[object]()
        for sample in samples:
            key = self._key(sample)
            total += len(sample.token_ids) if key in self.groups or key in prompts else sample.num_tokens
            if self.share_prompts:
                prompts.add(key)
        return total

    def add(self, index: int, sample: Sample) -> None:
        self.num_tokens += self.cost([sample])
        self.groups.setdefault(self._key(sample), []).append(index)

    def _key(self, sample: Sample) -> object:
        return sample.prompt if self.share_prompts else len(self.groups)


class _Layout:
    """One micro-batch on the host: the layout of its spans, and its tensors."""

    def __init__(
        self, samples: Sequence[Sample], indices: Sequence[Sequence[int]], *, shares: bool, has_several: bool
    ) -> None:
        """Lay out the samples with these `indices`; samples of a group share their prompt."""
        self.indices = [*chain.from_iterable(indices)]
        groups = [[samples[index] for index in group] for group in indices]
        self.samples = [*chain.from_iterable(groups)]
        self._tokens = list[int]()
        self._positions = list[NDArray[np.int64]]()
        self._keys = list[NDArray[np.int64]]()
        self._starts = [0]
        self._key_starts = [0]
        self.experts_TX = _no_experts(groups)  # NumPy: torch would use all threads, 8 ms per sample
        self.images = Gathered() if any(sample.images for sample in self.samples) else None
        rows_N = np.concatenate(self._rows(groups))
        keys_U = np.concatenate(self._keys) if shares else np.zeros(0, dtype=np.int64)
        repeats = any(len(group) > 1 and any(sample.num_prompt_rows for sample in group) for group in groups)
        targets_N = np.array([*chain.from_iterable(map(_first_targets, self.samples))], dtype=np.int64)
        self.width = max(1, *(sample.num_targets for sample in self.samples)) if has_several else 0
        several = [_filled(sample, self.width) for sample in self.samples] if has_several else []
        counts = [sample.num_trained for sample in self.samples]
        is_filtered = any(sample.kept for sample in self.samples)
        kept = [sample.kept or [KEEP_ALL] * sample.num_trained for sample in self.samples] if is_filtered else []
        integers = [
            *(np.array(values, dtype=np.int64) for values in (self._tokens, self._starts, self._key_starts)),
            np.concatenate(self._positions), keys_U, rows_N, targets_N, np.repeat(np.arange(len(counts)), counts),
        ]  # fmt: skip
        ids_NK = np.concatenate([ids for ids, _ in several]) if has_several else targets_N
        ids_NK = ids_NK.reshape(len(rows_N), -1)
        self.has_distinct = repeats
        if repeats:
            integers += _distinct(rows_N, ids_NK, [*chain.from_iterable(kept)])
        integers += [ids_NK.ravel()] if has_several else []
        pairs = _pairs(self.samples)
        self.has_pairs = bool(pairs)
        integers += [np.array(pairs, dtype=np.int64).ravel()] if pairs else []
        self.integers = [torch.from_numpy(values) for values in integers]  # torch.tensor takes four times as long
        floats = [
            np.array([*chain.from_iterable(sample.sampled_logprobs for sample in self.samples)], dtype=np.float32),
            np.array([*chain.from_iterable(sample.advantages for sample in self.samples)], dtype=np.float32),
            np.repeat(np.array([sample.weight for sample in self.samples], dtype=np.float32), counts),
            *np.array([*chain.from_iterable(kept)], dtype=np.float32).reshape(-1, 2).T,
        ]
        floats += [np.concatenate([weights for _, weights in several])] if has_several else []
        self.floats = [torch.from_numpy(values) for values in floats]
        assert len(rows_N) == len(targets_N) == len(floats[0]) == len(floats[1]), (len(rows_N), len(targets_N))
        starts = self._starts, self._key_starts
        queries, keys = ([end - begin for begin, end in pairwise(of_spans)] for of_spans in starts)
        self.lengths = list(zip(queries, keys, strict=True))
        self.longest = max(queries)
        self.longest_keys = max(keys)

    def _rows(self, groups: Sequence[Sequence[Sample]]) -> list[NDArray[np.int64]]:
        """Lay out all spans and return the indices of tokens that predict a sampled token, sample after sample.

        Shared prompts come first: spans of equal length are then neighbors, and computed in one block.
        """
        rows = list[NDArray[np.int64]]()
        shared = [self._add(group[0].prompt_token_ids) if len(group) > 1 else None for group in groups]
        for group, prompt in zip(groups, shared, strict=True):
            if prompt is not None:
                self._take_others(group[0], prompt, 0)
            for sample in group:
                assert sample.prompt_token_ids, "a prompt without tokens: nothing predicts the first sampled one"
                if prompt is None:
                    whole = self._add(sample.prompt_token_ids + sample.token_ids)
                    self._take_others(sample, whole, 0)
                    predicting = whole[: len(sample.prompt_token_ids)]
                    own = whole[len(predicting) :]
                else:
                    own = self._add(sample.token_ids, prompt)
                    self._take_others(sample, own, len(prompt))
                    predicting = prompt
                last = predicting[-1]
                rows.append(np.arange(last - sample.num_prompt_rows, last))
                of_tokens = np.concatenate([[last], np.arange(own.start, own.stop - 1)])
                is_sampled = slice(None) if sample.sampled is None else np.array(sample.sampled, dtype=bool)
                rows.append(of_tokens[is_sampled])
        return rows

    def _take_others(self, sample: Sample, indices: range, first: int) -> None:
        """Store the experts and images of the sample's tokens from `first` on, which are at `indices` in T."""
        if self.images is not None:
            self.images.add(sample.images, indices, first)
        if sample.experts and self.experts_TX is not None:
            own_TX = np.frombuffer(sample.experts, "<i2").reshape(sample.num_tokens - 1, -1)[first:][: len(indices)]
            self.experts_TX[indices.start : indices.start + len(own_TX)] = own_TX

    def _add(self, tokens: tuple[int, ...], prompt: range = range(0)) -> range:
        """Append a span that attends to `prompt` and itself; return its indices."""
        added = range(len(self._tokens), len(self._tokens) + len(tokens))
        self._tokens += tokens
        self._positions.append(np.arange(len(prompt), len(prompt) + len(tokens)))
        self._keys += [np.arange(indices.start, indices.stop) for indices in (prompt, added)]
        self._starts.append(len(self._tokens))
        self._key_starts.append(self._key_starts[-1] + len(prompt) + len(tokens))
        return added


def _pairs(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Return the indices of the two samples of each pair, the preferred one first."""
    if all(sample.pair is None for sample in samples):
        return []
    pairs = [unit for unit in units(samples) if samples[unit[0]].pair is not None]
    assert all(len(pair) == 2 for pair in pairs), "a pair is two samples"
    return [(one, other) if samples[one].advantages[0] > 0 else (other, one) for one, other in pairs]


def _first_targets(sample: Sample) -> Iterable[int]:
    """Return the first target of each row."""
    if sample.num_targets:
        return [targets[0] for targets in sample.targets if isinstance(targets, tuple)]
    of_prompt = sample.prompt_token_ids[len(sample.prompt_token_ids) - sample.num_prompt_rows :]
    return sample.targets or of_prompt + of_sampled(sample.token_ids, sample.sampled)  # type: ignore[return-value]


def _distinct(
    rows_N: NDArray[np.int64], ids_NK: NDArray[np.int64], kept: Sequence[tuple[float, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the rows that repeat no earlier one, [M], and for each row its index among them, [N]."""
    thresholds_N, counts_N = np.array(kept, dtype=np.float32).reshape(-1, 2).T
    of_kept = [np.ascontiguousarray(thresholds_N).view(np.uint32).astype(np.int64), counts_N.astype(np.int64)]
    numbers_N = rows_N
    for column_N in (*ids_NK.T, *(of_kept if kept else [])):
        _, chosen_M, numbers_N = np.unique(numbers_N * NUM_VALUES + column_N, return_index=True, return_inverse=True)
    return chosen_M, numbers_N


def _filled(sample: Sample, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the targets of a sample's rows and their weights, flattened and padded with targets of weight 0."""
    own = max(1, sample.num_targets)
    first_N1 = np.array(_first_targets(sample), dtype=np.int64).reshape(-1, 1)
    ids_NK = first_N1.repeat(width, axis=1)
    weights_NK = np.zeros(ids_NK.shape, dtype=np.float32)
    ids_NK[:, :own] = sample.targets if sample.num_targets else first_N1
    weights_NK[:, :own] = sample.target_weights or 1.0
    return ids_NK.reshape(-1), weights_NK.reshape(-1)


def _no_experts(groups: Sequence[Sequence[Sample]]) -> NDArray[np.int16] | None:
    """Return an array for the experts of all tokens, filled with `UNKNOWN`; None if no sample has experts."""
    known = next((sample for group in groups for sample in group if sample.experts), None)
    if known is None:
        return None
    num_tokens = sum(len(own[0].prompt_token_ids) + sum(len(sample.token_ids) for sample in own) for own in groups)
    return np.full((num_tokens, len(known.experts) // (2 * (known.num_tokens - 1))), UNKNOWN, dtype=np.int16)


def _micro_batches(layouts: Sequence[_Layout], device: torch.device) -> list[MicroBatch]:
    integers = _to_device([tensor for layout in layouts for tensor in layout.integers], device)
    floats = _to_device([tensor for layout in layouts for tensor in layout.floats], device)
    batches = []
    for layout in layouts:
        tokens_T, starts_S1, key_starts_S1, positions_T, keys_U, rows_N, targets_N, sequences_N = islice(integers, 8)
        distinct = Distinct(*islice(integers, 2)) if layout.has_distinct else None
        ids = next(integers).view(-1, layout.width) if layout.width else None
        pairs_P2 = next(integers).view(-1, 2) if layout.has_pairs else None
        sampled_logprobs_N, advantages_N, weights_N, thresholds_N, counts_N = islice(floats, 5)
        several = None if ids is None else Targets(ids, next(floats).view(-1, layout.width))
        seen = Attended(keys_U, key_starts_S1.int(), layout.longest_keys) if len(keys_U) else None
        batches.append(
            MicroBatch(
                tokens_T=tokens_T,
                positions_T=positions_T,
                spans=Spans(starts_S1=starts_S1.int(), longest=layout.longest, seen=seen),
                lengths=layout.lengths,
                indices=layout.indices,
                rows_N=rows_N,
                targets_N=targets_N,
                sequences_N=sequences_N,
                sampled_logprobs_N=sampled_logprobs_N,
                advantages_N=advantages_N,
                weights_N=weights_N,
                kept=Kept(thresholds_N, counts_N) if len(thresholds_N) else None,
                experts_TX=None if layout.experts_TX is None else torch.from_numpy(layout.experts_TX).to(device),
                images=None if layout.images is None else layout.images.packed(device),
                several=several,
                distinct=distinct,
                pairs_P2=pairs_P2,
            )
        )
    return batches


def _to_device(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Copy all tensors to the device in one transfer, and split them again there."""
    if not tensors:
        return iter(())
    joined = torch.cat(list(tensors))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return iter(joined.split([len(tensor) for tensor in tensors]))
