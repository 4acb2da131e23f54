"""The two processes behind one worker: a supervisor, and its child, which scores one completion after the other.

A score may hang, crash, fork (and even return in the child), call setsid, or orphan its children by ending the process
between them and us. The kernel gives an orphan to its nearest ancestor that is a subreaper, which is the supervisor. It
runs no foreign code, and kills all of its descendants when the scoring process ends, when the trainer requests it, and
when the trainer is gone. A process that a score forks has no connection, and ends where it would answer.

The trainer sends pickled questions. A score may write anything to any descriptor, so answers are lines of JSON of
bounded size, checked field by field.

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
"""Time for a process to end by itself."""
PARENT_POLL_S = 1.0
"""How often the supervisor checks that the trainer is alive."""
STOP = signal.SIGTERM
"""Sent to the supervisor: let the scoring process write its stack, and end it."""
END = signal.SIGUSR1
"""Sent to the supervisor: end everything now."""
BY_SIGNAL = 128
"""Exit code of the supervisor minus this: the signal that ended the scoring process, as shells report it."""
MAX_ANSWER_BYTES = 2**20
NOT_PICKLED = (
    "use classes and functions of modules that another process can import, not of the script that was started, or"
    " score in this process: --reward-processes 0"
)


@dataclass(frozen=True, kw_only=True)
class CannotScore:
    """The error that the trainer raises because a worker can score nothing."""

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
"""Name of an answer -> its class, and the exact type of each field."""


class NotPickledError(RewardError):
    """A question cannot be sent to another process."""


class BadAnswerError(ValueError):
    """What a worker sent is not an answer."""


# Messages


def pickled(content: object) -> bytes:
    """Return a recipe, or a call of its host, as workers read them."""
    try:
        return pickle.dumps(content)
    except Exception as error:  # pickling runs code of the objects inside
        raise NotPickledError(
            f"what scores completions, or a problem, cannot be sent to another process: {type(error).__name__}"
            f"{reason_of(error)}",
            hint=NOT_PICKLED,
        ) from error


def written(number: int, answer: Answer) -> bytes:
    """Return the answer to question `number` as a line of JSON."""
    return json.dumps([number, type(answer).__name__, asdict(answer)]).encode() + b"\n"


def read(text: bytes) -> tuple[int, Answer]:
    """Return the number of the question and the answer to it."""

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
        raise BadAnswerError("not the JSON of an answer") from error
    if type(number) is not int or given_types != types or not are_rewards:
        raise BadAnswerError("other fields than an answer has")
    return number, kind(**fields)


# The supervisor


def supervise(channel: int, last_words: int, trainer: int) -> None:
    """Start a process that scores over the socket `channel`, and obey the signals of the process `trainer`.

    This process never keeps `channel`, so that it closes when the scoring ends. Its exit code is that of the scoring.
    """
    signals = (signal.SIGCHLD, STOP, END)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _ignore_the_terminal()
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
    """Process that has ended -> its exit code, or minus its signal."""
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


def _ignore_the_terminal() -> None:
    """Ignore the signals that a terminal sends to all of its processes: the trainer decides."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


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
    with contextlib.suppress(ConnectionError), socket.socket(fileno=channel) as connection:
        _serve(connection)  # until it is closed, maybe before everything was read


def _disconnect(*descriptors: int) -> None:
    """Point the descriptors nowhere; if they were closed, a file that a score opens could get their numbers."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _serve(connection: socket.socket) -> None:
    """Answer the recipe by the origin of the host that it made, then each call of that host."""
    own = os.getpid()

    def reply(number: int, answer: Answer) -> None:
        if os.getpid() != own:
            os._exit(0)  # a child that foreign code forked, and that returned in its place
        connection.sendall(written(number, answer))

    number = 0
    with connection.makefile("rb") as questions:
        try:
            recipe = _unpickled(questions)
            with foreign_code("making what scores completions", ""):
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
        what = f"what scores completions, or a problem, cannot be loaded in another process: {type(error).__name__}"
        raise RewardError(what + reason_of(error), hint=NOT_PICKLED) from error
