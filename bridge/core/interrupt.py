"""When signals that end a process act: at the end of a block, or at once inside of one that holds them back.

Not covered: what they do, which is their handlers' own; `bridge` lets them raise KeyboardInterrupt (`cli/signals.py`).
Timers that a process sets itself, such as SIGALRM, which end nothing unless it asks for that.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""What ends a process that does not handle it, and comes from outside: from a person, a terminal that closes, or a
scheduler (Slurm sends SIGUSR1 or SIGXCPU before it kills)."""


@dataclass(frozen=True)
class _HeldBack:
    """The handler of one signal in one block that holds it back."""

    waiting: list[int]
    """The signals that came, of the whole block."""
    outside: Any
    """The handler outside of the block."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.waiting.append(number)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back every signal of `SIGNALS` until the end of the block, then let the last that came act."""
    waiting: list[int] = []
    with _handled_by(lambda handler: _HeldBack(waiting, handler)):
        yield
    if waiting:
        signal.raise_signal(waiting[-1])


@contextmanager
def acting_interrupt() -> Iterator[None]:
    """Let every signal of `SIGNALS` act at once, those too that came before, whatever blocks around hold them back.

    One that nobody handles is a KeyboardInterrupt here: ended by it, the process could not undo what it began.
    """
    with _handled_by(_outermost) as before:
        blocks = (block for handler in before.values() for block in _blocks(handler))
        came = [number for block in blocks for number in _taken(block.waiting)]
        if came:
            signal.raise_signal(came[-1])
        yield


@contextmanager
def _handled_by(change: Callable[[Any], Any]) -> Iterator[dict[signal.Signals, Any]]:
    """Let `change` of its handler handle each signal, and yield the handlers of before; none are in other threads.

    A signal that is ignored, as `nohup` does, stays ignored; one that is handled outside of Python is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    found = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in found.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number, handler in before.items():
            signal.signal(number, change(handler))
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _blocks(handler: Any) -> Iterator[_HeldBack]:
    """Yield the blocks that hold a signal back, the innermost first."""
    while isinstance(handler, _HeldBack):
        yield handler
        handler = handler.outside


def _outermost(handler: Any) -> Any:
    for block in _blocks(handler):
        handler = block.outside
    return signal.default_int_handler if handler == signal.SIG_DFL else handler


def _taken(waiting: list[int]) -> list[int]:
    taken = waiting.copy()
    waiting.clear()
    return taken
