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
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum, auto
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

from bridge.core import private
from bridge.core.foreign_code import place_in
from bridge.core.together import in_thread
from bridge.errors import RewardError
from bridge.scoring import worker
from bridge.scoring.score import FailedScore, Origin, Reply, Score, failed
from bridge.scoring.worker import GRACE_S, MAX_ANSWER_BYTES, BadAnswerError, CannotScore
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


class State(Enum):
    """What a worker does."""

    STARTING = auto()
    """It makes what scores."""
    IDLE = auto()
    ASKED = auto()
    """It has a question and a time limit, which may be suspended."""
    ENDED = auto()


class WorkerProcess:
    """A worker as seen from here: started, asked one question at a time, killed and replaced."""

    def __init__(self, recipe: bytes, *, timeout_s: float, variables: Collection[str] = ()) -> None:
        """Start it; its environment has no secrets but the `variables`."""
        self._recipe = recipe
        self._timeout_s = timeout_s
        self._variables = variables
        self._state = State.STARTING
        self._num_suspending = 0
        """Requests of an agent that suspend its time limit."""
        self._start()

    async def ask(
        self,
        question: bytes,
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
        """
        if self._state is State.ENDED or (self._state is State.IDLE and self._connection.poll()):  # it has exited
            self.kill()
            self._start()
            if not is_first:
                kind = "the environment's process ended between two calls"
                return failed(problem, completion, kind, kind)
        try:
            if self._state is State.STARTING:
                await self._wait_until_ready()
            answer = await self._answer(question, self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:  # its answer would be taken for that to the next question
            self.kill()
            raise
        if not isinstance(answer, str):
            return self._explained(answer)
        origin = self._origin
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

    def suspend_limit(self) -> None:
        """Suspend the question's time limit; pair each call with `resume_limit`."""
        self._num_suspending += 1
        self._set_limit(None)

    def resume_limit(self) -> None:
        self._num_suspending -= 1
        if not self._num_suspending:
            self._set_limit(asyncio.get_running_loop().time() + self._limit_s)

    def _set_limit(self, when: float | None) -> None:
        if self._state is State.ASKED:
            with contextlib.suppress(RuntimeError):  # it has expired, or the answer is there
                self._limit.reschedule(when)

    def dismiss(self) -> None:
        """Let it end by itself; follow with `kill`."""
        if self._state is State.IDLE:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(b"")

    def kill(self) -> None:
        """End it, with all that it has started; one that was dismissed first gets a grace period."""
        if self._state is State.ENDED:
            return
        try:
            if self._state is State.IDLE:
                self._connection.poll(GRACE_S)
        finally:
            self._state = State.ENDED
            self._process.send_signal(worker.END)
            self._reap()
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread may still read
            self._socket.close()
            self._connection.close()
            with self._last_words:
                self._last_words.seek(0)
                stack = self._last_words.read(MAX_STACK_BYTES).decode(errors="replace")
            self._stack = [(file, int(line)) for file, line in reversed(FRAME.findall(stack))]

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._last_words = tempfile.TemporaryFile()  # noqa: SIM115  closed once it is read
        given = theirs.fileno(), self._last_words.fileno()
        path = json.dumps([str(folder) for folder in sys.path])
        command = [sys.executable, "-u", "-P", "-c", PROGRAM, path, *map(str, (*given, os.getpid()))]
        environment = private.worker_environment(self._variables) | direct_to_loopback()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=given, process_group=0, env=environment
        )
        theirs.close()
        with contextlib.suppress(ConnectionError):  # it has exited already: the next question will notice
            self._connection.send_bytes(self._recipe)
        self._state = State.STARTING
        self._number = 0
        """Of the last question."""

    async def _wait_until_ready(self) -> None:
        """Wait until it has made what scores, and reports whose code that is."""
        self._limit = asyncio.timeout(START_LIMIT_S)
        try:
            self._origin = await self._exchange(None, Origin)
        except (EOFError, ConnectionError):
            how = await self._how_it_ended()
            what = f"has not made it in {START_LIMIT_S:g} s" if self._limit.expired() else how
        except BadAnswerError:
            what = SPOILED
        else:
            self._state = State.IDLE
            return
        raise RewardError(
            f"a process for scoring completions cannot make what scores them: it {what}",
            remedy="its output is above; --reward-processes 0 scores in this process, where a debugger can reach it",
        )

    async def _answer(self, question: bytes, timeout_s: float) -> Score | FailedScore | Reply | str:
        """Return the answer, or what the process did instead of answering, after which it has ended."""
        self._limit_s = timeout_s
        self._num_suspending = 0
        self._number += 1
        self._limit = asyncio.timeout(timeout_s)
        self._state = State.ASKED
        try:
            answer = await self._exchange(question, Score | FailedScore | Reply)
        except (EOFError, ConnectionError, BadAnswerError) as error:
            is_late = self._limit.expired()
            how = SPOILED if isinstance(error, BadAnswerError) else await self._how_it_ended()
            self.kill()
            return f"took longer than {timeout_s:g} s" if is_late else how
        self._state = State.IDLE
        return answer  # type: ignore[no-any-return]

    async def _exchange(self, question: bytes | None, expected: Any) -> Any:
        """Send a question, if there is one, and return the next answer.

        Raises what keeps it from being one: a RewardError of the worker, a BadAnswerError, or that of the connection.
        """
        connection = self._connection

        def exchange() -> bytes:
            if question is not None:
                connection.send_bytes(question)
            return connection.recv_bytes(MAX_ANSWER_BYTES)

        try:
            number, answer = worker.read(await self._in_time(in_thread(exchange, "worker")))
        except ConnectionError:
            raise
        except OSError as error:
            raise BadAnswerError(f"a message that was cut off, or of more than {MAX_ANSWER_BYTES:,} bytes") from error
        if isinstance(answer, CannotScore):
            raise RewardError(answer.message, remedy=answer.remedy + private.hint(answer.message, self._variables))
        if number != self._number or not isinstance(answer, expected):
            raise BadAnswerError("the answer to another question")
        return answer

    async def _in_time(self, received: Future[bytes]) -> bytes:
        """Return what is received; past the limit, stop the process by a signal on which it writes its stack."""
        answer = asyncio.wrap_future(received)
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # also if nobody awaits it
        try:
            async with self._limit:
                return await asyncio.shield(answer)
        except TimeoutError:
            if not received.done() and self._connection.poll():  # may be a partial message
                await asyncio.wait({answer}, timeout=GRACE_S)
        if not received.done():  # else this process was too busy to read it
            self._process.send_signal(worker.STOP)
            await asyncio.wait({answer}, timeout=3 * GRACE_S)
        if not received.done():  # a score may have stopped or killed the supervisor, too
            self._process.kill()
            self._socket.shutdown(socket.SHUT_RDWR)
        return await answer

    async def _how_it_ended(self) -> str:
        """Wait until it has ended; if only the connection was closed, the supervisor goes on."""
        wait = partial(self._process.wait, 2 * GRACE_S)
        try:
            status: int = await asyncio.wrap_future(in_thread(wait, "worker"))
        except subprocess.TimeoutExpired:
            status = -1
        if status < 0:  # a score may have killed the supervisor, too
            return "closed the connection of its process"
        if status <= worker.BY_SIGNAL:
            return f"ended its process with exit status {status}"
        number = status - worker.BY_SIGNAL
        memory = " (out of memory?)" if number == signal.SIGKILL else ""
        names = {known.value: known.name for known in signal.Signals}  # most real-time signals have none
        return f"ended its process by {names.get(number, f'signal {number}')}{memory}"

    def _reap(self) -> None:
        """Wait for the supervisor, which ends everything first."""
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
