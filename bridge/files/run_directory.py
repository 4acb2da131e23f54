"""The run directory: everything that one training run leaves behind, and the names of its files.

Not covered: checkpoints, whose folder the user chooses (`--save-path`).
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bridge.errors import UsageError
from bridge.files import atomic_file, claim
from bridge.files.atomic_file import one_line_errors
from bridge.training.metrics import StepMetrics, Summary
from bridge.weights.manifest import MANIFEST_NAME

RUNS = Path("runs")


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder."""

    path: Path
    """The folder."""
    made: tuple[Path, ...] = ()
    """The folders that were made for it, the innermost first."""
    tell: Callable[[str], None] | None = None
    """Tells a person of an event when it happens; absent: nobody is told."""

    @classmethod
    def create(
        cls, given: Path | None, *, environment: str, tell: Callable[[str], None] | None = None
    ) -> "RunDirectory":
        """Make the folder `given`, or a new one under `runs/` named by the time and `environment`.

        Raises:
            UsageError: `given` holds another run, is in use, is a file, or cannot be made.
        """
        path = _unused(environment) if given is None else given
        run = cls(path, _claimed(path), tell)
        if run.metrics.exists():
            raise UsageError(
                f"{path} holds another run: {run.metrics.name}",
                remedy="name another with --run-dir"
                + (f", or go on with that run: --resume --save-path {run.save_path}" if run.save_path else ""),
            )
        return run

    @classmethod
    def reopen(cls, path: Path, step: int, *, tell: Callable[[str], None] | None = None) -> "RunDirectory":
        """Return the directory of a run that goes on after `step`; metrics of later steps are moved aside.

        Raises:
            UsageError: another process is at it.
        """
        run = cls(path, _claimed(path), tell)
        lines = run.metrics.read_bytes().splitlines() if run.metrics.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            _append_once(run.lost_metrics, [line for line in lines if _step_of(line) > step])
            atomic_file.replace(run.metrics, _joined(kept))
        if step and step not in map(_step_of, kept):
            run.note(f"{run.metrics} has no line of step {step}: the run was killed before that, or began elsewhere")
        return run

    @property
    def config(self) -> Path:
        """Return the file of the resolved choices."""
        return self.path / "config.json"

    @property
    def server_config(self) -> Path:
        """Return the file of the server's resolved choices, where the run started the server."""
        return self.path / "serve.json"

    @property
    def metrics(self) -> Path:
        """Return the file of the steps, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Return the file of the completions, one JSON object a line."""
        return self.path / "rollouts.jsonl"

    @property
    def evaluations(self) -> Path:
        """Return the file of the evaluations on held-out problems, one JSON object a line."""
        return self.path / "evaluations.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Return the folder of what TensorBoard reads."""
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        """Return the file of what the whole run came to."""
        return self.path / "summary.json"

    @property
    def lost_metrics(self) -> Path:
        """Return the file of the steps that were lost, because the run went on from an earlier checkpoint."""
        return self.path / "metrics_lost.jsonl"

    @property
    def events(self) -> Path:
        """Return the file of what happened between the steps, one line each."""
        return self.path / "events.log"

    @property
    def served(self) -> Path:
        """Return the folder of what is handed to a server between two checkpoints."""
        return self.path / "served"

    @property
    def server_log(self) -> Path:
        """Return the file of the server's output, where the run started the server."""
        return self.path / "serve.log"

    @property
    def manifest(self) -> Path:
        """Return where the server's manifest goes, where the run started the server and no place was given."""
        return self.path / MANIFEST_NAME

    @property
    def save_path(self) -> Path | None:
        """Return the folder of the run's checkpoints; None where there is no telling."""
        try:
            return Path(json.loads(self.config.read_bytes())["save_path"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remove_if_unused(self) -> None:
        """Remove the folders that were made for this run, where nothing was put into them."""
        claim.remove_unused(self.made)

    def write_config(self, config: BaseModel) -> None:
        """Write the run's resolved choices."""
        write_json(self.config, config.model_dump(mode="json"))

    def write_summary(self, summary: Summary) -> None:
        """Write what the run came to; a number that is not finite becomes null."""
        values = {name: _finite(value) for name, value in dataclasses.asdict(summary).items()}
        rewards = [_finite(reward) for reward in summary.rewards]
        write_json(self.summary, values | {"checkpoint": str(summary.checkpoint), "rewards": rewards})

    def note(self, line: str) -> None:
        """Append what happened to the events, with the time, and tell it if somebody is to be told."""
        with one_line_errors(self.events), self.events.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")
        if self.tell is not None:
            self.tell(line)

    def append(self, metrics: StepMetrics) -> None:
        """Append one step and hand it to the operating system at once; a number that is not finite becomes null."""
        with one_line_errors(self.metrics), self.metrics.open("a") as file:
            file.write(to_json(metrics) + "\n")

    def settle(self) -> None:
        """Wait until the metrics are on the disk: no checkpoint shall survive a power cut that a line did not."""
        if self.metrics.exists():
            with one_line_errors(self.metrics), self.metrics.open("rb") as file:
                os.fsync(file.fileno())


def to_json(metrics: StepMetrics) -> str:
    """Return one step as a JSON object on one line; a number that is not finite becomes null."""
    values = {name: _finite(value) for name, value in dataclasses.asdict(metrics).items()}
    return json.dumps(values, allow_nan=False)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` to `path` atomically."""
    atomic_file.replace(path, (json.dumps(document, indent=1) + "\n").encode())


def _claimed(path: Path) -> tuple[Path, ...]:
    """Make the run directory `path`, keep other processes out of it, and return the folders that were made."""
    return claim.make(path, what="run directory", flag="--run-dir")


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _append_once(path: Path, lines: Sequence[bytes]) -> None:
    """Append `lines`, unless a process that was killed right afterwards has done so."""
    before = path.read_bytes() if path.exists() else b""
    if not before.endswith(_joined(lines)):
        atomic_file.replace(path, before + _joined(lines))


def _step_of(line: bytes) -> float:
    """Return the step of a line of metrics; infinity where a killed process has cut it short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unused(environment: str) -> Path:
    task = Path(environment.rpartition(":")[2]).stem
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}"
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    return next(RUNS / name for name in names if not (RUNS / name).exists())
