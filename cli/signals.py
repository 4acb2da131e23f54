"""End a command cleanly by whatever signal ends it, and let it outlive its terminal.

Not covered: when signals act (`bridge/core/interrupt.py`).
"""

import errno
import os
import signal
import sys
from types import FrameType
from typing import Any, TextIO, cast

from bridge.core.interrupt import SIGNALS

NOBODY_READS = (errno.EIO, errno.EPIPE)
"""Errors of writing to a terminal that is gone, and to a pipe that nobody reads."""


class Ending:
    """Lets signals raise KeyboardInterrupt: Ctrl-C each time, any other only if nothing has ended the command yet.

    A terminal that closes sends SIGHUP twice, by the shell and by the kernel: the second one would break off the
    checkpoint that the first one led to.
    """

    def __init__(self) -> None:
        self._has_begun = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle one signal."""
        first, self._has_begun = not self._has_begun, True
        if first or number == signal.SIGINT:
            raise KeyboardInterrupt


class Surviving:
    """A standard stream that is silent once nobody reads it, where others raise."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, if anybody reads it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._silence(error)
            return len(text)

    def flush(self) -> None:
        """Flush what was written, if anybody reads it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._silence(error)

    def __getattr__(self, name: str) -> Any:
        """Be the stream itself in all else."""
        return getattr(self._stream, name)

    def _silence(self, error: OSError) -> None:
        """Send what is written from now on nowhere, by whichever way."""
        if error.errno not in NOBODY_READS:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def prepare() -> None:
    """Let this process end cleanly by every signal but SIGQUIT, which ends it at once, and outlive its terminal.

    A signal that is ignored stays ignored: a run under `nohup` goes on.
    """
    ending = Ending()
    for number in set(SIGNALS) - {signal.SIGQUIT}:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, ending)
    sys.stdout, sys.stderr = cast(TextIO, Surviving(sys.stdout)), cast(TextIO, Surviving(sys.stderr))
