"""Classes with tools and classes of agents, made once in each worker and run for one trajectory after the other.

A class with tools has the shape of TRL's `environment_factory`: reset, public methods as tools, and a reward. An agent
has a method `run`, which gets its turns from an OpenAI-compatible address and may return the reward.
"""

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from bridge.core.foreign_code import described, reason_of
from bridge.scoring.score import (
    FailedScore,
    Host,
    Origin,
    Reply,
    Score,
    Scores,
    failed,
    limit_note,
    returned,
)
from bridge.types import Problem

NO_TOOLS = ("reset", "get_reward", "score", "scores", "held_out")
"""Public methods that the model cannot call."""
LONGEST_ANSWER = 10_000
"""Characters of a tool's answer, and of what `reset` adds to the prompt; the rest is cut, with a note."""
EXPECTED = "a finite number, one per turn, or a dict of finite numbers"


def names(kind: type) -> list[str]:
    """Return the names of the tools of a class."""
    methods = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in NO_TOOLS]


class _InstanceHost(Host):
    """Holds an instance of the user's class; each concurrent trajectory gets its own."""

    def __init__(self, make: Callable[[], Any], rewards: Scores | None = None) -> None:
        """Make it by `make`; `rewards` replace its own."""
        self._make = make
        self._rewards = rewards
        self._instance = make()

    def fresh(self) -> Self:
        return type(self)(self._make, self._rewards)


class Tools(_InstanceHost):
    """An instance of a class with tools."""

    def __init__(self, make: Callable[[], Any], rewards: Scores | None = None) -> None:
        super().__init__(make, rewards)
        kind = type(self._instance)
        self._names = names(kind)
        self._reset = Origin.of(kind, "reset")
        if rewards is None and hasattr(kind, "get_reward"):
            Host.__init__(self, self, Origin.of(kind, "get_reward"))
        else:
            Host.__init__(self, rewards or self._instance)

    def get_reward(self, *_: Any) -> Any:
        """Return the instance's own reward; called as other scores are."""
        return awaited(self._instance.get_reward())

    def begin(self, problem: Problem) -> Reply | FailedScore:
        """Reset it for a trajectory; the reply is what `reset` adds to the prompt."""
        try:
            added = awaited(self._instance.reset(**problem))
            if not isinstance(added, str | None):
                raise TypeError(f"returned a {type(added).__name__}, expected text or None")
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code
            return self._reset.raised(problem, error)
        return Reply(text=_cut(added or ""))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Call a tool; what it raises is the answer that the model gets."""
        if name not in self._names:
            return Reply(text=f"error: there is no tool {name}, only {', '.join(self._names)}", is_error=True)
        try:
            return Reply(text=_cut(str(awaited(getattr(self._instance, name)(**arguments)))))
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code
            return Reply(text=_cut(f"error: {type(error).__name__}{reason_of(error)}"), is_error=True)


class Agent(_InstanceHost):
    """An instance of a class of agents; `rewards` replace what it returns."""

    runs_in_thread = True
    """This process answers its requests while it runs."""

    def __init__(self, make: Callable[[], Any], rewards: Scores | None = None) -> None:
        super().__init__(make, rewards)
        self._runner: Any = None
        kind = type(self._instance)
        self._run = Origin.of(kind, "run")
        scores = rewards or (self._instance if hasattr(kind, "score") else None)
        Host.__init__(self, scores, None if scores else self._run)

    def run(self, problem: Problem, base_url: str) -> Reply | Score | FailedScore:
        """Run it to its end; a reply means that `score` has the reward."""
        try:
            result = self._result(self._instance.run(problem, base_url))
            if self._rewards or (result is None and self._scores is not None):
                return Reply(text="")
            score = returned(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code, in whose event loop a task may be cancelled
            return self._run.raised(problem, error, is_raised=True)
        if score is not None:
            return score
        kind = f"{self._run.name} returned something other than {EXPECTED}"
        what = f"{self._run.name} returned {described(result)}, expected {EXPECTED}{limit_note(result)}"
        return failed(problem, "", kind, f"{what} ({self._run.location})")

    def score(self, problem: Problem, completion: str) -> Score | FailedScore:
        """Score the trajectory that ran last, by its last turn's text; 0 if the run alone scores, and it raised."""
        return Score(reward=0.0) if self._scores is None else super().score(problem, completion)

    def _result(self, result: Any) -> Any:
        """Return what a run returned, or awaits: in a worker always in the same event loop, as clients expect."""
        if not inspect.isawaitable(result) or threading.current_thread() is not threading.main_thread():
            return awaited(result)
        import asyncio  # which most classes do not need

        async def alone() -> Any:
            try:
                return await result
            finally:
                left = asyncio.all_tasks() - {asyncio.current_task()}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(alone())


def awaited(result: Any) -> Any:
    """Return what foreign code returned; await it if it is awaitable."""
    if not inspect.isawaitable(result):
        return result
    import asyncio  # which most classes do not need

    from bridge.core.concurrency import in_thread, result_of

    async def value() -> Any:
        return await result

    return result_of(in_thread(lambda: asyncio.run(value()), "awaited"))  # this one may have an event loop


def _cut(text: str) -> str:
    note = f"... (cut: it has {len(text):,} characters)"
    return text if len(text) <= LONGEST_ANSWER else text[: LONGEST_ANSWER - len(note)] + note
