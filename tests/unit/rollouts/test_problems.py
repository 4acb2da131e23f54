"""The order of the problems, and their prompts as token ids."""

import random
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bridge.core.problem_form import problem_fault
from bridge.errors import RewardError
from bridge.rollouts.problems import WINDOW, encode, endless, held_out
from bridge.types import Message, Problem
from bridge.weights import skeleton
from tests.models import tiny

PROBLEMS: list[Problem] = [{"prompt": str(number)} for number in range(20)]
TEMPLATE = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the first role must be user') }}{% endif %}"
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


class Sums:
    def __iter__(self) -> Iterator[Problem]:
        yield from PROBLEMS

    def score(self, problem: Problem, completion: str) -> float:
        return 0.0


class SumsWithHeldOut(Sums):
    def __init__(self, kept: list[Problem]) -> None:
        self._kept = kept

    def held_out(self) -> list[Problem]:
        return self._kept


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder, tiny.VOCABULARY)
    return skeleton.tokenizer(str(folder))


def taken(seed: int, count: int) -> list[str | list[Message]]:
    return [problem["prompt"] for problem in islice(endless(PROBLEMS, seed), count)]


def test_each_pass_has_every_problem_once_in_a_new_order() -> None:
    order = taken(0, 60)
    passes = [order[:20], order[20:40], order[40:]]
    for one in passes:
        assert sorted(map(str, one)) == sorted(map(str, range(20)))
    assert passes[0] != passes[1] != passes[2]


def test_order_depends_only_on_the_seed() -> None:
    assert taken(3, 50) == taken(3, 50)
    assert taken(3, 20) != taken(4, 20)


def test_few_problems_are_shuffled_together() -> None:
    expected: list[Problem] = []
    for number in range(3):
        order = list(range(20))
        random.Random(f"5/{number}").shuffle(order)
        expected += [PROBLEMS[index] for index in order]
    for problems in (PROBLEMS, Sums()):
        assert list(islice(endless(problems, 5), 60)) == expected


class Numbers:
    """Counts reads; `size` None never ends."""

    def __init__(self, size: int | None) -> None:
        self._size, self.num_read = size, 0

    def __iter__(self) -> Iterator[Problem]:
        for number in count() if self._size is None else range(self._size):
            assert number < 10 * WINDOW, "read without an end"
            self.num_read += 1
            yield {"prompt": str(number)}


def numbers(problems: Iterable[Problem], seed: int, number: int) -> list[int]:
    return [int(str(problem["prompt"])) for problem in islice(endless(problems, seed), number)]


def test_endless_problems_are_read_on_demand() -> None:
    problems = Numbers(None)
    drawn = numbers(problems, 0, 3 * WINDOW)
    assert problems.num_read <= 4 * WINDOW
    assert len(set(drawn)) == len(drawn)
    assert drawn == numbers(Numbers(None), 0, 3 * WINDOW)
    assert drawn != numbers(Numbers(None), 1, 3 * WINDOW)
    assert max(drawn[:100]) < WINDOW + 100
    assert sum(drawn[:100]) / 100 > WINDOW / 4, "from the whole window"


def test_each_pass_of_a_large_set_has_every_problem_once() -> None:
    size = 2 * WINDOW + 7
    problems = Numbers(size)
    drawn = numbers(problems, 0, 2 * size)
    assert sorted(drawn[:size]) == sorted(drawn[size:]) == list(range(size))
    assert drawn[:size] != drawn[size:]
    assert drawn[:size] != sorted(drawn[:size])


def test_list_of_any_length_is_shuffled_completely() -> None:
    size = 4 * WINDOW
    assert max(numbers(list(Numbers(size)), 0, 100)) > 3 * WINDOW


class Exhausted:
    """Yields the same problems, but only once."""

    def __init__(self, size: int) -> None:
        self._iterator = iter(PROBLEMS[:size])

    def __iter__(self) -> Iterator[Problem]:
        return self._iterator


@pytest.mark.parametrize("size", [0, 2])
def test_empty_epoch_does_not_loop_forever(size: int) -> None:
    problems = endless(Exhausted(size), 0)
    assert len(list(islice(problems, size))) == size
    with pytest.raises(RewardError, match=f"pass {1 + bool(size)} over the environment's problems yielded none"):
        next(problems)


def test_held_out_problems_come_from_the_environment() -> None:
    assert held_out(SumsWithHeldOut(PROBLEMS[:2])) == PROBLEMS[:2]


@pytest.mark.parametrize("environment", [Sums(), SumsWithHeldOut([])])
def test_evaluation_without_held_out_problems_is_refused(environment: Sums) -> None:
    with pytest.raises(RewardError, match="held-out"):
        held_out(environment)


def test_text_is_encoded_unchanged(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode(tokenizer, {"prompt": "1+2="}) == tuple(tokenizer.convert_tokens_to_ids(list("1+2=")))


def test_messages_are_rendered_with_the_generation_prompt(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    encoded = encode(tokenizer, {"prompt": [{"role": "user", "content": "1+2="}]})
    assert encoded == tuple(tokenizer.convert_tokens_to_ids(list("1+2=>")))


def test_template_arguments_are_passed_to_the_template(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE + "{% if short %}={% endif %}")
    messages: Problem = {"prompt": [{"role": "user", "content": "1+2"}]}
    for short, text in ((True, "1+2>="), (False, "1+2>")):
        assert encode(tokenizer, messages, short=short) == tuple(tokenizer.convert_tokens_to_ids(list(text)))


@pytest.mark.parametrize("prompt", ["1+\ud800=", [{"role": "user", "content": "1+\ud800="}]])
def test_lone_surrogate_in_a_prompt_is_refused(tokenizer: PreTrainedTokenizerBase, prompt: Any) -> None:
    with pytest.raises(RewardError, match=r"its prompt .*ud800.* has half of a surrogate pair"):
        encode(tokenizer, {"prompt": prompt})


def test_messages_may_have_any_keys(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    message: Any = {"role": "user", "content": "1+2", ("own", 1): "note"}
    assert problem_fault({"prompt": [message]}) == ""
    assert encode(tokenizer, {"prompt": [message]}) == tuple(tokenizer.convert_tokens_to_ids(list("1+2>")))


def test_messages_without_a_template_use_the_plain_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    beside: Any = {"prompt": [{"role": "user", "content": "1+2"}], "plain_prompt": "1+2="}
    assert encode(tokenizer, beside) == tuple(tokenizer.convert_tokens_to_ids(list("1+2=")))
    assert encode(tokenizer, beside | {"prompt": "2+2="}) == tuple(tokenizer.convert_tokens_to_ids(list("2+2=")))


def test_messages_without_a_template_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RewardError, match="no chat template"):
        encode(tokenizer, {"prompt": [{"role": "user", "content": "hello"}]})


@pytest.mark.parametrize("template", [TEMPLATE, "{% for %}", "{{ messages.nothing.more }}"])
def test_messages_rejected_by_the_template_are_a_reward_error(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(RewardError, match="chat template") as caught:
        encode(tokenizer, {"prompt": [{"role": "system", "content": "hello"}]})
    assert "\n" not in caught.value.message


def test_prompt_without_tokens_is_refused(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(RewardError, match="no tokens"):
        encode(tokenizer, {"prompt": [{"role": "user", "content": ""}]})
    with pytest.raises(RewardError, match="its prompt is empty"):
        encode(tokenizer, {"prompt": ""})
