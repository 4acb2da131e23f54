"""What runs in a process that scores: make the scores, then score one completion after the other.

It is told what to do, and answers, in frames: the length of a pickle, and the pickle.

Not covered: time limits, and what becomes of a worker that hangs or dies (`worker_process.py`).
Source: prctl(2) PR_SET_PDEATHSIG; proc(5) `/proc/PID/oom_score_adj`.
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import struct
from dataclasses import dataclass
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, RewardError
from bridge.rewards.foreign_code import foreign_code, said
from bridge.rewards.scoring import Fault, Origin, Score, Scores, score_one

HEADER = struct.Struct("!Q")
PR_SET_PDEATHSIG = 1
NOT_PICKLED = (
    "let it be made of classes and functions of modules that another process can import, not of the script that was "
    "started, or score in this process: --reward-processes 0"
)


@dataclass(frozen=True)
class Refusal:
    """Why nothing can be scored here, as the one who started the process has to raise it."""

    message: str
    """What is wrong."""
    remedy: str
    """What mends it."""


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


def main(channel: int, last_words: int, parent: int) -> None:
    """Serve the process `parent` over the socket `channel` until it is closed.

    The stack of a crash, or of a SIGTERM, is written to the file `last_words`, and ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent that decides
    faulthandler.enable(last_words, all_threads=False)
    faulthandler.register(signal.SIGTERM, last_words, all_threads=False, chain=True)
    for descriptor in (channel, last_words):
        os.set_inheritable(descriptor, False)
    _die_with(parent)
    with socket.socket(fileno=channel) as connection, connection.makefile("rwb") as stream:
        _serve(stream)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends, and rather than its parent where memory runs out."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:
        os._exit(0)


def _serve(stream: BufferedRWPair) -> None:
    recipe = _read(stream)
    if recipe is None:
        return
    made = _made(recipe)
    if isinstance(made, Refusal):
        _write(stream, made)
        return
    scores, origin = made
    _write(stream, origin)
    while (question := _read(stream)) is not None:
        _write(stream, _answer(scores, origin, question))


def _made(recipe: bytes) -> tuple[Scores, Origin] | Refusal:
    make = _unpickled(recipe)
    if isinstance(make, Refusal):
        return make
    try:
        with foreign_code("making what scores completions", ""):
            scores = make()
            return scores, Origin.of(scores)
    except BridgeError as error:
        return Refusal(error.message, error.remedy)


def _answer(scores: Scores, origin: Origin, question: bytes) -> Score | Fault | Refusal:
    asked = _unpickled(question)
    return asked if isinstance(asked, Refusal) else score_one(scores, origin, *asked)


def _unpickled(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # noqa: S301  it is the parent who speaks
    except Exception as error:  # noqa: BLE001  unpickling imports and runs foreign code
        what = f"what scores completions, or a problem, cannot be loaded in another process: {type(error).__name__}"
        return Refusal(what + said(error), NOT_PICKLED)


def _read(stream: BufferedRWPair) -> bytes | None:
    """Return the next pickle; None at the end."""
    header = stream.read(HEADER.size)
    return stream.read(*HEADER.unpack(header)) if len(header) == HEADER.size else None


def _write(stream: BufferedRWPair, content: object) -> None:
    stream.write(framed(content))
    stream.flush()
