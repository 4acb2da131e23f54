"""`bridge train`: train on a server that is already running, and say what each step did.

Not covered: the training itself (`bridge/run/trainer.py`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.config import FeedConfig, TrainConfig
from bridge.core import claim
from bridge.errors import UsageError
from bridge.run.run_directory import RUNS, RunDirectory, labelled_json
from bridge.types import Environment
from cli import console, ending, live, resumable
from cli.options import Json, from_config
from cli.steps import summary_line

if TYPE_CHECKING:
    from bridge.modes.mode import ServerProcess
    from bridge.run.checkpoint import Found
    from bridge.run.metrics import Summary
    from bridge.scoring.score import Scores


@from_config(TrainConfig)
def train(config: TrainConfig, *, as_json: Json = False) -> None:
    """Train a model on a server that is already running."""
    from cli.start_command import StartCommand, started

    environment = load_environment(config)
    command = StartCommand.of(config) if config.publishing.start_command else None
    settled, run, found = open_run(config)
    try:
        rehearse(settled, environment)
        with started(command, run.server_log) as process, ending.told(run, settled):
            train_in(run, settled, environment, as_json=as_json, process=process, resume=found, chosen=config)
    finally:
        run.remove_if_unused()


def load_environment(config: TrainConfig) -> Environment | None:
    """Return the environment that `config` names, checked; None where rollouts come from elsewhere.

    Raises:
        UsageError: there is none, it cannot be used, or it holds nothing out to evaluate on.
    """
    from environments import registry

    if config.rollouts.source != "environment":
        return None
    environment = registry.load(config.task)
    if config.evaluation.samples:
        from bridge.rollouts import problems

        problems.held_out(environment)
    return environment


def rehearse(config: TrainConfig | FeedConfig, environment: Environment | None) -> None:
    """Try the first problems of `environment`, if there is one, before anything is started.

    Raises:
        UsageError: a prompt cannot be encoded, or nothing scores.
    """
    from environments import registry

    if environment is not None:
        from bridge.rollouts import rehearsal

        recipe = partial(registry.scorer, config.task)
        rehearsal.check(config.model_name, config.task, environment, recipe, console.note)


def recipe_of(config: TrainConfig) -> "Callable[[], Scores] | None":
    """Return what makes the scores of the environment that `config` names, in any process."""
    from environments import registry

    return partial(registry.scorer, config.task) if config.rollouts.source == "environment" else None


def open_run(config: TrainConfig) -> "tuple[TrainConfig, RunDirectory, Found | None]":
    """Return the choices with their places, the run directory, and the checkpoint to resume from; call it first of all.

    Raises:
        UsageError: checkpoints of another run are in the way, the run directory cannot be used, or the reference.
    """
    from bridge.learn import reference
    from bridge.run import trackers

    reference.check(config)
    trackers.check(config)
    resumed = resumable.find(config) if config.resume else resumable.Resumed(config)
    config = resumed.config
    folder = config.checkpoints.save_path
    made = claim.make(folder, what="folder of the checkpoints", flag="--save-path") if folder else ()
    try:
        run = _open_run(resumed)
    except BaseException:
        claim.remove_unused(made)
        raise
    config = config.changed(save_path=folder or run.checkpoints)
    return config, dataclasses.replace(run, made=(*run.made, *made)), resumed.found


def _open_run(resumed: resumable.Resumed) -> RunDirectory:
    config, found = resumed.config, resumed.found
    _refuse_overwriting(config, found)
    run = _directory(config, found)
    for line in resumed.passed_over:
        console.note(f"passed over: {line}")
    if found is not None:
        console.note(f"going on after step {found.progress.step}, from {found.folder}")
    elif config.resume:
        console.note(f"no checkpoint to go on from in {config.checkpoints.save_path or RUNS}: beginning at step 1")
    return run


def _directory(config: TrainConfig, found: "Found | None") -> RunDirectory:
    """Return the directory of the run that goes on, or a new one."""
    step, own = (found.progress.step, found.progress.run_dir) if found else (0, None)
    path = config.run_dir or own
    saved = config.checkpoints.save_path
    if config.resume and path and saved and (_is_same(path, own) or _saves_to(path, saved)):
        return RunDirectory.reopen(path, step, tell=console.note)
    task = config.task.environment if config.rollouts.source == "environment" else config.rollouts.source
    run = RunDirectory.create(config.run_dir, environment=task, tell=console.note)
    if found is not None:
        console.note(f"{run.path} begins at step {step + 1}: what came before is in {own}")
    return run


def _saves_to(path: Path, save_path: Path) -> bool:
    """Tell whether `path` is the directory of a run whose checkpoints are in `save_path`."""
    saved = RunDirectory(path).save_path
    return saved is not None and saved.resolve() == save_path.resolve()


def _is_same(path: Path, other: Path | None) -> bool:
    return other is not None and other.is_dir() and path.is_dir() and path.samefile(other)


def _refuse_overwriting(config: TrainConfig, found: "Found | None") -> None:
    """Refuse to start where a checkpoint of this run would meet a folder that it may not replace."""
    from bridge.modes import way_of
    from bridge.run import checkpoint

    save_path = config.checkpoints.save_path or (RunDirectory(config.run_dir).checkpoints if config.run_dir else None)
    if save_path is None:
        return
    steps = checkpoint.numbered(save_path, way_of(config).checkpoint_prefix)
    begin = found.progress.step if found else 0
    ahead = [folder for step, folder in sorted(steps.items()) if begin < step <= config.training_steps]
    foreign = [folder for folder in ahead if not checkpoint.is_checkpoint(folder) and not _is_empty(folder)]
    if foreign:
        raise UsageError(
            f"{foreign[0]} is no checkpoint of ours, and one would be saved under its name",
            remedy="move it away, or name another folder with --save-path",
        )
    ours = [folder for _, folder in sorted(steps.items()) if checkpoint.is_checkpoint(folder)]
    if ours and not config.resume:
        raise UsageError(
            f"{save_path} holds checkpoints of another run: {', '.join(folder.name for folder in ours[-3:])}",
            remedy="go on from the newest with --resume, or name another folder with --save-path",
        )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def train_in(
    run: RunDirectory,
    config: TrainConfig,
    environment: Environment | None,
    *,
    as_json: bool,
    process: "ServerProcess | None" = None,
    resume: "Found | None" = None,
    chosen: TrainConfig | None = None,
) -> "Summary":
    """Train, print one line a step, and leave everything in `run`; `config` is what was `chosen`, settled.

    Raises:
        BridgeError: the server, the manifest, the model or the environment is at fault.
    """
    from bridge.run import trackers, trainer
    from bridge.run.reporting import Several

    data = console.data if as_json else None
    first_step = resume.progress.step + 1 if resume else 1
    with (
        live.reporting_to_people(config.training_steps, f"run directory: {run.path}", data=data) as lines,
        trackers.of(config, run, first_step=first_step) as curves,
    ):
        summary = trainer.train(
            config,
            environment,
            run,
            Several(curves, lines),
            recipe=recipe_of(config),
            process=process,
            resume=resume,
            chosen=chosen,
        )
    run.write_summary(summary)
    console.note(summary_line(summary))
    if as_json:
        console.data(labelled_json("summary", summary, run_dir=run.path))
    return summary
