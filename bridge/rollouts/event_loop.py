"""An event loop that is kept between calls, and that nothing is left running on after one, an interrupt's included.

A signal's handler may raise KeyboardInterrupt anywhere, in the loop's own code too, which may then lose a step of a
task. Here what a handler raises waits for the end of the coroutine, which is cancelled for it.

Not covered: which signals interrupt (`bridge/core/interrupt.py`, and the command line).
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
"""Longest wait for what was cancelled: a task that a second interrupt broke may never end."""


class EventLoop:
    """Runs coroutines, one call after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: set[asyncio.Task[Any]] = set()
        self._cancelled: WeakSet[asyncio.Task[Any]] = WeakSet()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end, and end what it began with `each`; SIGINT and SIGTERM cancel it first."""
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
        """Yield what each coroutine returns as soon as it does; no more than `at_once` are begun and not yet yielded.

        What one of them raises is raised here, and ends the others.
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
        """End everything that is left, then run `last`, and close."""
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
        """Cancel tasks and wait for their end; what they raise is of no interest any more.

        None is cancelled twice: the second time would stop httpx from closing the connection of the first.
        """
        for task in tasks - set(self._cancelled):
            self._cancelled.add(task)
            task.cancel()
        if tasks:
            ended, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
            await asyncio.gather(*ended, return_exceptions=True)


@contextmanager
def _cancelled_by_signals(task: "asyncio.Task[Any]") -> Iterator[None]:
    """Let what a signal's handler raises cancel `task`, and raise it at the end; a second time it is raised at once.

    A handler that raises nothing, such as one that holds a signal back, is left to it.
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
    """Return those that are written in Python; none act in other threads."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in handlers.items() if callable(handler)}
