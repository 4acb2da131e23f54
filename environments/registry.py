"""Find an environment by name, `arithmetic` or `file.py:ClassName`, with the data, rewards and prompt chosen for it.

Not covered: the checks themselves (`inspection.py`), and where scores are called (`bridge/scoring`).
"""

import difflib
from collections.abc import Mapping
from functools import partial
from typing import Any

from bridge.config import TaskConfig
from bridge.config.choices import flag
from bridge.errors import UsageError
from bridge.scoring.scoring import Scores
from bridge.types import Environment, Problem
from environments import inspection, own_code, rewards, rows
from environments.arithmetic import Arithmetic
from environments.gsm8k import GSM8K
from environments.inspection import Checked
from environments.jsonl import JSONL
from environments.rewards import Reward, Rewards
from environments.task import Columns, Format, Task, instructed

CLASSES: Mapping[str, type] = {"arithmetic": Arithmetic}
FORMATS: Mapping[str, Format] = {"gsm8k": GSM8K, "jsonl": JSONL}
OF_DATA = ("data", "eval_data", "prompt_column", "answer_column")
"""Choices that mean something where problems are read from rows, and nowhere else."""


def load(config: TaskConfig) -> Environment:
    """Return the environment that `config` names, with its problems checked.

    Raises:
        UsageError: there is no such environment, file, class, data or reward, or it has no use for a choice.
        RewardError: its code raised, it has no problems or no score, or one of its problems is no problem.
    """
    name = config.environment
    if name in FORMATS:
        return _of_rows(config, FORMATS[name])
    kind = _class(name)
    _refuse_unused(config)
    return _of_class(config, kind)


def scorer(config: TaskConfig) -> Scores:
    """Return what scores the completions of the environment that `config` names, without its problems.

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
    """Return the chosen rewards, or the format's; none where the environment scores itself."""
    known = FORMATS.get(config.environment)
    text = config.reward or (known.reward if known else None)
    return rewards.parse(text) if text else ()


def _of_rows(config: TaskConfig, known: Format) -> Task:
    columns = Columns(prompt=config.prompt_column or known.prompt_column, answer=config.answer_column)
    system_prompt = known.system_prompt if config.system_prompt is None else config.system_prompt
    compared = _compared(_rewards(config))

    def problem(values: dict[str, Any]) -> Problem:
        made = known.problem(values, columns)
        if compared and (lack := inspection.answer_fault(made)):
            raise rows.BadRowError(f"{lack}, and the reward {compared} compares with the column {columns.answer!r}")
        return instructed(made, system_prompt)

    training, held_out = rows.read(_source(config, known), known.subset, "--data")
    if config.eval_data is not None:
        whole, split = rows.read(config.eval_data, known.subset, "--eval-data")
        held_out = split or whole
    kept = held_out.problems(problem) if held_out else []
    return Task(training.problems(problem), kept, partial(scorer, config))


def _source(config: TaskConfig, known: Format) -> str:
    if config.data is not None:
        return config.data
    if known.bundled is None:
        raise UsageError(
            f"--environment {config.environment} needs --data",
            remedy=f"--environment {config.environment} --data path/to/problems.jsonl",
        )
    return str(known.bundled)


def _of_class(config: TaskConfig, kind: type) -> Environment:
    name, chosen = config.environment, _rewards(config)
    environment = own_code.made(kind, name)
    if not chosen:
        inspection.check_score(environment, name)
    compared = _compared(chosen)
    held_out = inspection.check_problems(environment, name, compared)
    recipe = partial(scorer, config) if chosen else lambda: environment
    return Task(Checked(environment, name, compared), held_out, recipe, system_prompt=config.system_prompt)


def _compared(chosen: tuple[Reward, ...]) -> str:
    """Return the name of a reward that compares with the problem's answer, or nothing."""
    return next((reward.name for reward in chosen if reward.needs_answer), "")


def _refuse_unused(config: TaskConfig) -> None:
    unused = [name for name in OF_DATA if getattr(config, name) != TaskConfig.model_fields[name].default]
    if unused:
        verb = "means" if len(unused) == 1 else "mean"
        raise UsageError(
            f"{', '.join(map(flag, unused))} {verb} nothing with --environment {config.environment}, "
            f"only with {' and '.join(FORMATS)}",
            remedy=f"leave {'it' if len(unused) == 1 else 'them'} out, or --environment {list(FORMATS)[-1]}",
        )


def _class(name: str) -> type:
    if name in CLASSES:
        return CLASSES[name]
    if ":" in name or name.endswith(".py"):
        kind: type = own_code.find(own_code.ENVIRONMENT, name)
        return kind
    known = [*CLASSES, *FORMATS]
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    form = own_code.ENVIRONMENT.form
    raise UsageError(
        f"no environment {name!r}, expected {', '.join(known)} or {form}",
        remedy=f"{meant}--environment {close[0] if close else 'arithmetic'}, or --environment {form} for your own",
    )
