"""Packing: alignment, bounds, and independence of the order of arrival."""

import math
import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from bridge.passes.batch import MicroBatch, packs
from bridge.passes.samples import Sample

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


def pack(samples: list[Sample], max_tokens: int = 1000) -> list[MicroBatch]:
    return packs(samples, max_tokens=max_tokens, device=CPU)


def values(batch: MicroBatch) -> dict[str, object]:
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in found.items()}


def test_position_t_predicts_token_t_plus_one() -> None:
    (batch,) = pack([sample((6,), 7, advantage=-0.5, weight=0.25), sample((1, 2, 3), 4, 5)])
    assert values(batch) == {
        "tokens_T": [1, 2, 3, 4, 5, 6, 7],
        "positions_T": [0, 1, 2, 3, 4, 0, 1],
        "starts_S1": [0, 5, 7],
        "ends_S": (5, 7),
        "rows_N": [2, 3, 5],
        "targets_N": [4, 5, 7],
        "sequences_N": [0, 0, 1],
        "sampled_logprobs_N": pytest.approx([-0.4, -0.5, -0.7]),
        "advantages_N": [1.0, 1.0, -0.5],
        "weights_N": [0.5, 0.5, 0.25],
    }
    assert batch.tokens_T[batch.rows_N + 1].tolist() == batch.targets_N.tolist()
    assert (batch.num_tokens, batch.longest) == (7, 5)


def test_a_token_that_was_not_sampled_is_read_and_has_no_row() -> None:
    spoken = Sample(
        prompt_token_ids=(1, 2),
        token_ids=(3, 4, 5, 6),
        sampled_logprobs=(-0.3, -0.6),
        advantages=(1.0, -1.0),
        weight=0.5,
        sampled=(True, False, False, True),
    )
    (batch,) = pack([spoken, sample((7,), 8)])
    found = values(batch)
    assert (found["tokens_T"], found["positions_T"]) == ([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 0, 1])
    assert (found["rows_N"], found["targets_N"], found["sequences_N"]) == ([1, 4, 6], [3, 6, 8], [0, 0, 1])
    assert found["sampled_logprobs_N"] == pytest.approx([-0.3, -0.6, -0.8])
    assert (found["advantages_N"], found["weights_N"]) == ([1.0, -1.0, 1.0], [0.5, 0.5, 0.5])
    assert (spoken.num_tokens, spoken.num_trained) == (6, 2)


def test_unknown_log_probabilities_do_not_leave_the_order_to_chance() -> None:
    given = [
        Sample(prompt_token_ids=(1,), token_ids=(2, 3), sampled_logprobs=logprobs, advantages=(number, 1.0), weight=0.5)
        for number in (1.0, -1.0)
        for logprobs in [(math.nan, -0.5), (-0.5, math.nan), (math.nan, math.nan)]
    ]
    expected = [str(values(batch)) for batch in pack(given, max_tokens=6)]
    for seed in range(5):
        random.Random(seed).shuffle(given)
        assert [str(values(batch)) for batch in pack(given, max_tokens=6)] == expected


def test_types_are_those_of_the_contract_even_where_all_numbers_are_whole() -> None:
    whole = Sample(prompt_token_ids=(1,), token_ids=(2,), sampled_logprobs=(0,), advantages=(1,), weight=1)
    for batch in pack([whole, of_length(9)], max_tokens=5):
        integers = batch.tokens_T, batch.positions_T, batch.rows_N, batch.targets_N, batch.sequences_N
        assert {tensor.dtype for tensor in integers} == {torch.int64}
        assert batch.starts_S1.dtype == torch.int32
        floats = batch.sampled_logprobs_N, batch.advantages_N, batch.weights_N
        assert {tensor.dtype for tensor in floats} == {torch.float32}


def test_no_pack_is_larger_than_asked_and_every_token_is_in_one() -> None:
    lengths = [2, 9, 3, 3, 30, 2, 7, 5]
    batches = pack([of_length(length) for length in lengths], max_tokens=12)
    assert batches[0].ends_S == (30,)  # longer than asked: alone, and first
    assert all(batch.num_tokens <= 12 for batch in batches[1:])
    assert sorted(end - start for b in batches for start, end in zip((0, *b.ends_S), b.ends_S, strict=False)) == sorted(
        lengths
    )
    assert sum(len(batch.rows_N) for batch in batches) == sum(lengths) - len(lengths)


def test_shorter_samples_fill_the_room_that_longer_ones_leave() -> None:
    batches = pack([of_length(length) for length in (3, 7, 6, 4, 2, 8)], max_tokens=10)
    assert [batch.ends_S for batch in batches] == [(8, 10), (7, 10), (6, 10)]


def test_the_result_does_not_depend_on_the_order_of_arrival() -> None:
    samples = [
        sample(prompt, *tokens, advantage=advantage, weight=weight)
        for prompt in [(1, 2), (1, 3)]
        for tokens in [(5,), (6,), (7, 8), (9, 9)]
        for advantage in (1.0, -1.0)
        for weight in (0.5, 0.25)
    ]
    expected = [values(batch) for batch in pack(samples, max_tokens=9)]
    random.Random(0).shuffle(samples)
    assert [values(batch) for batch in pack(samples, max_tokens=9)] == expected


def test_no_samples_give_no_micro_batches() -> None:
    assert pack([]) == []
