"""Environments of verifiers, named `verifiers:ID`, in a process of the Python that verifiers is installed for.

verifiers pins versions of libraries that vLLM uses, too, and its environments bring libraries of their own. So it has a
virtual environment of its own, in which `verifiers_program.py` runs it. Each process of Bridge that needs the
environment starts one such program, which ends with it and prints to stderr.
"""

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from bridge.errors import RewardError, UsageError
from bridge.types import Problem

PREFIX = "verifiers:"
PROGRAM = Path(__file__).with_name("verifiers_program.py")
PYTHON = Path(__file__).parents[2] / ".venv-verifiers/bin/python"
"""Made by `make verifiers`."""
LOAD_LIMIT_S = 300.0
"""Time limit for loading the environment, and for listing some tasks: it may have to download a data set."""
GRACE_S = 2.0
"""Time for the process to end by itself."""
AT_ONCE = 64
"""Tasks per request."""


class FailedRequestError(Exception):
    """The other process could not do what it was asked."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        """`is_refused`: because of a choice, and not because something is missing."""
        super().__init__(message)
        self.is_refused = is_refused


class Verifiers:
    """One environment."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        held_out: Mapping[str, Any] | None = None,
        *,
        python: Path | None = None,
    ) -> None:
        """Load the environment `name`.

        `arguments` are the table `[env]` of a configuration of verifiers, and `held_out` overrides its `[env.taskset]`
        for held-out problems; `python` replaces the Python that `make verifiers` sets up.

        Raises:
            UsageError: there is no such Python, environment or argument.
        """
        self._name, self._python, self._passes = PREFIX + name, python or PYTHON, count()
        if not self._python.is_file():
            raise UsageError(
                f"--environment {self._name}: verifiers has no Python of its own, there is no file {self._python}",
                remedy="make verifiers, or name a Python that has verifiers: --verifiers-python path/to/bin/python",
            )
        tasks = arguments.get("taskset", {})
        if not isinstance(tasks, dict):
            raise UsageError(
                f"--env-args: taskset is {tasks!r}, expected a JSON object", remedy=f"leave it out: its id is {name}"
            )
        self._loading = {"config": {**arguments, "taskset": {**tasks, "id": name}}, "held_out": held_out}
        self._process: _Process | None = None
        try:
            self._start()
        except FailedRequestError as error:
            raise UsageError(
                f"--environment {self._name}: {error}",
                remedy="change --env-args, the table [env] of verifiers' configuration"
                if error.is_refused
                else f"install the environment ({self._python} -m pip install ...), or change --env-args",
            ) from error

    def __iter__(self) -> Iterator[Problem]:
        return self._tasks()

    def run(self, problem: Mapping[str, Any], base_url: str) -> dict[str, float]:
        """Run one episode with the model at `base_url`; return the rewards that it recorded, weighted.

        Raises:
            FailedRequestError: the episode failed.
        """
        rewards: dict[str, float] = self._ask("run", task=problem["task"], base_url=base_url)
        return rewards

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _tasks(self, *, held_out: bool = False) -> Iterator[Problem]:
        number = next(self._passes)
        found: list[Problem] = []
        while not found or len(found) == AT_ONCE:
            try:
                found = self._ask("tasks", number=number, count=AT_ONCE, held_out=held_out)
            except FailedRequestError as error:
                raise RewardError(
                    f"environment {self._name}: listing its tasks failed: {error}",
                    remedy="fix the environment, or change --env-args",
                ) from error
            if not found:
                return
            yield from found

    def _start(self) -> None:
        self._process = _Process(self._python)
        self._ask("load", **self._loading)

    def _ask(self, method: str, **given: Any) -> Any:
        """Return the answer to a request; a process that is gone is replaced first.

        Raises:
            FailedRequestError: it failed, or the process ended or did not answer in time.
        """
        if self._process is None:
            self._start()
        assert self._process is not None
        try:
            return self._process.answer({"method": method, "given": given}, None if method == "run" else LOAD_LIMIT_S)
        except (OSError, ValueError) as error:  # it ended, was late, or something else wrote to the socket
            process, self._process = self._process, None
            how = f"took longer than {LOAD_LIMIT_S:g} s" if isinstance(error, TimeoutError) else "ended"
            status = process.end()
            raise FailedRequestError(f"its process {how} (exit status {status}); its output is above") from error


class WithHeldOut(Verifiers):
    """The same with held-out problems."""

    def held_out(self) -> list[Problem]:
        return list(self._tasks(held_out=True))


class _Process:
    """The other process, as seen from here; its caller bounds how long an episode may take."""

    def __init__(self, python: Path) -> None:
        self._connection, other = socket.socketpair()
        with other:
            # -P: else the program's neighbors would come before libraries of the same name
            command = [str(python), "-u", "-P", str(PROGRAM), str(other.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(other.fileno(),), process_group=0
            )
        self._answers = self._connection.makefile("rb")

    def answer(self, request: object, limit_s: float | None) -> Any:
        """Return the answer to one request.

        Raises:
            FailedRequestError: it failed.
            OSError: the process ended, or did not answer in time.
            ValueError: the answer is no JSON.
        """
        self._connection.settimeout(limit_s)
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("closed")
        answer = json.loads(line)
        if "error" in answer:
            raise FailedRequestError(answer["error"], is_refused=answer.get("refused", False))
        return answer["result"]

    def end(self) -> int:
        """Close the connection, on which it ends, and return its exit status."""
        self._answers.close()
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE_S)
        self._process.kill()
        return self._process.wait()
