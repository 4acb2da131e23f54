"""The last lines of a run, however it ends: its checkpoint, and the commands that resume it and report on it."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.core import private
from cli import console

if TYPE_CHECKING:
    from bridge.config import TrainConfig
    from bridge.run.run_directory import RunDirectory

GIVEN: ContextVar[tuple[str, ...]] = ContextVar("GIVEN", default=("train",))
"""The arguments of this process."""
SWITCHES = {"resume", "no_resume"}


@contextmanager
def told(run: "RunDirectory", config: "TrainConfig") -> Iterator[None]:
    """Print at the end of the block where the checkpoint is and how to resume; nothing if no step was taken."""
    try:
        yield
    finally:
        for line in _lines(run, config):
            console.note(line)


def resuming(arguments: Sequence[str], run_dir: Path, *, training_steps: int | None = None) -> str:
    """Return the command that resumes the run in `run_dir`, with another number of steps if one is given."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, theirs = arguments[:place], arguments[place:]  # vLLM's flags, behind the dashes
    drop = {"run_dir"} | ({"training_steps"} if training_steps else set())
    more = ["--resume", "--run-dir", str(run_dir)]
    more += ["--training-steps", str(training_steps)] if training_steps else []
    command = [*_without(own, drop), *more, *theirs]
    return shlex.join(["bridge", *private.shown_arguments(command)])


def _lines(run: "RunDirectory", config: "TrainConfig") -> Iterator[str]:
    from bridge.modes import way_of
    from bridge.run import checkpoint

    if not run.metrics.exists():
        return
    saved = checkpoint.numbered(config.checkpoints.save_path or run.checkpoints, way_of(config).checkpoint_prefix)
    whole = {step: folder for step, folder in saved.items() if checkpoint.is_checkpoint(folder)}
    if whole:
        last = max(whole)
        yield f"checkpoint: {whole[last]}"
        if config.checkpoints.save_optimizer:
            further = last + config.training_steps if last >= config.training_steps else None
            yield f"resume:     {resuming(GIVEN.get(), run.path, training_steps=further)}"
    yield f"report:     {shlex.join(['bridge', 'report', str(run.path)])}"


def _without(arguments: Sequence[str], fields: set[str]) -> Iterator[str]:
    """Yield `arguments` without --resume, and without the flags of `fields` and their values."""
    from bridge.config import TrainConfig

    skips_next = False
    for argument in arguments:
        if skips_next:
            skips_next = False
            continue
        name, equals, _ = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        if key in SWITCHES or TrainConfig.field_of(key) in fields:
            skips_next = key not in SWITCHES and not equals
        else:
            yield argument
