"""Rewards: call the score of an environment, which is foreign code, and take nothing but finite numbers from it.

Not covered: loading an environment and checking its problems (`environments/registry.py`).
"""

import inspect
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import SupportsFloat, SupportsIndex

from bridge.errors import BridgeError, RewardError
from bridge.types import Environment, Problem

MAX_SHOWN_CHARACTERS = 60


def score_all(environment: Environment, problem: Problem, completions: Sequence[str]) -> tuple[float, ...]:
    """Score every completion of one problem, in their order.

    Raises:
        RewardError: a score raised, or returned what is no finite number.
    """
    return tuple(_score(environment, problem, completion) for completion in completions)


@contextmanager
def foreign_code(doing: str, file: str, subject: str = "") -> Iterator[None]:
    """Turn whatever foreign code raises inside into an error that names the exception and its line in `file`.

    Raises:
        RewardError: "`doing` raised ..., `subject`".
    """
    try:
        yield
    except BridgeError:  # ours, and clear already
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything, and may even call sys.exit
        what = shortened(f"{type(error).__name__}: {error}".removesuffix(": "), 200)
        raise RewardError(
            f"{doing} raised {what} ({_place(error, file)}){subject}",
            remedy=f"mend that line of {Path(file).name}, then run the same command again",
        ) from error


def shortened(value: object, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return `value` on one line of at most `limit` characters; strings inside are as Python quotes them."""
    line = " ".join(str(value).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def source_file(kind: type) -> str:
    """Return the file that defines the class `kind`, or its module's name when there is none."""
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):  # defined interactively, or in C
        return kind.__module__


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


def _place(error: BaseException, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # no frame of the file ever ran
        return f"{Path(error.filename).name} line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name} line {last.lineno}"
