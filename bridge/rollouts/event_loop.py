"""An event loop that is kept between calls, and that an interrupt cannot break.

A signal handler may raise KeyboardInterrupt anywhere, even in the loop's own code, which may then lose a step of a
task. Here a signal cancels the running coroutine, and what its handler raised is raised once the coroutine has ended.

Tasks that a coroutine leaves behind stand still until the next call, and so does the loop's clock: their time limits
count only the time in which they could have read an answer.
"""

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from bridge.core.interrupt import SIGNALS

Result = TypeVar("Result")
PATIENCE_S = 5.0
"""Longest wait for cancelled tasks: one that a second interrupt broke may never end."""


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose clock can be held."""

    _held_at: float | None = None
    _behind_s = 0.0

    def time(self) -> float:
        return (self._held_at or super().time()) - self._behind_s

    def hold(self) -> None:
        self._held_at = super().time()

    def go_on(self) -> None:
        self._behind_s += super().time() - (self._held_at or super().time())
        self._held_at = None


class EventLoop:
    """Runs coroutines, one call after the other."""

    def __init__(self) -> None:
        self._loop = _Loop()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine; SIGINT and SIGTERM cancel it."""
        self._loop.go_on()
        task = self._loop.create_task(coroutine)
        try:
            with _cancelled_by_signals(task):
                return self._loop.run_until_complete(task)
        finally:
            _cancel(task)  # not done if a signal came before its first step, or a second one
            self._loop.hold()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel everything that is left, then run `last`, and close."""

        async def end() -> None:
            if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    _cancel(task)
                ended, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
                await asyncio.gather(*ended, return_exceptions=True)
            await last
            await self._loop.shutdown_asyncgens()
            await self._loop.shutdown_default_executor()

        self._loop.go_on()
        task = self._loop.create_task(end())
        try:
            self._loop.run_until_complete(task)
        except KeyboardInterrupt:  # also one that ended a task, and that the task above it raises again
            self._loop.run_until_complete(task)
            raise
        finally:
            self._loop.close()


def _cancel(task: "asyncio.Task[Any]") -> None:
    if not task.cancelling():  # a second time would stop httpx from closing its connection
        task.cancel()


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
            task.get_loop().call_soon_threadsafe(_cancel, task)

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
    """Return the signal handlers that are written in Python; they run in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in handlers.items() if callable(handler)}
