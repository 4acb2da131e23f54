"""Find an environment by name, `arithmetic` or `file.py:ClassName`, with the data, rewards and prompt chosen for it."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

from bridge.config import TaskConfig
from bridge.config.choices import flag
from bridge.core.foreign_code import source_file
from bridge.errors import UsageError
from bridge.scoring.score import Scores
from bridge.types import Environment, Problem
from environments import inspection, own_code, rewards, rows
from environments.arithmetic import Arithmetic
from environments.gsm8k import GSM8K
from environments.jsonl import JSONL
from environments.rewards import Reward, Rewards
from environments.rows import Format

CLASSES: Mapping[str, type] = {"arithmetic": Arithmetic}
FORMATS: Mapping[str, Format] = {"gsm8k": GSM8K, "jsonl": JSONL}
OF_DATA = ("data", "eval_data", "prompt_column", "answer_column")
"""Choices that only apply to problems read from rows."""


class Task:
    """An environment put together from what a person chose."""

    def __init__(
        self, read: Callable[[], Iterator[Problem]], held_out: list[Problem], recipe: Callable[[], Scores]
    ) -> None:
        """`read` starts a pass over the training problems; `recipe` makes what scores, when it is first needed."""
        self._read, self._held_out, self._recipe = read, held_out, recipe

    def __iter__(self) -> Iterator[Problem]:
        return self._read()

    def held_out(self) -> list[Problem]:
        return list(self._held_out)

    def score(self, problem: Problem, completion: str) -> float:
        return self._scores.score(problem, completion)

    @cached_property
    def _scores(self) -> Scores:
        return self._recipe()


def load(config: TaskConfig) -> Environment:
    """Return the environment that `config` names, with its problems checked.

    Raises:
        UsageError: there is no such environment, file, class, data or reward, or a choice does not apply to it.
        RewardError: its code raised, it has no problems or no score, or one of its problems is invalid.
    """
    if config.environment in FORMATS:
        return _of_rows(config, FORMATS[config.environment])
    kind = _class(config.environment)
    unused = [name for name in OF_DATA if getattr(config, name) != TaskConfig.model_fields[name].default]
    if unused:
        raise UsageError(
            f"{', '.join(map(flag, unused))}: only for --environment {' and '.join(FORMATS)}, not {config.environment}",
            remedy=f"leave {'it' if len(unused) == 1 else 'them'} out, or --environment {list(FORMATS)[-1]}",
        )
    return _of_class(config, kind)


def scorer(config: TaskConfig) -> Scores:
    """Return what scores the completions of the environment that `config` names, without reading its problems.

    Raises:
        UsageError: there is no such environment, file, class or reward.
        RewardError: its code raised, or it has no score.
    """
    chosen = _rewards(config)
    if chosen:
        return Rewards(chosen)
    environment = own_code.made(_class(config.environment), config.environment)
    inspection.check_score(environment, config.environment)
    scores: Scores = environment
    return scores


def _rewards(config: TaskConfig) -> tuple[Reward, ...]:
    """Return the chosen rewards, or the format's; none if the environment scores itself."""
    known = FORMATS.get(config.environment)
    text = config.reward or (known.reward if known else None)
    return rewards.parse(text) if text else ()


def _compared(chosen: tuple[Reward, ...]) -> str:
    """Return the name of a reward that compares with the problem's answer; empty if none does."""
    return next((reward.name for reward in chosen if reward.needs_answer), "")


def _of_rows(config: TaskConfig, known: Format) -> Task:
    prompt_column = config.prompt_column or known.prompt_column
    system_prompt = known.system_prompt if config.system_prompt is None else config.system_prompt
    compared = _compared(_rewards(config))

    def problem(values: dict[str, Any]) -> Problem:
        made = known.problem(values, prompt_column, config.answer_column)
        if compared and (lack := inspection.answer_fault(made)):
            raise rows.BadRowError(
                f"{lack}, and the reward {compared} compares with the column {config.answer_column!r}"
            )
        return _instructed(made, system_prompt)

    source = known.bundled if config.data is None else config.data
    if source is None:
        raise UsageError(
            f"--environment {config.environment} needs --data",
            remedy=f"--environment {config.environment} --data path/to/problems.jsonl",
        )
    training, held_out = rows.read(str(source), known.subset, "--data")
    if config.eval_data is not None:
        whole, split = rows.read(config.eval_data, known.subset, "--eval-data")
        held_out = split or whole
    kept = held_out.problems(problem) if held_out else []
    return Task(partial(iter, training.problems(problem)), kept, partial(scorer, config))


def _of_class(config: TaskConfig, kind: type) -> Environment:
    name, chosen = config.environment, _rewards(config)
    environment = own_code.made(kind, name)
    if not chosen:
        inspection.check_score(environment, name)
    compared = _compared(chosen)
    held_out = inspection.check_problems(environment, name, compared)

    def read() -> Iterator[Problem]:
        problems = inspection.checked(environment, name, compared, source_file(type(environment)))
        return (_instructed(problem, config.system_prompt) for problem in problems)

    kept = [_instructed(problem, config.system_prompt) for problem in held_out]
    return Task(read, kept, partial(scorer, config) if chosen else lambda: environment)


def _class(name: str) -> type:
    if name in CLASSES:
        return CLASSES[name]
    if ":" in name or name.endswith(".py"):
        kind: type = own_code.find("environment", name)
        return kind
    known = [*CLASSES, *FORMATS]
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    form = own_code.FORMS["environment"]
    raise UsageError(
        f"no environment {name!r}, expected {', '.join(known)} or {form}",
        remedy=f"{meant}--environment {close[0] if close else 'arithmetic'}, or --environment {form} for your own",
    )


def _instructed(problem: Problem, system_prompt: str | None) -> Problem:
    """Return `problem` with this system message in place of its own; empty: without one; None: unchanged.

    A text prompt that becomes chat messages is kept as `plain_prompt`, for a model without a chat template.
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
