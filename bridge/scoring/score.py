"""The score of one completion by foreign code, and how many of a batch failed."""

import inspect
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, SupportsFloat, SupportsIndex

from bridge.core.foreign_code import described, location_of, reason_of, shortened, source_file
from bridge.errors import BridgeError, RewardError
from bridge.types import Problem

logger = logging.getLogger(__name__)

LARGEST = 1e30
"""Largest absolute reward that is accepted: the squares of such rewards, and their sums, would overflow."""
LONGEST_NAME = 200
"""Characters of the name of a part of a reward."""
LONGEST_LINE = 400
"""Characters of what happened, in the line about a completion without a reward."""


class Scores(Protocol):
    """What scores completions.

    It may have `scores(problem, completion) -> tuple[float, dict[str, float]]`, which is called instead of `score`: the
    reward, and the parts that it is a weighted sum of, unweighted.
    """

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of one completion, a finite number of at most `LARGEST` in size."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The reward of one completion."""

    reward: float
    """A finite number."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The finite numbers that it is a weighted sum of, by name, unweighted."""
    turns: list[float] = field(default_factory=list)
    """One finite number per turn of the model, of which it is the sum; empty: it is for the completion whole."""


@dataclass(frozen=True, kw_only=True)
class FailedScore:
    """Why one completion has no reward."""

    kind: str
    """What happened and where: the same text for every completion that it happened to."""
    line: str
    """The same with the prompt and the completion, in one line."""
    is_raised: bool = False
    """Whether the agent's run raised: its process is intact, and may still score the run."""


@dataclass(frozen=True, kw_only=True)
class UnusablePrompt(FailedScore):
    """Why nothing was sampled for a problem; it does not count for the share of a batch that may fail."""

    @classmethod
    def of(cls, problem: Problem, error: BridgeError) -> Self:
        kind = "the prompt cannot be used"
        line = f"{kind}: {shortened(error.message, LONGEST_LINE)}, on prompt {described(problem['prompt'])}"
        return cls(kind=kind, line=line)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The code that scores, for error messages."""

    name: str
    """The method with its class: `Class.score`."""
    file: str
    """The file of its class."""
    location: str
    """Where the method begins: the file's name and a line."""

    @classmethod
    def of(cls, kind: type, method: str) -> Self:
        file = source_file(kind)
        code = getattr(inspect.unwrap(getattr(kind, method, None)), "__code__", None)  # type: ignore[arg-type]
        location = f"{Path(file).name} line {code.co_firstlineno}" if code else Path(file).name
        return cls(name=f"{kind.__name__}.{method}", file=file, location=location)

    def raised(
        self, problem: Problem, error: BaseException, completion: str = "", *, is_raised: bool = False
    ) -> FailedScore:
        """Return why a run of this code that raised `error` has no reward."""
        first = error.__cause__ or error if isinstance(error, BridgeError) else error
        kind = f"{self.name} raised {type(first).__name__}"
        location = location_of(first, self.file) or self.location
        what = error.message if isinstance(error, BridgeError) else f"{kind}{reason_of(error)} ({location})"
        return failed(problem, completion, f"{kind} ({location})", what, is_raised=is_raised)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a reset, a tool or an agent's run returned."""

    text: str
    is_error: bool = False
    """Whether the tool raised instead of returning it."""


class Host:
    """What scores completions, made once in each worker; one with tools or an agent answers further calls."""

    runs_in_thread = False
    """Whether its calls wait for this process when it runs here."""

    def __init__(self, scores: Any, origin: Origin | None = None) -> None:
        self._scores = scores
        method = "scores" if callable(getattr(scores, "scores", None)) else "score"
        self.origin = origin or Origin.of(type(scores), method)

    def fresh(self) -> "Host":
        """Return one for a trajectory that runs at the same time."""
        return self

    def score(self, problem: Problem, completion: str) -> Score | FailedScore:
        """Score one completion; of all exceptions only KeyboardInterrupt gets through."""
        origin = self.origin
        method = self.origin.name.rpartition(".")[2]
        try:
            value = getattr(self._scores, method)(problem, completion)
            score = _read(value if method == "scores" else (value, {}))
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code may raise anything, and call sys.exit
            return origin.raised(problem, error, completion)
        if score is not None:
            return score
        expected = "one finite number per turn" if isinstance(value, list) else "a finite number"
        expected += " and a dict of finite numbers" if method == "scores" else ""
        shown = described(value) + ("" if isinstance(value, float) else f" of type {type(value).__name__}")
        what = f"{origin.name} returned {shown}, expected {expected}{limit_note(value)} ({origin.location})"
        return failed(problem, completion, f"{origin.name} returned something other than {expected}", what)


def host_of(made: Any) -> Host:
    """Return what a recipe made, as a host."""
    return made if isinstance(made, Host) else Host(made)


def failed(problem: Problem, completion: str, kind: str, what: str, *, is_raised: bool = False) -> FailedScore:
    """Return the failure "`what`, on prompt ... and completion ..."; `kind` is `what` without its variable parts."""
    subject = f"on prompt {described(problem['prompt'])} and completion {described(completion)}"
    line = f"{shortened(what, LONGEST_LINE)}, {subject}"
    return FailedScore(kind=shortened(kind, LONGEST_LINE), line=line, is_raised=is_raised)


def returned(value: object) -> Score | None:
    """Return a reward, or its parts by name, as a score; None if they are not numbers as `as_reward` reads them."""
    if not isinstance(value, Mapping):
        return _read((value, {}))
    parts = [as_reward(part) for part in value.values()]
    return _read((math.fsum(part or 0.0 for part in parts), value)) if parts else None


def _read(value: object) -> Score | None:
    """Return a reward, or a list of one per turn, and its parts as a score; None as `returned`."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Mapping):
        return None
    per_turn = isinstance(value[0], list)
    rewards = [as_reward(number) for number in (value[0] if per_turn else value[:1])]
    parts = {shortened(name, LONGEST_NAME): as_reward(part) for name, part in value[1].items()}
    numbers = [number for number in rewards if number is not None]
    whole = {name: part for name, part in parts.items() if part is not None}
    reward = as_reward(math.fsum(numbers))
    if not rewards or reward is None or (len(numbers), len(whole)) != (len(rewards), len(parts)):
        return None
    return Score(reward=reward, parts=whole, turns=numbers if per_turn else [])


def limit_note(value: object) -> str:
    """Return what to add to "expected a finite number" if `value` is, or directly holds, one that is too large."""
    several: Any = [value]
    if type(value) in (dict, list, tuple):  # those of foreign classes may do anything
        several = [*value.values()] if isinstance(value, dict) else value
    are_too_large = (type(number) in (int, float) and LARGEST < abs(number) < math.inf for number in several)
    return f" of at most {LARGEST:g} in size" if any(are_too_large) else ""


def as_reward(value: object) -> float | None:
    """Return what a reward may be as a float; None for text, NaN, infinity, and what is larger than `LARGEST`."""
    if not isinstance(value, SupportsFloat | SupportsIndex):  # text is refused: "1.0" is a bug of the environment
        return None
    try:
        as_float = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array or tensor of several elements
        return None
    return as_float if abs(as_float) <= LARGEST else None


class FailedScores:
    """The failed scores of one batch: counted, reported once per kind; too many of them end the run."""

    def __init__(self, batch: str, *, num_completions: int, max_share: float) -> None:
        """`batch` names it in messages; at most `max_share` of its `num_completions` may fail."""
        self._batch = batch
        self._num_completions = num_completions
        self._max_share = max_share
        self._num_scored = 0
        self._unusable: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        """The first line of each kind."""

    def add(self, results: Iterable[Score | FailedScore]) -> None:
        """Count the failures among the results."""
        for result in results:
            self._num_scored += 1
            if isinstance(result, FailedScore):
                self._counts[result.kind] += 1
                self._unusable[result.kind] += isinstance(result, UnusablePrompt)
                self._examples.setdefault(result.kind, result.line)
        num_completions = max(self._num_completions, self._num_scored)  # groups of later batches may be among them
        of_scores = self._counts - self._unusable
        num_failed = of_scores.total()
        if num_failed <= self._max_share * num_completions:
            return
        kind, count = of_scores.most_common(1)[0]
        raise RewardError(
            f"{self._batch}: at least {num_failed} of {_completions(num_completions)} without a reward,"
            f" more than a share of {self._max_share:g}; {count} of them: {self._examples[kind]}",
            hint="fix what scores, then run the same command again; --reward-timeout-s gives a score more time, and"
            " --max-unscored-share allows more completions without a reward",
        )

    def log(self, reported: set[str]) -> None:
        """Log each kind that is not in `reported`, and add it."""
        for kind, count in self._counts.items():
            if kind not in reported:
                reported.add(kind)
                logger.warning(
                    f"{self._batch}: {_completions(count)} left out for lack of a reward: {self._examples[kind]}"
                    " (reported once; all are counted)"
                )


def _completions(count: int) -> str:
    return f"{count} completion{'' if count == 1 else 's'}"
