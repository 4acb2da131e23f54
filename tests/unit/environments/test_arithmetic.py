"""The sums of `arithmetic`: which exist, which are held out, and how answers are scored."""

import pytest

from bridge.types import Problem
from bridge_environments.registry import Arithmetic

PROBLEM: Problem = {"prompt": "12+7=", "answer": "19"}


def test_training_and_held_out_sums_cover_each_sum_once() -> None:
    environment = Arithmetic()
    prompts = [problem["prompt"] for problem in [*environment, *environment.held_out()]]
    assert sorted(map(str, prompts)) == sorted(f"{a}+{b}=" for a in range(20) for b in range(20))
    assert len(environment.held_out()) == 80


def test_arithmetic_answers_are_right() -> None:
    environment = Arithmetic()
    for problem in [*environment, *environment.held_out()]:
        a, b = str(problem["prompt"]).removesuffix("=").split("+")
        assert problem["answer"] == str(int(a) + int(b))


def test_arithmetic_split_is_deterministic() -> None:
    # Pinned: if the split moved, a cached model might have been trained on the held-out sums.
    assert [problem["prompt"] for problem in Arithmetic().held_out()[:4]] == ["7+10=", "19+1=", "0+6=", "0+4="]
    assert Arithmetic().held_out() == Arithmetic().held_out()


def test_arithmetic_can_be_iterated_again() -> None:
    environment = Arithmetic()
    assert list(environment) == list(environment)


def test_changing_the_returned_held_out_list_changes_nothing() -> None:
    environment = Arithmetic()
    environment.held_out().clear()
    assert len(environment.held_out()) == 80


@pytest.mark.parametrize("completion", ["19", " 19", "19\n", "\t19  "])
def test_answer_scores_one_despite_surrounding_spaces(completion: str) -> None:
    assert Arithmetic().score(PROBLEM, completion) == 1.0


@pytest.mark.parametrize(
    "completion", ["", " ", "18", "1 9", "019", "+19", "19.", "19.0", "=19", "1919", "19 19", "١٩"]
)
def test_anything_but_the_exact_answer_scores_zero(completion: str) -> None:
    assert Arithmetic().score(PROBLEM, completion) == 0.0
