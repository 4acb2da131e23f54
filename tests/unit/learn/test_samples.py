"""Advantages, from rewards or given, and each completion's share of the loss, computed by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from bridge.config import AdvantageScale, TrainConfig
from bridge.errors import UsageError
from bridge.learn.policy_loss import LOSSES, LossSpec
from bridge.learn.samples import has_signal, samples, with_advantages
from bridge.passes.packing import Sample
from bridge.types import Array, Completion, FinishReason, Group, Images

SCALES: tuple[AdvantageScale, ...] = get_args(AdvantageScale)


def completion(length: int, reason: FinishReason = "stop") -> Completion:
    return Completion(
        token_ids=tuple(range(10, 10 + length)),
        logprobs=tuple(-index / 10 for index in range(length)),
        text="",
        finish_reason=reason,
        versions=(0,) * length,
    )


def group(rewards: Sequence[float], lengths: Sequence[int] = (), **given: Any) -> Group:
    completions = tuple(completion(length) for length in lengths or [1] * len(rewards))
    fixed = {"problem": {"prompt": "how much?"}, "prompt_token_ids": (1, 2), "completions": completions}
    return Group(**(fixed | {"rewards": tuple(rewards)} | given))


def advantages(groups: Sequence[Group], scale: AdvantageScale) -> list[list[float]]:
    return [[value for (value,) in filled.advantages or ()] for filled in with_advantages(groups, scale)]


def made(groups: Sequence[Group], max_new_tokens: int = 100, **choices: Any) -> list[Sample]:
    config = TrainConfig.model_validate({"model_name": "tiny", "mode": "lora_only"} | choices)
    return samples(groups, LossSpec.of(config.loss), max_new_tokens=max_new_tokens)


def test_advantages_are_standardized_within_the_group() -> None:
    values = advantages([group([1, 0, 0, 0]), group([2, 4, 2, 4])], "group")
    # first group: mean 1/4, variance 3/16, so 3/4 over sqrt(3)/4 = sqrt(3), and -1/sqrt(3) for the rest
    assert values[0] == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], abs=1e-5)
    assert values[1] == pytest.approx([-1, 1, -1, 1], abs=1e-5)


def test_advantages_without_a_scale_only_subtract_the_mean() -> None:
    assert advantages([group([1, 0, 0, 0]), group([2, 4])], "none") == [[0.75, -0.25, -0.25, -0.25], [-1, 1]]


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    # 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2; and 1 - 0, 0 - (1 + 0 + 0) / 3
    values = advantages([group([1, 0, 2]), group([1, 0, 0, 0])], "leave_one_out")
    assert values[0] == pytest.approx([0, -1.5, 1.5], rel=1e-12)
    assert values[1] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-12)


def test_batch_scale_uses_group_means_and_batch_deviation() -> None:
    # rewards 0, 2, 4, 4, 4, 4: mean 3, variance (9 + 1 + 4) / 6 = 7/3
    values = advantages([group([0, 2]), group([4, 4, 4, 4])], "batch")
    assert values[0] == pytest.approx([-((3 / 7) ** 0.5), (3 / 7) ** 0.5], rel=1e-5)
    assert values[1] == [0, 0, 0, 0]


def by_turn(*rewards: Sequence[float]) -> Group:
    """Return a group with rewards per turn; each turn has two tokens, and an unsampled token is between two turns."""
    completions = []
    for turns in rewards:
        sampled = tuple(index % 3 < 2 for index in range(3 * len(turns) - 1))
        completions.append(replace(completion(len(sampled)), sampled=sampled))
    return group(
        [sum(turns) for turns in rewards], completions=tuple(completions), turn_rewards=tuple(map(tuple, rewards))
    )


def of_tokens(scale: AdvantageScale, *rewards: Sequence[float]) -> list[list[float]]:
    return [list(row) for filled in with_advantages([by_turn(*rewards)], scale) for row in filled.advantages or ()]


def test_turns_are_compared_by_returns() -> None:
    rewards = [1, 2], [1, 0], [2]
    # returns of the first turns: 3, 1, 2, mean 2; of the second ones: 2, 0, mean 1
    assert of_tokens("none", *rewards) == [[1, 1, 0, 1, 1], [-1, -1, 0, -1, -1], [0, 0]]
    # squares of these differences: 1, 1, 0, 1, 1, mean 4/5
    root = 1.25**0.5
    assert of_tokens("group", *rewards)[0] == pytest.approx([root, root, 0, root, root], rel=1e-5)
    # of 3 first turns and of 2 second ones
    assert of_tokens("leave_one_out", *rewards)[0] == pytest.approx([1.5, 1.5, 0, 2, 2])
    # all returns: 3, 1, 2, 2, 0: mean 8/5, variance 26/25
    assert of_tokens("batch", *rewards)[1] == pytest.approx([-1 / 1.04**0.5] * 2 + [0] + [-1 / 1.04**0.5] * 2, rel=1e-5)


def test_turn_without_a_counterpart_has_no_advantage() -> None:
    assert of_tokens("none", [0, 0, 5], [0, 5]) == [[0.0] * 8, [0.0] * 5]
    assert not has_signal(by_turn([0, 0, 5], [0, 5]))
    assert has_signal(by_turn([0, 1], [1, 0])), "the totals are equal, but the turns are not"


def test_turn_rewards_train_only_sampled_tokens() -> None:
    first, second = made([by_turn([0, 1], [1, 0])], advantage_scale="none")
    # first turns: both return 1; second turns: 1 and 0
    assert list(first.advantages) == [0, 0, 0.5, 0.5]
    assert list(second.advantages) == [0, 0, -0.5, -0.5]


def test_advantages_work_for_groups_of_different_sizes() -> None:
    assert [len(values) for values in advantages([group([1, 0]), group([1, 2, 3]), group([5])], "group")] == [2, 3, 1]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6, 1 / 3])
def test_equal_rewards_give_exactly_zero_advantages(reward: float, scale: AdvantageScale) -> None:
    for size in range(1, 12):  # the mean of some of these differs from the reward by a rounding error
        assert advantages([group([reward] * size), group([0, 1])], scale)[0] == [0.0] * size


def test_rewards_equal_up_to_rounding_have_no_advantage() -> None:
    assert max(map(abs, advantages([group([0.1 + 0.2, 0.3, 0.3, 0.3])], "group")[0])) < 1e-9


def test_given_advantages_are_kept() -> None:
    theirs = group([100, -100], [2, 3], advantages=((1.5, -2.5), (7.0,)))
    filled = with_advantages([theirs, group([0, 2])], "batch")
    assert filled[0] == theirs
    assert [value for (value,) in filled[1].advantages or ()] == pytest.approx([-1, 1], abs=1e-5)
    assert [sample.advantages for sample in made([theirs])] == [(1.5, -2.5), (7.0, 7.0, 7.0)]


@pytest.mark.parametrize("scale", SCALES)
def test_completion_with_zero_advantage_counts_in_the_mean(scale: AdvantageScale) -> None:
    plain = [group([0, 1, 5]), group([2, 3])]
    zeroed = [group([0, 1, 5], zero_advantage=(False, True, True)), plain[1]]
    (first, _, _), second = advantages(plain, scale)
    assert advantages(zeroed, scale) == [[first, 0.0, 0.0], second]
    assert with_advantages(with_advantages(zeroed, scale), scale) == with_advantages(zeroed, scale)
    theirs = group([0, 1], [2, 3], advantages=((1.5, -2.5), (7.0,)), zero_advantage=(True, False))
    assert with_advantages([theirs], scale)[0].advantages == ((0.0,), (7.0,))


@pytest.mark.parametrize(
    ("rewards", "given", "expected"),
    [
        ([1, 1, 1], {}, False),
        ([0.1 + 0.2, 0.3], {}, True),
        ([], {}, False),
        ([1, 0], {"zero_advantage": (True, True)}, False),
        ([1, 0], {"zero_advantage": (True, False)}, True),
        ([1, 1], {"advantages": ((0.0,), (1.0,))}, True),
        ([1, 0], {"advantages": ((0.0,), (0.0,))}, False),
    ],
)
def test_group_with_a_nonzero_advantage_has_a_signal(
    rewards: list[float], given: dict[str, Any], expected: bool
) -> None:
    assert has_signal(group(rewards, **given)) is expected


def test_existing_advantages_are_not_computed_again() -> None:
    groups = with_advantages([group([0, 2]), group([4, 10])], "batch")
    first, second = made(groups[:1], loss="dr_grpo"), made(groups[1:], loss="dr_grpo")
    whole = made(groups, loss="dr_grpo")
    assert [sample.advantages for sample in first + second] == [sample.advantages for sample in whole]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (((1.0,),), "for 1 completions, but the group has 2"),
        (((1.0,), (1.0, 2.0)), "completion 2 has 3 tokens but 2 advantages"),
        (((1.0, 2.0), ()), "completion 2 has 3 tokens but 0 advantages"),
        (((1.0,), (0.0, math.nan, 1.0)), "one of completion 2 is nan"),
        (((math.inf,), (0.0,)), "one of completion 1 is inf"),
    ],
)
def test_given_advantages_of_the_wrong_length_are_refused(given: tuple[tuple[float, ...], ...], fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        made([group([0, 1]), group([0, 1], [2, 3], advantages=given)])
    assert caught.value.message.startswith("the advantages of group 2 (prompt 'how much?') are invalid: ")
    assert fault in caught.value.message


def test_sample_has_one_advantage_per_token() -> None:
    first, second = made([group([0, 1], [2, 3])], advantage_scale="none")
    assert first == Sample(
        prompt_token_ids=(1, 2),
        token_ids=(10, 11),
        sampled_logprobs=(0.0, -0.1),
        advantages=(-0.5, -0.5),
        weight=1 / 5,
    )
    assert second.advantages == (0.5, 0.5, 0.5)


def test_kept_words_belong_to_the_sampled_tokens() -> None:
    kept = ((0.5, 3), (1.5, 4), (2.5, 5), (3.5, 6))
    filtered = replace(completion(4), kept=kept, sampled=(False, True, False, True))
    (other, one) = made([replace(group([0, 1], [4, 4]), completions=(completion(4), filtered))])
    assert (other.kept, one.kept) == ((), ((1.5, 4), (3.5, 6)))


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ("dapo", [1 / 10] * 4),  # ten tokens in all
        ("grpo", [1 / (4 * length) for length in (1, 2, 3, 4)]),
        ("gspo", [1 / (4 * length) for length in (1, 2, 3, 4)]),
        ("dr_grpo", [1 / (4 * 100)] * 4),
        ("rloo", [1 / (4 * 100)] * 4),
    ],
)
def test_token_weights_follow_the_losss_aggregation(loss: str, weights: list[float]) -> None:
    trained_samples = made([group([0, 1], [1, 2]), group([3, 1], [3, 4])], loss=loss)
    assert [sample.weight for sample in trained_samples] == weights


@pytest.mark.parametrize(("loss", "weight"), [("dapo", 1 / 10), ("grpo", 1 / 4), ("dr_grpo", 1 / 400)])
def test_zero_advantage_is_dropped_but_counts_in_the_mean(loss: str, weight: float) -> None:
    (first, _) = made([group([0, 1], [1, 2]), group([3, 3], [3, 4])], loss=loss)
    assert first.weight == weight


def test_zero_advantage_is_trained_on_with_a_kl_term() -> None:
    trained_samples = made([group([3, 3], [1, 2])], kl_coef=0.1)
    assert [sample.advantages for sample in trained_samples] == [(0.0,), (0.0, 0.0)]


def test_one_token_with_an_advantage_keeps_its_completion() -> None:
    (kept,) = made([group([0, 0], [3, 2], advantages=((0.0, 1.0, 0.0), (0.0, 0.0)))])
    assert kept.advantages == (0.0, 1.0, 0.0)


def test_empty_completion_is_left_out_but_counts() -> None:
    (kept,) = made([group([0, 1], [0, 2])], loss="grpo", kl_coef=0.1)
    assert kept.weight == 1 / (2 * 2)


@pytest.mark.parametrize("reason", ["length", "abort"])
@pytest.mark.parametrize(("loss", "weight"), [("dapo", 1 / 2), ("grpo", 1 / (2 * 2)), ("dr_grpo", 1 / (2 * 100))])
def test_masked_completions_count_but_not_their_tokens(loss: str, weight: float, reason: FinishReason) -> None:
    cut = group([0, 1], completions=(completion(2), completion(7, reason)))
    assert [len(sample.token_ids) for sample in made([cut], loss=loss)] == [2, 7]
    (kept,) = made([cut], loss=loss, mask_truncated=True)
    assert kept.weight == weight
    assert kept.advantages == pytest.approx([made([cut], loss=loss)[0].advantages[0]] * 2)  # the mean is over all


def test_batch_of_truncated_completions_leaves_no_samples() -> None:
    cut = group([0, 1], completions=(completion(2, "length"), completion(7, "abort")))
    for loss in (name for name, spec in LOSSES.items() if spec.uses_rewards):
        assert made([cut], loss=loss, mask_truncated=True, kl_coef=0.1) == []


def test_sample_weights_of_each_aggregation_add_up() -> None:
    groups = [group([0, 1], [1, 2]), group([3, 1], [3, 4])]
    sums = {}
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        spec = replace(LOSSES["dapo"], aggregation=aggregation)
        trained_samples = samples(groups, spec, max_new_tokens=5)
        sums[aggregation] = sum(sample.weight * len(sample.token_ids) for sample in trained_samples)
    assert sums == pytest.approx({"token_mean": 1, "sequence_mean": 1, "constant": 10 / 20})


def turns(*sampled: bool, logprob: float = -1.0) -> Completion:
    """Return a completion with one token per flag; the flag says whether the model sampled the token."""
    length = len(sampled)
    return replace(completion(length), logprobs=(logprob,) * length, sampled=sampled)


@pytest.mark.parametrize(("loss", "weight"), [("dapo", 1 / 6), ("grpo", 1 / (2 * 2)), ("dr_grpo", 1 / (2 * 100))])
def test_unsampled_tokens_do_not_count_in_any_mean(loss: str, weight: float) -> None:
    both = group([0, 1], completions=(turns(True, False, False, True), completion(4)))
    first, second = made([both], loss=loss)
    assert (first.token_ids, first.sampled) == ((10, 11, 12, 13), (True, False, False, True))
    assert (len(first.sampled_logprobs), len(first.advantages), first.weight) == (2, 2, weight)
    assert (second.sampled, second.num_trained) == (None, 4)


def test_tokens_before_the_first_sampled_one_join_the_prompt() -> None:
    both = group([0, 1], prompt_token_ids=(), completions=(turns(False, False, True), turns(False, True, False)))
    first, second = made([both])
    assert (first.prompt_token_ids, first.token_ids, first.sampled) == ((10, 11), (12,), None)
    assert (second.prompt_token_ids, second.token_ids, second.sampled) == ((10,), (11, 12), (True, False))


def test_given_advantages_reach_only_sampled_tokens() -> None:
    theirs = ((1.0, 2.0, 3.0), (0.5,))
    both = group([0, 0], completions=(turns(True, False, True), turns(True, False)), advantages=theirs)
    assert [sample.advantages for sample in made([both])] == [(1.0, 3.0), (0.5,)]


def test_advantage_without_sampled_tokens_trains_nothing() -> None:
    assert made([group([0], completions=(turns(True, False),), advantages=((0.0, 1.0),))]) == []


def test_completion_without_sampled_tokens_counts_in_the_mean() -> None:
    (kept,) = made([group([0, 1], completions=(turns(False, False), completion(2)))], advantage_scale="none")
    assert kept.advantages == (0.5, 0.5)


@pytest.mark.parametrize("scale", SCALES)
def test_group_of_one_completion_or_none_has_no_advantage(scale: AdvantageScale) -> None:
    small = [group([], completions=()), group([3])]
    assert advantages(small, scale) == [[], [0.0]]
    assert made(small, advantage_scale=scale) == made([], advantage_scale=scale) == []
    with_others = made([*small, group([0, 2])], advantage_scale=scale, loss="dr_grpo")
    alone = made([group([0, 2])], advantage_scale=scale, loss="dr_grpo")
    assert len(with_others) == len(alone) == 2
    assert [sample.weight for sample in with_others] == [1 / (3 * 100)] * 2


def test_batch_deviation_ignores_missing_completions() -> None:
    # rewards 0, 2 and 5: mean 7/3, variance (49 + 1 + 64) / 27 = 38/9
    values = advantages([group([], completions=()), group([0, 2]), group([5])], "batch")
    assert values == [[], pytest.approx([-3 / 38**0.5, 3 / 38**0.5], rel=1e-5), [0]]


def test_samples_get_the_images_of_their_group() -> None:
    """Two groups may have the same token ids but different images."""
    shown = [
        Images.of((Array(name="pixels", dtype="uint8", shape=(1,), content=bytes([value])),), starts=(0,), grids=())
        for value in range(2)
    ]
    first, _, second, _ = made([group([1, 0], images=images) for images in shown])
    assert (first.images, second.images) == tuple(shown)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.prompt != second.prompt
    assert made([group([1, 0])])[0].prompt == ((1, 2), "", ())
