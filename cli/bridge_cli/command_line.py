"""The command line of this process, and how to repeat it with different choices."""

import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from pathlib import Path

from bridge.core import redaction

ARGUMENTS: ContextVar[tuple[str, ...]] = ContextVar("ARGUMENTS", default=("train",))
"""The arguments of this process."""


def resume_command(arguments: Sequence[str], run_dir: Path, *, training_steps: int | None = None) -> str:
    """Return the command that resumes the run in `run_dir`, for `training_steps` steps if given."""
    more = {"run_dir": str(run_dir)} | ({"training_steps": str(training_steps)} if training_steps else {})
    return shlex.join(["bridge", *redaction.redacted_arguments(with_choices(arguments, more))])


def with_choices(arguments: Sequence[str], choices: Mapping[str, str], *, resume: bool = True) -> list[str]:
    """Return `arguments` with `choices` overridden, adding --resume unless `resume` is False."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = ((f"--{key.replace('_', '-')}", value) for key, value in choices.items())
    more = [*(["--resume"] if resume else []), *chain.from_iterable(given)]
    return [*_without(arguments[:end], choices, resume=resume), *more, *arguments[end:]]


def _without(arguments: Sequence[str], fields: Container[str | None], *, resume: bool) -> Iterator[str]:
    """Yield `arguments` without the flags for `fields` and their values and, with `resume`, without --resume."""
    from bridge.config import TrainConfig

    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        if TrainConfig.field_of(key) in fields:
            if not equals:
                next(rest, None)  # skip the flag's value
        elif not (resume and key in {"resume", "no_resume"}):
            yield argument
