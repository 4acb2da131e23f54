"""Environments of other packages: `verifiers:ID`, and the tasks of Reasoning Gym, `reasoning_gym:TASK`.

verifiers pins versions of libraries that vLLM uses, too, and its environments bring libraries of their own. So it has a
virtual environment of its own, where `verifiers_program.py` runs it. Each process of Bridge that needs the
environment has one such process, which ends with it. What that prints goes to stderr.

Reasoning Gym's pins do not exclude vLLM's, so it is imported here: its entries are problems, its own score the reward.

Source: reasoning-gym 0.1.25 `create_dataset`, `score_answer`, `extract_answer` and `SYSTEM_PROMPTS`.
"""

import contextlib
import difflib
import json
import subprocess
from collections.abc import Iterator, Mapping
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from bridge.core.foreign_code import reason_of
from bridge.errors import RewardError, UsageError
from bridge.types import Problem

VERIFIERS_PREFIX = "verifiers:"
GYM_PREFIX = "reasoning_gym:"
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
    """The other process could not answer a request."""

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
        """
        self._name = VERIFIERS_PREFIX + name
        self._python = python or PYTHON
        self._passes = count()
        if not self._python.is_file():
            raise UsageError(
                f"--environment {self._name}: verifiers has no Python of its own, there is no file {self._python}",
                hint="make verifiers, or name a Python that has verifiers: --verifiers-python path/to/bin/python",
            )
        tasks = arguments.get("taskset", {})
        if not isinstance(tasks, dict):
            raise UsageError(
                f"--env-args: taskset is {tasks!r}, expected a JSON object", hint=f"leave it out: its id is {name}"
            )
        self._loading = {"config": {**arguments, "taskset": {**tasks, "id": name}}, "held_out": held_out}
        self._process: _Process | None = None
        try:
            self._start()
        except FailedRequestError as error:
            raise UsageError(
                f"--environment {self._name}: {error}",
                hint="change --env-args, the table [env] of verifiers' configuration"
                if error.is_refused
                else f"install the environment ({self._python} -m pip install ...), or change --env-args",
            ) from error

    def __iter__(self) -> Iterator[Problem]:
        return self._tasks()

    def held_out(self) -> list[Problem] | None:
        return None if self._loading["held_out"] is None else list(self._tasks(held_out=True))

    def run(self, problem: Mapping[str, Any], base_url: str) -> dict[str, float]:
        """Run one episode with the model at `base_url`; return the rewards that it recorded, weighted."""
        rewards: dict[str, float] = self._ask("run", task=problem["task"], base_url=base_url)
        return rewards

    def _tasks(self, *, held_out: bool = False) -> Iterator[Problem]:
        number = next(self._passes)
        listed: list[Problem] = []
        while not listed or len(listed) == AT_ONCE:
            try:
                listed = self._ask("tasks", number=number, count=AT_ONCE, held_out=held_out)
            except FailedRequestError as error:
                raise RewardError(
                    f"environment {self._name}: listing its tasks failed: {error}",
                    hint="fix the environment, or change --env-args",
                ) from error
            if not listed:
                return
            yield from listed

    def _start(self) -> None:
        self._process = _Process(self._python)
        self._ask("load", **self._loading)

    def _ask(self, method: str, **given: Any) -> Any:
        """Return the answer to a request; a process that is gone is replaced first."""
        if self._process is None:
            self._start()
        assert self._process is not None
        try:
            return self._process.answer({"method": method, "given": given}, None if method == "run" else LOAD_LIMIT_S)
        except (OSError, EOFError, ValueError) as error:  # it ended, was late, or something else wrote to the socket
            process = self._process
            self._process = None
            how = f"took longer than {LOAD_LIMIT_S:g} s" if isinstance(error, TimeoutError) else "ended"
            status = process.end()
            raise FailedRequestError(f"its process {how} (exit status {status}); its output is above") from error


class _Process:
    """The other process, as seen from here; its caller bounds how long an episode may take."""

    def __init__(self, python: Path) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            # -P: else the program's neighbors would come before libraries of the same name
            command = [str(python), "-u", "-P", str(PROGRAM), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), process_group=0
            )

    def answer(self, request: object, limit_s: float | None) -> Any:
        """Return the answer to one request, or raise why there is none."""
        self._connection.send_bytes(json.dumps(request).encode())
        if not self._connection.poll(limit_s):
            raise TimeoutError
        answer = json.loads(self._connection.recv_bytes())
        if "error" in answer:
            raise FailedRequestError(answer["error"], is_refused=answer.get("refused", False))
        return answer["result"]

    def end(self) -> int:
        """Close the connection, on which it ends, and return its exit status."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE_S)
        self._process.kill()
        return self._process.wait()


class ReasoningGym:
    """One task."""

    def __init__(self, name: str, arguments: Mapping[str, Any], held_out: Mapping[str, Any] | None = None) -> None:
        """Create the task `name` with the `arguments` of its configuration; without a seed it gets 0.

        `held_out` overrides the arguments for held-out problems, whose seed is the next one unless it has one.
        """
        self._name = name
        self._library = _library(name)
        arguments = {"seed": 0, **arguments}
        self._entries = self._created(arguments)
        self._held_out: Any = None
        if held_out is not None:
            self._held_out = self._created({**arguments, "seed": (arguments["seed"] or 0) + 1, **held_out})

    def __iter__(self) -> Iterator[Problem]:
        return self._problems(self._entries)

    def held_out(self) -> list[Problem] | None:
        return None if self._held_out is None else list(self._problems(self._held_out))

    def score(self, problem: Problem, completion: str) -> float:
        """Return the task's own score of the text between `<answer>` and `</answer>`."""
        answer = self._library.utils.extract_answer(completion)
        score: float = self._entries.score_answer(answer=answer, entry=dict(problem)["entry"])
        return score

    def _created(self, arguments: Mapping[str, Any]) -> Any:
        try:
            if self._name == "composite":  # its parts are objects
                parts = [self._library.composite.DatasetSpec(**part) for part in arguments.get("datasets", [])]
                arguments = {**arguments, "datasets": parts}
            return self._library.create_dataset(self._name, **arguments)
        except Exception as error:  # a library's code
            raise UsageError(
                f"{GYM_PREFIX}{self._name} cannot be made with {dict(arguments)}: {type(error).__name__}"
                f"{reason_of(error)}",
                hint="give it, as JSON, what its configuration in Reasoning Gym takes: --env-args '{\"size\": 1000}'",
            ) from error

    def _problems(self, entries: Any) -> Iterator[Problem]:
        system = self._library.utils.SYSTEM_PROMPTS["default"].strip()
        for index in range(len(entries)):  # its own iterator would be shared between passes
            entry = entries[index]
            made = {
                "prompt": [{"role": "system", "content": system}, {"role": "user", "content": entry["question"]}],
                "plain_prompt": f"{system}\n\n{entry['question']}",
                "entry": entry,
            }
            if entry["answer"] is not None:  # some tasks have many right answers
                made["answer"] = entry["answer"]
            yield cast("Problem", made)


def _library(name: str) -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UsageError(
            f"--environment {GYM_PREFIX}{name} needs the library reasoning-gym, which is not installed",
            hint="pip install reasoning-gym",
        ) from error
    known = reasoning_gym.factory.DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1) or ["basic_arithmetic"]
        raise UsageError(
            f"Reasoning Gym has no task {name!r}, only {len(known)} others",
            hint=f"--environment {GYM_PREFIX}{close[0]}",
        )
    library: ModuleType = reasoning_gym
    return library
