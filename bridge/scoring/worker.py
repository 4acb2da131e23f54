"""The two processes behind one worker: a supervisor, and its child, which scores one completion after the other.

A score may hang, crash, fork (and even return in the child), call setsid, or orphan its children by ending the process
between them and us. The kernel gives an orphan to its nearest ancestor that is a subreaper, which is the supervisor. It
runs no foreign code, and kills all of its descendants when the scoring process ends, when the trainer asks for it, and
when the trainer is gone. A process that a score forks has no connection, and ends where it would answer.

Source: prctl(2) PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG; proc(5) `/proc/PID/oom_score_adj`. A process whose
    children have all been reaped has no descendants.
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from functools import partial
from io import BufferedRWPair
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from bridge.core.foreign_code import foreign_code, said
from bridge.errors import BridgeError
from bridge.scoring import wire
from bridge.scoring.score import Origin, Scores, score_one
from bridge.scoring.wire import HEADER, NOT_PICKLED, Answer, CannotScore

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOP = b"s"
"""Sent by the trainer: let the scoring process write its stack, and end it. A closed connection: end it at once."""
STATUS = struct.Struct("!i")
"""Sent to the trainer once all have ended: the exit code of the scoring process, or minus its signal."""
GRACE_S = 2.0
"""Time for a process to end by itself."""
PARENT_POLL_S = 1.0
"""How often the supervisor checks that the trainer is alive."""


def supervise(control: int, channel: int, last_words: int, trainer: int) -> None:
    """Start a process that scores over the socket `channel`, and obey the process `trainer` over the socket `control`.

    Foreign code never has `control`; this process never keeps `channel`, so that it closes when the scoring ends.
    """
    _ignore_the_terminal()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own = os.getpid()
    for descriptor in (control, channel, last_words):
        os.set_inheritable(descriptor, False)
    scoring = os.fork()
    if not scoring:
        os.close(control)
        work(channel, last_words, own)
        return
    os.close(channel)
    os.close(last_words)
    with socket.socket(fileno=control) as connection:
        ended = _watched(scoring, connection, trainer)
        last = _end_all(scoring)
        status = last if ended is None else ended
        with contextlib.suppress(OSError):  # the trainer is gone
            connection.send(STATUS.pack(0 if status is None else os.waitstatus_to_exitcode(status)))


def work(channel: int, last_words: int, supervisor: int) -> None:
    """Score for the other end of the socket `channel` until it is closed; `supervisor` is the parent process.

    A crash or a SIGTERM ends the process, with its stack written to the file `last_words`.
    """
    os.setpgid(0, 0)  # a score that signals its process group means what it has started
    _ignore_the_terminal()
    faulthandler.enable(last_words, all_threads=False)
    faulthandler.register(signal.SIGTERM, last_words, all_threads=False, chain=True)
    os.register_at_fork(after_in_child=partial(_disconnect, channel, last_words))
    _die_with(supervisor)
    with (
        contextlib.suppress(ConnectionError),  # closed before everything was read, which is the end as well
        socket.socket(fileno=channel) as connection,
        connection.makefile("rwb") as stream,
    ):
        _serve(stream)


def _ignore_the_terminal() -> None:
    """Ignore the signals that a terminal sends to all of its processes: the trainer decides."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


# The supervisor


def _watched(scoring: int, connection: socket.socket, trainer: int) -> int | None:
    """Wait until the process `scoring` has ended, and return its status; None if it is to be killed."""
    poll, deadline = select.poll(), float("inf")
    poll.register(connection, select.POLLIN)
    poll.register(_woken_by_children(), select.POLLIN)
    while os.getppid() == trainer and time.monotonic() < deadline:
        if (status := _reaped(scoring)) is not None:
            return status
        ready = [descriptor for descriptor, _ in poll.poll(PARENT_POLL_S * 1000)]
        for descriptor in set(ready) - {connection.fileno()}:
            os.read(descriptor, 4096)
        if connection.fileno() in ready:
            if connection.recv(1) != STOP:
                return _reaped(scoring)
            os.kill(scoring, signal.SIGTERM)  # ours to reap: nobody else can have its pid before that
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
        ChildProcessError: no child is left, and so no descendant.
    """
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
        yield ended


def _end_all(scoring: int) -> int | None:
    """Kill and reap every descendant; return the status of `scoring` if it was still there.

    A process that the kernel does not let go of is left behind after a while.
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


# The process that scores


def _disconnect(*descriptors: int) -> None:
    """Point the descriptors nowhere; if they were closed, a file that a score opens could get their numbers."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _die_with(parent: int) -> None:
    """Let the kernel end this process with its parent, and before all others when memory runs out."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:
        os._exit(0)


def _serve(stream: BufferedRWPair) -> None:
    recipe, own = _read(stream), os.getpid()
    if recipe is None:
        return
    made = _made(recipe)
    if isinstance(made, CannotScore):
        _write(stream, own, 0, made)
        return
    scores, origin = made
    _write(stream, own, 0, origin)
    for number in count(1):
        if (question := _read(stream)) is None:
            return
        asked = _unpickled(question)
        answer = asked if isinstance(asked, CannotScore) else score_one(scores, origin, *asked)
        _write(stream, own, number, answer)


def _made(recipe: bytes) -> tuple[Scores, Origin] | CannotScore:
    make = _unpickled(recipe)
    if isinstance(make, CannotScore):
        return make
    try:
        with foreign_code("making what scores completions", ""):
            scores = make()
            return scores, Origin.of(scores)
    except BridgeError as error:
        return CannotScore(message=error.message, remedy=error.remedy)


def _unpickled(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # noqa: S301  the trainer sent it
    except Exception as error:  # noqa: BLE001  unpickling imports and runs foreign code
        what = f"what scores completions, or a problem, cannot be loaded in another process: {type(error).__name__}"
        return CannotScore(message=what + said(error), remedy=NOT_PICKLED)


def _read(stream: BufferedRWPair) -> bytes | None:
    """Return the next question, still pickled; None at the end."""
    header = stream.read(HEADER.size)
    return stream.read(*HEADER.unpack(header)) if len(header) == HEADER.size else None


def _write(stream: BufferedRWPair, own: int, number: int, answer: Answer) -> None:
    """Answer question `number`, if this is still the process `own`."""
    if os.getpid() != own:
        os._exit(0)  # a child that foreign code forked, and that returned in its place
    stream.write(wire.answer(number, answer))
    stream.flush()
