"""Load an environment by name, such as `arithmetic` or `file.py:ClassName`, with its data, rewards and prompt."""

import difflib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from bridge.agents.tools import Agent, Tools
from bridge.config import TaskConfig
from bridge.config.choices import flag
from bridge.core import paths
from bridge.core.foreign_code import FORMS, check_file, find_object, instance_of, shortened, source_file
from bridge.errors import UsageError
from bridge.types import Interaction, Problem, Task
from bridge_environments import dataset, environment_checks, packages, rewards
from bridge_environments.dataset import GSM8K, JSONL, Format
from bridge_environments.rewards import Reward, Rewards
from bridge_environments.word_problems import WordProblems

NUMBERS = range(20)
NUM_HELD_OUT = 80
"""Number of held-out sums, a fifth of all."""


class Arithmetic:
    """Sums of two numbers below 20, such as `3+4=`; only the exact answer scores.

    Of the 400 sums, a fixed random selection of 80 is held out, and the other 320 are for training.

    The selection is the same in every process and on every machine. Pairs are ordered: `4+3=` may be a training problem
    while `3+4=` is held out.
    """

    def __init__(self) -> None:
        sums: list[Problem] = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in NUMBERS for b in NUMBERS]
        # Random, because a rule such as every fifth sum would exclude certain pairs of last digits from training.
        random.Random(0).shuffle(sums)  # noqa: S311  not a secret
        self._held_out = sums[:NUM_HELD_OUT]
        self._training = sums[NUM_HELD_OUT:]

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._training)

    def held_out(self) -> list[Problem]:
        return list(self._held_out)

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the completion is the answer, apart from surrounding whitespace, otherwise 0.0."""
        return float(completion.strip() == problem["answer"])


CLASSES: Mapping[str, type] = {"arithmetic": Arithmetic, "word_problems": WordProblems}
FORMATS: Mapping[str, Format] = {"gsm8k": GSM8K, "jsonl": JSONL}
OF_DATA = ("data", "eval_data", "prompt_column", "answer_column")
"""Settings that only apply to problems read from rows."""
PACKAGES = (f"{packages.VERIFIERS_PREFIX}ID", f"{packages.GYM_PREFIX}TASK")
"""Names of environments from other packages."""


def check_files(config: TaskConfig) -> None:
    """Check that the environment and the data named in `config` exist, without reading them.

    Commands call this before anything slow.
    """
    _check_package_choices(config)
    name = config.environment
    if not name.startswith((packages.VERIFIERS_PREFIX, packages.GYM_PREFIX)):
        if ":" in name or name.endswith(".py"):
            check_file("environment", name)
        elif name not in (*CLASSES, *FORMATS):
            raise _no_environment(name)
    for key in ("data", "eval_data"):
        if (source := getattr(config, key)) is not None:
            dataset.check_source(str(source), flag(key))


def load(config: TaskConfig) -> Task:
    """Load the environment named in `config`, and check its problems."""
    _check_package_choices(config)
    name = config.environment
    if name in FORMATS:
        known = FORMATS[name]
        chosen = known.system_prompt if config.system_prompt is None else config.system_prompt
        return _of_rows(config, known, partial(_with_system_prompt, system_prompt=chosen))
    kind = _class(config)
    interaction = environment_checks.interaction(kind, name)
    _refuse_unused_data(config, interaction)
    environment = instance_of(kind, name)
    own_reward = {"tools": "get_reward", "agent": "run"}.get(interaction, "")
    if not _rewards(config) and (hasattr(kind, "score") or not hasattr(kind, own_reward)):
        environment_checks.check_score(environment, name)
    schemas = environment_checks.schemas(environment, name) if interaction == "tools" else []
    instructed = partial(_with_system_prompt, system_prompt=config.system_prompt, is_chat=interaction == "tools")
    task = _of_class(config, environment, instructed) if config.data is None else _of_rows(config, JSONL, instructed)
    return replace(task, interaction=interaction, schemas=tuple(schemas))


def scorer(config: TaskConfig) -> Any:
    """Return the object that scores completions for the environment named in `config`, without reading its problems.

    For an environment with tools, the object also calls the tools; for an agent, it also runs the agent.
    """
    chosen = _rewards(config)
    rewards_chosen = Rewards(chosen) if chosen else None
    if config.environment in FORMATS:
        return rewards_chosen
    kind = _class(config)
    make = partial(instance_of, kind, config.environment)
    interaction = environment_checks.interaction(kind, config.environment)
    if interaction != "completion":
        return (Tools if interaction == "tools" else Agent)(make, rewards_chosen)
    if rewards_chosen is not None:
        return rewards_chosen
    environment = make()
    environment_checks.check_score(environment, config.environment)
    return environment


def _rewards(config: TaskConfig) -> tuple[Reward, ...]:
    """Return the chosen rewards, or the format's default; none if the environment's own score applies."""
    known = FORMATS.get(config.environment)
    text = config.reward or (known.reward if known else None)
    return rewards.parse(text) if text else ()


def _compared(chosen: tuple[Reward, ...]) -> str:
    """Return the name of the first reward that compares with the problem's answer; empty if none does."""
    return next((reward.name for reward in chosen if reward.needs_answer), "")


def _of_rows(config: TaskConfig, known: Format, instructed: Callable[[Problem], Problem]) -> Task:
    prompt_column = config.prompt_column or known.prompt_column
    compared = _compared(_rewards(config))

    columns = set[str]()

    def problem(values: dict[str, Any]) -> Problem:
        has_answer = dataset.has_column(values, config.answer_column)
        columns.update(dataset.columns_in(values), [config.answer_column] if has_answer else [])
        made = known.problem(values, prompt_column, config.answer_column)
        if compared and (lack := environment_checks.answer_fault(made)):
            found = "" if has_answer else f", found {shortened(', '.join(dataset.columns_in(values)), 200)}"
            raise dataset.BadRowError(
                f"{lack}, but the reward {compared} compares with the column {config.answer_column!r}{found} (--reward"
                " none compares nothing)"
            )
        return instructed(made)

    source = known.bundled if config.data is None else config.data
    if source is None:
        raise UsageError(
            f"--environment {config.environment} needs --data",
            hint=f"--environment {config.environment} --data path/to/problems.jsonl",
        )
    training, held_out = dataset.read(str(source), known.subset, "--data")
    if config.eval_data is not None:
        whole, split = dataset.read(config.eval_data, known.subset, "--eval-data")
        held_out = split or whole
    kept = held_out.problems(problem) if held_out else []
    problems = training.problems(problem)
    if config.answer_column not in {*columns, TaskConfig.model_fields["answer_column"].default}:
        raise UsageError(
            f"--answer-column {config.answer_column}: no row of {training.source} has this column, found"
            f" {shortened(', '.join(sorted(columns)), 200)}",
            hint="name a column of the rows, or leave it out",
        )
    return Task(problems=partial(iter, problems), kept=kept, recipe=partial(scorer, config))


def _of_class(config: TaskConfig, environment: Any, instructed: Callable[[Problem], Problem]) -> Task:
    name = config.environment
    compared = _compared(_rewards(config))
    held_out = environment_checks.check_problems(environment, name, compared)

    def read() -> Iterator[Problem]:
        file = source_file(type(environment))
        return map(instructed, environment_checks.checked(environment, name, compared, file, opens_images=False))

    kept = [*map(instructed, held_out)]
    return Task(problems=read, kept=kept, recipe=partial(scorer, config))


def _refuse_unused_data(config: TaskConfig, interaction: Interaction) -> None:
    """Refuse settings that only apply to rows, unless an environment with tools or an agent reads --data."""
    unused = [name for name in OF_DATA if getattr(config, name) != TaskConfig.model_fields[name].default]
    if not unused or (interaction != "completion" and config.data is not None):
        return
    names = ", ".join(map(flag, unused))
    if interaction != "completion":
        raise UsageError(
            f"{names}: only with --data, because {config.environment} has its own problems",
            hint="add --data path/to/problems.jsonl, or a method held_out() to the class",
        )
    raise UsageError(
        f"{names}: only for --environment {' and '.join(FORMATS)}, not {config.environment}",
        hint=f"leave {'it' if len(unused) == 1 else 'them'} out, or --environment {list(FORMATS)[-1]}",
    )


def _check_package_choices(config: TaskConfig) -> None:
    """Refuse settings that would be ignored, because they do or do not apply to environments from other packages."""
    is_verifiers = config.environment.startswith(packages.VERIFIERS_PREFIX)
    is_gym = config.environment.startswith(packages.GYM_PREFIX)
    if not (is_verifiers or is_gym):
        reason = f"it is for --environment {' and '.join(PACKAGES)}"
        _refuse_given(config, "env_args", reason)
        _refuse_given(config, "eval_env_args", reason)
    if is_verifiers:
        _refuse_given(config, "data", "it has its own tasks")
        _refuse_given(config, "system_prompt", "its tasks have their own")


def _refuse_given(config: TaskConfig, name: str, reason: str) -> None:
    """Refuse a setting that this environment would ignore, if the user has changed it."""
    if getattr(config, name) != TaskConfig.model_fields[name].default:
        raise UsageError(
            f"{flag(name)} has no effect with --environment {config.environment}: {reason}", hint="leave it out"
        )


def _of_package(config: TaskConfig) -> type | None:
    """Return a class for an environment from another package, callable without arguments; None for other names."""
    prefix, _, name = config.environment.partition(":")
    base: Any = {"verifiers": packages.Verifiers, "reasoning_gym": packages.ReasoningGym}.get(prefix)
    if base is None:
        return None
    more = {"python": config.verifiers_python} if prefix == "verifiers" else {}

    def make(self: Any) -> None:
        base.__init__(self, name, config.env_args, config.eval_env_args, **more)

    return type(base.__name__, (base,), {"__init__": make, "__module__": base.__module__})


def _class(config: TaskConfig) -> type:
    if (kind := _of_package(config)) is not None:
        return kind
    name = config.environment
    if name in CLASSES:
        return CLASSES[name]
    if ":" in name or name.endswith(".py"):
        return find_object("environment", name)  # type: ignore[no-any-return]
    raise _no_environment(name)


def _no_environment(name: str) -> UsageError:
    known = [*CLASSES, *FORMATS]
    form = FORMS["environment"]
    hint = f"--environment arithmetic, or --environment {form} for your own"
    if paths.is_file(file := paths.expanded(f"{name}.py")):
        hint = f"did you mean --environment {file}:ClassName?"
    elif close := difflib.get_close_matches(name, known, n=1):
        hint = f"did you mean {close[0]}? --environment {close[0]}, or --environment {form} for your own"
    return UsageError(f"no environment {name!r}, expected {', '.join((*known, *PACKAGES))} or {form}", hint=hint)


def _with_system_prompt(problem: Problem, system_prompt: str | None, *, is_chat: bool = False) -> Problem:
    """Return `problem` with its system message replaced; an empty text removes it, None changes nothing.

    When a text prompt becomes chat messages, the text is kept as `plain_prompt` for models without a chat template.
    With `is_chat` it is not kept, because `reset` gets the problem's keys.
    """
    if system_prompt is None:
        return problem
    prompt = problem["prompt"]
    plain = problem.get("plain_prompt")
    if isinstance(prompt, str):
        if not system_prompt:
            return problem
        plain = plain if is_chat else prompt
        prompt = [{"role": "user", "content": prompt}]
    own = prompt
    if prompt[0]["role"] in ("system", "developer"):
        own = prompt[1:]
        before = prompt[0]["content"]
        plain = plain and plain.removeprefix(f"{before}\n\n")
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    changed = {**problem, "prompt": [*system, *own]}
    if plain is not None:
        changed["plain_prompt"] = f"{system_prompt}\n\n{plain}".lstrip("\n")
    return cast("Problem", changed)
