"""Find an environment by name, `arithmetic` or `file.py:ClassName`, with the data, rewards and prompt chosen for it."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

from bridge.config import TaskConfig
from bridge.config.choices import flag
from bridge.core import own_code
from bridge.core.foreign_code import source_file
from bridge.errors import UsageError
from bridge.scoring.agent import Agent
from bridge.scoring.score import Scores
from bridge.scoring.tools import Tools
from bridge.types import Environment, Problem
from bridge_environments import inspection, packages, rewards, rows
from bridge_environments.arithmetic import Arithmetic
from bridge_environments.gsm8k import GSM8K
from bridge_environments.jsonl import JSONL
from bridge_environments.rewards import Reward, Rewards
from bridge_environments.rows import Format

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


class ToolTask(Task):
    """A class with tools, put together from what a person chose."""

    def __init__(self, task: Task, schemas: list[dict[str, Any]], tools: Callable[[], Tools]) -> None:
        super().__init__(task.__iter__, task.held_out(), tools)
        self.schemas, self.tools = schemas, tools


class AgentTask(Task):
    """An agent, put together from what a person chose."""

    def __init__(self, task: Task, agent: Callable[[], Agent]) -> None:
        super().__init__(task.__iter__, task.held_out(), agent)
        self.agent = agent


def load(config: TaskConfig) -> Environment:
    """Return the environment that `config` names, with its problems checked.

    Raises:
        UsageError: there is no such environment, file, class, data or reward, or a choice does not apply to it.
        RewardError: its code raised, it has no problems or no score, or one of its problems is invalid.
    """
    packages.check(config)
    if config.environment in FORMATS:
        return _of_rows(config, FORMATS[config.environment])
    kind = _class(config)
    if inspection.is_agent(kind, config.environment) or inspection.has_tools(kind):
        return _of_turns(config, kind)
    unused = _of_data(config)
    if unused:
        raise UsageError(
            f"{', '.join(map(flag, unused))}: only for --environment {' and '.join(FORMATS)}, not {config.environment}",
            remedy=f"leave {'it' if len(unused) == 1 else 'them'} out, or --environment {list(FORMATS)[-1]}",
        )
    environment = own_code.made(kind, config.environment)
    if not _rewards(config):
        inspection.check_score(environment, config.environment)
    return _of_class(config, environment)


def scorer(config: TaskConfig) -> Scores:
    """Return what scores the completions of the environment that `config` names, without reading its problems.

    With tools it is what calls them, too, and of an agent what runs it.

    Raises:
        UsageError: there is no such environment, file, class or reward.
        RewardError: its code raised, or it has no score.
    """
    chosen = _rewards(config)
    kind = None if config.environment in FORMATS else _class(config)
    if kind is not None and inspection.has_tools(kind):
        return _tools(config, kind)
    if kind is not None and inspection.is_agent(kind, config.environment):
        return _agent(config, kind)
    if chosen or kind is None:
        return Rewards(chosen)
    environment = own_code.made(kind, config.environment)
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


def _of_class(config: TaskConfig, environment: Any) -> Task:
    name, chosen = config.environment, _rewards(config)
    compared = _compared(chosen)
    held_out = inspection.check_problems(environment, name, compared)

    def read() -> Iterator[Problem]:
        problems = inspection.checked(environment, name, compared, source_file(type(environment)))
        return (_instructed(problem, config.system_prompt) for problem in problems)

    kept = [_instructed(problem, config.system_prompt) for problem in held_out]
    return Task(read, kept, partial(scorer, config) if chosen else lambda: environment)


def _of_data(config: TaskConfig) -> list[str]:
    """Return the choices that only apply to rows."""
    return [name for name in OF_DATA if getattr(config, name) != TaskConfig.model_fields[name].default]


def _of_turns(config: TaskConfig, kind: type) -> ToolTask | AgentTask:
    """Return a class with tools or an agent: its problems are its own, or those of --data."""
    name = config.environment
    if config.data is None and (unused := _of_data(config)):
        raise UsageError(
            f"{', '.join(map(flag, unused))}: {name} has its own problems, unless --data has them",
            remedy="add --data path/to/problems.jsonl, or a method held_out to the class",
        )
    environment = own_code.made(kind, name)
    has_tools, own = inspection.has_tools(kind), "get_reward" if inspection.has_tools(kind) else "run"
    if not _rewards(config) and (hasattr(kind, "score") or not hasattr(kind, own)):
        inspection.check_score(environment, name)
    schemas = inspection.schemas(environment, name) if has_tools else []
    task = _of_class(config, environment) if config.data is None else _of_rows(config, JSONL)
    if has_tools:
        return ToolTask(task, schemas, partial(_tools, config, kind))
    return AgentTask(task, partial(_agent, config, kind))


def _tools(config: TaskConfig, kind: type) -> Tools:
    chosen = _rewards(config)
    return Tools(partial(own_code.made, kind, config.environment), Rewards(chosen) if chosen else None)


def _agent(config: TaskConfig, kind: type) -> Agent:
    chosen = _rewards(config)
    return Agent(partial(own_code.made, kind, config.environment), Rewards(chosen) if chosen else None)


def _class(config: TaskConfig) -> type:
    if found := packages.kind(config):
        return found
    name = config.environment
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
        f"no environment {name!r}, expected {', '.join((*known, *packages.FORMS))} or {form}",
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
    own = prompt
    if prompt[0]["role"] == "system":
        own, before = prompt[1:], prompt[0]["content"]
        plain = plain and plain.removeprefix(f"{before}\n\n")
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    changed: Any = {**problem, "prompt": [*system, *own]}
    if plain is not None:
        changed["plain_prompt"] = f"{system_prompt}\n\n{plain}".lstrip("\n")
    made: Problem = changed
    return made
