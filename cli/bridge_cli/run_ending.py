"""The last lines of a run, however it ends: its checkpoint, and the commands to resume it and to report on it.

Not covered: exit codes and signals (`main.py`, `signals.py`), lost ranks (`rank_launcher.py`).
"""

import shlex
from typing import TYPE_CHECKING

from bridge_cli import console
from bridge_cli.command_line import ARGUMENTS, resume_command

if TYPE_CHECKING:
    from bridge.checkpoints.run_directory import RunDirectory
    from bridge.config import CheckpointConfig


def print_ending(
    run: "RunDirectory", checkpoints: "CheckpointConfig", way: tuple[str, str], training_steps: int
) -> None:
    """Print where the checkpoint is and how to resume; nothing if no step was taken.

    The run publishes in this `way`, and was to take `training_steps`.
    """
    from bridge.checkpoints import checkpoint
    from bridge.modes import WAYS

    if not run.metrics.exists():
        return
    prefix = WAYS[way].checkpoint_prefix
    saved = checkpoint.numbered(checkpoints.save_path or run.checkpoints, prefix)
    complete = [step for step, folder in saved.items() if checkpoint.is_checkpoint(folder)]
    if complete:
        last = max(complete)
        console.note(f"checkpoint: {saved[last]}")
        if checkpoints.save_optimizer:
            arguments = ARGUMENTS.get()
            if last < training_steps:
                console.note(f"resume:     {resume_command(arguments, run.path)}")
            else:  # all steps were taken
                further = last + training_steps
                console.note(f"longer:     {resume_command(arguments, run.path, training_steps=further)}")
    console.note(f"report:     {shlex.join(['bridge', 'report', str(run.path)])}")
