"""An event loop that is kept between calls, and that no task outlives a call on, even one that is interrupted.

A signal handler may raise KeyboardInterrupt anywhere, even in the loop's own code, which may then lose a step of a
task. Here a signal cancels the running coroutine, and what its handler raised is raised once the coroutine has ended.
"""

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import islice
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

from bridge.core.interrupt import SIGNALS

Result = TypeVar("Result")
PATIENCE_S = 5.0
"""Longest wait for cancelled tasks: one that a second interrupt broke may never end."""


class EventLoop:
    """Runs coroutines, one call after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: set[asyncio.Task[Any]] = set()
        self._cancelled: WeakSet[asyncio.Task[Any]] = WeakSet()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine, then cancel what it began with `each` and left running; SIGINT and SIGTERM cancel it."""
        try:
            task = self._loop.create_task(self._alone(coroutine))
            with _cancelled_by_signals(task):
                return self._loop.run_until_complete(task)
        finally:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # a signal came before its first step: Python would warn that nobody awaits it

    async def each(
        self, coroutines: Iterator[Coroutine[Any, Any, Result]], *, at_once: int
    ) -> AsyncGenerator[Result, None]:
        """Yield what each coroutine returns as soon as it does; at most `at_once` are begun and not yet yielded.

        An exception of one is raised here, and cancels the others.
        """
        done: asyncio.Queue[asyncio.Task[Result]] = asyncio.Queue()
        tasks: set[asyncio.Task[Result]] = set()
        try:
            for coroutine in islice(coroutines, at_once):
                tasks.add(self._start(coroutine, done))
            while tasks:
                task = await done.get()
                tasks.discard(task)
                for coroutine in islice(coroutines, 1):
                    tasks.add(self._start(coroutine, done))
                yield task.result()
        finally:
            await self._end(tasks)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel everything that is left, then run `last`, and close."""
        try:
            self._loop.run_until_complete(self._close(last))
        finally:
            self._loop.close()

    def _start(
        self, coroutine: Coroutine[Any, Any, Result], done: "asyncio.Queue[asyncio.Task[Result]]"
    ) -> "asyncio.Task[Result]":
        task = self._loop.create_task(coroutine)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        task.add_done_callback(done.put_nowait)
        return task

    async def _alone(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await coroutine
        finally:
            await self._end(self._started.copy())

    async def _close(self, last: Coroutine[Any, Any, None]) -> None:
        await self._end({task for task in asyncio.all_tasks() if task is not asyncio.current_task()})
        await last
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    async def _end(self, tasks: AbstractSet["asyncio.Task[Any]"]) -> None:
        """Cancel tasks, wait for their end, and ignore what they raise.

        None is cancelled twice: the second time would stop httpx from closing its connection after the first.
        """
        for task in tasks - set(self._cancelled):
            self._cancelled.add(task)
            task.cancel()
        if tasks:
            ended, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
            await asyncio.gather(*ended, return_exceptions=True)


@contextmanager
def _cancelled_by_signals(task: "asyncio.Task[Any]") -> Iterator[None]:
    """Cancel `task` when a signal handler raises, and raise its exception at the end; a second one is raised at once.

    A handler that raises nothing, such as one that defers the signal, cancels nothing.
    """
    raised: list[BaseException] = []

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            before[signal.Signals(number)](number, frame)
        except BaseException as error:
            raised.append(error)
            if len(raised) > 1:
                raise
            task.get_loop().call_soon_threadsafe(task.cancel)

    before = _handlers()
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if raised:
            raise raised[0]


def _handlers() -> dict[signal.Signals, Any]:
    """Return the handlers that are written in Python; none run in other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in handlers.items() if callable(handler)}
