"""Open a run: its directory, its checkpoints and, with `--resume`, the run and checkpoint that it resumes."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from bridge.config import TrainConfig
from bridge.core import claim, mark
from bridge.errors import UsageError
from bridge.run.run_directory import RUNS, RunDirectory
from bridge_cli import console

if TYPE_CHECKING:
    from bridge.run.checkpoint import Found


class OpenedRun(NamedTuple):
    """A run that can begin."""

    config: TrainConfig
    """With the folder of its checkpoints."""
    directory: RunDirectory
    checkpoint: "Found | None"
    """What it resumes from."""


def open_run(config: TrainConfig) -> OpenedRun:
    """Open the run of `config`, before anything is started."""
    from bridge.learn import reference
    from bridge.learn.policy_loss import LossSpec
    from bridge.run import metrics, reporting

    of_loss = LossSpec.of(config.loss).metrics
    if config.loss.is_own:
        metrics.check_names(of_loss[1:], config.loss.name)  # `kl` is Bridge's
    metrics.goal_of(config.stop_at, of_loss)
    reference.check(config.model_name, config.loss.reference_model)
    reporting.check_trackers(config.tracking)
    chosen = config
    passed_over: list[str] = []
    config, found = _resumed(config, passed_over) if config.resume else (config, None)
    if found is not None:
        found.check_left(config.training_steps)
    folder = config.checkpoints.save_path
    made = claim.make(folder, what="folder of the checkpoints", flag="--save-path") if folder else ()
    try:
        _refuse_overwriting(config, found)
        run = _directory(config, found)
    except BaseException:
        claim.remove_unused(made)
        raise
    for line in passed_over:
        console.note(f"passed over: {line}")
    if found is not None:
        console.note(f"resuming after step {found.progress.step} from {found.folder}")
    elif config.resume:
        console.note(f"no checkpoint to resume from in {folder or RUNS}: starting at step 1")
    config = config.changed(save_path=folder or run.checkpoints)
    return OpenedRun(config, dataclasses.replace(run, made=(*run.made, *made), chosen=chosen), found)


def _resumed(config: TrainConfig, passed_over: list[str]) -> "tuple[TrainConfig, Found | None]":
    """Return `config` with the folders of the run to resume, and the checkpoint.

    They are those of --save-path, else of --run-dir, else of the newest run that fits. Newer runs and checkpoints that
    cannot be resumed are added to `passed_over`.
    """
    if config.checkpoints.save_path is not None:
        return config, _newest_checkpoint(config, passed_over)
    if config.run_dir is not None:
        run = RunDirectory(config.run_dir)
        config = config.changed(save_path=run.save_path or run.checkpoints)
        return config, _newest_checkpoint(config, passed_over)
    wanted = {key: config.get(key) for key, choice in config.choices().items() if choice.identifies}
    runs = [RunDirectory(path) for path in RUNS.iterdir()] if RUNS.is_dir() else []
    known = [run for run in runs if run.config.is_file() and mark.kind_of(run.path) in ("run", None)]
    for run in sorted(known, key=lambda run: run.config.stat().st_mtime, reverse=True):
        try:
            chosen = run.choices()
        except (OSError, ValueError, AttributeError):
            continue
        if any(chosen.get(key) != value for key, value in wanted.items()):
            continue
        pid = claim.holder(run.path.stat().st_ino)
        if pid is not None:
            passed_over.append(f"{run.path} is in use by process {pid}")
            continue
        resumed = config.changed(run_dir=run.path, save_path=run.save_path or run.checkpoints)
        if found := _newest_checkpoint(resumed, passed_over):
            return resumed, found
        passed_over.append(f"{run.path} has no whole checkpoint")
    return config, None


def _newest_checkpoint(config: TrainConfig, passed_over: list[str]) -> "Found | None":
    from bridge.modes import WAYS
    from bridge.run import checkpoint

    assert config.checkpoints.save_path is not None
    found, damaged = checkpoint.newest(config.checkpoints.save_path, WAYS[config.way].checkpoint_prefix)
    passed_over += damaged
    return found


def _directory(config: TrainConfig, found: "Found | None") -> RunDirectory:
    """Return the directory of the run that is resumed, or a new one."""
    step, own = (found.progress.step, found.progress.run_dir) if found else (0, None)
    path, saved = config.run_dir or own, config.checkpoints.save_path
    if config.resume and path and saved and path.is_dir():
        its_saved = RunDirectory(path).save_path
        is_own = own is not None and own.resolve() == path.resolve()
        if is_own or (its_saved is not None and its_saved.resolve() == saved.resolve()):
            return RunDirectory.reopen(path, step, echo=console.note)
    task = config.task.environment if config.rollouts.samples_here else config.rollouts.source
    run = RunDirectory.create(config.run_dir, environment=task, echo=console.note)
    if found is not None:
        console.note(f"{run.path} begins at step {step + 1}; the steps before it are in {own}")
    return run


def _refuse_overwriting(config: TrainConfig, found: "Found | None") -> None:
    """Refuse to start where a checkpoint would overwrite a folder that it may not replace."""
    from bridge.modes import WAYS
    from bridge.run import checkpoint

    save_path = config.checkpoints.save_path or (RunDirectory(config.run_dir).checkpoints if config.run_dir else None)
    if save_path is None:
        return
    begin = found.progress.step if found else 0
    ours = []
    for step, folder in sorted(checkpoint.numbered(save_path, WAYS[config.way].checkpoint_prefix).items()):
        if checkpoint.is_checkpoint(folder):
            ours.append(folder.name)
        elif begin < step <= config.training_steps and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(
                f"{folder} is not a checkpoint of Bridge, and step {step} would be saved under its name",
                remedy="move it away, or name another folder with --save-path",
            )
    if ours and not config.resume:
        raise UsageError(
            f"{save_path} holds checkpoints of another run: {', '.join(ours[-3:])}",
            remedy="resume from the newest with --resume, or name another folder with --save-path",
        )
