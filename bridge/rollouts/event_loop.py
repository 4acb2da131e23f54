"""An event loop in its own thread, which keeps running while its caller computes.

Signals are handled only in the main thread. An interrupt that arrives while a caller waits cancels the caller's
coroutine, and is raised once the coroutine has ended. User code that scores in this process runs in the waiting thread,
as debuggers and signal handlers expect, so it does not run while that thread computes.

Concurrent calls from several threads run one at a time. A forked child process has no copy of the loop's thread, and
does not touch it.
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
"""Longest wait for cancelled tasks when the loop is closed."""


class EventLoop:
    """Runs one coroutine at a time for its callers, and the tasks that these coroutines start."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """Calls to make in the waiting thread; after each call, the thread checks whether its task is done."""
        self._is_waited_for = False
        self._waited_for: asyncio.Task[Any] | None = None
        self._num_awaited = 0
        """Number of coroutines that other event loops await."""
        self._limits: dict[asyncio.Timeout, float] = {}
        self._turn = threading.RLock()
        """Held by the thread that runs a coroutine; reentrant, because a call made in that thread may run another."""
        self._starting = threading.Lock()
        self._pid = 0
        """The process that started the thread."""

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine, and wait for it; an exception raised in the waiting thread, such as Ctrl-C, cancels it.

        If another thread's coroutine is running, wait for it first.

        Raises:
            asyncio.CancelledError: `close` or `cancel` cancelled the coroutine.
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
        """Run a coroutine alongside others, awaited from a different event loop, which may cancel it."""
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
                except KeyboardInterrupt:  # a second interrupt cancels a coroutine that survived the first
                    self._loop.call_soon_threadsafe(lambda: task.result().cancel())
                    raise
            raise
        return task.result().result()

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Limit a block as asyncio.timeout does, but only while a caller waits: a server may pause while it computes.

        The time limit restarts when a caller waits again.
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
        if self._num_awaited and was_waited_for:  # another coroutine is still awaited, so the limits keep running
            return
        for limit, seconds in self._limits.items():
            with suppress(RuntimeError):  # the timeout has expired
                limit.reschedule(self._loop.time() + seconds if self._is_waited_for else None)

    async def call_here(self, call: Callable[[], Any]) -> Any:
        """Make a call in the thread that waits for a coroutine, and return its result."""
        result = Future[Any]()

        def act() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(call())
                except KeyboardInterrupt:
                    if not result.done():  # the interrupt may arrive after the result is set
                        result.set_exception(asyncio.CancelledError())
                    raise
                except BaseException as error:  # noqa: BLE001  raised where it is awaited
                    result.set_exception(error)

        self._calls.put(act)
        return await asyncio.wrap_future(result)

    def cancel(self) -> None:
        """Cancel the coroutine that another thread waits for, if any; `run` raises CancelledError in that thread."""
        waited_for = self._waited_for
        if waited_for is not None and self._pid == os.getpid():
            self._loop.call_soon_threadsafe(_cancel, waited_for)

    @deferred_interrupt()  # interrupted halfway, it would leak the remaining tasks
    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel all remaining tasks, run `last`, and end the thread; a second interrupt ends the wait."""
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

    @deferred_interrupt()  # an interrupt between creating and starting the thread would make `close` wait forever
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
        """Start the thread unless it is running."""
        with self._starting:
            if self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._pid = os.getpid()
                self._thread = threading.Thread(target=self._run_forever, name="rollouts", daemon=True)
                self._thread.start()

    def _wait(self, task: "Future[asyncio.Task[Any]]") -> None:
        """Run the calls that the loop requests until a task is done.

        The last call may be lost: to an interrupt that arrives after it was taken from the queue, or to another thread
        that closes the loop. So the task itself is checked first.
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
        else:  # an interrupt arrived before the task was created
            coroutine.close()
            task.cancel()
            self._calls.put(_wake)

    def _run_forever(self) -> None:
        while True:
            with suppress(KeyboardInterrupt, SystemExit):  # raised by a task, which also stores it as its result
                self._loop.run_forever()
                return


def _wake() -> None:
    """Do nothing; queued only to wake the waiting thread."""


def _cancel(task: "asyncio.Task[Any]") -> None:
    if not task.cancelling():  # a second cancellation would keep httpx from closing its connection
        task.cancel()
