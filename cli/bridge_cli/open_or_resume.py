"""Open a run: its directory, its checkpoints and, with `--resume`, the run and checkpoint that it resumes.

Not covered: restoring the checkpoint's state (`bridge/run/resuming.py`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.checkpoints.run_directory import RUNS, RunDirectory
from bridge.config import TrainConfig
from bridge.core import folder_claim, folder_mark
from bridge.errors import UsageError
from bridge.types import Environment
from bridge_cli import console
from bridge_cli.rank_process import OWN_RANK

if TYPE_CHECKING:
    from bridge.checkpoints.checkpoint import SavedCheckpoint
    from bridge.rollouts.training_rows import TrainingRow


def open_run(
    config: TrainConfig, environment: Environment | None = None, rows: "Sequence[TrainingRow]" = ()
) -> "tuple[TrainConfig, RunDirectory, SavedCheckpoint | None]":
    """Open the run of `config`, which trains on the problems of `environment` and on `rows`, before anything starts.

    Return the configuration with the checkpoint folder set, the run directory, and the checkpoint to resume from.
    """
    from bridge.checkpoints import metrics
    from bridge.engine import reference, teacher
    from bridge.learn.policy_loss import LossSpec
    from bridge.modes import WAYS
    from bridge.run import reporting, resuming

    of_loss = LossSpec.of(config.loss).metrics
    if config.loss.is_own:
        metrics.check_names(LossSpec.of(config.loss).own_metrics, config.loss.name)
    metrics.goal_of(config.stop_at, of_loss)
    reference.check(config.model_name, config.loss)
    teacher.check_server(config.model_name, config.loss, config.sampling)
    reporting.check_trackers(config.tracking)
    prefix = WAYS[config.way].checkpoint_prefix
    run_dir = config.run_dir
    folder = config.checkpoints.save_path
    checkpoint = None
    if config.resume:
        wanted = {key: config.get(key) for key, choice in config.choices().items() if choice.identifies}
        run_dir, folder, checkpoint = _resumed(run_dir, folder, prefix, wanted)
    if checkpoint is not None:
        checkpoint.check_left(config.training_steps)
        trained_on = None if config.loss.takes_rows else environment
        resuming.check(checkpoint, config, trained_on, rows)  # the reporter logs changed choices once the run is open
    made = folder_claim.make(folder, what="checkpoint folder", flag="--save-path") if folder else ()
    try:
        steps = range(checkpoint.progress.step if checkpoint else 0, config.training_steps)
        _refuse_overwriting(folder, run_dir, prefix, steps, resume=config.resume)
        task = config.task.environment if config.rollouts.samples_here else config.rollouts.source
        if config.loss.takes_rows:
            task = config.loss.name
        run = _directory(run_dir, folder, checkpoint, task, resume=config.resume)
    except BaseException:
        folder_claim.remove_unused(made)
        raise
    if checkpoint is not None:
        console.note(f"resuming after step {checkpoint.progress.step} from {checkpoint.folder}")
    elif config.resume:
        console.note(f"no checkpoint to resume from in {folder or RUNS}: starting at step 1")
    directory = dataclasses.replace(run, made=(*run.made, *made))
    if (own_rank := OWN_RANK.get()) is not None:
        own_rank.keep(run.path)
    return config.changed(run_dir=run_dir, save_path=folder or run.checkpoints), directory, checkpoint


def _resumed(
    run_dir: Path | None, save_path: Path | None, prefix: str, wanted: Mapping[str, Any]
) -> "tuple[Path | None, Path | None, SavedCheckpoint | None]":
    """Return the run directory and the checkpoint folder to resume from, and the newest checkpoint there.

    They come from --save-path, --run-dir, or the newest run whose choices match `wanted`, in this order. Newer runs
    and checkpoints that cannot be resumed are reported.
    """
    if run_dir is not None:
        run = RunDirectory(run_dir)
        save_path = save_path or run.save_path or run.checkpoints
    if save_path is not None:
        return run_dir, save_path, _newest_checkpoint(save_path, prefix)
    runs = [RunDirectory(path) for path in RUNS.iterdir()] if RUNS.is_dir() else []
    known = [run for run in runs if run.config.is_file() and folder_mark.kind_of(run.path) in ("run", None)]
    for run in sorted(known, key=lambda run: run.config.stat().st_mtime, reverse=True):
        try:
            choices = run.choices()
        except (OSError, ValueError, AttributeError):
            continue
        if any(choices.get(key) != value for key, value in wanted.items()):
            continue
        pid = folder_claim.holder(run.path.stat().st_ino)
        if pid is not None:
            console.note(f"skipped: {run.path} is in use by process {pid}")
            continue
        folder = run.save_path or run.checkpoints
        if checkpoint := _newest_checkpoint(folder, prefix):
            return run.path, folder, checkpoint
        console.note(f"skipped: {run.path} has no complete checkpoint")
    return None, None, None


def _newest_checkpoint(folder: Path, prefix: str) -> "SavedCheckpoint | None":
    from bridge.checkpoints import checkpoint

    newest, damaged = checkpoint.newest(folder, prefix)
    for why in damaged:
        console.note(f"skipped: {why}")
    return newest


def _directory(
    run_dir: Path | None, save_path: Path | None, checkpoint: "SavedCheckpoint | None", task: str, *, resume: bool
) -> RunDirectory:
    """Return the run directory of the resumed run, or a new one."""
    step, own = 0, None
    if checkpoint is not None:
        step = checkpoint.progress.step
        own = RunDirectory.of_checkpoint(checkpoint.folder, saved_by=checkpoint.progress.run_dir).path
    path = run_dir or own
    if resume and path and save_path and path.is_dir():
        its_saved = RunDirectory(path).save_path
        is_own = own is not None and own.resolve() == path.resolve()
        have_moved = its_saved is None or not its_saved.is_dir()
        if (is_own and have_moved) or (its_saved is not None and its_saved.resolve() == save_path.resolve()):
            return RunDirectory.reopen(path, step)
    run = RunDirectory.create(run_dir, environment=task)
    if checkpoint is not None:
        console.note(f"{run.path} begins at step {step + 1}; the steps before it are in {own}")
    return run


def _refuse_overwriting(
    save_path: Path | None, run_dir: Path | None, prefix: str, steps: range, *, resume: bool
) -> None:
    """Refuse to start if saving after one of `steps` would overwrite a folder that Bridge must not replace."""
    from bridge.checkpoints import checkpoint

    another = f"choose a different folder with {'--save-path' if save_path else '--run-dir'}"
    save_path = save_path or (RunDirectory(run_dir).checkpoints if run_dir else None)
    if save_path is None:
        return
    ours = []
    for step, folder in sorted(checkpoint.numbered(save_path, prefix).items()):
        if checkpoint.is_checkpoint(folder):
            ours.append(folder.name)
        elif step - 1 in steps and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(
                f"{folder} is not a Bridge checkpoint, and step {step} would be saved under this name",
                hint=f"move it away, or {another}",
            )
    if ours and not resume:
        raise UsageError(
            f"{save_path} holds checkpoints of another run: {', '.join(ours[-3:])}",
            hint=f"resume from the newest one with --resume, or {another}",
        )
