"""Score one completion with foreign code, and count the failed scores of a batch."""

import inspect
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Complex, Real
from pathlib import Path
from typing import Any, Protocol, Self, SupportsFloat, SupportsIndex

from bridge.core.foreign_code import described, location_of, reason_of, shortened, source_file
from bridge.errors import BridgeError, RewardError
from bridge.types import Problem

logger = logging.getLogger(__name__)

LARGEST = 1e30
"""Largest accepted absolute value of a reward: sums of the squares of larger rewards could overflow."""
LONGEST_NAME = 200
"""Maximum length of the name of a reward part."""
LONGEST_LINE = 400
"""Maximum length of the reason in the line about a completion without a reward."""


class Scores(Protocol):
    """An object that scores completions.

    It may also have `scores(problem, completion) -> tuple[float, dict[str, float]]`, which is called instead of `score`
    and returns the reward, and the unweighted parts of which it is a weighted sum.
    """

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of one completion, a finite number with an absolute value of at most `LARGEST`."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The reward of one completion."""

    reward: float
    """A finite number."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Name -> unweighted part; the reward is a weighted sum of these finite numbers."""
    turns: list[float] = field(default_factory=list)
    """One finite number per turn of the model, which add up to the reward; empty if it is for the whole completion."""


@dataclass(frozen=True, kw_only=True)
class FailedScore:
    """Why one completion has no reward."""

    kind: str
    """The failure and its location, with the same text for every completion that fails in this way."""
    line: str
    """The failure with its prompt and completion, on one line."""
    is_raised: bool = False
    """Whether the agent's run raised an exception; its process is intact then, and may still score the run."""


@dataclass(frozen=True, kw_only=True)
class UnusablePrompt(FailedScore):
    """Why nothing was sampled for a problem; does not count toward the share of a batch that may fail."""

    @classmethod
    def of(cls, problem: Problem, error: BridgeError) -> Self:
        kind = "the prompt cannot be used"
        line = f"{kind}: {shortened(error.message, LONGEST_LINE)}, on prompt {described(problem['prompt'])}"
        return cls(kind=kind, line=line)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Identifies the code that scores, for error messages."""

    name: str
    """The method with its class, such as `Class.score`."""
    file: str
    """The file that defines the class."""
    location: str
    """The file name and line at which the method begins."""

    @classmethod
    def of(cls, kind: type, method: str) -> Self:
        file = source_file(kind)
        code = getattr(inspect.unwrap(getattr(kind, method, None)), "__code__", None)  # type: ignore[arg-type]
        location = f"{Path(file).name} line {code.co_firstlineno}" if code else Path(file).name
        return cls(name=f"{kind.__name__}.{method}", file=file, location=location)

    def raised(
        self, problem: Problem, error: BaseException, completion: str = "", *, is_raised: bool = False
    ) -> FailedScore:
        """Return the failure for a call of this code that raised `error`."""
        first = error.__cause__ or error if isinstance(error, BridgeError) else error
        kind = f"{self.name} raised {type(first).__name__}"
        location = location_of(first, self.file) or self.location
        what = error.message if isinstance(error, BridgeError) else f"{kind}{reason_of(error)} ({location})"
        return failed(problem, completion, f"{kind} ({location})", what, is_raised=is_raised)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The text that a reset, a tool or an agent's run returned."""

    text: str
    is_error: bool = False
    """Whether the tool raised an exception, which `text` describes."""


class Host:
    """Scores completions; built once in each worker. Subclasses with tools or an agent answer further calls."""

    runs_in_thread = False
    """Whether calls must run in a thread if the host is in the trainer's process, because they wait for the trainer."""

    def __init__(self, scores: Any, origin: Origin | None = None) -> None:
        self._scores = scores
        method = "scores" if callable(getattr(scores, "scores", None)) else "score"
        self.origin = origin or Origin.of(type(scores), method)

    def fresh(self) -> "Host":
        """Return a host for a concurrent trajectory."""
        return self

    def score(self, problem: Problem, completion: str) -> Score | FailedScore:
        """Score one completion; no exception except KeyboardInterrupt is passed on."""
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
    """Wrap the result of a recipe in a host, unless it is a host already."""
    return made if isinstance(made, Host) else Host(made)


def failed(problem: Problem, completion: str, kind: str, what: str, *, is_raised: bool = False) -> FailedScore:
    """Return the failure "`what`, on prompt ... and completion ..."; `kind` is `what` without the variable parts."""
    subject = f"on prompt {described(problem['prompt'])} and completion {described(completion)}"
    line = f"{shortened(what, LONGEST_LINE)}, {subject}"
    return FailedScore(kind=shortened(kind, LONGEST_LINE), line=line, is_raised=is_raised)


def returned(value: object) -> Score | None:
    """Return a score from a reward, or from a dict of its parts; None if `as_reward` does not accept the numbers."""
    if not isinstance(value, Mapping):
        return _read((value, {}))
    parts = [as_reward(part) for part in value.values()]
    return _read((math.fsum(part or 0.0 for part in parts), value)) if parts else None


def _read(value: object) -> Score | None:
    """Return a score from a pair: a reward, or a list with one per turn, and its parts. None: see `returned`."""
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
    """Return a suffix for "expected a finite number" if `value` is, or directly holds, a number that is too large."""
    several: Any = [value]
    if type(value) in (dict, list, tuple):  # subclasses may run foreign code
        several = [*value.values()] if isinstance(value, dict) else value
    are_too_large = (type(number) in (int, float) and LARGEST < abs(number) < math.inf for number in several)
    return f" of at most {LARGEST:g} in absolute value" if any(are_too_large) else ""


def as_reward(value: object) -> float | None:
    """Return a valid reward as a float; None for text, NaN, infinity, and numbers larger than `LARGEST`."""
    is_text = isinstance(value, str | bytes)  # "1.0" is a bug of the environment, also as NumPy's text
    is_complex = isinstance(value, Complex) and not isinstance(value, Real)  # NumPy drops the imaginary part
    if is_text or is_complex or not isinstance(value, SupportsFloat | SupportsIndex):
        return None
    try:
        as_float = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array or tensor with several elements
        return None
    return as_float if abs(as_float) <= LARGEST else None


class FailedScores:
    """Counts the failed scores of one batch and reports each kind once; too many failures end the run."""

    def __init__(self, batch: str, *, num_completions: int, max_share: float) -> None:
        """`batch` is the batch's name in messages; at most `max_share` of its `num_completions` may fail."""
        self._batch = batch
        self._num_completions = num_completions
        self._max_share = max_share
        self._num_scored = 0
        self._unusable: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        """Kind of failure -> the line of its first occurrence."""

    def add(self, results: Iterable[Score | FailedScore]) -> None:
        """Count the failures among the results."""
        for result in results:
            self._num_scored += 1
            if isinstance(result, FailedScore):
                self._counts[result.kind] += 1
                self._unusable[result.kind] += isinstance(result, UnusablePrompt)
                self._examples.setdefault(result.kind, result.line)
        num_completions = max(self._num_completions, self._num_scored)  # may include groups of later batches
        of_scores = self._counts - self._unusable
        num_failed = of_scores.total()
        if num_failed <= self._max_share * num_completions:
            return
        kind, count = of_scores.most_common(1)[0]
        raise RewardError(
            f"{self._batch}: at least {num_failed} of {_completions(num_completions)} have no reward,"
            f" more than the allowed fraction of {self._max_share:g}; {count} of them: {self._examples[kind]}",
            hint="fix the score method, then rerun the command; --reward-timeout-s gives a score more time, and"
            " --max-unscored-share allows more completions without a reward",
        )

    def log(self, reported: set[str]) -> None:
        """Log each kind of failure that is not yet in `reported`, and add it."""
        for kind, count in self._counts.items():
            if kind not in reported:
                reported.add(kind)
                logger.warning(
                    f"{self._batch}: {_completions(count)} without a reward left out: {self._examples[kind]}"
                    " (reported once; all are counted)"
                )


def _completions(count: int) -> str:
    return f"{count} completion{'' if count == 1 else 's'}"
