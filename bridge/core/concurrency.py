"""Run several coroutines, and a call in a thread that can be left behind; end a thread; wait for a socket."""

import asyncio
import ctypes
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any

from bridge.types import Result

RETRY_S = 0.5


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results in order; if one raises, the others are cancelled, and have ended when this raises it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start `call` in a daemon thread: an executor's thread would keep the event loop, or the process, from ending."""
    result = Future[Result]()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def is_readable(connection: socket.socket, wait_s: float) -> bool:
    """Return whether something arrives within `wait_s`, or the other end closes.

    `select.select` would refuse a descriptor of 1024 or more.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(wait_s * 1e3))


def end_thread(thread: threading.Thread) -> None:
    """Raise SystemExit at the next line of Python of `thread`, and again until it ends, since any code may catch it.

    Its `is_alive` does not tell: once Ctrl-C interrupts a `join`, Python 3.11 takes a running thread for an ended one.
    """
    while thread in threading.enumerate():  # not asked by number, which the next thread may get
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        time.sleep(RETRY_S)
