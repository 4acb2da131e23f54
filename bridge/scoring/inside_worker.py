"""The two processes of a worker: a supervisor, and its child, which scores one completion at a time.

A score may hang, crash, fork (and even return in the child), call setsid, or orphan its children by killing the process
between them and us. The kernel reparents an orphan to its nearest subreaper ancestor, which is the supervisor. The
supervisor runs no foreign code. It kills all of its descendants when the scoring process ends, when the trainer
requests it, and when the trainer has exited. A process that a score forks has no connection to the trainer, and exits
at the point where it would answer.

The trainer sends pickled requests. A score may write anything to any descriptor, so answers are lines of JSON of
bounded size, and every field is checked.

Source: prctl(2) PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG; proc(5) `/proc/PID/oom_score_adj`. A process whose
    children have all been reaped has no descendants.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import psutil

from bridge.core.foreign_code import foreign_code, reason_of
from bridge.errors import BridgeError, RewardError
from bridge.scoring.score import FailedScore, Origin, Reply, Score, as_reward, host_of

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0
"""Time that a process gets to exit by itself."""
PARENT_POLL_S = 1.0
"""How often the supervisor checks that the trainer is alive."""
STOP = signal.SIGTERM
"""Tells the supervisor to let the scoring process write its stack and exit."""
END = signal.SIGUSR1
"""Tells the supervisor to kill everything now."""
BY_SIGNAL = 128
"""If a signal killed the scoring process, the supervisor exits with this plus the signal's number, as shells do."""
MAX_ANSWER_BYTES = 2**20
NOT_PICKLED = (
    "move classes and functions from the script that was started to a module that other processes can import, or"
    " score in this process: --reward-processes 0"
)


@dataclass(frozen=True, kw_only=True)
class CannotScore:
    """An answer for which the trainer raises an error, because the worker cannot score anything."""

    message: str
    hint: str


Answer = Origin | Score | FailedScore | Reply | CannotScore
ANSWERS: Mapping[str, tuple[type[Any], Mapping[str, type]]] = {
    "Origin": (Origin, {"name": str, "file": str, "location": str}),
    "Score": (Score, {"reward": float, "parts": dict, "turns": list}),
    "FailedScore": (FailedScore, {"kind": str, "line": str, "is_raised": bool}),
    "Reply": (Reply, {"text": str, "is_error": bool}),
    "CannotScore": (CannotScore, {"message": str, "hint": str}),
}
"""Name of a kind of answer -> its class, and the exact type of each field."""


class NotPickledError(RewardError):
    """A request cannot be pickled, and so cannot be sent to a worker."""


class BadAnswerError(ValueError):
    """A worker sent something that is not a valid answer."""


# Messages


def pickled(content: object) -> bytes:
    """Pickle a recipe, or a call of its host, for a worker."""
    try:
        return pickle.dumps(content)
    except Exception as error:  # pickling runs the objects' own code
        raise NotPickledError(
            f"the scoring code or a problem cannot be sent to another process: {type(error).__name__}"
            f"{reason_of(error)}",
            hint=NOT_PICKLED,
        ) from error


def written(number: int, answer: Answer) -> bytes:
    """Return the answer to request `number` as a line of JSON."""
    return json.dumps([number, type(answer).__name__, asdict(answer)]).encode() + b"\n"


def read(text: bytes) -> tuple[int, Answer]:
    """Parse a line of JSON; return the number of the request, and the answer."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        number, name, fields = json.loads(text, parse_constant=refuse)
        kind, types = ANSWERS[name]
        given_types = {field: type(value) for field, value in fields.items()}
        numbers = [fields.get("reward", 0.0), *fields.get("parts", {}).values(), *fields.get("turns", ())]
        are_rewards = all(
            type(number) is float and as_reward(number) is not None for number in numbers
        )  # 1e999 is infinity
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadAnswerError("the line is not JSON of a known answer") from error
    if type(number) is not int or given_types != types or not are_rewards:
        raise BadAnswerError("the answer has unexpected fields")
    return number, kind(**fields)


# The supervisor


def supervise(channel: int, last_words: int, trainer: int) -> None:
    """Start a process that scores over the socket `channel`, and obey signals from the process `trainer`.

    The supervisor closes its copy of `channel`, so that the connection ends with the scoring process. It exits with the
    scoring process's exit code.
    """
    signals = (signal.SIGCHLD, STOP, END)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _ignore_terminal_signals()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own = os.getpid()
    for descriptor in (channel, last_words):
        os.set_inheritable(descriptor, False)
    scoring = os.fork()
    if not scoring:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        work(channel, last_words, own)
        return
    os.close(channel)
    os.close(last_words)
    ended: dict[int, int] = {}
    """Pid of an exited process -> its exit code, or the negative number of the signal that killed it."""
    deadline = float("inf")
    while os.getppid() == trainer and time.monotonic() < deadline and _reap(ended) and scoring not in ended:
        received = signal.sigtimedwait(signals, PARENT_POLL_S)
        if received is None:
            continue
        if received.si_signo == END:
            break
        if received.si_signo == STOP:
            os.kill(scoring, signal.SIGTERM)  # not reaped yet, so its pid is not reused
            deadline = time.monotonic() + GRACE_S
    _end_all(ended)
    status = ended.get(scoring, 0)
    os._exit(status if status >= 0 else BY_SIGNAL - status)


def _ignore_terminal_signals() -> None:
    """Ignore the signals that a terminal sends to all of its processes: the trainer decides when to stop."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _reap(ended: dict[int, int]) -> bool:
    """Reap exited children; return whether any child, and therefore any descendant, is left."""
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.setdefault(child[0], os.waitstatus_to_exitcode(child[1]))
    except ChildProcessError:
        return False
    return True


def _end_all(ended: dict[int, int]) -> None:
    """Kill and reap all descendants; give up on unkillable ones after a grace period."""
    deadline = time.monotonic() + GRACE_S
    while _reap(ended) and time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.002)


# The process that scores


def work(channel: int, last_words: int, supervisor: int) -> None:
    """Answer the requests from the socket `channel` until it is closed; `supervisor` is the parent process.

    On a crash or SIGTERM, the process writes its stack to the file `last_words` and exits.
    """
    os.setpgid(0, 0)  # a score that signals its process group must only reach processes that it started
    _ignore_terminal_signals()
    faulthandler.enable(last_words, all_threads=False)
    faulthandler.register(signal.SIGTERM, last_words, all_threads=False, chain=True)
    os.register_at_fork(after_in_child=partial(_disconnect, channel, last_words))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first process to be killed when memory runs out
    if os.getppid() != supervisor:
        os._exit(0)
    with contextlib.suppress(ConnectionError), socket.socket(fileno=channel) as connection:
        _serve(connection)  # returns once the connection is closed, possibly with unread requests


def _disconnect(*descriptors: int) -> None:
    """Redirect descriptors to /dev/null. If they were closed, files that a score opens could get their numbers."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _serve(connection: socket.socket) -> None:
    """Answer the recipe with the origin of its host, then each call with the host's result."""
    own = os.getpid()

    def reply(number: int, answer: Answer) -> None:
        if os.getpid() != own:
            os._exit(0)  # foreign code forked, and its child returned from the call as well
        connection.sendall(written(number, answer))

    number = 0
    with connection.makefile("rb") as questions:
        try:
            recipe = _unpickled(questions)
            with foreign_code("creating the scoring object", ""):
                host = host_of(recipe())
            reply(0, host.origin)
            while questions.peek(1):
                number += 1
                method, *given = _unpickled(questions)
                reply(number, getattr(host, method)(*given))
        except BridgeError as error:
            reply(number, CannotScore(message=error.message, hint=error.hint))


def _unpickled(questions: BinaryIO) -> Any:
    try:
        return pickle.load(questions)  # noqa: S301  the trainer sent it
    except Exception as error:  # unpickling imports and runs foreign code
        what = f"the scoring code or a problem cannot be loaded in another process: {type(error).__name__}"
        raise RewardError(what + reason_of(error), hint=NOT_PICKLED) from error
