"""Score completions, call tools and run agents, in worker processes or in this process."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bridge.core import redaction
from bridge.core.concurrency import gather_or_cancel, in_thread
from bridge.core.foreign_code import foreign_code, shortened
from bridge.scoring.inside_worker import NotPickledError, pickled
from bridge.scoring.score import FailedScore, Host, Reply, Score, host_of
from bridge.scoring.worker_handle import WorkerProcess, direct_to_loopback
from bridge.types import Problem

DEFAULT_PROCESSES = 4
"""Maximum number of processes by default, because trainer and server need CPU cores too."""
Call = Callable[[], Any]
"""A call of foreign code."""


async def _call_here(call: Call) -> Any:
    await asyncio.sleep(0)  # lets requests to servers proceed
    return call()


class Scorer:
    """Scores in workers, or in this process; used from one event loop, and closed by the thread that created it."""

    def __init__(
        self,
        recipe: Callable[[], Any],
        *,
        processes: int | None,
        timeout_s: float,
        tool_timeout_s: float = 30.0,
        variables: Collection[str] = (),
        call_here: Callable[[Call], Awaitable[Any]] = _call_here,
    ) -> None:
        """Start the workers without waiting for them; each builds a host with `recipe`, which must be picklable.

        `processes` is the number of workers. None means one per core, at most 4; 0 means to score in this process,
        through `call_here` and without a time limit. `tool_timeout_s` limits each tool call, and an agent's time
        between two turns. `variables` names environment variables that workers get even if they hold secrets.
        """
        self._workers: list[WorkerProcess] = []
        self._tool_timeout_s = tool_timeout_s
        self._call_here = call_here
        if processes == 0:
            with foreign_code("creating the scoring object", ""):
                self._own = host_of(recipe())
            if self._own.runs_in_thread:
                os.environ.update(direct_to_loopback())
            return
        redaction.hide_environment()
        recipe_bytes = pickled(recipe)
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        for _ in range(processes or min(DEFAULT_PROCESSES, len(os.sched_getaffinity(0)))):
            self._workers.append(WorkerProcess(recipe_bytes, timeout_s=timeout_s, variables=variables))
            self._idle.put_nowait(self._workers[-1])

    async def score(self, problem: Problem, completions: Sequence[str]) -> list[Score | FailedScore]:
        """Score the completions of one problem in parallel, and return the results in the same order."""

        async def scored(completion: str) -> Score | FailedScore:
            async with self.trajectory(problem) as trajectory:
                return await trajectory.score(completion)

        if not self._workers:
            return [await scored(completion) for completion in completions]
        return await gather_or_cancel(scored(completion) for completion in completions)

    @asynccontextmanager
    async def trajectory(self, problem: Problem) -> AsyncIterator["Trajectory"]:
        """Reserve a host for one trajectory, in a process that runs no other trajectory meanwhile."""
        if not self._workers:
            call = _call_in_thread if self._own.runs_in_thread else self._call_here
            yield Trajectory(problem, self._tool_timeout_s, host=self._own.fresh(), call_here=call)
            return
        worker = await self._idle.get()
        try:
            yield Trajectory(problem, self._tool_timeout_s, worker=worker)
        finally:
            self._idle.put_nowait(worker)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.kill()


@dataclass(frozen=True)
class Trajectory:
    """A host that is reserved for one completion until its reward is known; unusable after a FailedScore."""

    _problem: Problem
    _tool_timeout_s: float
    worker: WorkerProcess | None = None
    host: Host | None = None
    """A host in this process, used instead of a worker."""
    call_here: Callable[[Call], Awaitable[Any]] = _call_here

    async def begin(self) -> Reply | FailedScore:
        """Reset the environment; the reply holds the text that `reset` adds to the prompt."""
        return await self._ask("reset", "", "begin", self._problem, is_first=True)  # type: ignore[no-any-return]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Reply | FailedScore:
        """Call a tool with the name and the arguments that a model wrote."""
        try:
            return await self._ask(f"tool {name}", "", "call", name, arguments)  # type: ignore[no-any-return]
        except NotPickledError:
            return Reply(text=f"error: the arguments of {shortened(name)} are nested too deeply", is_error=True)

    async def run(self, base_url: str) -> Reply | Score | FailedScore:
        """Run an agent to its end; after a reply, call `score` for the reward."""
        run = self._ask("the agent's run", "", "run", self._problem, base_url, is_first=True)
        return await run  # type: ignore[no-any-return]

    async def score(self, completion: str) -> Score | FailedScore:
        """Return the reward; `completion` is the text of the last turn."""
        return await self._ask("", completion, "score", self._problem, completion)  # type: ignore[no-any-return]

    def held(self) -> AbstractContextManager[None]:
        """Suspend an agent's time limit, which restarts afterwards."""
        return contextlib.nullcontext() if self.worker is None else self.worker.suspended_limit()

    async def _ask(self, name: str, completion: str, method: str, *given: Any, is_first: bool = False) -> Any:
        if self.worker is not None:
            return await self.worker.ask(
                pickled((method, *given)), self._problem, completion,
                name=name, timeout_s=self._tool_timeout_s if name else None, is_first=is_first or not name,
            )  # fmt: skip
        own = os.getpid()

        def call() -> Any:
            result = getattr(self.host, method)(*given)
            if os.getpid() != own:
                os._exit(0)  # foreign code forked: its child must not continue as a second trainer
            return result

        return await self.call_here(call)


async def _call_in_thread(call: Call) -> Any:
    return await asyncio.wrap_future(in_thread(call, "agent"))
