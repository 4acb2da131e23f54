"""Score completions in processes of their own, so that a score that hangs or crashes harms nothing else.

A worker is not a fork, because this process may have threads, and CUDA. It is a Python of its own that runs nothing of
the script that was started here, so that such a script needs no `if __name__ == "__main__"`. What it prints goes to
stderr. Every wait has a deadline, and an answer counts only if it has the number of the question. Questions are
pickled. A score may write anything to any descriptor, so answers are JSON of bounded size, checked field by field.
"""

import asyncio
import contextlib
import json
import math
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from bridge.core.foreign_code import foreign_code, place_in, said
from bridge.errors import RewardError
from bridge.scoring.score import FailedScore, Origin, Score, Scores, failed, score_one
from bridge.scoring.worker import GRACE_S, HEADER, NOT_PICKLED, STATUS, STOP, Answer, CannotScore
from bridge.types import Problem

DEFAULT_PROCESSES = 4
"""At most so many by default: a trainer and a server need cores too."""
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
MAX_ANSWER_BYTES = 2**20
ANSWERS: Mapping[str, tuple[type[Any], Mapping[str, type]]] = {
    "Origin": (Origin, {"name": str, "file": str, "place": str}),
    "Score": (Score, {"reward": float, "parts": dict}),
    "FailedScore": (FailedScore, {"kind": str, "line": str}),
    "CannotScore": (CannotScore, {"message": str, "remedy": str}),
}
"""Name of an answer -> its class, and the exact type of each field."""


class BadAnswerError(ValueError):
    """What a worker sent is not an answer."""


class Scorer:
    """Workers, or this process if there are none; used from one event loop, and closed by the thread that made it."""

    def __init__(self, recipe: Callable[[], Scores], *, processes: int | None, timeout_s: float) -> None:
        """Start the workers without waiting for them; each makes what scores by `recipe`, which is pickled.

        `processes`: None: one per core, at most 4; 0: score in this process, without a time limit.

        Raises:
            RewardError: the recipe cannot be pickled, or fails in this process.
        """
        self._workers: list[_Worker] = []
        self._pid = os.getpid()
        if processes == 0:
            with foreign_code("making what scores completions", ""):
                self._own = recipe()
                self._origin = Origin.of(self._own)
            return
        pickled = question(recipe)
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for _ in range(processes or min(DEFAULT_PROCESSES, len(os.sched_getaffinity(0)))):
            self._workers.append(_Worker(pickled, timeout_s=timeout_s))
            self._idle.put_nowait(self._workers[-1])

    async def score(self, problem: Problem, completions: Sequence[str]) -> list[Score | FailedScore]:
        """Score the completions of one problem, in parallel; the results are in their order.

        Raises:
            RewardError: a worker cannot make what scores, or the problem cannot be pickled.
        """
        if not self._workers:
            return [await self._here(problem, completion) for completion in completions]
        tasks = [asyncio.create_task(self._in_worker(problem, completion)) for completion in completions]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.kill()

    async def _here(self, problem: Problem, completion: str) -> Score | FailedScore:
        await asyncio.sleep(0)  # lets requests to servers proceed
        found = score_one(self._own, self._origin, problem, completion)
        if os.getpid() != self._pid:
            os._exit(0)  # a child that the score forked: it would be a second trainer
        return found

    async def _in_worker(self, problem: Problem, completion: str) -> Score | FailedScore:
        worker = await self._idle.get()
        try:
            return await worker.score(problem, completion)
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """A worker as seen from here: started, asked one question at a time, killed and replaced."""

    def __init__(self, recipe: bytes, *, timeout_s: float) -> None:
        self._recipe, self._timeout_s = recipe, timeout_s
        self._start()

    async def score(self, problem: Problem, completion: str) -> Score | FailedScore:
        """Return the score, or what happened instead; a process that came to harm is replaced.

        Raises:
            RewardError: the process cannot make what scores, or the problem cannot be pickled.
        """
        asked = question((problem, completion))
        if self._channel.fileno() < 0 or (self._origin is not None and self._has_spoken()):  # it is gone
            self.kill()
            self._start()
        try:
            origin = await self._ready()
            answer = await self._answer(asked)
        except BaseException:  # an answer that nobody waits for would be taken for the next one's
            self.kill()
            raise
        if not isinstance(answer, str):
            return answer
        self._start()
        kind = f"{origin.name} {answer}"
        return failed(problem, completion, kind, f"{kind} ({place_in(self._stack, origin.file) or origin.place})")

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
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=given, process_group=0)
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

    async def _answer(self, asked: bytes) -> Score | FailedScore | str:
        """Return the answer, or what the process did instead of answering, after which it has ended."""
        loop = asyncio.get_running_loop()
        self._is_late, self._timer = False, loop.call_later(self._timeout_s, self._end)
        self._number += 1
        try:
            await loop.sock_sendall(self._channel, asked)
            answer = await self._next()
        except BadAnswerError:
            self.kill()
            return SPOILED
        except (EOFError, ConnectionError):
            how = await self._how_it_ended()
            return f"took longer than {self._timeout_s:g} s" if self._is_late else how
        finally:
            self._timer.cancel()
        if self._is_late:  # the answer came while it was being ended
            self.kill()
        assert isinstance(answer, Score | FailedScore)
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
            raise RewardError(answer.message, remedy=answer.remedy)
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


def question(content: object) -> bytes:
    """Return a recipe, or a problem and a completion, as workers read them.

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


def read(text: bytes) -> tuple[int, Answer]:
    """Return the number of the question and the answer to it.

    Raises:
        BadAnswerError: this is not an answer.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        number, name, fields = json.loads(text, parse_constant=refuse)
        kind, types = ANSWERS[name]
        found = {field: type(value) for field, value in fields.items()}
        numbers = [fields.get("reward", 0.0), *fields.get("parts", {}).values()]
        is_finite = all(type(one) is float and math.isfinite(one) for one in numbers)  # JSON reads 1e999 as infinity
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadAnswerError("not the JSON of an answer") from error
    if type(number) is not int or found != types or not is_finite:
        raise BadAnswerError("other fields than an answer has")
    return number, kind(**fields)
