"""Let a command end cleanly on any signal, and outlive its terminal.

Not covered: when signals act (`bridge/core/interrupt.py`).
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar, cast

from bridge.core.interrupt import COMPILER, SIGNALS
from bridge.errors import UsageError

T = TypeVar("T")
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as a shell reports it."""
READER_GONE = (errno.EIO, errno.EPIPE)
"""Errors of writing to a terminal that is gone, or to a pipe without a reader."""


class InterruptHandler:
    """A handler that raises KeyboardInterrupt: on every Ctrl-C, and on another signal only if it is the first.

    A closing terminal sends SIGHUP twice, from the shell and from the kernel: the second would interrupt the checkpoint
    that the first one triggered.
    """

    def __init__(self) -> None:
        self._first: int | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        is_first = self._first is None
        self._first = self._first or number
        if is_first or number == signal.SIGINT:
            raise KeyboardInterrupt

    def finish(self, code: int) -> int:
        """From now on, let a signal end the process silently: Python would print a traceback.

        Return the exit code of a process that would end with `code`: 128 + its first signal if interrupted.
        """
        for number in SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        return 128 + (self._first or signal.SIGINT) if code == INTERRUPTED else code


class DisconnectableStream:
    """A standard stream that discards its output instead of raising once nobody reads it.

    If its disk is full, data raises a UsageError, and notes are dropped: a run does not fail because of its log.
    """

    def __init__(self, stream: TextIO, *, holds_notes: bool = False) -> None:
        self._stream = stream
        self._holds_notes = holds_notes

    def write(self, text: str) -> int:
        return self._attempt(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._attempt(self._stream.flush, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, action: Callable[[], T], otherwise: T) -> T:
        """Run `action`; once the reader has gone, redirect the descriptor to /dev/null and return `otherwise`."""
        try:
            return action()
        except OSError as error:
            if error.errno not in READER_GONE:
                if self._holds_notes:
                    return otherwise
                raise UsageError(
                    f"cannot write the output: {error.strerror}",
                    hint="make room on the disk that stdout is redirected to",
                ) from error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        return otherwise


def leave(code: int) -> NoReturn:
    """Exit with `code`, without any cleanup if torch is still compiling in a thread that could not be stopped."""
    if any(thread.name == COMPILER for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def prepare() -> InterruptHandler:
    """Let this process end cleanly on every signal except SIGQUIT, which ends it immediately, and outlive its terminal.

    Ignored signals stay ignored: a run under `nohup` continues. A closed standard stream becomes /dev/null.
    """
    ending = InterruptHandler()
    for number in set(SIGNALS) - {signal.SIGQUIT}:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, ending)
    output, notes = (stream or Path(os.devnull).open("w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    sys.stdout = cast(TextIO, DisconnectableStream(output))
    sys.stderr = cast(TextIO, DisconnectableStream(notes, holds_notes=True))
    return ending
