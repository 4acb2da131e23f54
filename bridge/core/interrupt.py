"""Defer terminating signals until the end of a block, or let them take effect immediately inside such a block.

Their effect is up to their handlers; the `bridge` command has them raise KeyboardInterrupt
(`cli/bridge_cli/signals.py`).
"""

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bridge.types import Result

WAKE_S = 0.2
"""Longest uninterruptible part of a wait."""
COMPILER = "compiler"
"""Name of a thread in which torch compiles: the interpreter would crash if it exited before such a thread."""
SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""External signals that end a process without a handler: sent by a user, a closing terminal, or a scheduler (Slurm
sends SIGUSR1 or SIGXCPU before it kills)."""


@dataclass(frozen=True)
class _Deferred:
    """The handler for one signal in a block that defers it."""

    waiting: list[int]
    """The signals that arrived during the block, shared by all its handlers."""
    outside: Any
    """The handler outside the block."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.waiting.append(number)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer the signals in `SIGNALS` until the end of the outermost such block, then let the last one take effect.

    If the outermost block raises, deferred signals are dropped, because they would hide the error. Errors that are
    handled inside the block do not drop any.
    """
    waiting: list[int] = []
    with _handled_by(lambda handler: handler if isinstance(handler, _Deferred) else _Deferred(waiting, handler)):
        yield
    if waiting:
        signal.raise_signal(waiting[-1])


@contextmanager
def acting_interrupt() -> Iterator[None]:
    """Let the signals in `SIGNALS`, including deferred ones, take effect immediately, even within a deferring block.

    A signal without a handler raises KeyboardInterrupt here, because a killed process could not clean up.
    """
    with _handled_by(_outer_handler) as before:
        came = []
        for block in (handler for handler in before.values() if isinstance(handler, _Deferred)):
            came += block.waiting
            block.waiting.clear()
        if came:
            signal.raise_signal(came[-1])
        yield


def wait_until(wait: Callable[[float], object]) -> None:
    """Call `wait(seconds)` until it returns a true value; interrupts take effect between two calls.

    A single wait without a timeout could miss an interrupt. A signal goes to any thread that has signals unblocked at
    that moment, such as one that is starting a thread or a process; Python runs the handler in the main thread, but
    nothing wakes that thread.
    """
    while not wait(WAKE_S):
        pass


def next_item(items: "queue.SimpleQueue[Result]") -> Result:
    """Return the next item of a queue; an interrupt ends the wait."""
    while True:
        try:
            return items.get(timeout=WAKE_S)
        except queue.Empty:
            continue


@contextmanager
def taken(lock: "threading.RLock | threading.Lock") -> Iterator[None]:
    """Hold `lock` inside the block; an interrupt ends the wait without acquiring the lock."""
    is_taken = False
    try:
        while not is_taken:
            with deferred_interrupt():
                is_taken = lock.acquire(timeout=WAKE_S)
        yield
    finally:
        if is_taken:
            lock.release()


@contextmanager
def _handled_by(change: Callable[[Any], Any]) -> Iterator[dict[signal.Signals, Any]]:
    """Replace each signal's handler with `change(handler)`, and yield the old ones; a no-op outside the main thread.

    Ignored signals, as with `nohup`, stay ignored; those handled outside Python are not touched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number, handler in before.items():
            signal.signal(number, change(handler))
        yield before
    finally:
        for number, handler in reversed(before.items()):  # Ctrl-C last: its handler may raise
            signal.signal(number, handler)


def _outer_handler(handler: Any) -> Any:
    """Return the handler outside the deferring block; one that raises KeyboardInterrupt if there is none."""
    outside = handler.outside if isinstance(handler, _Deferred) else handler
    return signal.default_int_handler if outside == signal.SIG_DFL else outside
