"""Defer signals that end a process to the end of a block, or let them act at once inside such a block.

What they do is up to their handlers; `bridge` lets them raise KeyboardInterrupt (`cli/bridge_cli/signals.py`).
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
"""Longest part of a wait that an interrupt should end."""
COMPILER = "compiler"
"""Name of a thread in which torch compiles: the interpreter would crash if it ended under that."""
SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""Signals that come from outside and end a process without a handler: from a person, a terminal that closes, or a
scheduler (Slurm sends SIGUSR1 or SIGXCPU before it kills)."""


@dataclass(frozen=True)
class _Deferred:
    """The handler of one signal in one block that defers it."""

    waiting: list[int]
    """The signals that arrived, of the whole block."""
    outside: Any
    """The handler outside the block."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.waiting.append(number)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer every signal of `SIGNALS` until the end of the outermost such block, then let the last one act.

    After an error of that block none does: it would hide the error. One that is handled inside the block costs none.
    """
    waiting: list[int] = []
    with _handled_by(lambda handler: handler if isinstance(handler, _Deferred) else _Deferred(waiting, handler)):
        yield
    if waiting:
        signal.raise_signal(waiting[-1])


@contextmanager
def acting_interrupt() -> Iterator[None]:
    """Let every signal of `SIGNALS` act at once, including deferred ones, whatever blocks around defer them.

    A signal without a handler raises KeyboardInterrupt here: if it ended the process, nothing could be undone.
    """
    with _handled_by(_outside) as before:
        came = []
        for block in (handler for handler in before.values() if isinstance(handler, _Deferred)):
            came += block.waiting
            block.waiting.clear()
        if came:
            signal.raise_signal(came[-1])
        yield


def wait_until(wait: Callable[[float], object]) -> None:
    """Call `wait(seconds)` until it returns something true; an interrupt acts between two calls.

    Without a time limit, an interrupt may be lost. A signal goes to any thread that unblocks signals at that moment,
    as one does that starts a thread or a process; Python runs the handler in the main thread, but nothing wakes it.
    """
    while not wait(WAKE_S):
        pass


def next_item(items: "queue.SimpleQueue[Result]") -> Result:
    """Return the next item of a queue; an interrupt ends the wait for it."""
    while True:
        try:
            return items.get(timeout=WAKE_S)
        except queue.Empty:
            continue


@contextmanager
def taken(lock: "threading.RLock | threading.Lock") -> Iterator[None]:
    """Hold `lock` inside the block; an interrupt ends the wait for it, and leaves it free."""
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
    """Replace each signal's handler by `change(handler)` and yield the old ones; none outside the main thread.

    An ignored signal, as with `nohup`, stays ignored; one that is handled outside Python is left alone.
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
        for number, handler in reversed(before.items()):  # Ctrl-C last: it would leave the others as they are
            signal.signal(number, handler)


def _outside(handler: Any) -> Any:
    """Return the handler outside the block that defers a signal; one that raises, if none would handle it."""
    outside = handler.outside if isinstance(handler, _Deferred) else handler
    return signal.default_int_handler if outside == signal.SIG_DFL else outside
