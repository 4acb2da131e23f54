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
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from bridge.core.foreign_code import foreign_code, place_in, said
from bridge.core.together import together
from bridge.errors import RewardError
from bridge.scoring.agent import Agent
from bridge.scoring.score import FailedScore, Origin, Score, Scores, failed, score_one
from bridge.scoring.tools import Reply, Tools
from bridge.scoring.worker import GRACE_S, HEADER, NOT_PICKLED, STATUS, STOP, Answer, CannotScore
from bridge.types import Problem

Result = TypeVar("Result")
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
    "Score": (Score, {"reward": float, "parts": dict, "turns": list}),
    "FailedScore": (FailedScore, {"kind": str, "line": str}),
    "Reply": (Reply, {"text": str, "is_error": bool}),
    "CannotScore": (CannotScore, {"message": str, "remedy": str}),
}
"""Name of an answer -> its class, and the exact type of each field."""


class BadAnswerError(ValueError):
    """What a worker sent is not an answer."""


class Scorer:
    """Workers, or this process if there are none; used from one event loop, and closed by the thread that made it."""

    def __init__(
        self,
        recipe: Callable[[], Scores | Tools | Agent],
        *,
        processes: int | None,
        timeout_s: float,
        tool_timeout_s: float = 30.0,
    ) -> None:
        """Start the workers without waiting for them; each makes what scores by `recipe`, which is pickled.

        `processes`: None: one per core, at most 4; 0: score in this process, without a time limit. `tool_timeout_s`
        limits each call of a tool, and an agent between two turns.

        Raises:
            RewardError: the recipe cannot be pickled, or fails in this process.
        """
        self._workers: list[_Worker] = []
        self._tool_timeout_s = tool_timeout_s
        self._pid = os.getpid()
        if processes == 0:
            with foreign_code("making what scores completions", ""):
                self._own = recipe()
                self._origin = self._own.origin if isinstance(self._own, Tools | Agent) else Origin.of(self._own)
            if isinstance(self._own, Agent):
                os.environ.update(_direct_to_loopback())
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
        return await together(self._in_worker(problem, completion) for completion in completions)

    @asynccontextmanager
    async def trajectory(self, problem: Problem) -> AsyncIterator["Trajectory"]:
        """Reserve a class with tools or an agent for one trajectory, in a process that runs no other meanwhile."""
        if not self._workers:
            assert isinstance(self._own, Tools | Agent)
            yield Trajectory(self._own.fresh(), problem, self._tool_timeout_s, self._pid)
            return
        worker = await self._idle.get()
        try:
            yield Trajectory(worker, problem, self._tool_timeout_s, self._pid)
        finally:
            self._idle.put_nowait(worker)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.kill()

    async def _here(self, problem: Problem, completion: str) -> Score | FailedScore:
        assert not isinstance(self._own, Tools | Agent)
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


@dataclass
class Trajectory:
    """An instance of a class with tools, or of an agent, up to its reward; of no further use after a FailedScore."""

    _host: "_Worker | Tools | Agent"
    _problem: Problem
    _tool_timeout_s: float
    _pid: int

    async def begin(self) -> Reply | FailedScore:
        """Reset it; the reply is what `reset` adds to the prompt."""
        return await self._ask("reset", "", "begin", self._problem, is_first=True)  # type: ignore[return-value]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Reply | FailedScore:
        """Call a tool."""
        return await self._ask(f"tool {name}", "", "call", name, arguments)  # type: ignore[return-value]

    async def run(self, base_url: str) -> Reply | Score | FailedScore:
        """Run an agent to its end; after a reply, `score` has the reward."""
        return await self._ask("the agent's run", "", "run", self._problem, base_url, is_first=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop the clock of an agent's time limit, which begins anew afterwards."""
        if not isinstance(self._host, _Worker):
            yield
            return
        self._host.hold()
        try:
            yield
        finally:
            self._host.go_on()

    async def score(self, completion: str) -> Score | FailedScore:
        """Return the reward; `completion` is the text of the last turn."""
        return await self._ask("", completion, "score", self._problem, completion)  # type: ignore[return-value]

    async def _ask(
        self, name: str, completion: str, method: str, *given: Any, is_first: bool = False
    ) -> Reply | Score | FailedScore:
        if isinstance(self._host, _Worker):
            limit_s = self._tool_timeout_s if name else None
            asked = question((method, *given))
            return await self._host.ask(
                asked, self._problem, completion, name=name, timeout_s=limit_s, is_first=is_first
            )
        await asyncio.sleep(0)
        if isinstance(self._host, Agent):  # its requests are answered here meanwhile
            return await _in_own_thread(lambda: self._here(method, given))
        return self._here(method, given)

    def _here(self, method: str, given: tuple[Any, ...]) -> Reply | Score | FailedScore:
        found: Reply | Score | FailedScore = getattr(self._host, method)(*given)
        if os.getpid() != self._pid:
            os._exit(0)  # a child that foreign code forked
        return found


async def _in_own_thread(act: Callable[[], Result]) -> Result:
    """Return `act()`; the event loop's own threads look up hosts, are few, and are waited for at its end."""
    made = Future[Result]()
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            made.set_result(act())
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            made.set_exception(error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await asyncio.wrap_future(made)


class _Worker:
    """A worker as seen from here: started, asked one question at a time, killed and replaced."""

    def __init__(self, recipe: bytes, *, timeout_s: float) -> None:
        self._recipe, self._timeout_s = recipe, timeout_s
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
            return answer
        self._start()
        kind, place = f"{name or origin.name} {answer}", place_in(self._stack, origin.file)
        place = place or ("" if name else origin.place)
        return failed(problem, completion, kind, f"{kind} ({place})" if place else kind)

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
        environment = os.environ | _direct_to_loopback()
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


def _direct_to_loopback() -> dict[str, str]:
    """Return the variables with which no proxy stands between an agent and the address that it is given."""
    names = ("no_proxy", "NO_PROXY")
    given = [host.strip() for name in names for host in os.environ.get(name, "").split(",")]
    hosts = ["*"] if "*" in given else [*filter(None, given), "127.0.0.1"]  # a star counts only if it stands alone
    return dict.fromkeys(names, ",".join(dict.fromkeys(hosts)))


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
        numbers = [fields.get("reward", 0.0), *fields.get("parts", {}).values(), *fields.get("turns", ())]
        is_finite = all(type(one) is float and math.isfinite(one) for one in numbers)  # JSON reads 1e999 as infinity
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadAnswerError("not the JSON of an answer") from error
    if type(number) is not int or found != types or not is_finite:
        raise BadAnswerError("other fields than an answer has")
    return number, kind(**fields)
