"""One process that scores one completion at a time, as seen from here: started, asked, ended and started again.

It is no fork: this process may have threads, and CUDA. It is a Python of its own, which runs nothing of the script that
was started here, so that such a script needs no `if __name__ == "__main__"`. It is the child of a supervisor, which
ends it with all that a score has started. What it prints goes to stderr.

Every wait has a deadline, and an answer counts only if it has the number of the question.

Not covered: which completion it is asked for (`scorer.py`), and how everything is ended (`supervisor.py`).
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
from functools import partial

from bridge.core.foreign_code import place_in
from bridge.errors import RewardError
from bridge.scoring import answers
from bridge.scoring.answers import HEADER, Answer, BadAnswerError, Refusal
from bridge.scoring.scoring import Fault, Origin, Score, fault_of
from bridge.scoring.supervisor import GRACE_S, STATUS, STOP
from bridge.scoring.worker import framed
from bridge.types import Problem

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bridge.scoring import supervisor; supervisor.main(*map(int, sys.argv[2:]))"
)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
"""A line of the stack that `faulthandler` writes, the innermost first."""
START_LIMIT_S = 600.0
"""Time for a process to make what scores; the same was done in this process before."""
SPOILED = "wrote to the connection of its process"
"""What came over it is no answer."""
MAX_STACK_BYTES = 2**16
"""Read of what `faulthandler` writes: a score may write to that file, too."""


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
            self._control.close()
            self._reap()
            self._read_stack()

    def _start(self) -> None:
        (self._channel, channel), (self._control, control) = socket.socketpair(), socket.socketpair()
        self._last_words = tempfile.TemporaryFile()  # noqa: SIM115  closed once it is read
        given = control.fileno(), channel.fileno(), self._last_words.fileno()
        path = json.dumps([str(folder) for folder in sys.path])
        command = [sys.executable, "-u", "-P", "-c", PROGRAM, path, *map(str, (*given, os.getpid()))]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=given, process_group=0)
        channel.close()
        control.close()
        with contextlib.suppress(ConnectionError):  # it is gone already: whoever asks it will see
            self._channel.sendall(self._recipe)
        self._channel.setblocking(False)
        self._control.setblocking(False)
        self._origin: Origin | None = None
        self._received = bytearray()
        self._number = 0
        """Of the last question."""
        self._status = b""
        """What the supervisor says of the end of the process."""

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
                    made = await self._next()
            except TimeoutError:
                raise _no_start(f"has not made it in {START_LIMIT_S:g} s") from None
            except (EOFError, ConnectionError):
                await self._see_the_end()
                raise _no_start(self._how_it_ended()) from None
            except BadAnswerError:
                raise _no_start(SPOILED) from None
            assert isinstance(made, Origin)
            self._origin = made
        return self._origin

    async def _answer(self, question: bytes) -> Score | Fault | str:
        """Return the answer, or what the process did instead, which has ended then."""
        loop = asyncio.get_running_loop()
        self._is_late, self._timer = False, loop.call_later(self._timeout_s, self._end)
        self._number += 1
        try:
            await loop.sock_sendall(self._channel, question)
            answer = await self._next()
        except BadAnswerError:
            self.kill()
            return SPOILED
        except (EOFError, ConnectionError):
            await self._see_the_end()
            return f"took longer than {self._timeout_s:g} s" if self._is_late else self._how_it_ended()
        finally:
            self._timer.cancel()
        if self._is_late:  # it is ending, since it was not seen that the answer was there
            self.kill()
        assert isinstance(answer, Score | Fault)
        return answer

    def _end(self, *, has_spoken: bool = False) -> None:
        """End it by a signal on which it says where it was; not if it was this process that was held up."""
        loop = asyncio.get_running_loop()
        if not has_spoken and self._has_spoken():  # what is there may be no whole answer: it has a moment to be read
            self._timer = loop.call_later(GRACE_S, partial(self._end, has_spoken=True))
            return
        self._is_late = True
        with contextlib.suppress(OSError):
            self._control.send(STOP)
        self._timer = loop.call_later(3 * GRACE_S, self._abandon)

    def _abandon(self) -> None:
        """Wait no longer for a supervisor that does not end it: a score may have stopped or killed that, too."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    async def _next(self) -> Answer:
        """Return the answer to the last question.

        Raises:
            RewardError: it says that it cannot.
            EOFError: it says nothing more.
            BadAnswerError: what it says is no answer to that question.
        """
        while (end := answers.num_bytes(self._received)) is None or end > len(self._received):
            if not (piece := await asyncio.get_running_loop().sock_recv(self._channel, 2**16)):
                raise EOFError
            self._received += piece
        number, answer = answers.read(self._received[HEADER.size : end])
        del self._received[:end]
        if isinstance(answer, Refusal):
            raise RewardError(answer.message, remedy=answer.remedy)
        if number != self._number or isinstance(answer, Origin) != (number == 0):
            raise BadAnswerError("the answer to another question")
        return answer

    async def _see_the_end(self) -> None:
        """Let the supervisor say how the process ended; it says nothing of one that only closed its connection."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(2 * GRACE_S):
                self._status = await asyncio.get_running_loop().sock_recv(self._control, STATUS.size)
        self.kill()

    def _reap(self) -> None:
        """Wait for the supervisor, which ends everything once its connection is closed."""
        try:
            self._process.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)

    def _read_stack(self) -> None:
        with self._last_words:
            self._last_words.seek(0)
            written = self._last_words.read(MAX_STACK_BYTES).decode(errors="replace")
        self._stack = [(file, int(line)) for file, line in reversed(FRAME.findall(written))]

    def _how_it_ended(self) -> str:
        if len(self._status) < STATUS.size:
            return "closed the connection of its process"
        (status,) = STATUS.unpack(self._status)
        if status >= 0:
            return f"ended its process, by exit status {status}"
        memory = ", as where memory runs out" if status == -signal.SIGKILL else ""
        names = {each.value: each.name for each in signal.Signals}  # most real-time signals have none
        return f"ended its process, by {names.get(-status, f'signal {-status}')}{memory}"


def _no_start(what: str) -> RewardError:
    return RewardError(
        f"a process that is to score completions cannot make what scores them: it {what}",
        remedy="what it printed is above; --reward-processes 0 scores in this process, where a debugger reaches it",
    )
