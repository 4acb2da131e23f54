"""The run directory: the files of one training run, and their names.

Not covered: checkpoints (`checkpoint.py`), whose folder the user may choose (`--save-path`).
"""

import dataclasses
import json
import logging
import shlex
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.checkpoints import rollout_record
from bridge.checkpoints.metrics import Evaluation, StepMetrics, Summary
from bridge.config import TrainConfig
from bridge.core import atomic_file, folder_claim, folder_mark, json_lines, logs, redaction
from bridge.core.atomic_file import one_line_errors
from bridge.errors import UsageError
from bridge.server.manifest import MANIFEST_NAME
from bridge.types import Group

logger = logging.getLogger(__name__)

RUNS = Path("runs")
REPORT = "report.html"
LONGEST_EVENT = 10_000
"""Maximum length of a line in `events.log`."""


@dataclass(frozen=True)
class _Entry:
    """Path of a file or folder in a run directory."""

    name: str
    checked_apart: bool = False
    """Whether its own code recognizes it by its content, and never overwrites anything else."""

    def __get__(self, run: "RunDirectory", _: type["RunDirectory"]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder."""

    path: Path
    made: tuple[Path, ...] = ()
    """The folders that were created for the run, innermost first."""
    is_writer: bool = True
    """Whether this process may write; only the first rank may."""

    config = _Entry("config.json")
    """The run's choices, and the values derived from them."""
    server_config = _Entry("serve.json")
    """The server's choices, if the run started the server."""
    starts = _Entry("starts.jsonl")
    """Versions, commit, device and command of each start of the run, one JSON object per line."""
    metrics = _Entry("metrics.jsonl")
    """The metrics of each step, one JSON object per line."""
    rollouts = _Entry("rollouts.jsonl")
    """The completions of each group, one JSON object per line."""
    evaluations = _Entry("evaluations.jsonl")
    """The evaluations on held-out problems, one JSON object per line."""
    summary = _Entry("summary.json")
    """The result of the whole run."""
    events = _Entry("events.log")
    """The run's log messages, one per line."""
    server_log = _Entry("serve.log")
    """The server's output, if the run started the server."""
    ranks = _Entry("ranks")
    """Folder with the output of each rank except the first, and of its server."""
    manifest = _Entry(MANIFEST_NAME, checked_apart=True)
    """The server's manifest, if the run started the server and no other path was given."""
    served = _Entry("served")
    """Folder with versions of the weights for a server to load between checkpoints."""
    checkpoints = _Entry("checkpoints", checked_apart=True)
    """Folder with the checkpoints, unless `--save-path` names a different one."""
    report = _Entry(REPORT, checked_apart=True)
    """The page that `bridge report` writes."""
    tensorboard = _Entry("tensorboard")
    """Folder with TensorBoard's files."""
    wandb = _Entry("wandb")
    """Folder with the files of Weights & Biases."""
    wandb_id = _Entry("wandb_id")
    """The run's id at Weights & Biases."""

    @classmethod
    def create(
        cls,
        given: Path | None,
        *,
        environment: str,
        kind: folder_mark.Kind = "run",
    ) -> "RunDirectory":
        """Create the folder `given`, or a new one under `runs/` named after the time and the `environment`.

        Raises:
            UsageError: `given` already holds a run or foreign files, is in use, is a file, or cannot be created.
        """
        path = given or _unused(environment)
        run = cls(path, folder_claim.make(path, what="run directory", flag="--run-dir"))
        if run.metrics.exists():
            resume = f", or resume that run: --resume --save-path {shlex.quote(str(run.save_path))}"
            raise UsageError(
                f"{path} already holds a run: it has {run.metrics.name}",
                hint="name a new folder with --run-dir" + (resume if run.save_path else ""),
            )
        taken = run.names - {entry.name for entry in _entries() if entry.checked_apart}
        folder_mark.refuse_foreign(path, taken, flag="--run-dir")
        folder_mark.put(path, kind)
        return run

    @classmethod
    def reopen(cls, path: Path, step: int, *, kind: folder_mark.Kind = "run") -> "RunDirectory":
        """Open the directory of a run that resumes after `step`; lines of later steps are moved to separate files.

        Raises:
            UsageError: another process uses the directory, or it cannot be written.
        """
        run = cls(path, folder_claim.make(path, what="run directory", flag="--run-dir"))
        folder_mark.put(path, kind)
        last = json_lines.cut(run.metrics, step)
        json_lines.cut(run.rollouts, step)
        json_lines.cut(run.evaluations, step)
        if step > 0 and step != last:
            with run.recording():
                logger.info(
                    f"{run.metrics} has no line for step {step}: the run was killed before writing it, or began"
                    " in a different directory"
                )
        return run

    @classmethod
    def of_checkpoint(cls, folder: Path, *, saved_by: Path) -> "RunDirectory":
        """Return the run directory that contains a checkpoint, even if the directory was moved or copied.

        If none contains it, return `saved_by`, the run directory that the checkpoint names.
        """
        around = cls(folder.absolute().parent.parent)
        save_path = around.save_path
        is_inside = save_path is not None and save_path.resolve() == folder.resolve().parent
        return around if is_inside else cls(saved_by)

    @classmethod
    def join(cls, path: Path) -> "RunDirectory":
        """Open a run directory for a rank other than 0. Only rank 0, which has claimed the directory, writes into it.

        Raises:
            UsageError: no process has claimed it.
        """
        if not (path.is_dir() and folder_claim.is_claimed(path)):
            raise UsageError(
                f"no run is using the run directory {path}, so this process cannot be one of its ranks",
                hint="start rank 0 of the run first",
            )
        return cls(path, is_writer=False)

    @property
    def lost_metrics(self) -> Path:
        """The file with the lines of steps after the checkpoint from which the run resumed."""
        return json_lines.lost(self.metrics)

    @property
    def names(self) -> frozenset[str]:
        """The names of all files and folders that Bridge writes into the directory."""
        names = {entry.name for entry in _entries()}
        return frozenset(names | {json_lines.lost(Path(name)).name for name in names if name.endswith(".jsonl")})

    @property
    def save_path(self) -> Path | None:
        """The folder of the run's checkpoints: the one that the user chose, or `checkpoints` in this directory.

        None if the run's choices cannot be read.
        """
        try:
            chosen = self.choices(derived=False)["save_path"]
            return self.checkpoints if chosen is None else Path(chosen)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def choices(self, *, derived: bool = True) -> dict[str, Any]:
        """Return the run's choices by key; with `derived`, derived values fill in missing ones.

        Raises:
            OSError: `config.json` cannot be read.
            ValueError: `config.json` is damaged.
        """
        document = json_lines.parsed(self.config.read_bytes())
        if not isinstance(document, dict):
            raise ValueError(f"{self.config} holds a {type(document).__name__}, expected an object")
        return TrainConfig.written(document if derived else {**document, "derived": None})

    def remove_if_unused(self) -> None:
        """Remove the folders that were created for this run, if they are empty."""
        if self.is_writer:
            folder_claim.remove_unused(self.made)
            folder_mark.remove_if_alone(self.path)
            folder_claim.remove_unused(self.made)

    def write_config(self, document: dict[str, Any]) -> None:
        """Write the run's choices (`Config.document`), readable only by the owner, because they may hold secrets."""
        write_json(self.writable(self.config), document, mode=0o600)

    def write_summary(self, summary: Summary) -> None:
        """Write the result of the run; non-finite numbers become null."""
        write_json(self.writable(self.summary), json_lines.plain(dataclasses.asdict(summary)))

    def record(self, line: str) -> None:
        """Append an event with the time; control characters, which a model may have written, are escaped."""
        if self.is_writer:
            shown = redaction.escaped(" ".join(redaction.redact_urls(line[:LONGEST_EVENT]).split()))
            with one_line_errors(self.events), self.events.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {shown}\n")

    def recording(self) -> AbstractContextManager[None]:
        """Append all log messages of Bridge as events while the block runs."""
        return logs.handled_by(_Events(self))

    def append_start(self, start: dict[str, Any]) -> None:
        """Append the versions, device and command of a start of the run."""
        json_lines.append(self.writable(self.starts), [start])

    def append(self, metrics: StepMetrics) -> None:
        """Append the metrics of one step immediately; non-finite numbers become null."""
        json_lines.append(self.writable(self.metrics), [metrics])

    def append_rollouts(self, step: int, groups: Sequence[Group], *, version: int | None = None) -> None:
        """Append the groups of `step`, trained with weights of `version`; values that JSON lacks become their repr."""
        rows = (rollout_record.record(step, group, version) for group in groups)
        json_lines.append(self.writable(self.rollouts), rows)

    def append_evaluation(self, evaluation: Evaluation) -> None:
        """Append one evaluation immediately; non-finite numbers become null."""
        json_lines.append(self.writable(self.evaluations), [evaluation])

    def first_evaluation(self) -> float | None:
        """Return the mean held-out reward before the run's first step; None if it was not measured."""
        if not self.evaluations.exists():
            return None
        with self.evaluations.open() as file:
            first = json.loads(file.readline() or "{}")
        return first.get("reward_mean") if first.get("step") == 0 else None

    def last_evaluated(self) -> int | None:
        """Return the step of the last evaluation; None if there was none."""
        if not self.evaluations.exists():
            return None
        steps: list[int] = [json.loads(line)["step"] for line in self.evaluations.read_text().splitlines()]
        return max(steps, default=None)

    def writable(self, path: Path) -> Path:
        """Return `path` unchanged, after asserting that this process may write into the run directory."""
        assert self.is_writer, f"only rank 0 of a run writes {path}"
        return path


class _Events(logging.Handler):
    """Appends Bridge's log messages to the events of a run."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__()
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        self._run.record(record.getMessage())


def labelled_json(label: str, record: Evaluation | Summary, **more: object) -> str:
    """Return a record with `more` keys as `{label: {...}}` on one line."""
    return json_lines.line({label: {**(record if isinstance(record, dict) else dataclasses.asdict(record)), **more}})


def write_json(path: Path, document: dict[str, Any], *, mode: int = 0o666) -> None:
    """Write `document` to `path` atomically."""
    atomic_file.replace(path, (json.dumps(document, indent=1) + "\n").encode(), mode=mode)


def _entries() -> list[_Entry]:
    return [entry for entry in vars(RunDirectory).values() if isinstance(entry, _Entry)]


def _unused(environment: str) -> Path:
    task = Path(environment.rpartition(":")[2]).stem
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}"
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    return next(RUNS / name for name in names if not (RUNS / name).exists())
