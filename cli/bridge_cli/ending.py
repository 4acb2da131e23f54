"""The last lines of a run, however it ends: its checkpoint, and the commands to resume it and to report on it."""

import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.core import redaction
from bridge_cli import console

if TYPE_CHECKING:
    from bridge.checkpoints.run_directory import RunDirectory
    from bridge.config import CheckpointConfig

GIVEN: ContextVar[tuple[str, ...]] = ContextVar("GIVEN", default=("train",))
"""The arguments of this process."""


@contextmanager
def print_at_end(run: "RunDirectory", checkpoints: "CheckpointConfig") -> Iterator[None]:
    """Print at the end of the block where the checkpoint is and how to resume; nothing if no step was taken."""
    try:
        yield
    finally:
        if run.metrics.exists():
            from bridge.checkpoints import checkpoint
            from bridge.modes import WAYS

            assert run.chosen is not None, "it was opened"
            prefix, steps = WAYS[run.chosen.way].checkpoint_prefix, run.chosen.training_steps
            saved = checkpoint.numbered(checkpoints.save_path or run.checkpoints, prefix)
            if whole := [step for step, folder in saved.items() if checkpoint.is_checkpoint(folder)]:
                last = max(whole)
                console.note(f"checkpoint: {saved[last]}")
                if checkpoints.save_optimizer:
                    further = last + steps if last >= steps else None
                    command = resume_command(GIVEN.get(), run.path, training_steps=further)
                    label = "resume:" if further is None else "longer:"  # all steps were taken
                    console.note(f"{label}     {command}")
            console.note(f"report:     {shlex.join(['bridge', 'report', str(run.path)])}")


def resume_command(arguments: Sequence[str], run_dir: Path, *, training_steps: int | None = None) -> str:
    """Return the command that resumes the run in `run_dir`, with another number of steps if one is given."""
    more = {"run_dir": str(run_dir)} | ({"training_steps": str(training_steps)} if training_steps else {})
    return shlex.join(["bridge", *redaction.redacted_arguments(with_choices(arguments, more))])


def with_choices(arguments: Sequence[str], choices: Mapping[str, str], *, resume: bool = True) -> list[str]:
    """Return the arguments of this command with these `choices` replaced and, unless `resume` is False, --resume."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = ((f"--{key.replace('_', '-')}", value) for key, value in choices.items())
    more = [*(["--resume"] if resume else []), *chain.from_iterable(given)]
    return [*_without(arguments[:end], choices, resume=resume), *more, *arguments[end:]]


def _without(arguments: Sequence[str], fields: Container[str | None], *, resume: bool) -> Iterator[str]:
    """Yield `arguments` without the flags of `fields` and their values, and without --resume if it is added again."""
    from bridge.config import TrainConfig

    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        if TrainConfig.field_of(key) in fields:
            if not equals:
                next(rest, None)  # its value
        elif not (resume and key in {"resume", "no_resume"}):
            yield argument
