"""The run directory of a loop that uses the library, with metrics, completions and checkpoints.

Its files have the same format as those of `bridge train`: `bridge report`, `export` and `restore` read them.

Not covered: loading weights into the server (`policy.py`).
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from bridge.checkpoints import checkpoint, optimizer_state
from bridge.checkpoints.checkpoint import Progress, SavedCheckpoint
from bridge.checkpoints.run_directory import RunDirectory, write_json
from bridge.config import SamplingConfig
from bridge.core import folder_mark, json_lines
from bridge.core.foreign_code import described
from bridge.engine import measuring, provenance
from bridge.errors import UsageError
from bridge.learn.mismatch import share
from bridge.learn.samples import has_signal
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.server.fence import FenceTimes
from bridge.types import Group

logger = logging.getLogger(__name__)

KIND: Final = "loop"
PREFIXES = "step_", "adapter_step_"
"""Prefixes of checkpoint folder names in the different modes; the step number follows."""
NOTHING = -1
"""The last step if nothing was logged: smaller than any step that a loop may log."""


class RunFolder:
    """The run directory of one loop, created when the first file is written, or reopened by `newest`."""

    def __init__(self, given: Path | None, model: str, sampling: SamplingConfig) -> None:
        """Choose the folder: `given`, or a new one under `runs/`."""
        self._given = given
        self._model = model
        self._sampling = sampling
        self._run: RunDirectory | None = None
        self._step: int | None = None
        """The last step that was logged or loaded."""
        self._begun = time.perf_counter()
        """Start time of the current step."""
        self._sampled_s = 0.0
        """Seconds of the current step that were spent on sampling."""
        self._fences: list[FenceTimes] = []
        """The fences since the last logged step; only the newest ones if the loop never logs."""

    @property
    def run(self) -> RunDirectory:
        """The run directory. UsageError: it holds a different run, or cannot be created."""
        if self._run is None:
            given = self._given
            if given is not None and (
                RunDirectory(given).metrics.exists()
                or any(checkpoint.numbered(_save_path(given), prefix) for prefix in PREFIXES)
            ):
                raise UsageError(
                    f"{given} already holds a different run",
                    hint="resume it with policy.resume(OPTIMIZER) before the first step, or name another run_dir",
                )
            run = RunDirectory.create(given, environment=Path(sys.argv[0]).stem or KIND, kind=KIND)
            self._run = self._opened(run)
        return self._run

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the time spent in the block as rollout time."""
        start = time.perf_counter()
        yield
        self._sampled_s += time.perf_counter() - start

    def add_fence(self, times: FenceTimes) -> None:
        """Add the times of a fence to the next logged step."""
        self._fences = [*self._fences[-99:], times]

    def log(self, step: int, groups: Any, given: Mapping[str, Any], *, version: int, device: str) -> None:
        """Append the metrics line of `step`: the measured values, overridden by the `given` ones.

        Raises:
            UsageError: a value is not a number, or `step` is not after the last one.
        """
        if type(step) is not int or step < 0:
            raise UsageError(f"step is {step!r}, expected an integer from 0", hint="policy.log(STEP, loss=loss)")
        if not isinstance(groups, Sequence) or not all(isinstance(group, Group) for group in groups):
            raise UsageError(
                f"groups is {described(groups)}, expected a list of bridge.Group", hint="policy.log(STEP, groups)"
            )
        if self._step is not None and step <= self._step:
            raise UsageError(f"step {step} was logged after step {self._step}", hint="log each step once, in order")
        values = {name: _number(name, value) for name, value in given.items()}
        line = {"step": step, "weight_version": version, "device": device, **self._times(), **_measured(step, groups)}
        run = self.run
        if groups:
            run.append_rollouts(step, groups)
        json_lines.append(run.metrics, [{**line, **values}])
        self._step = step
        self._begun = time.perf_counter()
        self._sampled_s = 0.0
        self._fences = []

    def about_to_save(self, given: Path | None, step: int, prefix: str) -> tuple[Path, Path]:
        """Flush the lines that a checkpoint depends on to disk; return the checkpoint folder and the run directory."""
        json_lines.fsync(self.run.metrics)
        return given or self.run.checkpoints / f"{prefix}{step}", self.run.path.absolute()

    def save(
        self,
        folder: Path,
        optimizer: torch.optim.Optimizer,
        write: Callable[[Path], None],
        *,
        model: nn.Module,
        progress: Progress,
    ) -> Path:
        """Save a checkpoint of any optimizer, with the weights that `write` puts into a folder; return its folder.

        Raises:
            UsageError: writing fails, something else is at `folder`, or the optimizer's state cannot be saved.
        """

        def fill(scratch: Path) -> None:
            write(scratch)
            _write_state(scratch, model, optimizer)

        return checkpoint.save(folder, fill, progress)

    def checked(
        self, source: SavedCheckpoint, optimizer: torch.optim.Optimizer, *, model: nn.Module
    ) -> Callable[[], None]:
        """Return a function that loads the optimizer's state and torch's random state; hyperparameters stay unchanged.

        Raises:
            CheckpointError: the checkpoint has no state, or the state of a different kind of optimizer.
            UsageError: the state belongs to different parameters; nothing was loaded.
        """
        if isinstance(optimizer, InPlaceOptimizer):
            return optimizer_state.checked(source.folder, _trained(model, optimizer), optimizer)
        return optimizer_state.checked_foreign(source.folder, model, optimizer)

    def newest(self, prefix: str) -> SavedCheckpoint | None:
        """Reopen the run directory, and return its newest complete checkpoint; lines of later steps are moved aside.

        Raises:
            UsageError: no folder was given, or it is in use or holds something else.
        """
        if self._given is None:
            raise UsageError("there is no run to resume", hint='name its folder: bridge.attach(run_dir="runs/NAME")')
        if self._run is not None:
            raise UsageError("this run has already begun", hint="call policy.resume before policy.log and policy.save")
        if (kind := folder_mark.kind_of(self._given)) not in {KIND, None}:
            raise UsageError(
                f"{self._given} is a {kind} of Bridge, expected the run directory of a loop: its configuration would be"
                " replaced",
                hint="name another run_dir; policy.load_state(CHECKPOINT) loads a checkpoint of any run",
            )
        newest, skipped = checkpoint.newest(_save_path(self._given), prefix)
        for line in skipped:
            logger.info(f"skipped: {line}")
        if newest is None and not RunDirectory(self._given).metrics.exists():
            return None
        step = NOTHING if newest is None else newest.progress.step
        self._run = self._opened(RunDirectory.reopen(self._given, step, kind=KIND))
        self._step = None if newest is None else step
        outcome = "restarting, without a checkpoint" if newest is None else f"resuming after step {step}"
        logger.info(f"{self._given}: {outcome}")
        return newest

    def end(self) -> None:
        """Record that the loop ended normally, if it logged anything."""
        if self._run is not None and self._step is not None:
            write_json(self._run.summary, {"steps": self._step})

    def _opened(self, run: RunDirectory) -> RunDirectory:
        choices = self._sampling.model_dump(mode="json")
        document = {"model_name": self._model, **choices, "save_path": None}
        write_json(run.writable(run.config), document, mode=0o600)
        run.append_start(provenance.of_this_process())
        return run

    def _times(self) -> dict[str, float]:
        pause_s = sum(times.pause_s for times in self._fences)
        write_s = sum(times.write_s for times in self._fences)
        publish_s = sum(times.publish_s for times in self._fences)
        passed_s = time.perf_counter() - self._begun
        train_s = passed_s - self._sampled_s - pause_s - write_s - publish_s
        return {
            "rollout_s": self._sampled_s,
            "train_s": max(0.0, train_s),
            "fence_pause_s": pause_s,
            "fence_write_s": write_s,
            "fence_publish_s": publish_s,
        }


def _write_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, InPlaceOptimizer):
        optimizer_state.write(folder, _trained(model, optimizer), optimizer)
    else:
        optimizer_state.write_foreign(folder, model, optimizer)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    own = {id(parameter) for parameter in optimizer_state.parameters(optimizer)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}


def _measured(step: int, groups: Sequence[Group]) -> dict[str, Any]:
    """Return the metrics that `bridge train` reports for a step's groups, under the same names."""
    if not groups:
        return {}
    whole = measuring.evaluation(groups, step=step, version=0, seconds=0.0)
    others = ("step", "weight_version", "seconds", "num_problems", "pass_at_k")
    completions = [completion for group in groups for completion in group.completions]
    return {
        **{name: value for name, value in whole.items() if name not in others},
        "no_signal_share": share(sum(not has_signal(group) for group in groups), len(groups)),
        "tokens_generated": sum(completion.num_sampled for completion in completions),
    }


def _number(name: str, value: Any) -> Any:
    """Return a metric for JSON: a number, or numbers in a mapping or list; a tensor of one element is a number."""
    if isinstance(value, list | tuple):
        return [_number(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(key): _number(f"{name}[{key!r}]", item) for key, item in value.items()}
    try:
        number = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"{name} is {str(value)[:80]!r}, expected a number, or numbers by name", hint="policy.log(STEP, loss=0.5)"
        ) from None
    if isinstance(number, bool):
        return int(number)
    return number if math.isfinite(number) else None


def _save_path(run_dir: Path) -> Path:
    run = RunDirectory(run_dir)
    return run.save_path or run.checkpoints
