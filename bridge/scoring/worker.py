"""What runs in a process that scores: make the scores, then score one completion after the other.

What it is sent is pickled; what it answers is plain data (`answers.py`). Each is a frame: a length, and as many bytes.

A score may fork, and may even return in the child. A child has no connection, and ends where it would answer.

Not covered: time limits, and what becomes of a worker that hangs or dies (`worker_process.py`, `supervisor.py`).
Source: prctl(2) PR_SET_PDEATHSIG; proc(5) `/proc/PID/oom_score_adj`.
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
from functools import partial
from io import BufferedRWPair
from itertools import count
from pathlib import Path
from typing import Any

from bridge.core.foreign_code import foreign_code, said
from bridge.errors import BridgeError, RewardError
from bridge.scoring import answers
from bridge.scoring.answers import HEADER, Answer, Refusal
from bridge.scoring.scoring import Origin, Scores, score_one

PR_SET_PDEATHSIG = 1
NOT_PICKLED = (
    "let it be made of classes and functions of modules that another process can import, not of the script that was "
    "started, or score in this process: --reward-processes 0"
)


def framed(content: object) -> bytes:
    """Return `content` as it is sent.

    Raises:
        RewardError: it cannot be pickled.
    """
    try:
        pickled = pickle.dumps(content)
    except Exception as error:  # pickling runs code of the objects inside
        raise RewardError(
            f"what scores completions, or a problem, cannot be sent to another process: {type(error).__name__}"
            f"{said(error)}",
            remedy=NOT_PICKLED,
        ) from error
    return HEADER.pack(len(pickled)) + pickled


def main(channel: int, last_words: int, supervisor: int) -> None:
    """Serve whoever is at the other end of the socket `channel` until it is closed; `supervisor` is our parent.

    The stack of a crash, or of a SIGTERM, is written to the file `last_words`, and ends the process.
    """
    os.setpgid(0, 0)  # a score that signals its process group means what it has started
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all: the trainer decides
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable(last_words, all_threads=False)
    faulthandler.register(signal.SIGTERM, last_words, all_threads=False, chain=True)
    os.register_at_fork(after_in_child=partial(_let_go, channel, last_words))
    _die_with(supervisor)
    with (
        contextlib.suppress(ConnectionError),  # closed before everything was read: it is the end as well
        socket.socket(fileno=channel) as connection,
        connection.makefile("rwb") as stream,
    ):
        _serve(stream)


def _let_go(*descriptors: int) -> None:
    """Point the descriptors nowhere; closed, they could become those of a file that a score opens."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends, and rather than another where memory runs out."""
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
    if isinstance(made, Refusal):
        _write(stream, own, 0, made)
        return
    scores, origin = made
    _write(stream, own, 0, origin)
    for number in count(1):
        if (question := _read(stream)) is None:
            return
        _write(stream, own, number, _answer(scores, origin, question))


def _made(recipe: bytes) -> tuple[Scores, Origin] | Refusal:
    make = _unpickled(recipe)
    if isinstance(make, Refusal):
        return make
    try:
        with foreign_code("making what scores completions", ""):
            scores = make()
            return scores, Origin.of(scores)
    except BridgeError as error:
        return Refusal(message=error.message, remedy=error.remedy)


def _answer(scores: Scores, origin: Origin, question: bytes) -> Answer:
    asked = _unpickled(question)
    return asked if isinstance(asked, Refusal) else score_one(scores, origin, *asked)


def _unpickled(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # noqa: S301  it is the parent who speaks
    except Exception as error:  # noqa: BLE001  unpickling imports and runs foreign code
        what = f"what scores completions, or a problem, cannot be loaded in another process: {type(error).__name__}"
        return Refusal(message=what + said(error), remedy=NOT_PICKLED)


def _read(stream: BufferedRWPair) -> bytes | None:
    """Return the next pickle; None at the end."""
    header = stream.read(HEADER.size)
    return stream.read(*HEADER.unpack(header)) if len(header) == HEADER.size else None


def _write(stream: BufferedRWPair, own: int, number: int, answer: Answer) -> None:
    """Answer question `number`, if this is still the process `own`."""
    if os.getpid() != own:
        os._exit(0)  # a child that foreign code has forked came back in its place
    stream.write(answers.framed(number, answer))
    stream.flush()
