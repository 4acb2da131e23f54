"""The two processes behind one worker: a supervisor, and its child, which scores one completion after the other.

A score may hang, crash, fork (and even return in the child), call setsid, or orphan its children by ending the process
between them and us. The kernel gives an orphan to its nearest ancestor that is a subreaper, which is the supervisor. It
runs no foreign code, and kills all of its descendants when the scoring process ends, when the trainer requests it, and
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
import time
from functools import partial
from io import BufferedRWPair
from pathlib import Path
from typing import Any

import psutil

from bridge.core.foreign_code import foreign_code, said
from bridge.errors import BridgeError, RewardError
from bridge.scoring.agent import Agent
from bridge.scoring.score import Origin, score_one
from bridge.scoring.tools import Tools
from bridge.scoring.wire import HEADER, NOT_PICKLED, STATUS, STOP, Answer, CannotScore, packed

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
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
    ended: dict[int, int] = {}
    """Process that has ended -> its exit code, or minus its signal."""
    with socket.socket(fileno=control) as connection:
        _watch(scoring, ended, connection, trainer)
        _end_all(ended)
        with contextlib.suppress(OSError):  # the trainer is gone
            connection.send(STATUS.pack(ended.get(scoring, 0)))


def work(channel: int, last_words: int, supervisor: int) -> None:
    """Score for the other end of the socket `channel` until it is closed; `supervisor` is the parent process.

    A crash or a SIGTERM ends the process, with its stack written to the file `last_words`.
    """
    os.setpgid(0, 0)  # a score that signals its process group means what it has started
    _ignore_the_terminal()
    faulthandler.enable(last_words, all_threads=False)
    faulthandler.register(signal.SIGTERM, last_words, all_threads=False, chain=True)
    os.register_at_fork(after_in_child=partial(_disconnect, channel, last_words))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # ends before all others when memory runs out
    if os.getppid() != supervisor:
        os._exit(0)
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


def _watch(scoring: int, ended: dict[int, int], connection: socket.socket, trainer: int) -> None:
    """Return once the process `scoring` has ended, or is to be killed."""
    woken, waker = os.pipe()  # readable once a child has ended
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    poll, deadline = select.poll(), float("inf")
    poll.register(connection, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while os.getppid() == trainer and time.monotonic() < deadline and _reap(ended) and scoring not in ended:
        ready = [descriptor for descriptor, _ in poll.poll(PARENT_POLL_S * 1000)]
        if woken in ready:
            os.read(woken, 4096)
        if connection.fileno() in ready:
            if connection.recv(1) != STOP:
                return
            os.kill(scoring, signal.SIGTERM)  # ours to reap: nobody else can have its pid before that
            deadline = time.monotonic() + GRACE_S


def _reap(ended: dict[int, int]) -> bool:
    """Reap the children that have ended; return whether any child, and so any descendant, is left."""
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.setdefault(child[0], os.waitstatus_to_exitcode(child[1]))
    except ChildProcessError:
        return False
    return True


def _end_all(ended: dict[int, int]) -> None:
    """Kill and reap every descendant; one that the kernel does not let go of is left behind after a while."""
    deadline = time.monotonic() + GRACE_S
    while _reap(ended) and time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.002)


# The process that scores


def _disconnect(*descriptors: int) -> None:
    """Point the descriptors nowhere; if they were closed, a file that a score opens could get their numbers."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _serve(stream: BufferedRWPair) -> None:
    own, number = os.getpid(), 0

    def reply(answer: Answer) -> None:
        if os.getpid() != own:
            os._exit(0)  # a child that foreign code forked, and that returned in its place
        stream.write(packed(number, answer))
        stream.flush()

    try:
        for number, question in enumerate(iter(partial(_read, stream), None)):
            content = _unpickled(question)
            if number == 0:  # the recipe
                with foreign_code("making what scores completions", ""):
                    scores = content()
                    origin = scores.origin if isinstance(scores, Tools | Agent) else Origin.of(scores)
                reply(origin)
            elif isinstance(scores, Tools | Agent):
                method, *given = content
                reply(getattr(scores, method)(*given))
            else:
                reply(score_one(scores, origin, *content))
    except BridgeError as error:
        reply(CannotScore(message=error.message, remedy=error.remedy))


def _read(stream: BufferedRWPair) -> bytes | None:
    """Return the next question; None at the end."""
    header = stream.read(HEADER.size)
    return stream.read(*HEADER.unpack(header)) if len(header) == HEADER.size else None


def _unpickled(question: bytes) -> Any:
    try:
        return pickle.loads(question)  # noqa: S301  the trainer sent it
    except Exception as error:  # unpickling imports and runs foreign code
        what = f"what scores completions, or a problem, cannot be loaded in another process: {type(error).__name__}"
        raise RewardError(what + said(error), remedy=NOT_PICKLED) from error
