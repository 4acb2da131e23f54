"""One process that scores one completion at a time, as seen from here: started, asked, ended and started again.

It is no fork: this process may have threads, and CUDA. It is a Python of its own, which runs nothing of the script that
was started here, so that such a script needs no `if __name__ == "__main__"`. It leads a process group, which is ended
with it: what a score has started ends too. What it prints goes to stderr.

Not covered: which completion it is asked for (`scorer.py`); threads: whoever starts a worker has to outlive it.
"""

import asyncio
import contextlib
import json
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

from bridge.errors import RewardError
from bridge.rewards.foreign_code import place_in
from bridge.rewards.scoring import Fault, Origin, Score, fault_of
from bridge.rewards.worker import HEADER, Refusal, framed
from bridge.types import Problem

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bridge.rewards import worker; worker.main(*map(int, sys.argv[2:]))"
)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
"""A line of the stack that `faulthandler` writes, the innermost first."""
START_LIMIT_S = 600.0
"""Time for a process to make what scores; the same was done in this process before."""
GRACE_S = 2.0
"""Time for a process to end by itself."""


class WorkerProcess:
    """A process that makes what scores by a recipe, and scores."""

    def __init__(self, recipe: bytes, *, timeout_s: float) -> None:
        """Start it, and wait for nothing; `recipe` is framed."""
        self._recipe, self._timeout_s = recipe, timeout_s
        self._start()

    async def score(self, problem: Problem, completion: str) -> Score | Fault:
        """Return the score, or what happened instead; a process that came to harm is replaced.

        Raises:
            RewardError: the process cannot make what scores, or the problem cannot be sent to it.
        """
        question = framed((problem, completion))
        if self._is_gone():
            self.kill()
            self._start()
        try:
            origin = await self._ready()
            answer = await self._answer(question)
        except BaseException:  # an answer that nobody waits for would be taken for the next one's
            self.kill()
            raise
        if not isinstance(answer, str):
            return answer
        self._start()
        kind = f"{origin.name} {answer}"
        return fault_of(problem, completion, kind, f"{kind} ({place_in(self._stack, origin.file) or origin.place})")

    def dismiss(self) -> None:
        """Let it end by itself; `kill` sees to it."""
        if self._origin is not None and not self._is_gone():
            self._channel.shutdown(socket.SHUT_WR)
            self._channel.settimeout(GRACE_S)

    def kill(self) -> None:
        """End it, with all that it has started; one that was dismissed is given a moment before."""
        if self._channel.fileno() < 0:
            return
        try:
            if self._channel.gettimeout():
                with contextlib.suppress(TimeoutError, ConnectionError):
                    self._channel.recv(1)
        finally:
            self._channel.close()
            self._end_group()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            self._read_stack()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._last_words = tempfile.TemporaryFile()  # noqa: SIM115  closed once it is read
        given = theirs.fileno(), self._last_words.fileno()
        path = json.dumps([str(folder) for folder in sys.path])
        command = [sys.executable, "-u", "-P", "-c", PROGRAM, path, *map(str, (*given, os.getpid()))]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=given, process_group=0)
        theirs.close()
        with contextlib.suppress(ConnectionError):  # it is gone already: whoever asks it will see
            self._channel.sendall(self._recipe)
        self._channel.setblocking(False)
        self._origin: Origin | None = None
        self._received = bytearray()

    def _is_gone(self) -> bool:
        return self._channel.fileno() < 0 or (self._origin is not None and self._has_spoken())

    def _has_spoken(self) -> bool:
        """Tell whether there is an answer, or the end of it."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(0))

    async def _ready(self) -> Origin:
        """Wait until it has made what scores, and return whose code that is."""
        if self._origin is None:
            try:
                async with asyncio.timeout(START_LIMIT_S):
                    self._origin = await self._frame()
            except TimeoutError:
                raise _no_start(f"has not made it in {START_LIMIT_S:g} s") from None
            except (EOFError, ConnectionError):
                self.kill()
                raise _no_start(self._how_it_ended()) from None
        return self._origin

    async def _answer(self, question: bytes) -> Score | Fault | str:
        """Return the answer, or what the process did instead, which has ended then."""
        loop = asyncio.get_running_loop()
        self._is_late, self._timer = False, loop.call_later(self._timeout_s, self._end)
        try:
            await loop.sock_sendall(self._channel, question)
            score: Score | Fault = await self._frame()
        except (EOFError, ConnectionError):
            self.kill()
            return f"took longer than {self._timeout_s:g} s" if self._is_late else self._how_it_ended()
        finally:
            self._timer.cancel()
        if self._is_late:  # it is ending, since it was not seen that the answer was there
            self.kill()
        return score

    def _end(self) -> None:
        """End it by a signal on which it says where it was; not if it was this process that was held up."""
        if not self._has_spoken():
            self._is_late = True
            os.kill(self._process.pid, signal.SIGTERM)
            self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._end_group)

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _frame(self) -> Any:
        """Return what it says next.

        Raises:
            RewardError: it says that it cannot.
            EOFError: it says nothing more.
        """
        while (end := self._frame_end()) > len(self._received):
            if not (piece := await asyncio.get_running_loop().sock_recv(self._channel, 2**16)):
                raise EOFError
            self._received += piece
        content = pickle.loads(self._received[HEADER.size : end])  # noqa: S301  it runs what we told it to
        del self._received[:end]
        if isinstance(content, Refusal):
            raise RewardError(content.message, remedy=content.remedy)
        return content

    def _frame_end(self) -> int:
        if len(self._received) < HEADER.size:
            return HEADER.size
        return HEADER.size + int(HEADER.unpack_from(self._received)[0])

    def _read_stack(self) -> None:
        with self._last_words:
            self._last_words.seek(0)
            written = self._last_words.read().decode(errors="replace")
        self._stack = [(file, int(line)) for file, line in reversed(FRAME.findall(written))]

    def _how_it_ended(self) -> str:
        status = self._process.returncode
        if status is None or status >= 0:
            return f"ended its process, by exit status {status}"
        memory = ", as where memory runs out" if status == -signal.SIGKILL else ""
        return f"ended its process, by {signal.Signals(-status).name}{memory}"


def _no_start(what: str) -> RewardError:
    return RewardError(
        f"a process that is to score completions cannot make what scores them: it {what}",
        remedy="what it printed is above; --reward-processes 0 scores in this process, where a debugger reaches it",
    )
