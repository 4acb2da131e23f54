"""Which run `--resume` goes on with: the one that is named, else the newest of the same model and task.

Not covered: opening its directory (`train.py`), and reading the checkpoint (`bridge/run/checkpoint.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.config import TrainConfig
from bridge.core import claim, mark
from bridge.run.run_directory import RUNS, RunDirectory

if TYPE_CHECKING:
    from bridge.run.checkpoint import Found

SAME = ("model_name", "mode", "rollouts", "environment", "data")
"""Choices in which a run has to be the same for another to go on with it unasked."""


@dataclass(frozen=True)
class Resumed:
    """A run's choices, and what it resumes from."""

    config: TrainConfig
    """The choices, with the places of the run that is resumed."""
    found: "Found | None" = None
    """The checkpoint; None: the run begins."""
    passed_over: tuple[str, ...] = ()
    """A line about each run and checkpoint that would have been newer and cannot be resumed."""


def find(config: TrainConfig) -> Resumed:
    """Return what `config` resumes from: its --save-path, its --run-dir, or else the newest run that fits."""
    if config.checkpoints.save_path is None and config.run_dir is None:
        return _newest(config)
    if config.checkpoints.save_path is None and config.run_dir is not None:
        run = RunDirectory(config.run_dir)
        config = config.changed(save_path=run.save_path or run.checkpoints)
    return _from(config)


def _newest(config: TrainConfig) -> Resumed:
    passed_over: list[str] = []
    for run in _runs_of(config):
        pid = claim.holder(run.path.stat().st_ino)
        if pid is not None:
            passed_over.append(f"{run.path} is in use by process {pid}")
            continue
        places = {"run_dir": run.path, "save_path": run.save_path or run.checkpoints}
        resumed = _from(config.changed(**places))
        passed_over += resumed.passed_over
        if resumed.found is not None:
            return Resumed(resumed.config, resumed.found, tuple(passed_over))
        passed_over.append(f"{run.path} has no whole checkpoint")
    return Resumed(config, None, tuple(passed_over))


def _from(config: TrainConfig) -> Resumed:
    from bridge.modes import way_of
    from bridge.run import checkpoint

    assert config.checkpoints.save_path is not None
    found, passed_over = checkpoint.newest(config.checkpoints.save_path, way_of(config).checkpoint_prefix)
    return Resumed(config, found, passed_over)


def _runs_of(config: TrainConfig) -> Iterator[RunDirectory]:
    """Yield the runs of the same model and task, that which was started last first."""
    wanted = {key: config.get(key) for key in SAME}
    runs = [RunDirectory(path) for path in RUNS.iterdir()] if RUNS.is_dir() else []
    known = [run for run in runs if run.config.is_file() and mark.kind_of(run.path) in ("run", None)]
    for run in sorted(known, key=lambda run: run.config.stat().st_mtime, reverse=True):
        try:
            chosen = run.choices()
        except (OSError, ValueError, AttributeError):
            continue
        if all(chosen.get(key) == value for key, value in wanted.items()):
            yield run
