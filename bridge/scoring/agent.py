"""A class with a method `run`: an agent that asks an OpenAI-compatible address for its turns, and returns its reward.

It is made once in each process, and runs once for each trajectory.
"""

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bridge.core.foreign_code import described, place_of, said, source_file
from bridge.scoring.score import FailedScore, Origin, Score, Scores, failed, limit_note, returned, score_one
from bridge.scoring.tools import Reply, awaited
from bridge.types import Environment, Problem

EXPECTED = "a finite number, one per turn, or a dict of finite numbers"


@runtime_checkable
class WithAgent(Environment, Protocol):
    """An environment whose trajectories are made by an agent."""

    def agent(self) -> "Agent":
        """Return an instance of its class."""


class Agent:
    """An instance of such a class."""

    def __init__(self, make: Callable[[], Any], rewards: Scores | None = None) -> None:
        """Make it by `make`; `rewards` replace what it returns."""
        self._make, self._rewards, self._instance = make, rewards, make()
        kind = type(self._instance)
        self._name, self._file = f"{kind.__name__}.run", source_file(kind)
        self._place = f"{Path(self._file).name} line {inspect.unwrap(kind.run).__code__.co_firstlineno}"
        self._scores: Any = rewards or (self._instance if hasattr(kind, "score") else None)
        self._runner: Any = None
        own = Origin(name=self._name, file=self._file, place=self._place)
        self.origin = Origin.of(self._scores) if self._scores else own

    def fresh(self) -> "Agent":
        """Return another instance, for a trajectory that runs at the same time."""
        return Agent(self._make, self._rewards)

    def run(self, problem: Problem, base_url: str) -> Reply | Score | FailedScore:
        """Run it to its end; a reply means that `score` has the reward."""
        try:
            found = self._result(self._instance.run(problem, base_url))
            if self._rewards or (found is None and self._scores is not None):
                return Reply(text="")
            score = returned(found)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code, in whose event loop a task may be cancelled
            kind, place = f"{self._name} raised {type(error).__name__}", place_of(error, self._file) or self._place
            return failed(problem, "", f"{kind} ({place})", f"{kind}{said(error)} ({place})", is_raised=True)
        if score is not None:
            return score
        kind = f"{self._name} returned something other than {EXPECTED}"
        what = f"{self._name} returned {described(found)}, expected {EXPECTED}{limit_note(found)} ({self._place})"
        return failed(problem, "", kind, what)

    def _result(self, found: Any) -> Any:
        """Return what a run returned, or awaits: in a worker always in the same event loop, as clients expect."""
        if not inspect.isawaitable(found) or threading.current_thread() is not threading.main_thread():
            return awaited(found)
        import asyncio  # which most classes do not need

        async def alone() -> Any:
            try:
                return await found
            finally:
                left = asyncio.all_tasks() - {asyncio.current_task()}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(alone())

    def score(self, problem: Problem, completion: str) -> Any:
        """Return the Score or FailedScore of the trajectory that ran last; `completion` is its last turn's text.

        It is 0 if the run alone scores, and it raised.
        """
        if self._scores is None:
            return Score(reward=0.0)
        return score_one(self._scores, self.origin, problem, completion)
