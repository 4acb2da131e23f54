"""One completion's score: call foreign code, and take nothing but finite numbers from it.

Not covered: where it is called (`scorer.py`), loading an environment and its problems (`environments/registry.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, SupportsFloat, SupportsIndex

from bridge.core.foreign_code import place_of, said, shortened, source_file
from bridge.errors import BridgeError
from bridge.types import Problem


class Scores(Protocol):
    """What scores completions.

    It may have `scores(problem, completion) -> tuple[float, dict[str, float]]`, the reward and the parts that it is a
    weighted sum of, before their weights; that is called in the place of `score` then.
    """

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of one completion, a finite number."""
        ...


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one completion is worth."""

    reward: float
    """A finite number."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The finite numbers that it is a weighted sum of, by their names, before their weights."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why one completion has no reward."""

    kind: str
    """What happened and where: the same words for every completion that it happened to."""
    line: str
    """What happened, where, and to which prompt and completion, in one line."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Whose code scores, for the person who is to mend it."""

    name: str
    """The method with its class: `Class.score`."""
    several: bool
    """Whether it is `scores`, and returns the parts of the reward too."""
    file: str
    """The file of its class."""
    place: str
    """Where the method begins: the file's name and a line."""

    @classmethod
    def of(cls, scores: Scores) -> Self:
        """Look it up."""
        file, several = source_file(type(scores)), callable(getattr(scores, "scores", None))
        method = "scores" if several else "score"
        code = getattr(getattr(scores, method), "__code__", None)
        place = f"{Path(file).name} line {code.co_firstlineno}" if code else Path(file).name
        return cls(name=f"{type(scores).__name__}.{method}", several=several, file=file, place=place)


def score_one(scores: Scores, origin: Origin, problem: Problem, completion: str) -> Score | Fault:
    """Score one completion; an interrupt alone is raised."""
    try:
        value = getattr(scores, "scores" if origin.several else "score")(problem, completion)
        score = _read(value if origin.several else (value, {}))
    except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code may raise anything, and even call sys.exit
        return fault_of(problem, completion, *_raised(error, origin))
    return score or fault_of(problem, completion, *_returned(value, origin))


def fault_of(problem: Problem, completion: str, kind: str, told: str) -> Fault:
    """Return the fault "`told`, on prompt ... and completion ..."; `kind` is `told` without what differs each time."""
    subject = f"on prompt {shortened(repr(problem['prompt']))} and completion {shortened(repr(completion))}"
    return Fault(kind=kind, line=f"{told}, {subject}")


def _raised(error: BaseException, origin: Origin) -> tuple[str, str]:
    first = error.__cause__ or error if isinstance(error, BridgeError) else error
    place = place_of(first, origin.file) or origin.place
    raised = f"{origin.name} raised {type(first).__name__}"
    told = error.message if isinstance(error, BridgeError) else f"{raised}{said(error)} ({place})"
    return f"{raised} ({place})", told


def _returned(value: object, origin: Origin) -> tuple[str, str]:
    expected = "a finite number" + (" and a dict of finite numbers" if origin.several else "")
    found = shortened(repr(value)) + ("" if isinstance(value, float) else f" of type {type(value).__name__}")
    kind = f"{origin.name} returned something else than {expected}"
    return kind, f"{origin.name} returned {found}, expected {expected} ({origin.place})"


def _read(value: object) -> Score | None:
    """Return a reward and its parts; None where they are none."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Mapping):
        return None
    reward, parts = _finite(value[0]), {str(name): _finite(part) for name, part in value[1].items()}
    whole = {name: part for name, part in parts.items() if part is not None}
    return None if reward is None or len(whole) < len(parts) else Score(reward=reward, parts=whole)


def _finite(value: object) -> float | None:
    if not isinstance(value, SupportsFloat | SupportsIndex):  # text is refused: "1.0" is a mistake of the environment
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array or tensor of several elements
        return None
    return number if math.isfinite(number) else None
