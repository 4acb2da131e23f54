"""The trainer's handle of a worker: start it, send it one request at a time, kill and replace it.

A worker is not forked, because this process may have threads and use CUDA. It is a fresh Python process that does not
run the user's script, so the script does not need `if __name__ == "__main__"`. Its output goes to stderr.
Every wait has a deadline, and an answer is accepted only if it has the number of the request.
"""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

from bridge.core import redaction
from bridge.core.concurrency import is_readable
from bridge.core.foreign_code import location_in
from bridge.errors import RewardError
from bridge.scoring import inside_worker
from bridge.scoring.inside_worker import GRACE_S, MAX_ANSWER_BYTES, BadAnswerError, CannotScore
from bridge.scoring.score import FailedScore, Origin, Reply, Score, failed
from bridge.types import Problem

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bridge.scoring import inside_worker; inside_worker.supervise(*map(int, sys.argv[2:]))"
)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
"""A line of the stack that `faulthandler` writes, innermost frame first."""
START_LIMIT_S = 600.0
"""Time that a worker gets to build its host; generous, because the recipe has already run once in this process."""
SPOILED = "wrote to the connection of its process"
MAX_STACK_BYTES = 2**16
"""Maximum number of bytes read from the file of `faulthandler`, which a score may have written to as well."""
HARM = (EOFError, ConnectionError, BadAnswerError)
"""Errors after which a process can no longer answer."""


class WorkerProcess:
    """One worker process, which is replaced by a new one after a failure."""

    def __init__(self, recipe: bytes, *, timeout_s: float, variables: Collection[str]) -> None:
        """Start the process; its environment has no secrets except the `variables`."""
        self._recipe = recipe
        self._timeout_s = timeout_s
        self._variables = variables
        self._limit: asyncio.Timeout | None = None
        """Time limit of the current request."""
        self._num_suspending = 0
        """Number of an agent's requests for turns that currently suspend the limit."""
        self._start()

    def _start(self) -> None:
        self._socket, worker_socket = socket.socketpair()
        self._last_words = tempfile.TemporaryFile()  # noqa: SIM115  closed after it is read
        given = worker_socket.fileno(), self._last_words.fileno()
        path = json.dumps([str(folder) for folder in sys.path])
        command = [sys.executable, "-u", "-P", "-c", PROGRAM, path, *map(str, (*given, os.getpid()))]
        environment = redaction.worker_environment(self._variables) | direct_to_loopback()
        self._starter = os.getpid()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=given, process_group=0, env=environment
        )
        worker_socket.close()
        with suppress(ConnectionError):  # the process has already exited, which the next request will notice
            self._socket.sendall(self._recipe)
        self._socket.setblocking(False)
        self._received = bytearray()
        self._number = 0
        """Number of the last request."""
        self._origin: Origin | None = None
        """Identifies the scoring code; None until the host is built."""

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
        """Send a request, and return the answer, or a FailedScore if the process failed and had to be replaced.

        `name` is the name of the called method for messages, and `timeout_s` its time limit, if it is not the score
        method. `is_first` means that the request does not depend on the state that earlier requests left.
        """
        if self._is_gone() or (self._origin is not None and self._has_written()):  # exited, or wrote unasked
            self.kill()
            self._start()
            if not is_first:
                kind = "the environment's process ended between two calls"
                return failed(problem, completion, kind, kind)
        try:
            origin = self._origin or await self._made()
            self._origin = origin
            answer = await self._answer(question, self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:  # a late answer would be mistaken for the answer to the next request
            self.kill()
            raise
        if not isinstance(answer, str):
            return self._with_hint(answer)
        stack = self.kill()
        self._start()
        kind = f"{name or origin.name} {answer}"
        location = location_in(stack, origin.file)
        location = location or ("" if name else origin.location)
        return failed(problem, completion, kind, f"{kind} ({location})" if location else kind)

    def _with_hint(self, answer: Score | FailedScore | Reply) -> Score | FailedScore | Reply:
        """Return the answer; if a hidden variable caused a failure, add a hint for the user, but not for the model."""
        if isinstance(answer, FailedScore):
            what = answer.line.partition(", on prompt ")[0]
            return replace(answer, line=answer.line + redaction.env_hint(what, self._variables))
        if isinstance(answer, Reply) and answer.is_error and (hint := redaction.env_hint(answer.text, self._variables)):
            _report(f"a tool failed{hint}")
        return answer

    @contextmanager
    def suspended_limit(self) -> Iterator[None]:
        """Suspend the current request's time limit; it restarts once no caller suspends it any more."""
        self._num_suspending += 1
        self._reschedule(None)
        try:
            yield
        finally:
            self._num_suspending -= 1
            if not self._num_suspending:
                self._reschedule(asyncio.get_running_loop().time() + self._limit_s)

    def _reschedule(self, when: float | None) -> None:
        if self._limit is not None:
            with suppress(RuntimeError):  # the limit has expired
                self._limit.reschedule(when)

    def dismiss(self) -> None:
        """Let the worker exit by itself; call `kill` afterwards."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> list[tuple[str, int]]:
        """Kill the worker and everything it started, and return its last stack. An idle worker gets a grace period."""
        if self._is_gone() or self._starter != os.getpid():  # a forked child of the trainer must not touch the worker
            return []
        try:
            if self._origin is not None and self._limit is None:
                self._has_written(GRACE_S)
        finally:
            self._process.send_signal(inside_worker.END)
            try:
                self._process.wait(2 * GRACE_S)  # the supervisor kills its descendants first
            except subprocess.TimeoutExpired:
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)
            self._socket.close()
            with self._last_words:
                self._last_words.seek(0)
                stack = self._last_words.read(MAX_STACK_BYTES).decode(errors="replace")
        return [(file, int(line)) for file, line in reversed(FRAME.findall(stack))]

    async def _made(self) -> Origin:
        """Wait until the worker has built its host, and return the origin of the scoring code."""
        limit = asyncio.timeout(START_LIMIT_S)
        try:
            return await self._next_answer(limit, Origin)  # type: ignore[no-any-return]
        except HARM as error:
            how = await self._failure(error)
            what = f"took longer than {START_LIMIT_S:g} s" if limit.expired() else how
        raise RewardError(
            f"a scoring process failed to create the scoring object: it {what}",
            hint="see its output above; --reward-processes 0 scores in this process, where a debugger works",
        )

    async def _answer(self, question: bytes, timeout_s: float) -> Score | FailedScore | Reply | str:
        """Return the answer, or what the process did instead of answering."""
        self._number += 1
        self._limit_s = timeout_s
        limit = asyncio.timeout(timeout_s)
        self._limit = limit
        try:
            return await self._next_answer(limit, Score | FailedScore | Reply, question)  # type: ignore[no-any-return]
        except HARM as error:
            how = await self._failure(error)
            return f"took longer than {timeout_s:g} s" if limit.expired() else how
        finally:
            self._limit = None

    async def _next_answer(self, limit: asyncio.Timeout, expected: Any, question: bytes = b"") -> Any:
        """Send a request, and return the answer; past the limit, make the process write its stack and exit."""
        try:
            async with limit:
                await asyncio.get_running_loop().sock_sendall(self._socket, question)
                line = await self._line()
        except TimeoutError:
            line = await self._late_line()
        number, answer = inside_worker.read(line)
        if isinstance(answer, CannotScore):
            raise RewardError(answer.message, hint=answer.hint + redaction.env_hint(answer.message, self._variables))
        if number != self._number or not isinstance(answer, expected):
            raise BadAnswerError("the answer belongs to a different request")
        return answer

    async def _late_line(self) -> bytes:
        """Return a line that the trainer was too busy to read in time; raise EOFError once the worker has exited."""
        if self._has_written():
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):  # only a part of the line may have arrived
                    return await self._line()
        self._process.send_signal(inside_worker.STOP)
        try:
            async with asyncio.timeout(3 * GRACE_S):
                return await self._line()
        except TimeoutError as error:  # a score may have stopped or killed the supervisor
            self._process.kill()
            raise EOFError from error

    async def _line(self) -> bytes:
        """Return the next line. Cancellation does not lose received bytes."""
        loop = asyncio.get_running_loop()
        is_readable = asyncio.Event()
        loop.add_reader(self._socket, is_readable.set)
        try:
            while b"\n" not in self._received:
                await is_readable.wait()
                is_readable.clear()
                with suppress(BlockingIOError):
                    piece = self._socket.recv(MAX_ANSWER_BYTES)
                    self._received += piece
                    if not piece:
                        raise EOFError
                if len(self._received) > MAX_ANSWER_BYTES:
                    raise BadAnswerError("the answer is too long")
        finally:
            loop.remove_reader(self._socket)
        line, _, rest = self._received.partition(b"\n")
        self._received = rest
        return bytes(line)

    def _is_gone(self) -> bool:
        return self._socket.fileno() < 0

    def _has_written(self, wait_s: float = 0.0) -> bool:
        """Return whether the worker has written anything unread, or has closed the connection."""
        return bool(self._received or is_readable(self._socket, wait_s))

    async def _failure(self, harm: BaseException) -> str:
        """Wait for the worker to exit, and describe how it failed; it may only have closed the connection."""
        if isinstance(harm, BadAnswerError):
            return SPOILED
        try:
            status = await asyncio.to_thread(self._process.wait, 2 * GRACE_S)
        except subprocess.TimeoutExpired:
            status = -1
        if status < 0:  # a score may have killed the supervisor
            return "closed the connection of its process"
        if status <= inside_worker.BY_SIGNAL:
            return f"exited with status {status}"
        number = status - inside_worker.BY_SIGNAL
        memory = " (out of memory?)" if number == signal.SIGKILL else ""
        names = {known.value: known.name for known in signal.Signals}  # most real-time signals have no name
        return f"was killed by {names.get(number, f'signal {number}')}{memory}"


@cache
def _report(line: str) -> None:
    """Write a line to stderr, but only once."""
    sys.stderr.write(f"{line}\n")


def direct_to_loopback() -> dict[str, str]:
    """Return NO_PROXY settings that let an agent reach its base URL on loopback without a proxy."""
    names = ("no_proxy", "NO_PROXY")
    given = [host.strip() for name in names for host in os.environ.get(name, "").split(",")]
    hosts = ["*"] if "*" in given else [*filter(None, given), "127.0.0.1"]  # a star counts only as the sole entry
    return dict.fromkeys(names, ",".join(dict.fromkeys(hosts)))
