"""An event loop in its own thread, which keeps running while its caller computes.

Signals act in the main thread alone. One that interrupts a caller while it waits cancels the coroutine, and is raised
once that has ended. Foreign code that scores in this process runs in the thread that waits, as debuggers and signal
handlers expect, so none of it runs while that thread computes.

Threads that call wait for each other. A process that was forked from this one has no such thread, and leaves it alone.
"""

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from typing import Any

from bridge.core.interrupt import WAKE_S, acting_interrupt, deferred_interrupt, taken
from bridge.types import Result

PATIENCE_S = 5.0
"""Longest wait for tasks that are cancelled when the loop is closed."""


class EventLoop:
    """Runs coroutines, one call after the other, and the tasks that they start."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """Calls for the waiting thread; after each it checks whether to wait on."""
        self._is_waited_for = False
        self._waited_for: asyncio.Task[Any] | None = None
        self._num_awaited = 0
        """Coroutines that other event loops await."""
        self._limits: dict[asyncio.Timeout, float] = {}
        self._turn = threading.RLock()
        """Held by the thread that runs a coroutine; a call that it makes for the loop may run another one."""
        self._starting = threading.Lock()
        self._pid = 0
        """The process that has the thread."""

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine, and wait for it; an exception raised here, such as Ctrl-C, cancels it.

        Another thread's coroutine is waited for first. asyncio.CancelledError if `close` cancelled this one.
        """
        is_begun = False
        try:
            with taken(self._turn):
                is_begun = True
                return self._run(coroutine)
        finally:
            if not is_begun:
                coroutine.close()

    async def run_async(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine beside others, and await it from another event loop, whose cancellation cancels it."""
        self._start()
        future = asyncio.run_coroutine_threadsafe(self._awaited(coroutine), self._loop)
        return await asyncio.wrap_future(future)

    async def _awaited(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        self._num_awaited += 1
        self._count_time(True)
        try:
            return await coroutine
        finally:
            self._num_awaited -= 1
            self._count_time(self._waited_for is not None)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        task: Future[asyncio.Task[Result]] = Future()
        try:
            self._begin(coroutine, task)
            self._wait(task)
        except BaseException:
            if self._thread is None:
                coroutine.close()
            else:
                try:
                    self._loop.call_soon_threadsafe(self._cancel, task, coroutine)
                    self._wait(task)
                except KeyboardInterrupt:  # a second one ends what the first one could not
                    self._loop.call_soon_threadsafe(lambda: task.result().cancel())
                    raise
            raise
        return task.result().result()

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Limit a block as asyncio.timeout does, while a caller waits: a server may pause as long as it computes.

        The limit begins anew when a caller waits again.
        """
        limit = asyncio.timeout(seconds if self._is_waited_for else None)
        self._limits[limit] = seconds
        try:
            async with limit:
                yield
        finally:
            del self._limits[limit]

    def _count_time(self, is_waited_for: bool) -> None:
        was_waited_for = self._is_waited_for
        self._is_waited_for = is_waited_for or self._num_awaited > 0
        if self._num_awaited and was_waited_for:  # the limits go on
            return
        for limit, seconds in self._limits.items():
            with suppress(RuntimeError):  # it has expired
                limit.reschedule(self._loop.time() + seconds if self._is_waited_for else None)

    async def call_here(self, call: Callable[[], Any]) -> Any:
        """Return `call()`, made in the thread that waits for a coroutine."""
        result = Future[Any]()

        def act() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(call())
                except KeyboardInterrupt:
                    if not result.done():  # it may come once the result is set
                        result.set_exception(asyncio.CancelledError())
                    raise
                except BaseException as error:  # noqa: BLE001  raised where it is awaited
                    result.set_exception(error)

        self._calls.put(act)
        return await asyncio.wrap_future(result)

    def cancel(self) -> None:
        """Cancel the coroutine that another thread waits for, if there is one: its `run` raises CancelledError."""
        waited_for = self._waited_for
        if waited_for is not None and self._pid == os.getpid():
            self._loop.call_soon_threadsafe(_cancel, waited_for)

    @deferred_interrupt()  # half closed, it would lose the tasks that are left
    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel everything that is left, then run `last`, and end the thread; a second interrupt ends the wait."""
        if self._thread is None or self._pid != os.getpid():
            self._thread = None
            last.close()
            return
        task: Future[asyncio.Task[None]] = Future()
        self._begin(self._end(last), task)
        try:
            with acting_interrupt():
                self._wait(task)
        except KeyboardInterrupt:
            with acting_interrupt():
                self._wait(task)
            raise
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None
            self._loop.close()
        task.result().result()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                _cancel(task)
            ended, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
            await asyncio.gather(*ended, return_exceptions=True)
        await last
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    @deferred_interrupt()  # a thread that is known and was not started would be waited for
    def _begin(self, coroutine: Coroutine[Any, Any, Any], task: "Future[asyncio.Task[Any]]") -> None:
        """Start a coroutine as a task of the loop, whose thread starts with the first one."""

        def begin() -> None:
            self._count_time(True)
            self._waited_for = self._loop.create_task(coroutine)
            task.set_result(self._waited_for)
            task.result().add_done_callback(end)

        def end(_: "asyncio.Task[Any]") -> None:
            self._count_time(False)
            self._waited_for = None
            self._calls.put(_wake)

        self._start()
        self._loop.call_soon_threadsafe(begin)

    @deferred_interrupt()
    def _start(self) -> None:
        """Start the thread, once."""
        with self._starting:
            if self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._pid = os.getpid()
                self._thread = threading.Thread(target=self._run_forever, name="rollouts", daemon=True)
                self._thread.start()

    def _wait(self, task: "Future[asyncio.Task[Any]]") -> None:
        """Run the calls that the loop requests, until a task is done.

        An interrupt may come after the last call was taken out of the queue, or another thread that closes the loop may
        take it, so the task itself is looked at first.
        """
        while not (task.cancelled() or (task.done() and task.result().done())):
            if self._loop.is_closed():
                raise asyncio.CancelledError
            try:
                call = self._calls.get(timeout=WAKE_S)
            except queue.Empty:
                continue
            call()

    def _cancel(self, task: "Future[asyncio.Task[Any]]", coroutine: Coroutine[Any, Any, Any]) -> None:
        if task.done():
            _cancel(task.result())
        else:  # an interrupt came before it was begun
            coroutine.close()
            task.cancel()
            self._calls.put(_wake)

    def _run_forever(self) -> None:
        while True:
            with suppress(KeyboardInterrupt, SystemExit):  # raised by a task, which also has it as its result
                self._loop.run_forever()
                return


def _wake() -> None:
    """Do nothing: queued to wake the waiting thread."""


def _cancel(task: "asyncio.Task[Any]") -> None:
    if not task.cancelling():  # a second time would stop httpx from closing its connection
        task.cancel()
