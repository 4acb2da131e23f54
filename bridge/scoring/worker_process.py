"""A worker as the trainer sees it: started, asked one question at a time, killed and replaced.

It is not forked, because this process may have threads and CUDA. It is a fresh Python that runs nothing of the user's
script, so that the script needs no `if __name__ == "__main__"`. What it prints goes to stderr.
Every wait has a deadline, and an answer counts only if it has the number of the question.
"""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial

from bridge.core import private
from bridge.core.foreign_code import place_in
from bridge.errors import RewardError
from bridge.scoring.score import FailedScore, Origin, Score, failed
from bridge.scoring.tools import Reply
from bridge.scoring.wire import (
    HEADER,
    MAX_ANSWER_BYTES,
    STATUS,
    STOP,
    Answer,
    BadAnswerError,
    CannotScore,
    question,
    read,
)
from bridge.scoring.worker import GRACE_S
from bridge.types import Problem

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bridge.scoring import worker; worker.supervise(*map(int, sys.argv[2:]))"
)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
"""A line of the stack that `faulthandler` writes, the innermost first."""
START_LIMIT_S = 600.0
"""Time for a worker to make what scores; this process did the same before."""
SPOILED = "wrote to the connection of its process"
MAX_STACK_BYTES = 2**16
"""Read of the file that `faulthandler` writes: a score may write to it, too."""


class WorkerProcess:
    """A worker as seen from here: started, asked one question at a time, killed and replaced."""

    def __init__(self, recipe: bytes, *, timeout_s: float, variables: Collection[str] = ()) -> None:
        """Start it; its environment has no secrets but the `variables`."""
        self._recipe = recipe
        self._timeout_s = timeout_s
        self._variables = variables
        self._is_asked, self._num_holding = False, 0
        self._start()

    async def score(self, problem: Problem, completion: str) -> Score | FailedScore:
        """Return the score, or what happened instead.

        Raises:
            RewardError: as `ask`, or the problem cannot be pickled.
        """
        answer = await self.ask(question((problem, completion)), problem, completion)
        assert not isinstance(answer, Reply)
        return answer

    async def ask(
        self,
        asked: bytes,
        problem: Problem,
        completion: str,
        *,
        name: str = "",
        timeout_s: float | None = None,
        is_first: bool = True,
    ) -> Score | FailedScore | Reply:
        """Return the answer, or what happened instead; a process that came to harm is replaced.

        `name` is what is called, if it is not what scores; `timeout_s` its time limit, if it is another.
        `is_first`: the question needs nothing that an earlier one left in the process.

        Raises:
            RewardError: the process cannot make what scores.
        """
        if self._channel.fileno() < 0 or (self._origin is not None and self._has_spoken()):  # it is gone
            self.kill()
            self._start()
            if not is_first:
                kind = "the environment's process ended between two calls"
                return failed(problem, completion, kind, kind)
        try:
            origin = await self._ready()
            answer = await self._answer(asked, self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:  # an answer that nobody waits for would be taken for the next one's
            self.kill()
            raise
        if not isinstance(answer, str):
            return self._explained(answer)
        self._start()
        kind, place = f"{name or origin.name} {answer}", place_in(self._stack, origin.file)
        place = place or ("" if name else origin.place)
        return failed(problem, completion, kind, f"{kind} ({place})" if place else kind)

    def _explained(self, answer: Score | FailedScore | Reply) -> Score | FailedScore | Reply:
        """Return an answer, with a hint if it failed for lack of a hidden variable: for the user, not for the model."""
        if isinstance(answer, FailedScore):
            what = answer.line.partition(", on prompt ")[0]
            return replace(answer, line=answer.line + private.hint(what, self._variables))
        if isinstance(answer, Reply) and answer.is_error and (hint := private.hint(answer.text, self._variables)):
            _report(f"a tool failed{hint}")
        return answer

    def hold(self) -> None:
        """Stop the clock of the question's time limit until as many calls of `go_on`."""
        self._num_holding += 1
        if not self._is_late:
            self._timer.cancel()

    def go_on(self) -> None:
        self._num_holding -= 1
        if self._is_asked and not self._is_late and not self._num_holding:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._end)

    def dismiss(self) -> None:
        """Let it end by itself; follow with `kill`."""
        if self._channel.fileno() >= 0 and self._origin is not None and not self._has_spoken():
            self._channel.shutdown(socket.SHUT_WR)
            self._channel.settimeout(GRACE_S)

    def kill(self) -> None:
        """End it, with all that it has started; one that was dismissed first gets a moment."""
        if self._channel.fileno() < 0:
            return
        try:
            if self._channel.gettimeout():
                with contextlib.suppress(TimeoutError, ConnectionError):
                    self._channel.recv(1)
        finally:
            self._channel.close()
            self._control.close()
            self._reap()
            with self._last_words:
                self._last_words.seek(0)
                written = self._last_words.read(MAX_STACK_BYTES).decode(errors="replace")
            self._stack = [(file, int(line)) for file, line in reversed(FRAME.findall(written))]

    def _start(self) -> None:
        (self._channel, channel), (self._control, control) = socket.socketpair(), socket.socketpair()
        self._last_words = tempfile.TemporaryFile()  # noqa: SIM115  closed once it is read
        given = control.fileno(), channel.fileno(), self._last_words.fileno()
        path = json.dumps([str(folder) for folder in sys.path])
        command = [sys.executable, "-u", "-P", "-c", PROGRAM, path, *map(str, (*given, os.getpid()))]
        environment = private.worker_environment(self._variables) | direct_to_loopback()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=given, process_group=0, env=environment
        )
        channel.close()
        control.close()
        with contextlib.suppress(ConnectionError):  # it is gone already: the next question will notice
            self._channel.sendall(self._recipe)
        self._channel.setblocking(False)
        self._control.setblocking(False)
        self._origin: Origin | None = None
        self._received = bytearray()
        self._number = 0
        """Of the last question."""

    def _has_spoken(self) -> bool:
        """Return whether an answer, or the end of the connection, can be read."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(0))

    async def _ready(self) -> Origin:
        """Wait until it has made what scores, and return whose code that is."""
        if self._origin is not None:
            return self._origin
        try:
            async with asyncio.timeout(START_LIMIT_S):
                made = await self._next()
        except TimeoutError:
            what = f"has not made it in {START_LIMIT_S:g} s"
        except (EOFError, ConnectionError):
            what = await self._how_it_ended()
        except BadAnswerError:
            what = SPOILED
        else:
            assert isinstance(made, Origin)
            self._origin = made
            return made
        raise RewardError(
            f"a process for scoring completions cannot make what scores them: it {what}",
            remedy="its output is above; --reward-processes 0 scores in this process, where a debugger can reach it",
        )

    async def _answer(self, asked: bytes, timeout_s: float) -> Score | FailedScore | Reply | str:
        """Return the answer, or what the process did instead of answering, after which it has ended."""
        loop = asyncio.get_running_loop()
        self._is_late, self._limit_s, self._timer = False, timeout_s, loop.call_later(timeout_s, self._end)
        self._is_asked, self._num_holding = True, 0
        self._number += 1
        try:
            await loop.sock_sendall(self._channel, asked)
            answer = await self._next()
        except BadAnswerError:
            self.kill()
            return SPOILED
        except (EOFError, ConnectionError):
            how = await self._how_it_ended()
            return f"took longer than {timeout_s:g} s" if self._is_late else how
        finally:
            self._is_asked = False
            self._timer.cancel()
        if self._is_late:  # the answer came while it was being ended
            self.kill()
        assert isinstance(answer, Score | FailedScore | Reply)
        return answer

    def _end(self, *, has_spoken: bool = False) -> None:
        """End it by a signal on which it writes its stack; not if this process was too busy to read its answer."""
        loop = asyncio.get_running_loop()
        if not has_spoken and self._has_spoken():  # what is there may be no whole answer: it has a moment to be read
            self._timer = loop.call_later(GRACE_S, partial(self._end, has_spoken=True))
            return
        self._is_late = True
        with contextlib.suppress(OSError):
            self._control.send(STOP)
        self._timer = loop.call_later(3 * GRACE_S, self._abandon)

    def _abandon(self) -> None:
        """Stop waiting for a supervisor that does not end it: a score may have stopped or killed that, too."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    async def _next(self) -> Answer:
        """Return the answer to the last question.

        Raises:
            RewardError: the worker can score nothing.
            EOFError: the connection ended.
            BadAnswerError: what came is not an answer to that question.
        """
        (length,) = HEADER.unpack(await self._receive(HEADER.size))
        if length > MAX_ANSWER_BYTES:
            raise BadAnswerError(f"{length:,} bytes, expected at most {MAX_ANSWER_BYTES:,}")
        number, answer = read(await self._receive(length))
        if isinstance(answer, CannotScore):
            raise RewardError(answer.message, remedy=answer.remedy + private.hint(answer.message, self._variables))
        if number != self._number or isinstance(answer, Origin) != (number == 0):
            raise BadAnswerError("the answer to another question")
        return answer

    async def _receive(self, num_bytes: int) -> bytes:
        while len(self._received) < num_bytes:
            if not (piece := await asyncio.get_running_loop().sock_recv(self._channel, 2**16)):
                raise EOFError
            self._received += piece
        found = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return found

    async def _how_it_ended(self) -> str:
        """Wait until it has ended; the supervisor reports nothing if only the connection was closed."""
        reported = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(2 * GRACE_S):
                reported = await asyncio.get_running_loop().sock_recv(self._control, STATUS.size)
        self.kill()
        if len(reported) < STATUS.size:
            return "closed the connection of its process"
        (status,) = STATUS.unpack(reported)
        if status >= 0:
            return f"ended its process with exit status {status}"
        memory = " (out of memory?)" if status == -signal.SIGKILL else ""
        names = {each.value: each.name for each in signal.Signals}  # most real-time signals have none
        return f"ended its process by {names.get(-status, f'signal {-status}')}{memory}"

    def _reap(self) -> None:
        """Wait for the supervisor, which ends everything once its connection is closed."""
        try:
            self._process.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)


@cache
def _report(line: str) -> None:
    """Write a line to stderr, once."""
    sys.stderr.write(f"{line}\n")


def direct_to_loopback() -> dict[str, str]:
    """Return the variables with which no proxy stands between an agent and the address that it is given."""
    names = ("no_proxy", "NO_PROXY")
    given = [host.strip() for name in names for host in os.environ.get(name, "").split(",")]
    hosts = ["*"] if "*" in given else [*filter(None, given), "127.0.0.1"]  # a star counts only if it stands alone
    return dict.fromkeys(names, ",".join(dict.fromkeys(hosts)))
