"""Environments from other packages: `verifiers:ID`, and the tasks of Reasoning Gym, `reasoning_gym:TASK`.

verifiers pins versions of libraries that vLLM also uses, and its environments require further libraries. So it is
installed in a separate virtual environment, where `verifiers_program.py` runs it. Each process of Bridge that needs the
environment starts one such process, which exits with it. Its output goes to stderr.

Reasoning Gym's pins are compatible with vLLM's, so it is imported here: its entries become problems, its score the
reward.

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
"""The Python that `make verifiers` installs."""
LOAD_LIMIT_S = 300.0
"""Time limit for loading the environment, and for listing tasks, which may include downloading a data set."""
GRACE_S = 2.0
"""Time that the process gets to exit by itself."""
AT_ONCE = 64
"""Number of tasks per request."""


class FailedRequestError(Exception):
    """The other process could not answer a request."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        """`is_refused` means that a setting caused the failure, rather than something missing."""
        super().__init__(message)
        self.is_refused = is_refused


class Verifiers:
    """An environment of verifiers, which runs in a separate process."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        held_out: Mapping[str, Any] | None = None,
        *,
        python: Path | None = None,
    ) -> None:
        """Load the environment `name`.

        `arguments` is the table `[env]` of a verifiers configuration, and `held_out` overrides its `[env.taskset]` for
        held-out problems; `python` replaces the Python that `make verifiers` installs.
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
        """Run one episode with the model at `base_url`, and return its weighted rewards by name."""
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
        """Send a request, and return the result; an exited process is replaced first."""
        if self._process is None:
            self._start()
        assert self._process is not None
        try:
            return self._process.answer({"method": method, "given": given}, None if method == "run" else LOAD_LIMIT_S)
        except (OSError, EOFError, ValueError) as error:  # exited, too slow, or foreign output
            process = self._process
            self._process = None
            how = f"took longer than {LOAD_LIMIT_S:g} s" if isinstance(error, TimeoutError) else "ended"
            status = process.end()
            raise FailedRequestError(f"its process {how} (exit status {status}); its output is above") from error


class _Process:
    """Handle of the process that runs verifiers; the caller limits the time of an episode."""

    def __init__(self, python: Path) -> None:
        self._connection, child_end = Pipe()
        with child_end:
            # -P: otherwise, files next to the program would shadow libraries of the same name
            command = [str(python), "-u", "-P", str(PROGRAM), str(child_end.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(child_end.fileno(),), process_group=0
            )

    def answer(self, request: object, limit_s: float | None) -> Any:
        """Send a request, and return its result; raise FailedRequestError if the process reports an error."""
        self._connection.send_bytes(json.dumps(request).encode())
        if not self._connection.poll(limit_s):
            raise TimeoutError
        answer = json.loads(self._connection.recv_bytes())
        if "error" in answer:
            raise FailedRequestError(answer["error"], is_refused=answer.get("refused", False))
        return answer["result"]

    def end(self) -> int:
        """Close the connection, which makes the process exit, and return its exit status."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE_S)
        self._process.kill()
        return self._process.wait()


class ReasoningGym:
    """A task of Reasoning Gym."""

    def __init__(self, name: str, arguments: Mapping[str, Any], held_out: Mapping[str, Any] | None = None) -> None:
        """Create the task `name` with the `arguments` of its configuration; the default seed is 0.

        `held_out` overrides the arguments for held-out problems, whose default seed is the task's seed plus 1.
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
        """Score the text between `<answer>` and `</answer>` with the task's own method."""
        answer = self._library.utils.extract_answer(completion)
        score: float = self._entries.score_answer(answer=answer, entry=dict(problem)["entry"])
        return score

    def _created(self, arguments: Mapping[str, Any]) -> Any:
        try:
            if self._name == "composite":  # its parts must be objects of the library
                parts = [self._library.composite.DatasetSpec(**part) for part in arguments.get("datasets", [])]
                arguments = {**arguments, "datasets": parts}
            return self._library.create_dataset(self._name, **arguments)
        except Exception as error:  # the library may raise anything
            raise UsageError(
                f"{GYM_PREFIX}{self._name} cannot be created with {dict(arguments)}: {type(error).__name__}"
                f"{reason_of(error)}",
                hint="pass the task's configuration in Reasoning Gym as JSON: --env-args '{\"size\": 1000}'",
            ) from error

    def _problems(self, entries: Any) -> Iterator[Problem]:
        system = self._library.utils.SYSTEM_PROMPTS["default"].strip()
        for index in range(len(entries)):  # the library's own iterator would be shared between passes
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
            f"Reasoning Gym has no task {name!r} among its {len(known)} tasks",
            hint=f"--environment {GYM_PREFIX}{close[0]}",
        )
    library: ModuleType = reasoning_gym
    return library
