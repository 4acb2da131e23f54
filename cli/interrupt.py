"""When Ctrl-C acts: at once, or at the end of a block.

Not covered: the fence, which holds back SIGTERM as well (`bridge/weights/fence.py`).
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def acting() -> Iterator[None]:
    """Let Ctrl-C act at once, even inside a block that holds it back."""
    with _handled_by(signal.default_int_handler):
        yield


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let Ctrl-C act at the end of the block."""
    pressed: list[int] = []
    with _handled_by(lambda number, _: pressed.append(number)):
        yield
    if pressed:
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # no signal is handled in any other
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
