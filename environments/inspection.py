"""Checks of an environment before anything is started: it has problems, each is one, and something scores them.

Not covered: finding it (`registry.py`, `own_code.py`), and calling the score (`bridge/rewards`).
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from bridge.errors import RewardError
from bridge.rewards.foreign_code import foreign_code, shortened, source_file

EXAMPLE = "{'prompt': '3+4='}"
SCORE = "def score(self, problem: dict, completion: str) -> float"


def check_score(environment: Any, name: str) -> None:
    """Check that `environment` has a score that can be called.

    Raises:
        RewardError: it has none.
    """
    score = getattr(environment, "score", None)
    if not callable(score):
        raise RewardError(f"environment {name} has no method score", remedy=f"add to it: {SCORE}")
    try:
        inspect.signature(score).bind({}, "")
    except TypeError as error:
        raise RewardError(
            f"environment {name}: score cannot be called with (problem, completion): {error}",
            remedy=f"write it as: {SCORE}",
        ) from error


def check_problems(environment: Any, name: str) -> None:
    """Iterate over `environment` once and check each problem, those held out as well.

    Raises:
        RewardError: its code raised, it has no problems, or one of them is no problem.
    """
    file = source_file(type(environment))
    with foreign_code(f"environment {name}: listing its problems", file):
        if not isinstance(environment, Iterable):
            _refuse(name, "is not iterable", f"add __iter__, which yields problems such as {EXAMPLE}")
        if iter(environment) is environment:
            _refuse(name, "is an iterator, so a second pass would be empty", "return a new iterator from __iter__")
        _check_each(name, "problem", list(environment))
    if hasattr(environment, "held_out"):
        with foreign_code(f"environment {name}: listing its held-out problems", file):
            held_out = environment.held_out()
            if not isinstance(held_out, list):
                _refuse(name, f"has a held_out that returned a {type(held_out).__name__}", "return a list of problems")
            _check_each(name, "held-out problem", held_out)


def check_answers(problems: Sequence[Any], name: str, reward: str) -> None:
    """Check that every problem has an answer, which `reward` compares with.

    Raises:
        RewardError: one has none.
    """
    for index, problem in enumerate(problems):
        if lack := answer_fault(problem):
            raise RewardError(
                f"environment {name}: problem {index} {lack}, and the reward {reward} compares with it",
                remedy="give every problem an answer that is text or a number, or choose another --reward",
            )


def answer_fault(problem: Any) -> str:
    """Say what is wrong with the answer of `problem`, as the rest of a sentence about it, or nothing."""
    if "answer" not in problem:
        return "has no answer"
    answer = problem["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"has the answer {shortened(repr(answer))}, expected text or a number"
    return "" if str(answer).strip() else "has an empty answer"


def problem_fault(problem: object) -> str:
    """Say what is wrong with `problem`, or nothing."""
    if not isinstance(problem, dict):
        return f"found {shortened(repr(problem))} of type {type(problem).__name__}, expected a dict with a prompt"
    if "prompt" not in problem:
        return f"no prompt, found the keys {shortened(list(problem))}"
    prompt = problem["prompt"]
    if isinstance(prompt, str):
        return "" if prompt else "its prompt is empty"
    if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
        return f"its prompt is {shortened(repr(prompt))}, expected text or messages {{'role': text, 'content': text}}"
    return ""


def _check_each(name: str, noun: str, problems: list[Any]) -> None:
    if not problems:
        _refuse(name, f"has no {noun}s", f"give it at least one, such as {EXAMPLE}")
    for index, problem in enumerate(problems):
        if fault := problem_fault(problem):
            _refuse(name, f"has a bad {noun} {index}: {fault}", f"make each a dict such as {EXAMPLE}")


def _refuse(name: str, fault: str, remedy: str) -> NoReturn:
    raise RewardError(f"environment {name} {fault}", remedy=remedy)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
