"""The user's classes with tools and agent classes: instantiated once per worker, and run for one trajectory at a time.

A class with tools has the interface of TRL's `environment_factory`: `reset`, public methods as tools, and a reward. An
agent class has a method `run`, which requests turns from an OpenAI-compatible base URL and may return the reward.
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
"""Maximum length of a tool result, and of the text that `reset` adds; longer texts are truncated, with a note."""
PARTS = ("text", "image", "image_url", "video", "video_url", "audio", "input_audio", "audio_url")
"""Types of the parts of a message's content, which TRL passes on to the chat template."""
SOURCES = ("url", "path", "base64")
"""Keys of a part, other than its type, that may hold its content."""
EXPECTED = "a finite number, one per turn, or a dict of finite numbers"


def names(kind: type) -> list[str]:
    """Return the names of the tools of a class."""
    methods = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in NO_TOOLS]


class _InstanceHost(Host):
    """Holds an instance of the user's class; each concurrent trajectory gets its own."""

    def __init__(self, make: Callable[[], Any], rewards: Scores | None = None) -> None:
        """Create the instance by calling `make`; `rewards` replace its own reward."""
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
        """Return the instance's own reward; the arguments of other score methods are ignored."""
        return awaited(self._instance.get_reward())

    def begin(self, problem: Problem) -> Reply | FailedScore:
        """Reset the instance for a trajectory; the reply holds the text that `reset` adds to the prompt."""
        try:
            added = awaited(self._instance.reset(**problem))
            if not isinstance(added, str | None):
                raise TypeError(f"returned a {type(added).__name__}, expected text or None")
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code
            return self._reset.raised(problem, error)
        return Reply(text=_cut(added or ""))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Call a tool; if it raises, the reply holds the error as text for the model."""
        if name not in self._names:
            return Reply(text=f"error: there is no tool {name}, only {', '.join(self._names)}", is_error=True)
        try:
            return Reply(text=_cut(_text(awaited(getattr(self._instance, name)(**arguments)))))
        except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code
            return Reply(text=_cut(f"error: {type(error).__name__}{reason_of(error)}"), is_error=True)


class Agent(_InstanceHost):
    """An instance of an agent class; `rewards` replace the reward that it returns."""

    runs_in_thread = True
    """Run in a thread, because this process must answer the agent's requests meanwhile."""

    def __init__(self, make: Callable[[], Any], rewards: Scores | None = None) -> None:
        super().__init__(make, rewards)
        self._runner: Any = None
        kind = type(self._instance)
        self._run = Origin.of(kind, "run")
        scores = rewards or (self._instance if hasattr(kind, "score") else None)
        Host.__init__(self, scores, None if scores else self._run)

    def run(self, problem: Problem, base_url: str) -> Reply | Score | FailedScore:
        """Run the agent to its end; a reply means that `score` must be called for the reward."""
        try:
            result = self._result(self._instance.run(problem, base_url))
            if self._rewards or (result is None and self._scores is not None):
                return Reply(text="")
            score = returned(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code may raise anything, even CancelledError
            return self._run.raised(problem, error, is_raised=True)
        if score is not None:
            return score
        kind = f"{self._run.name} returned something other than {EXPECTED}"
        what = f"{self._run.name} returned {described(result)}, expected {EXPECTED}{limit_note(result)}"
        return failed(problem, "", kind, f"{what} ({self._run.location})")

    def score(self, problem: Problem, completion: str) -> Score | FailedScore:
        """Score the last trajectory by the text of its last turn; 0 if only `run` returns rewards, and it raised."""
        return Score(reward=0.0) if self._scores is None else super().score(problem, completion)

    def _result(self, result: Any) -> Any:
        """Return a run's result, awaiting it if necessary. A worker reuses one event loop, as HTTP clients expect."""
        if not inspect.isawaitable(result) or threading.current_thread() is not threading.main_thread():
            return awaited(result)
        import asyncio  # imported here because most classes do not need it

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
    """Return a result of foreign code, awaiting it if it is awaitable."""
    if not inspect.isawaitable(result):
        return result
    import asyncio  # imported here because most classes do not need it

    from bridge.core.concurrency import in_thread, result_of

    async def value() -> Any:
        return await result

    return result_of(in_thread(lambda: asyncio.run(value()), "awaited"))  # this thread may have an event loop


def _text(result: Any) -> str:
    """Return a tool's result as the model sees it: `str` of it, or the text of a message's content in parts.

    Raises:
        TypeError: a part is not text.
    """
    if not isinstance(result, list) or not result or not all(map(_is_part, result)):
        return str(result)
    if other := next((part["type"] for part in result if part["type"] != "text"), None):
        raise TypeError(f"returned a part of the type {other}, expected text")
    return "".join(part["text"] for part in result)


def _is_part(entry: object) -> bool:
    """Return whether an entry of a result is a part of a message's content, rather than data with a type."""
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or kind not in PARTS:
        return False
    return isinstance(entry.get("text"), str) if kind == "text" else any(key in entry for key in (kind, *SOURCES))


def _cut(text: str) -> str:
    note = f"... (truncated from {len(text):,} characters)"
    return text if len(text) <= LONGEST_ANSWER else text[: LONGEST_ANSWER - len(note)] + note
