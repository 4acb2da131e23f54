"""A class with tools, in the shape of TRL's `environment_factory`: reset, its public methods as tools, and its reward.

It is made once in each process, and reset for each trajectory.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bridge.core.foreign_code import place_of, said, source_file
from bridge.scoring.score import FailedScore, Origin, Scores, failed, score_one
from bridge.types import Environment, Problem

NO_TOOLS = ("reset", "get_reward", "score", "scores", "held_out")
"""Public methods that the model cannot call."""
LONGEST_ANSWER = 10_000
"""Characters of a tool's answer; the rest is cut, with a note."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a reset or a tool answered."""

    text: str
    is_error: bool = False
    """Whether the tool raised instead of returning it."""


def names(kind: type) -> list[str]:
    """Return the names of the tools of a class."""
    methods = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in NO_TOOLS]


@dataclass(eq=False)
class _OwnReward:
    """Lets `get_reward()` be called as other scores are."""

    instance: Any
    get_reward: Callable[[Problem, str], Any] = field(init=False)

    def __post_init__(self) -> None:
        self.get_reward = lambda *_: awaited(self.instance.get_reward())


@runtime_checkable
class WithTools(Environment, Protocol):
    """An environment whose completions call tools."""

    schemas: Sequence[Mapping[str, Any]]
    """The JSON schema of each tool."""

    def tools(self) -> "Tools":
        """Return an instance of its class."""


class Tools:
    """An instance of such a class."""

    def __init__(self, make: Callable[[], Any], rewards: Scores | None = None) -> None:
        """Make it by `make`; `rewards` replace its own."""
        self._make, self._rewards, self._instance = make, rewards, make()
        kind = type(self._instance)
        self.kind, self._file, self._names = kind.__name__, source_file(kind), names(kind)
        if rewards is None and hasattr(kind, "get_reward"):
            self._scores: Any = _OwnReward(self._instance)
            place = f"{Path(self._file).name} line {inspect.unwrap(kind.get_reward).__code__.co_firstlineno}"
            self.origin = Origin(name=f"{self.kind}.get_reward", file=self._file, place=place)
        else:
            self._scores = rewards or self._instance
            self.origin = Origin.of(self._scores)

    def fresh(self) -> "Tools":
        """Return another instance, for a trajectory that runs at the same time."""
        return Tools(self._make, self._rewards)

    def begin(self, problem: Problem) -> Reply | FailedScore:
        """Reset it for a trajectory; the reply is what `reset` adds to the prompt."""
        try:
            found = awaited(self._instance.reset(**problem))
            if not isinstance(found, str | None):
                raise TypeError(f"returned a {type(found).__name__}, expected text or None")
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code
            kind = f"{self.kind}.reset raised {type(error).__name__}"
            place = place_of(error, self._file) or self.origin.place
            return failed(problem, "", f"{kind} ({place})", f"{kind}{said(error)} ({place})")
        return Reply(text=found or "")

    def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Call a tool; what it raises is the answer that the model gets."""
        if name not in self._names:
            return Reply(text=f"error: there is no tool {name}, only {', '.join(self._names)}", is_error=True)
        try:
            return Reply(text=_cut(str(awaited(getattr(self._instance, name)(**arguments)))))
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code
            return Reply(text=_cut(f"error: {type(error).__name__}{said(error)}"), is_error=True)

    def score(self, problem: Problem, completion: str) -> Any:
        """Return the Score or FailedScore of the trajectory that was begun; `completion` is its last turn's text."""
        return score_one(self._scores, self.origin, problem, completion)


def awaited(found: Any) -> Any:
    """Return what foreign code returned, or what that becomes once it is awaited."""
    if not inspect.isawaitable(found):
        return found
    import asyncio  # which most classes do not need
    from concurrent.futures import ThreadPoolExecutor

    async def result() -> Any:
        return await found

    with ThreadPoolExecutor(1) as thread:  # this one may have an event loop
        return thread.submit(asyncio.run, result()).result()


def _cut(text: str) -> str:
    note = f"... (cut: it has {len(text):,} characters)"
    return text if len(text) <= LONGEST_ANSWER else text[: LONGEST_ANSWER - len(note)] + note
