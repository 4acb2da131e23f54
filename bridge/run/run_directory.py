"""The run directory: everything that one training run leaves behind, and the names of its files.

Not covered: checkpoints (`bridge/run/checkpoint.py`), whose folder the user may choose (`--save-path`).
"""

import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.config import TrainConfig
from bridge.core import atomic_file, claim, json_lines, mark, private
from bridge.core.atomic_file import one_line_errors
from bridge.errors import UsageError
from bridge.run import records
from bridge.run.metrics import Evaluation, StepMetrics, Summary
from bridge.server.manifest import MANIFEST_NAME
from bridge.types import Group

RUNS = Path("runs")
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
CHECKED_APART = {CHECKPOINTS, REPORT, MANIFEST_NAME}
"""What is known by its own content, and replaces nothing else wherever it is written."""


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder."""

    path: Path
    """The folder."""
    made: tuple[Path, ...] = ()
    """The folders that were made for it, the innermost first."""
    tell: Callable[[str], None] | None = None
    """Tells a person of an event when it happens; absent: nobody is told."""
    is_writer: bool = True
    """False on every rank of the run but the first: its notes are shown but not kept, and it writes nothing else."""

    @classmethod
    def create(
        cls,
        given: Path | None,
        *,
        environment: str,
        tell: Callable[[str], None] | None = None,
        kind: mark.Kind = "run",
    ) -> "RunDirectory":
        """Make the folder `given`, or a new one under `runs/` named by the time and `environment`.

        Raises:
            UsageError: `given` holds another run or foreign files, is in use, is a file, or cannot be made.
        """
        path = _unused(environment) if given is None else given
        run = cls(path, _claimed(path), tell)
        if run.metrics.exists():
            raise UsageError(
                f"{path} holds another run: {run.metrics.name}",
                remedy="name another with --run-dir"
                + (
                    f", or go on with that run: --resume --save-path {shlex.quote(str(run.save_path))}"
                    if run.save_path
                    else ""
                ),
            )
        mark.refuse_foreign(path, run.names - CHECKED_APART, flag="--run-dir")
        mark.put(path, kind)
        return run

    @classmethod
    def reopen(cls, path: Path, step: int, *, tell: Callable[[str], None] | None = None) -> "RunDirectory":
        """Return the directory of a run that goes on after `step`; what is of later steps is moved aside.

        Raises:
            UsageError: another process is at it, or the disk refuses.
        """
        run = cls(path, _claimed(path), tell)
        mark.put(path, "run")
        last = json_lines.cut(run.metrics, step)
        json_lines.cut(run.rollouts, step)
        json_lines.cut(run.evaluations, step)
        if step and step != last:
            run.note(f"{run.metrics} has no line of step {step}: the run was killed before that, or began elsewhere")
        return run

    @classmethod
    def join(cls, path: Path, *, tell: Callable[[str], None] | None = None) -> "RunDirectory":
        """Open the directory of a run whose rank 0 has claimed it and writes it.

        Raises:
            UsageError: no process has claimed it.
        """
        if not (path.is_dir() and claim.is_claimed(path)):
            raise UsageError(
                f"no run is using the run directory {path}, so this process cannot be one of its ranks",
                remedy="start rank 0 of the run first",
            )
        return cls(path, tell=tell, is_writer=False)

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
        """Return the file of the completions, one JSON object a line for each group."""
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
    def wandb_id(self) -> Path:
        """Return the file of the id that Weights & Biases knows the run by."""
        return self.path / "wandb_id"

    @property
    def summary(self) -> Path:
        """Return the file of what the whole run came to."""
        return self.path / "summary.json"

    @property
    def lost_metrics(self) -> Path:
        """Return the file of the steps that were lost, because the run went on from an earlier checkpoint."""
        return json_lines.lost(self.metrics)

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
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints, unless `--save-path` names another."""
        return self.path / CHECKPOINTS

    @property
    def report(self) -> Path:
        """Return the file of the page that `bridge report` writes."""
        return self.path / REPORT

    @property
    def names(self) -> frozenset[str]:
        """Return the name of everything that Bridge writes into the folder."""
        lines = (self.metrics, self.rollouts, self.evaluations)
        files = (self.config, self.server_config, self.summary, self.events, self.server_log, self.wandb_id)
        folders = (self.tensorboard, self.path / "wandb", self.served, self.checkpoints)
        whole = (*lines, *map(json_lines.lost, lines), *files, *folders, self.manifest, self.report)
        return frozenset(path.name for path in whole)

    @property
    def save_path(self) -> Path | None:
        """Return the folder of the run's checkpoints; None where there is no telling."""
        try:
            return Path(self.choices()["save_path"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def choices(self) -> dict[str, Any]:
        """Return the run's choices by key, derived values in the place of absent ones.

        Raises:
            OSError: there is no `config.json`.
            ValueError: it is damaged.
        """
        return TrainConfig.written(json.loads(self.config.read_bytes()))

    def remove_if_unused(self) -> None:
        """Remove the folders that were made for this run, where nothing was put into them."""
        if self.is_writer:
            claim.remove_unused(self.made)
            mark.remove_if_alone(self.path)
            claim.remove_unused(self.made)

    def write_config(self, chosen: TrainConfig, settled: TrainConfig | None = None) -> None:
        """Write what was chosen and, apart from it, what `settled` derived; readable by the owner only: secrets."""
        write_json(self._writable(self.config), chosen.document(settled), mode=0o600)

    def write_summary(self, summary: Summary) -> None:
        """Write what the run came to; a number that is not finite becomes null."""
        write_json(self._writable(self.summary), json_lines.plain(dataclasses.asdict(summary)))

    def record(self, line: str) -> None:
        """Append what happened to the events, with the time."""
        if not self.is_writer:
            return
        line = private.shown_line(line)
        with one_line_errors(self.events), self.events.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")

    def note(self, line: str) -> None:
        """Append what happened to the events, and show it to the person who started the run."""
        self.record(line)
        if self.tell is not None:
            self.tell(private.shown_line(line))

    def append(self, metrics: StepMetrics) -> None:
        """Append one step and hand it to the operating system at once; a number that is not finite becomes null."""
        json_lines.append(self._writable(self.metrics), [dataclasses.asdict(metrics)])

    def append_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Append what `step` was learnt from; what JSON cannot hold of an answer becomes its repr."""
        json_lines.append(self._writable(self.rollouts), (records.of_group(step, group) for group in groups))

    def append_evaluation(self, evaluation: Evaluation) -> None:
        """Append one evaluation on held-out problems, as `append` does."""
        json_lines.append(self._writable(self.evaluations), [dataclasses.asdict(evaluation)])

    def first_evaluation(self) -> float | None:
        """Return the mean held-out reward before the run's first step; None if it was not measured."""
        if not self.evaluations.exists():
            return None
        with self.evaluations.open() as file:
            first = json.loads(file.readline() or "{}")
        return first.get("reward_mean") if first.get("step") == 0 else None

    def settle(self) -> None:
        """Wait until the metrics are on the disk: no checkpoint shall survive a power cut that a line did not."""
        json_lines.settle(self.metrics)

    def _writable(self, path: Path) -> Path:
        assert self.is_writer, f"only rank 0 of a run writes {path}"
        return path


def to_json(metrics: StepMetrics) -> str:
    """Return one step as a JSON object on one line; a number that is not finite becomes null."""
    return json_lines.line(dataclasses.asdict(metrics))


def labelled_json(label: str, record: Evaluation | Summary, **more: object) -> str:
    """Return a record of another kind, with what else belongs to it, as `{label: {...}}` on one line."""
    return json_lines.line({label: {**dataclasses.asdict(record), **more}})


def write_json(path: Path, document: dict[str, Any], *, mode: int = 0o666) -> None:
    """Write `document` to `path` atomically."""
    atomic_file.replace(path, (json.dumps(document, indent=1) + "\n").encode(), mode=mode)


def _claimed(path: Path) -> tuple[Path, ...]:
    """Make the run directory `path`, keep other processes out of it, and return the folders that were made."""
    return claim.make(path, what="run directory", flag="--run-dir")


def _unused(environment: str) -> Path:
    task = Path(environment.rpartition(":")[2]).stem
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}"
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    return next(RUNS / name for name in names if not (RUNS / name).exists())
