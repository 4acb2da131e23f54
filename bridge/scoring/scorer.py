"""Score completions, call tools and run agents in processes of their own, or in this one."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from bridge.core import private
from bridge.core.foreign_code import foreign_code, shortened
from bridge.core.together import together
from bridge.scoring.agent import Agent
from bridge.scoring.score import FailedScore, Origin, Score, Scores, score_one
from bridge.scoring.tools import Reply, Tools
from bridge.scoring.wire import NotPickledError, question
from bridge.scoring.worker_process import WorkerProcess, direct_to_loopback
from bridge.types import Problem

Result = TypeVar("Result")
DEFAULT_PROCESSES = 4
"""At most so many by default: a trainer and a server need cores too."""


class Scorer:
    """Workers, or this process if there are none; used from one event loop, and closed by the thread that made it."""

    def __init__(
        self,
        recipe: Callable[[], Scores | Tools | Agent],
        *,
        processes: int | None,
        timeout_s: float,
        tool_timeout_s: float = 30.0,
        variables: Collection[str] = (),
    ) -> None:
        """Start the workers without waiting for them; each makes what scores by `recipe`, which is pickled.

        `processes`: None: one per core, at most 4; 0: score in this process, without a time limit. `tool_timeout_s`
        limits each call of a tool, and an agent between two turns. `variables` with secrets are in the environment of
        the workers, too.

        Raises:
            RewardError: the recipe cannot be pickled, or fails in this process.
            UsageError: a variable is not set.
        """
        self._workers: list[WorkerProcess] = []
        self._tool_timeout_s = tool_timeout_s
        self._pid = os.getpid()
        if processes == 0:
            with foreign_code("making what scores completions", ""):
                self._own = recipe()
                self._origin = self._own.origin if isinstance(self._own, Tools | Agent) else Origin.of(self._own)
            if isinstance(self._own, Agent):
                os.environ.update(direct_to_loopback())
            return
        private.hide_environment()
        pickled = question(recipe)
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        for _ in range(processes or min(DEFAULT_PROCESSES, len(os.sched_getaffinity(0)))):
            self._workers.append(WorkerProcess(pickled, timeout_s=timeout_s, variables=variables))
            self._idle.put_nowait(self._workers[-1])

    async def score(self, problem: Problem, completions: Sequence[str]) -> list[Score | FailedScore]:
        """Score the completions of one problem, in parallel; the results are in their order.

        Raises:
            RewardError: a worker cannot make what scores, or the problem cannot be pickled.
        """
        if not self._workers:
            return [await self._here(problem, completion) for completion in completions]
        return await together(self._in_worker(problem, completion) for completion in completions)

    @asynccontextmanager
    async def trajectory(self, problem: Problem) -> AsyncIterator["Trajectory"]:
        """Reserve a class with tools or an agent for one trajectory, in a process that runs no other meanwhile."""
        if not self._workers:
            assert isinstance(self._own, Tools | Agent)
            yield Trajectory(self._own.fresh(), problem, self._tool_timeout_s, self._pid)
            return
        worker = await self._idle.get()
        try:
            yield Trajectory(worker, problem, self._tool_timeout_s, self._pid)
        finally:
            self._idle.put_nowait(worker)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.kill()

    async def _here(self, problem: Problem, completion: str) -> Score | FailedScore:
        assert not isinstance(self._own, Tools | Agent)
        await asyncio.sleep(0)  # lets requests to servers proceed
        found = score_one(self._own, self._origin, problem, completion)
        if os.getpid() != self._pid:
            os._exit(0)  # a child that the score forked: it would be a second trainer
        return found

    async def _in_worker(self, problem: Problem, completion: str) -> Score | FailedScore:
        worker = await self._idle.get()
        try:
            return await worker.score(problem, completion)
        finally:
            self._idle.put_nowait(worker)


@dataclass
class Trajectory:
    """An instance of a class with tools, or of an agent, up to its reward; of no further use after a FailedScore."""

    _host: "WorkerProcess | Tools | Agent"
    _problem: Problem
    _tool_timeout_s: float
    _pid: int

    async def begin(self) -> Reply | FailedScore:
        """Reset it; the reply is what `reset` adds to the prompt."""
        return await self._ask("reset", "", "begin", self._problem, is_first=True)  # type: ignore[return-value]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Reply | FailedScore:
        """Call a tool, by a name and with arguments that a model wrote."""
        try:
            return await self._ask(f"tool {name}", "", "call", name, arguments)  # type: ignore[return-value]
        except NotPickledError:
            return Reply(text=f"error: the arguments of {shortened(name)} are nested too deeply", is_error=True)

    async def run(self, base_url: str) -> Reply | Score | FailedScore:
        """Run an agent to its end; after a reply, `score` has the reward."""
        return await self._ask("the agent's run", "", "run", self._problem, base_url, is_first=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop the clock of an agent's time limit, which begins anew afterwards."""
        if not isinstance(self._host, WorkerProcess):
            yield
            return
        self._host.hold()
        try:
            yield
        finally:
            self._host.go_on()

    async def score(self, completion: str) -> Score | FailedScore:
        """Return the reward; `completion` is the text of the last turn."""
        return await self._ask("", completion, "score", self._problem, completion)  # type: ignore[return-value]

    async def _ask(
        self, name: str, completion: str, method: str, *given: Any, is_first: bool = False
    ) -> Reply | Score | FailedScore:
        if isinstance(self._host, WorkerProcess):
            limit_s = self._tool_timeout_s if name else None
            asked = question((method, *given))
            return await self._host.ask(
                asked, self._problem, completion, name=name, timeout_s=limit_s, is_first=is_first
            )
        await asyncio.sleep(0)
        if isinstance(self._host, Agent):  # its requests are answered here meanwhile
            return await _in_own_thread(lambda: self._here(method, given))
        return self._here(method, given)

    def _here(self, method: str, given: tuple[Any, ...]) -> Reply | Score | FailedScore:
        found: Reply | Score | FailedScore = getattr(self._host, method)(*given)
        if os.getpid() != self._pid:
            os._exit(0)  # a child that foreign code forked
        return found


async def _in_own_thread(act: Callable[[], Result]) -> Result:
    """Return `act()`; the event loop's own threads look up hosts, are few, and are waited for at its end."""
    made = Future[Result]()
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            made.set_result(act())
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            made.set_exception(error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await asyncio.wrap_future(made)
