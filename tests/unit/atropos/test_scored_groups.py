"""Convert an environment's groups to training data: prompts, masks, log-probabilities, advantages, and every fault."""

import math
from typing import Any

import pytest

from bridge.atropos.api import ScoredGroup
from bridge.atropos.scored_groups import flaws, to_train_on
from bridge.types import Group
from tests.unit.atropos.atropos_api import pair, scored

BOUNDS = {"longest": 6, "num_words": 100}


def read(document: dict[str, Any]) -> ScoredGroup:
    return ScoredGroup.model_validate(document)


def learnt(document: dict[str, Any]) -> Group:
    assert not list(flaws(read(document), **BOUNDS))
    return to_train_on(read(document), lambda token_ids: "".join(chr(60 + token) for token in token_ids))


def known(logprobs: tuple[float, ...]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in logprobs]


def test_group_with_only_sampled_completions_needs_no_mask() -> None:
    group = learnt(pair())
    assert (group.problem, group.prompt_token_ids, group.rewards) == ({"prompt": "AB"}, (5, 6), (0.0, 1.0))
    first, second = group.completions
    assert (first.token_ids, first.logprobs, first.text, first.sampled) == ((7, 8), (-0.5, -0.5), "CD", None)
    assert (second.token_ids, second.sampled, second.versions) == ((9,), None, ())
    assert group.advantages is None


def test_prompt_is_the_common_prefix_of_all_sequences() -> None:
    group = learnt(scored(((1, 2, 3, 9), 3), ((1, 2, 4, 9), 3), ((1, 2, 3, 3, 9), 4)))
    assert group.prompt_token_ids == (1, 2)
    assert [completion.token_ids for completion in group.completions] == [(3, 9), (4, 9), (3, 3, 9)]
    assert [completion.sampled for completion in group.completions] == [(False, True)] * 2 + [(False, False, True)]
    assert known(group.completions[0].logprobs) == [None, -0.5]


def test_prompt_ends_before_the_first_sampled_token() -> None:
    group = learnt(scored(((1, 2, 3, 4), 3), ((1, 2, 3, 4), 2)))
    assert group.prompt_token_ids == (1, 2)
    assert [completion.sampled for completion in group.completions] == [(False, True), None]


def test_sequences_without_a_common_prefix_have_no_prompt() -> None:
    group = learnt(scored(((1, 2), 1), ((3, 2), 1)))
    assert group.prompt_token_ids == ()
    assert [completion.sampled for completion in group.completions] == [(False, True)] * 2


def test_tool_result_between_turns_is_not_sampled() -> None:
    group = learnt(scored(((1, 2, 3, 4, 5), 1), masks=[[-100, 2, -100, -100, 5]]))
    (completion,) = group.completions
    assert (completion.token_ids, completion.sampled) == ((2, 3, 4, 5), (True, False, False, True))


def test_first_token_of_a_sequence_is_never_trained_on() -> None:
    group = learnt(scored(((1, 2, 3), 0), ((1, 2, 4), 0)))
    assert group.prompt_token_ids == (1,)
    assert [completion.sampled for completion in group.completions] == [None, None]


def test_sequence_without_sampled_tokens_keeps_its_reward() -> None:
    group = learnt(scored(((1, 2, 3), 3), ((1, 2), 1)))
    assert (group.prompt_token_ids, group.rewards) == ((1,), (0.0, 1.0))
    assert group.completions[0].sampled == (False, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [None, None]),
        ([], [None, None]),
        ([[1.0, 1.0, -0.25, 1.0], [1.0, 1.0, -1.0]], [-0.25, None]),
        ([[1.0, 1.0, None, 0.005], [1.0, 1.0, -1.0]], [None, 0.005]),
        ([[math.nan, 7.0, -0.25, math.nan], [1.0, 1.0, -1.0]], [-0.25, None]),
    ],
)
def test_log_probability_of_one_or_null_is_unknown(given: Any, expected: list[float | None]) -> None:
    assert known(learnt(pair(inference_logprobs=given)).completions[0].logprobs) == expected


def test_versions_are_those_of_the_sampled_tokens() -> None:
    overrides = [{"weight_versions": [[3, 1], [5, 1]]}, {}]
    tool = scored(((1, 5, 6, 7, 8), 1), ((1, 9), 1), masks=[[-100, 5, -100, -100, 8], [-100, 9]], overrides=overrides)
    assert [completion.versions for completion in learnt(tool).completions] == [(3, None, None, 5), ()]


def test_advantages_are_per_token_or_per_sequence() -> None:
    group = learnt(pair(advantages=[[9.0, None, 1.0, -1.0], [2.0]]))
    assert group.advantages == ((1.0, -1.0), (2.0,))


def test_unsampled_tokens_have_no_advantage() -> None:
    group = learnt(scored(((1, 2, 3, 4), 1), masks=[[-100, 2, -100, 4]], advantages=[[5.0, 6.0, math.nan, 7.0]]))
    assert group.advantages == ((6.0, 0.0, 7.0),)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"tokens": [], "masks": [], "scores": []}, "tokens", "it has no sequences"),
        ({"tokens": [[], []], "masks": [[], []]}, "tokens", "sequence 1 of 2 has no tokens"),
        ({"scores": [1.0]}, "scores", "it has 2 sequences and 1 scores"),
        ({"masks": []}, "masks", "it has 2 sequences and 0 masks"),
        ({"advantages": [[1.0]]}, "advantages", "it has 2 sequences and 1 advantages"),
        ({"inference_logprobs": [[1.0]]}, "inference_logprobs", "it has 2 sequences and 1 inference_logprobs"),
        ({"overrides": [{}]}, "overrides", "it has 2 sequences and 1 overrides"),
        ({"overrides": [{"weight_versions": [[3, 1]]}, {}]}, "overrides", "1 of 2 has invalid weight_versions"),
        ({"overrides": [{"weight_versions": 3}, {}]}, "overrides", "pairs for 2 tokens"),
        ({"overrides": [{}, {"weight_versions": [["3", 1]]}]}, "overrides", "pairs for 1 tokens"),
        ({"images": ["a.png"]}, "images", "its prompt has images"),
        ({"masks": [[-100, -100, 7], [-100, -100, 9]]}, "masks", "sequence 1 of 2 has 4 tokens and a mask of 3"),
        ({"masks": [[-100, -100, 7, 8], [-100, 9, -100]]}, "masks", "2 of 2 has a mask value that is neither -100"),
        ({"masks": [[0, 0, 1, 1], [0, 0, 1]]}, "masks", "sequence 1 of 2 has a mask value that is neither"),
        ({"tokens": [[5, 6, 100, 8], [5, 6, 9]]}, "vocabulary", "the token 100, expected 0 to 99"),
        ({"tokens": [[5, 6, -1, 8], [5, 6, 9]]}, "vocabulary", "the token -1"),
        ({"tokens": [[5] * 7, [5, 6, 9]]}, "length", "7 tokens, expected at most 6"),
        ({"scores": [math.nan, 1.0]}, "scores", "sequence 1 of 2 has the score nan"),
        ({"scores": [1.0, -math.inf]}, "scores", "sequence 2 of 2 has the score -inf"),
        ({"advantages": [[1.0], [1.0, 1.0]]}, "advantages", "sequence 2 of 2 has 3 tokens and 2 advantages"),
        ({"advantages": [[0, 0, math.inf, 0], [0]]}, "advantages", "sequence 1 of 2 has the advantage inf"),
        ({"advantages": [[math.nan], [0]]}, "advantages", "sequence 1 of 2 has the advantage nan"),
        ({"inference_logprobs": [[1.0] * 4, [-1.0]]}, "inference_logprobs", "3 tokens and 1 log-probabilities"),
        ({"inference_logprobs": [[1, 1, -math.inf, -1], [1, 1, -1]]}, "inference_logprobs", "log-probability -inf"),
        ({"inference_logprobs": [[1, 1, 0.5, -1], [1, 1, -1]]}, "inference_logprobs", "log-probability 0.5"),
    ],
)
def test_faulty_group_is_refused_with_its_fault(change: dict[str, Any], kind: str, message: str) -> None:
    first, fault = next(flaws(read(pair() | change), **BOUNDS))
    assert first == kind
    assert message in fault
    assert "\n" not in fault
