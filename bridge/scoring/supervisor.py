"""The parent of a process that scores: it kills everything that a score has started.

A score may fork, call setsid, or orphan its children by ending the process between them and us. The kernel gives an
orphan to its nearest ancestor that is a subreaper, which is this process. It runs no foreign code. It kills all of its
descendants when the scoring process ends, when the trainer asks for it, and when the trainer is gone.

Not covered: scoring (`worker.py`), and when a score is late (`worker_process.py`).
Source: prctl(2) PR_SET_CHILD_SUBREAPER; a process whose children have all been reaped has no descendants then.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator

import psutil

from bridge.scoring import worker

PR_SET_CHILD_SUBREAPER = 36
STOP = b"s"
"""Sent by the trainer: let the scoring process write its stack, and end it. A closed connection: end it at once."""
STATUS = struct.Struct("!i")
"""Sent to the trainer once all have ended: the exit code of the scoring process, or minus its signal."""
GRACE_S = 2.0
"""Time for a process to end by itself."""
LOOK_S = 1.0
"""Between two looks whether the trainer still lives."""


def main(control: int, channel: int, last_words: int, trainer: int) -> None:
    """Start a process that scores over the socket `channel`, and obey the process `trainer` over the socket `control`.

    Foreign code never has `control`; this process never keeps `channel`, so that it closes with those who score.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all: the trainer decides
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own = os.getpid()
    for descriptor in (control, channel, last_words):
        os.set_inheritable(descriptor, False)
    scoring = os.fork()
    if not scoring:
        os.close(control)
        worker.main(channel, last_words, own)
        return
    os.close(channel)
    os.close(last_words)
    with socket.socket(fileno=control) as connection:
        ended = _watched(scoring, connection, trainer)
        last = _end_all(scoring)
        status = last if ended is None else ended
        with contextlib.suppress(OSError):  # the trainer is gone
            connection.send(STATUS.pack(0 if status is None else os.waitstatus_to_exitcode(status)))


def _watched(scoring: int, connection: socket.socket, trainer: int) -> int | None:
    """Wait until the process `scoring` has ended, and return its status; None: it has to be ended."""
    poll, deadline = select.poll(), float("inf")
    poll.register(connection, select.POLLIN)
    poll.register(_woken_by_children(), select.POLLIN)
    while os.getppid() == trainer and time.monotonic() < deadline:
        if (status := _reaped(scoring)) is not None:
            return status
        ready = [descriptor for descriptor, _ in poll.poll(LOOK_S * 1000)]
        for descriptor in set(ready) - {connection.fileno()}:
            os.read(descriptor, 4096)
        if connection.fileno() in ready:
            if connection.recv(1) != STOP:
                return _reaped(scoring)
            os.kill(scoring, signal.SIGTERM)  # ours to reap: its pid is its own until then
            deadline = time.monotonic() + GRACE_S
    return _reaped(scoring)


def _woken_by_children() -> int:
    """Return a descriptor that can be read once a child has ended."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    return woken


def _reaped(scoring: int) -> int | None:
    """Reap every child that has ended; return the status of `scoring` if it is one of them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        for pid, status in _ended_children():
            found = status if pid == scoring else found
    return found


def _ended_children() -> Iterator[tuple[int, int]]:
    """Reap the children that have ended, one by one.

    Raises:
        ChildProcessError: there is no child any more, so no descendant either.
    """
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
        yield ended


def _end_all(scoring: int) -> int | None:
    """Kill and reap every descendant; one that the kernel does not let go of is left to it after a while.

    Return the status of `scoring` if it was still there.
    """
    found, deadline = None, time.monotonic() + GRACE_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            for pid, status in _ended_children():
                found = status if pid == scoring else found
            time.sleep(0.002)
    return found
