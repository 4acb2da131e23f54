"""Run coroutines, and calls in threads that can be abandoned; stop a thread; wait for a socket."""

import asyncio
import ctypes
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, TypeVar

from bridge.core.interrupt import acting_interrupt, deferred_interrupt, wait_until
from bridge.types import Result

Item = TypeVar("Item")
RETRY_S = 0.5
GRACE_S = 2.0
"""Time that a thread gets to stop after a second interrupt, before it is abandoned."""


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results in order; if one raises, cancel the others, and raise once all have finished."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start `call` in a daemon thread; an executor's thread would block the exit of the event loop or the process."""
    result = Future[Result]()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def result_of(future: "Future[Result]", limit_s: float = math.inf) -> Result:
    """Return the result of a future, or raise its error; an interrupt ends the wait.

    Raise TimeoutError if there is no result after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    wait_until(lambda seconds: wait([future], timeout=seconds).done or time.monotonic() > deadline)
    return future.result(0)


def map_in_threads(call: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> Iterator[Result]:
    """Yield `call(item)` for each item, in order, with up to `num_threads` concurrent calls.

    After an error or an interrupt, no new call starts, and running ones are abandoned.
    """
    turns = threading.Semaphore(num_threads)
    is_over = threading.Event()

    def run(item: Item) -> Result:
        with turns:
            if is_over.is_set():
                raise CancelledError
            return call(item)

    try:
        futures = [in_thread(partial(run, item), "map") for item in items]
        for future in futures:
            yield result_of(future)
    finally:
        is_over.set()


def is_readable(connection: socket.socket, wait_s: float) -> bool:
    """Return whether data arrives, or the other end closes the connection, within `wait_s`.

    `select.select` would refuse descriptors from 1024 on.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(wait_s * 1e3))


def end_thread(thread: threading.Thread) -> None:
    """Raise SystemExit in `thread` at its next Python instruction, repeatedly until it ends, since code may catch it.

    A thread inside a long C call notices only when the call returns. An interrupt ends the wait, and is raised.

    `thread.is_alive` is unreliable: after Ctrl-C interrupts a `join`, Python 3.11 considers a running thread dead.
    """
    with deferred_interrupt():
        try:
            with acting_interrupt():
                _end(thread, math.inf)
        except KeyboardInterrupt:
            _end(thread, GRACE_S)
            raise


def _end(thread: threading.Thread, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while thread in threading.enumerate() and time.monotonic() < deadline:  # thread ids are reused
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        time.sleep(RETRY_S)
