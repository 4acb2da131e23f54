"""Problems with what scores them, put together from what a person chose.

Not covered: where problems come from (`rows.py`), finding an environment (`registry.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.scoring.scoring import Scores
from bridge.types import Problem


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where a row keeps what."""

    prompt: str
    """Column of the prompt."""
    answer: str
    """Column of the answer."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How rows become problems."""

    problem: Callable[[Mapping[str, Any], Columns], Problem]
    """Makes one problem of one row's values, or refuses it with a `BadRowError`."""
    prompt_column: str
    """Column of the prompt, if no other is named."""
    reward: str
    """What scores a completion, unless other rewards are chosen."""
    system_prompt: str | None = None
    """The system message, unless another is chosen."""
    subset: str | None = None
    """Configuration of the data set on the hub."""
    bundled: Path | None = None
    """Folder of the problems that are taken where none are named."""


class Task:
    """An environment of problems, of those held out, and of what scores them."""

    def __init__(
        self,
        problems: Iterable[Problem],
        held_out: list[Problem],
        recipe: Callable[[], Scores],
        *,
        system_prompt: str | None = None,
    ) -> None:
        """Take the problems, which are not read yet, and a system message for all of them.

        `recipe` is called when something is scored here for the first time.
        """
        self._problems, self._recipe, self._system_prompt = problems, recipe, system_prompt
        self._held_out = [instructed(problem, system_prompt) for problem in held_out]

    def __iter__(self) -> Iterator[Problem]:
        """Yield the training problems, as they are read."""
        if self._system_prompt is None:
            return iter(self._problems)
        return (instructed(problem, self._system_prompt) for problem in self._problems)

    def held_out(self) -> list[Problem]:
        """Return the problems that training never sees; there may be none."""
        return list(self._held_out)

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of one completion."""
        return self._scores.score(problem, completion)

    @cached_property
    def _scores(self) -> Scores:
        return self._recipe()


def instructed(problem: Problem, system_prompt: str | None) -> Problem:
    """Return `problem` with that system message in place of its own; empty: with none; None: as it is.

    What is then a chat message keeps a text beside it, for a model without a chat template.
    """
    if system_prompt is None:
        return problem
    prompt, plain = problem["prompt"], problem.get("plain_prompt")
    if isinstance(prompt, str):
        if not system_prompt:
            return problem
        plain = prompt
        prompt = [{"role": "user", "content": prompt}]
    own = prompt[1:] if prompt[0]["role"] == "system" else prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    changed: Any = {**problem, "prompt": [*system, *own]}
    if plain is not None:
        changed["plain_prompt"] = f"{system_prompt}\n\n{plain}".lstrip("\n")
    made: Problem = changed
    return made
