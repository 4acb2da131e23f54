"""Packing: alignment, bounds, and independence of the order of arrival."""

import math
import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bridge.passes.packing import MicroBatch, Sample, longest_unit, num_tokens, packs
from bridge.passes.routing import UNKNOWN

CPU = torch.device("cpu")


def sample(prompt: tuple[int, ...], *token_ids: int, advantage: float = 1.0, weight: float = 0.5) -> Sample:
    return Sample(
        prompt_token_ids=prompt,
        token_ids=token_ids,
        sampled_logprobs=tuple(-token / 10 for token in token_ids),
        advantages=(advantage,) * len(token_ids),
        weight=weight,
    )


def of_length(length: int) -> Sample:
    return sample((1,), *range(2, length + 1))


def pack(samples: list[Sample], max_tokens: int = 1000, *, share_prompts: bool = False) -> list[MicroBatch]:
    return packs(samples, max_tokens=max_tokens, device=CPU, share_prompts=share_prompts)


def values(batch: MicroBatch) -> dict[str, object]:
    fields_by_name = {
        field.name: getattr(record, field.name) for record in (batch, batch.spans) for field in fields(record)
    }
    del fields_by_name["spans"]
    if batch.spans.seen is not None:
        fields_by_name["seen"] = [value.tolist() if isinstance(value, Tensor) else value for value in batch.spans.seen]
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in fields_by_name.items()}


def of_samples(batch: MicroBatch, samples: list[Sample]) -> dict[str, object]:
    """Return a micro-batch's values, with the samples themselves instead of their indices."""
    return values(batch) | {"indices": [samples[index] for index in batch.indices]}


def lengths_of(batch: MicroBatch) -> list[int]:
    lengths: list[int] = batch.spans.starts_S1.diff().tolist()
    return lengths


def test_position_t_predicts_token_t_plus_one() -> None:
    (batch,) = pack([sample((6,), 7, advantage=-0.5, weight=0.25), sample((1, 2, 3), 4, 5)])
    assert values(batch) == {
        "tokens_T": [1, 2, 3, 4, 5, 6, 7],
        "positions_T": [0, 1, 2, 3, 4, 0, 1],
        "starts_S1": [0, 5, 7],
        "longest": 5,
        "seen": None,
        "lengths": [(5, 5), (2, 2)],
        "indices": [1, 0],
        "rows_N": [2, 3, 5],
        "targets_N": [4, 5, 7],
        "sequences_N": [0, 0, 1],
        "sampled_logprobs_N": pytest.approx([-0.4, -0.5, -0.7]),
        "advantages_N": [1.0, 1.0, -0.5],
        "weights_N": [0.5, 0.5, 0.25],
        "kept": None,
        "experts_TX": None,
        "images": None,
        "several": None,
        "distinct": None,
        "pairs_P2": None,
        "taught": None,
    }
    assert batch.tokens_T[batch.rows_N + 1].tolist() == batch.targets_N.tolist()
    assert len(batch.tokens_T) == 7


def test_shared_prompt_is_packed_once() -> None:
    given = [sample((1, 2, 3), 4, 5), sample((6,), 7, advantage=-0.5, weight=0.25), sample((1, 2, 3), 8)]
    (batch,) = pack(given, share_prompts=True)
    assert values(batch) == {
        "tokens_T": [1, 2, 3, 4, 5, 8, 6, 7],
        "positions_T": [0, 1, 2, 3, 4, 3, 0, 1],
        "starts_S1": [0, 3, 5, 6, 8],
        "longest": 3,
        "seen": [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7], [0, 3, 8, 12, 14], 5],
        "lengths": [(3, 3), (2, 5), (1, 4), (2, 2)],
        "indices": [0, 2, 1],
        "rows_N": [2, 3, 2, 6],
        "targets_N": [4, 5, 8, 7],
        "sequences_N": [0, 0, 1, 2],
        "sampled_logprobs_N": pytest.approx([-0.4, -0.5, -0.8, -0.7]),
        "advantages_N": [1.0, 1.0, 1.0, -0.5],
        "weights_N": [0.5, 0.5, 0.5, 0.25],
        "kept": None,
        "experts_TX": None,
        "images": None,
        "several": None,
        "distinct": None,
        "pairs_P2": None,
        "taught": None,
    }
    assert num_tokens(given, share_prompts=True) == len(batch.tokens_T) == 8
    assert num_tokens(given, share_prompts=False) == 11


@pytest.mark.parametrize("share_prompts", [False, True])
def test_experts_follow_their_tokens(share_prompts: bool) -> None:
    """There is one layer with one expert per token, whose number is the token's position; the last is unknown."""
    known = [
        replace(sample(prompt, *tokens), experts=np.arange(len(prompt) + len(tokens) - 1).astype("<i2").tobytes())
        for prompt, tokens in (((1, 2, 3), (4, 5)), ((1, 2, 3), (6,)), ((7,), (8, 9)))
    ]
    (batch,) = packs([*known, sample((7, 8), 9)], max_tokens=100, device=CPU, share_prompts=share_prompts)
    assert batch.experts_TX is not None
    ends = {tuple(one.prompt_token_ids + one.token_ids)[-1] for one in known}
    for token, position, expert in zip(
        batch.tokens_T.tolist(), batch.positions_T.tolist(), batch.experts_TX[:, 0].tolist(), strict=True
    ):
        assert expert in ((UNKNOWN,) if token in ends else (position, UNKNOWN))
    assert (batch.experts_TX == UNKNOWN).sum() == len(known) + 3, "the last tokens, and a sample without"


def test_kept_words_follow_the_packed_rows() -> None:
    filtered = replace(sample((1, 2, 3), 4, 5), kept=((0.5, 9), (-1.5, 2)))
    (batch,) = pack([sample((6,), 7), filtered])
    assert batch.kept is not None
    assert batch.kept.thresholds_N.tolist() == [0.5, -1.5, torch.finfo(torch.float32).min], "the last kept all"
    assert batch.kept.counts_N.tolist() == [9, 2, 0]


def test_shared_prompt_counts_once_per_micro_batch() -> None:
    group = [sample((1, 2, 3, 4), token, token) for token in (5, 6, 7)]
    first, second = pack(group, max_tokens=9, share_prompts=True)
    assert (len(first.tokens_T), len(second.tokens_T)) == (4 + 2 + 2, 4 + 2)
    assert first.spans.seen is not None
    assert second.spans.seen is not None  # though only one completion has this prompt: compiled layers need one form
    assert second.spans.seen.keys_U.tolist() == [*range(4 + 2)]
    assert pack(group[:1], share_prompts=True)[0].spans.seen is None
    assert len(pack(group, max_tokens=10, share_prompts=True)) == 1


def test_unsampled_tokens_have_no_row_but_are_attended_to() -> None:
    spoken = Sample(
        prompt_token_ids=(1, 2),
        token_ids=(3, 4, 5),
        sampled_logprobs=(-0.3, -0.5),
        advantages=(1.0, -1.0),
        weight=0.5,
        sampled=(True, False, True),
    )
    (batch,) = pack([spoken, sample((1, 2), 9)], share_prompts=True)
    packed = values(batch)
    assert (packed["tokens_T"], packed["positions_T"]) == ([1, 2, 3, 4, 5, 9], [0, 1, 2, 3, 4, 2])
    assert (packed["rows_N"], packed["targets_N"], packed["sequences_N"]) == ([1, 3, 1], [3, 5, 9], [0, 0, 1])


def test_context_tokens_have_no_row() -> None:
    spoken = Sample(
        prompt_token_ids=(1, 2),
        token_ids=(3, 4, 5, 6),
        sampled_logprobs=(-0.3, -0.6),
        advantages=(1.0, -1.0),
        weight=0.5,
        sampled=(True, False, False, True),
    )
    (batch,) = pack([spoken, sample((7,), 8)])
    packed = values(batch)
    assert (packed["tokens_T"], packed["positions_T"]) == ([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 0, 1])
    assert (packed["rows_N"], packed["targets_N"], packed["sequences_N"]) == ([1, 4, 6], [3, 6, 8], [0, 0, 1])
    assert packed["sampled_logprobs_N"] == pytest.approx([-0.3, -0.6, -0.8])
    assert (packed["advantages_N"], packed["weights_N"]) == ([1.0, -1.0, 1.0], [0.5, 0.5, 0.5])
    assert (spoken.num_tokens, spoken.num_trained) == (6, 2)


def test_packing_order_is_deterministic_with_unknown_log_probs() -> None:
    given = [
        Sample(prompt_token_ids=(1,), token_ids=(2, 3), sampled_logprobs=logprobs, advantages=(number, 1.0), weight=0.5)
        for number in (1.0, -1.0)
        for logprobs in [(math.nan, -0.5), (-0.5, math.nan), (math.nan, math.nan)]
    ]
    expected = [str(of_samples(batch, given)) for batch in pack(given, max_tokens=6)]
    for seed in range(5):
        random.Random(seed).shuffle(given)
        assert [str(of_samples(batch, given)) for batch in pack(given, max_tokens=6)] == expected


def test_packed_tensors_are_float32_even_for_integer_values() -> None:
    whole = Sample(prompt_token_ids=(1,), token_ids=(2,), sampled_logprobs=(0,), advantages=(1,), weight=1)
    for batch in pack([whole, of_length(9)], max_tokens=5):
        integers = batch.tokens_T, batch.positions_T, batch.rows_N, batch.targets_N, batch.sequences_N
        assert {tensor.dtype for tensor in integers} == {torch.int64}
        assert batch.spans.starts_S1.dtype == torch.int32
        floats = batch.sampled_logprobs_N, batch.advantages_N, batch.weights_N
        assert {tensor.dtype for tensor in floats} == {torch.float32}
    (shared,) = pack([whole, whole], share_prompts=True)
    assert shared.spans.seen is not None
    assert (shared.spans.seen.keys_U.dtype, shared.spans.seen.starts_S1.dtype) == (torch.int64, torch.int32)


def test_packs_respect_the_limit_and_hold_every_token() -> None:
    lengths = [2, 9, 3, 3, 30, 2, 7, 5]
    batches = pack([of_length(length) for length in lengths], max_tokens=12)
    assert lengths_of(batches[0]) == [30]  # longer than the limit: it comes first, in a separate micro-batch
    assert all(len(batch.tokens_T) <= 12 for batch in batches[1:])
    assert sorted(length for batch in batches for length in lengths_of(batch)) == sorted(lengths)
    assert sum(len(batch.rows_N) for batch in batches) == sum(lengths) - len(lengths)


def test_short_samples_fill_gaps_between_long_ones() -> None:
    batches = pack([of_length(length) for length in (3, 7, 6, 4, 2, 8)], max_tokens=10)
    assert [lengths_of(batch) for batch in batches] == [[8, 2], [7, 3], [6, 4]]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_packing_is_independent_of_sample_order(share_prompts: bool) -> None:
    samples = [
        sample(prompt, *tokens, advantage=advantage, weight=weight)
        for prompt in [(1, 2), (1, 3)]
        for tokens in [(5,), (6,), (7, 8), (9, 9)]
        for advantage in (1.0, -1.0)
        for weight in (0.5, 0.25)
    ]
    expected = [of_samples(batch, samples) for batch in pack(samples, max_tokens=9, share_prompts=share_prompts)]
    random.Random(0).shuffle(samples)
    packed = pack(samples, max_tokens=9, share_prompts=share_prompts)
    assert [of_samples(batch, samples) for batch in packed] == expected


def test_packing_no_samples_gives_no_micro_batches() -> None:
    assert pack([]) == []


def pair(number: int, *lengths: int) -> list[Sample]:
    """Return the chosen and the rejected sample of a pair, of these lengths, with a prompt of two tokens."""
    return [
        replace(sample((1, 10 + number), *range(20, 18 + length), advantage=sign), pair=number)
        for length, sign in zip(lengths, (1.0, -1.0), strict=True)
    ]


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 9, 20, 30, 1000])
def test_pairs_are_never_cut(max_tokens: int, share_prompts: bool) -> None:
    samples = [*pair(0, 6, 9), *pair(1, 4, 3), *pair(2, 12, 5), *pair(3, 3, 3)]
    mixed = [samples[index] for index in (0, 7, 2, 4, 1, 6, 5, 3)]
    batches = pack(mixed, max_tokens, share_prompts=share_prompts)
    assert len(batches) == {1: 4, 9: 4 if not share_prompts else 3, 1000: 1}.get(max_tokens, len(batches))
    seen = []
    for batch in batches:
        assert batch.pairs_P2 is not None
        of_batch = [mixed[index] for index in batch.indices]
        for chosen, rejected in batch.pairs_P2.tolist():
            assert of_batch[chosen].pair == of_batch[rejected].pair
            assert of_batch[chosen].advantages[0] > 0 > of_batch[rejected].advantages[0]
            seen.append(of_batch[chosen].pair)
        assert 2 * len(batch.pairs_P2) == len(of_batch)
        assert len(batch.tokens_T) <= max_tokens or len(of_batch) == 2
    assert sorted(map(str, seen)) == ["0", "1", "2", "3"]


def test_longest_unit_is_that_of_a_whole_pair() -> None:
    samples = [*pair(0, 6, 9), of_length(12)]
    assert longest_unit(samples, share_prompts=False) == 15
    assert longest_unit(samples, share_prompts=True) == 13
    assert longest_unit(samples[2:], share_prompts=True) == 12
