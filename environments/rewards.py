"""Rewards that are chosen by name, `--reward math,format=0.2,my.py:brief`, and added up by their weights.

Not covered: time limits and what becomes of a reward that fails (`bridge/scoring`).
"""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from bridge.core.foreign_code import shortened
from bridge.errors import RewardError, UsageError
from bridge.types import Problem
from environments import answers, own_code

Score = Callable[[Problem, str], Any]
FORM = "def {name}(problem: dict, completion: str) -> float"


def exact(problem: Problem, completion: str) -> float:
    """Return 1.0 for the problem's answer and nothing else; white space around both is forgiven."""
    return float(completion.strip() == str(problem["answer"]).strip())


def equal(problem: Problem, completion: str) -> float:
    """Return 1.0 where the completion's answer equals the problem's as a number or formula."""
    return float(answers.is_right(problem["answer"], completion))


def is_marked(problem: Problem, completion: str) -> float:
    r"""Return 1.0 where the completion marks an answer, by `####` or in `\\boxed{}`, right or wrong."""
    del problem
    return float(bool(answers.marked(completion)))


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward and its weight in the sum."""

    name: str
    """What its share is called in the metrics."""
    weight: float
    """What it is multiplied by."""
    score: Score
    """Gives the number."""
    needs_answer: bool = False
    """Whether it looks at the problem's `answer`."""
    place: str = ""
    """Where a function of the user's begins: its file and line."""

    def __call__(self, problem: Problem, completion: str) -> float:
        """Return the number before its weight.

        Raises:
            RewardError: it returned no number. Whatever else its code raises is raised.
        """
        value = self.score(problem, completion)
        if isinstance(value, str) or not isinstance(value, SupportsFloat):
            raise RewardError(
                f"reward {self.name} returned {shortened(repr(value))}, expected a number ({self.place})",
                remedy=f"return a number from {self.name}",
            )
        return float(value)


class Rewards:
    """Several rewards as one."""

    def __init__(self, rewards: tuple[Reward, ...]) -> None:
        if any(reward.score is equal for reward in rewards):
            answers.prepare()
        self._rewards = rewards

    def score(self, problem: Problem, completion: str) -> float:
        """Return the sum of all rewards, each by its weight."""
        return self.scores(problem, completion)[0]

    def scores(self, problem: Problem, completion: str) -> tuple[float, dict[str, float]]:
        """Return that sum, and each reward before its weight."""
        parts = {reward.name: reward(problem, completion) for reward in self._rewards}
        return sum(reward.weight * parts[reward.name] for reward in self._rewards), parts


NAMED: Mapping[str, tuple[Score, bool]] = {"math": (equal, True), "exact": (exact, True), "format": (is_marked, False)}
"""Name -> the reward, and whether it needs the problem's answer."""


def parse(text: str) -> tuple[Reward, ...]:
    """Return the rewards that `text` names: names or `file.py:function`, with `=WEIGHT` behind, separated by commas.

    Raises:
        UsageError: a reward that there is not, a weight that is no number, or two of one name.
        RewardError: the code of a file raised.
    """
    rewards = tuple(_reward(item.strip()) for item in text.split(","))
    names = [reward.name for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(
            f"--reward {text}: two rewards are called {' and '.join(sorted(twice))}",
            remedy="give each reward once, and functions names of their own",
        )
    if not any(reward.weight for reward in rewards):
        raise UsageError(f"--reward {text}: no reward has a weight other than 0", remedy="leave =0 out of one of them")
    return rewards


def _reward(item: str) -> Reward:
    name, sign, written = item.partition("=")
    weight = _weight(item, written) if sign else 1.0
    if ":" in name or name.endswith(".py"):
        return _own(name, weight)
    if name in NAMED:
        score, needs_answer = NAMED[name]
        return Reward(name=name, weight=weight, score=score, needs_answer=needs_answer)
    close = difflib.get_close_matches(name, NAMED, n=1) or ["math"]
    raise UsageError(
        f"no reward {name!r}, expected {', '.join(NAMED)} or {own_code.REWARD.form}",
        remedy=f"--reward {close[0]}, or --reward {own_code.REWARD.form} for your own",
    )


def _weight(item: str, written: str) -> float:
    try:
        weight = float(written)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UsageError(
            f"--reward {item}: the weight {written!r} is no finite number",
            remedy=f"--reward {item.partition('=')[0]}=0.5",
        )
    return weight


def _own(name: str, weight: float) -> Reward:
    function = own_code.find(own_code.REWARD, name)
    title = getattr(function, "__name__", type(function).__name__)
    if inspect.iscoroutinefunction(function):
        raise UsageError(
            f"reward {name} is an async function, expected a plain one",
            remedy=f"write it as: {FORM.format(name=title)}",
        )
    score = _of_lists(function) if "completions" in _parameters(function) else _of_one(function, name, title)
    return Reward(name=title, weight=weight, score=score, place=_place(function, name))


def _of_one(function: Any, name: str, title: str) -> Score:
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise UsageError(
            f"reward {name} cannot be called with (problem, completion): {error}",
            remedy=f"write it as: {FORM.format(name=title)}",
        ) from error
    score: Score = function
    return score


def _of_lists(function: Any) -> Score:
    """Return a score out of a function in TRL's form: lists of prompts and completions, and one list per column."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(function).values())

    def score(problem: Problem, completion: str) -> Any:
        is_chat = not isinstance(problem["prompt"], str)
        given: dict[str, Any] = {**problem, "prompts": problem["prompt"]}
        given["completions"] = [{"role": "assistant", "content": completion}] if is_chat else completion
        wanted = given.keys() - {"prompt"} if takes_all else given.keys() & _parameters(function).keys()
        (value,) = function(**{key: [given[key]] for key in wanted})
        return value

    return score


def _place(function: Any, name: str) -> str:
    code = getattr(function, "__code__", None)
    file = Path(name.rpartition(":")[0]).name
    return f"{file} line {code.co_firstlineno}" if code else file


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # written in C
        return {}
