"""Rewards: call the score of an environment, which is foreign code, and take nothing but finite numbers from it.

Not covered: loading an environment and checking its problems (`environments/registry.py`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import SupportsFloat, SupportsIndex

from bridge.errors import RewardError
from bridge.rewards.foreign_code import foreign_code, shortened, source_file
from bridge.types import Environment, Problem


def score_all(environment: Environment, problem: Problem, completions: Sequence[str]) -> tuple[float, ...]:
    """Score every completion of one problem, in their order.

    Raises:
        RewardError: a score raised, or returned what is no finite number.
    """
    return tuple(_score(environment, problem, completion) for completion in completions)


def _score(environment: Environment, problem: Problem, completion: str) -> float:
    name, file = type(environment).__name__, source_file(type(environment))
    prompt = shortened(repr(problem["prompt"]))
    subject = f", on prompt {prompt} and completion {shortened(repr(completion))}"
    with foreign_code(f"{name}.score", file, subject):
        value: object = environment.score(problem, completion)
    reward = _as_float(value)
    if reward is not None and math.isfinite(reward):
        return reward
    kind = "" if reward is not None else f" of type {type(value).__name__}"
    returned = f"{name}.score returned {shortened(repr(value))}{kind}, expected a finite number"
    raise RewardError(
        f"{returned} ({_definition(environment, file)}){subject}",
        remedy=f"return a finite number from score in {Path(file).name}, then run the same command again",
    )


def _as_float(value: object) -> float | None:
    if not isinstance(value, SupportsFloat | SupportsIndex):  # text is refused: "1.0" is a mistake of the environment
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array or tensor of several elements
        return None


def _definition(environment: Environment, file: str) -> str:
    code = getattr(environment.score, "__code__", None)
    return f"{Path(file).name} line {code.co_firstlineno}" if code else Path(file).name
