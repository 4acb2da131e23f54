"""Tasks of Reasoning Gym, named `reasoning_gym:TASK`: its entries as problems, its own score as the reward.

Its pins do not exclude vLLM's, so it is imported here, and not in a process of another Python.

Source: reasoning-gym 0.1.25 `create_dataset`, `score_answer`, `extract_answer` and `SYSTEM_PROMPTS`.
"""

import difflib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from bridge.core.foreign_code import said
from bridge.errors import UsageError
from bridge.types import Problem

PREFIX = "reasoning_gym:"


class ReasoningGym:
    """One task."""

    def __init__(self, name: str, arguments: Mapping[str, Any], held_out: Mapping[str, Any] | None = None) -> None:
        """Create the task `name` with the `arguments` of its configuration; without a seed it gets 0.

        `held_out` overrides the arguments for held-out problems, whose seed is the next one unless it has one.

        Raises:
            UsageError: Reasoning Gym is not installed, has no such task, or refuses an argument.
        """
        self._name, self._library = name, _library(name)
        arguments = {"seed": 0, **arguments}
        self._entries = self._created(arguments)
        if held_out is not None:
            self._held_out = self._created({**arguments, "seed": (arguments["seed"] or 0) + 1, **held_out})

    def __iter__(self) -> Iterator[Problem]:
        return self._problems(self._entries)

    def score(self, problem: Problem, completion: str) -> float:
        """Return the task's own score of what stands between `<answer>` and `</answer>`."""
        answer = self._library.utils.extract_answer(completion)
        found: float = self._entries.score_answer(answer=answer, entry=dict(problem)["entry"])
        return found

    def _created(self, arguments: Mapping[str, Any]) -> Any:
        try:
            if self._name == "composite":  # its parts are objects
                parts = [self._library.composite.DatasetSpec(**part) for part in arguments.get("datasets", [])]
                arguments = {**arguments, "datasets": parts}
            return self._library.create_dataset(self._name, **arguments)
        except Exception as error:  # a library's code
            raise UsageError(
                f"{PREFIX}{self._name} cannot be made with {dict(arguments)}: {type(error).__name__}{said(error)}",
                remedy="give it, as JSON, what its configuration in Reasoning Gym takes: --env-args '{\"size\": 1000}'",
            ) from error

    def _problems(self, entries: Any) -> Iterator[Problem]:
        for index in range(len(entries)):  # its own iterator would be shared between passes
            yield self._problem(entries[index])

    def _problem(self, entry: Mapping[str, Any]) -> Problem:
        system, question = self._library.utils.SYSTEM_PROMPTS["default"].strip(), entry["question"]
        made: Any = {
            "prompt": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "plain_prompt": f"{system}\n\n{question}",
            "entry": entry,
        }
        if entry["answer"] is not None:  # some tasks have many right answers
            made["answer"] = entry["answer"]
        problem: Problem = made
        return problem


class WithHeldOut(ReasoningGym):
    """The same with held-out problems."""

    def held_out(self) -> list[Problem]:
        return list(self._problems(self._held_out))


def _library(name: str) -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UsageError(
            f"--environment {PREFIX}{name} needs the library reasoning-gym, which is not installed",
            remedy="pip install reasoning-gym",
        ) from error
    known = reasoning_gym.factory.DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1) or ["basic_arithmetic"]
        raise UsageError(
            f"Reasoning Gym has no task {name!r}, only {len(known)} others", remedy=f"--environment {PREFIX}{close[0]}"
        )
    library: ModuleType = reasoning_gym
    return library
