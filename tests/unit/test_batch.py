"""Micro-batches: alignment, padding, order, and what is left out."""

import torch

from bridge.training.batch import MicroBatch, count_tokens, micro_batches
from bridge.types import Completion, Group

CPU = torch.device("cpu")
PAD = 99


def completion(*token_ids: int) -> Completion:
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(-token / 10 for token in token_ids),
        text="",
        finish_reason="stop",
        weight_version=0,
    )


def group(prompt: tuple[int, ...], *completions: Completion) -> Group:
    return Group(
        problem={"prompt": "?"}, prompt_token_ids=prompt, completions=completions, rewards=(0.0,) * len(completions)
    )


def cut(groups: list[Group], advantages: list[list[float]], max_tokens: int = 1000) -> list[MicroBatch]:
    return micro_batches(groups, torch.tensor(advantages), max_tokens=max_tokens, pad_token_id=PAD, device=CPU)


def test_position_t_predicts_token_t_plus_one() -> None:
    (batch,) = cut([group((1, 2, 3), completion(4, 5), completion(6, 7, 8))], [[0.5, -0.5]])
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 6, 7, 8], [1, 2, 3, 4, 5, PAD]]
    assert batch.attention_mask_BT.int().tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]
    assert batch.mask_BT.int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0]]
    torch.testing.assert_close(
        batch.sampled_logprobs_BT, torch.tensor([[0, 0, -0.6, -0.7, -0.8, 0], [0, 0, -0.4, -0.5, 0, 0]])
    )
    assert batch.advantages_B.tolist() == [-0.5, 0.5]
    assert batch.tokens_BT.dtype == torch.int64
    assert batch.sampled_logprobs_BT.dtype == batch.advantages_B.dtype == torch.float32


def test_a_prompt_of_one_token_is_enough() -> None:
    (batch,) = cut([group((1,), completion(2))], [[1.0]])
    assert batch.mask_BT.tolist() == [[True, False]]


def test_no_micro_batch_is_larger_than_asked_and_every_token_is_in_one() -> None:
    lengths = [1, 9, 3, 3, 30, 2, 7, 5]
    groups = [group((1, 2), *(completion(*range(length)) for length in lengths))]
    batches = cut(groups, [[1.0] * len(lengths)], max_tokens=24)
    assert batches[0].tokens_BT.shape == (1, 32)  # longer than asked: alone
    assert all(batch.tokens_BT.numel() <= 24 for batch in batches[1:])
    assert sum(int(batch.mask_BT.sum()) for batch in batches) == sum(lengths) == count_tokens(groups)


def test_similar_lengths_share_a_micro_batch_so_that_little_is_padding() -> None:
    groups = [group((1,), *(completion(*range(length)) for length in (40, 1, 39, 2, 38, 3)))]
    batches = cut(groups, [[1.0] * 6], max_tokens=123)
    assert [tuple(batch.tokens_BT.shape) for batch in batches] == [(3, 41), (3, 4)]


def test_the_result_does_not_depend_on_the_order_of_arrival() -> None:
    prompts = [(1, 2), (1, 3), (1, 2)]  # one prompt drawn twice: the same tokens with other advantages
    groups = [group(prompt, completion(5), completion(6), completion(7, 8), completion(9, 9)) for prompt in prompts]
    advantages = [[1.0, -1.0, 0.5, 0.25], [2.0, -2.0, 1.5, 1.25], [3.0, -3.0, 2.5, 2.25]]
    order = [2, 0, 1]
    expected = cut(groups, advantages, max_tokens=9)
    shuffled = cut([groups[i] for i in order], [advantages[i] for i in order], max_tokens=9)
    assert [batch.tokens_BT.tolist() for batch in shuffled] == [batch.tokens_BT.tolist() for batch in expected]
    assert [batch.advantages_B.tolist() for batch in shuffled] == [batch.advantages_B.tolist() for batch in expected]


def test_empty_completions_and_zero_advantages_are_left_out_but_their_tokens_count() -> None:
    groups = [group((1,), completion(), completion(2, 3)), group((4,), completion(5), completion(6, 7))]
    (batch,) = cut(groups, [[1.0, -1.0], [0.0, 0.0]])
    assert batch.tokens_BT.tolist() == [[1, 2, 3]]
    assert count_tokens(groups) == 5


def test_a_batch_without_any_advantage_has_no_micro_batches() -> None:
    assert cut([group((1,), completion(2), completion(3))], [[0.0, 0.0]]) == []
