"""One run as its directory tells it: finished, under way, killed or broken, and by whichever version it was written.

Not covered: completions (`samples.py`), and what is made of the numbers (`figures.py`, `charts.py`).
"""

import dataclasses
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bridge.config import ServeConfig, TrainConfig
from bridge.core import claim, private
from bridge.errors import UsageError
from bridge.run.metrics import StepMetrics
from bridge.run.run_directory import RunDirectory
from cli.report import events
from cli.report.events import Column, Event
from cli.report.lines import number, objects, parsed

ENGINE_VERSION = re.compile(rb"LLM engine \(v(\d[\w.+]*)")
"""What vLLM 0.26 to 0.33 log when the engine starts."""
LOG_START_BYTES = 1 << 18
"""How much of the server's log is searched for it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that is read of a run at once: all but its completions."""

    path: Path
    """The run directory."""
    steps: tuple[int, ...]
    """Numbers of the steps, rising."""
    columns: Mapping[str, Column]
    """Field of `StepMetrics` -> its value in each step; the items of a field of several are `field/name`."""
    evaluations: tuple[Mapping[str, Any], ...]
    """The evaluations on held-out problems, by rising step, at least `step` and `reward_mean` in each."""
    config: Mapping[str, Any]
    """The run's resolved choices; empty where the file is missing."""
    server: Mapping[str, Any]
    """The server's resolved choices; empty where the run did not start it."""
    summary: Mapping[str, Any]
    """What the run came to; empty where it did not finish."""
    events: tuple[Event, ...]
    """What happened between the steps."""
    device: str
    """`cuda`, `cpu`, or empty where no step tells."""
    engine_version: str
    """vLLM's version, from the server's log; empty where the run did not start it."""
    holder: str | None
    """Process that is at work in the directory."""
    written: tuple[datetime, datetime]
    """When the first and the last of its files were written."""
    notes: tuple[str, ...]
    """What is missing or broken, one line each."""

    def column(self, name: str) -> Column:
        """Return one number a step, all None where the run has none of that name."""
        return self.columns.get(name) or [None] * len(self.steps)

    def items(self, field: str) -> dict[str, Column]:
        """Return the columns of a field of several, by the items' names."""
        return {name.partition("/")[2]: each for name, each in self.columns.items() if name.startswith(f"{field}/")}


def read(path: Path) -> Run:
    """Read the run directory `path`.

    Raises:
        UsageError: it is none, or no step of it is whole.
    """
    files = RunDirectory(path)
    if not files.metrics.is_file():
        raise _no_run(path)
    notes: list[str] = []
    rows = {row["step"]: row for row in objects(files.metrics, notes) if _is_step(row.get("step"))}
    steps = tuple(sorted(rows))
    if not steps:
        raise UsageError(
            f"{path} has no whole step in {files.metrics.name}", remedy="wait until its first step is done"
        )
    columns = _columns([rows[step] for step in steps])
    notes += _gaps(rows.values())
    held_out = {row["step"]: row for row in objects(files.evaluations, notes) if _is_evaluation(row)}
    config = private.shown(TrainConfig.written(_document(files.config, notes)))
    summary = _document(files.summary, notes)
    server = private.shown(ServeConfig.written(_document(files.server_config, [])))
    notes += _absences(files, config, len(held_out))
    return Run(
        path=path, steps=steps, columns=columns, config=config, server=server,
        summary=summary if number(summary.get("steps")) == steps[-1] else {},
        evaluations=tuple(held_out[step] for step in sorted(held_out)),
        events=tuple(events.read(files, steps, columns)), device=str(rows[steps[-1]].get("device") or ""),
        engine_version=_engine_version(files.server_log), holder=claim.holder(path.stat().st_ino),
        written=_written(files), notes=tuple(notes),
    )  # fmt: skip


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return _is_step(row.get("step")) and number(row.get("reward_mean")) is not None


def _no_run(path: Path) -> UsageError:
    if not path.is_dir():
        return UsageError(f"no folder {path}", remedy="name a run directory: bridge train says which one it writes")
    inside = sorted(path.glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    if inside:
        return UsageError(
            f"{path} is no run, but holds some", remedy=shlex.join(["bridge", "report", str(inside[-1].parent)])
        )
    return UsageError(
        f"{path} is no run of Bridge, or one without a step: it has no metrics.jsonl",
        remedy="name the folder that bridge train has told as its run directory",
    )


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    columns: dict[str, list[float | None]] = {}
    for index, row in enumerate(rows):
        for name, value in _flat(row):
            columns.setdefault(name, [None] * len(rows))[index] = value
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield every number of a step under its name, `field/name` for those inside a mapping or a list."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", number(each)) for key, each in value.items())
        elif isinstance(value, list):
            yield from ((f"{name}/{index}", number(each)) for index, each in enumerate(value))
        else:
            yield name, number(value)


def _gaps(rows: Collection[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the fields that no step has. A null is no gap: there was nothing to measure in that step."""
    known = [field.name for field in dataclasses.fields(StepMetrics) if field.type in (int, float)]
    absent = [name for name in known if not any(name in row for row in rows)]
    if absent:
        yield f"no step has {', '.join(absent)}: another version of Bridge wrote them"


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the JSON object that the file holds; empty where it is missing or broken."""
    if not path.is_file():
        return {}
    found = parsed(path.read_bytes())
    if found is None:
        notes.append(f"{path.name} is no JSON object, and is left out")
    return found or {}


def _absences(files: RunDirectory, config: Mapping[str, Any], num_evaluations: int) -> Iterator[str]:
    if not files.config.is_file():
        yield "no config.json: with which choices it was trained is not known"
    if not num_evaluations and not files.summary.is_file() and config.get("eval_samples") != 0:
        yield "no evaluations.jsonl: the reward on held-out problems is not known"
    if not files.rollouts.is_file() and config.get("save_rollouts") is not False:
        yield "no rollouts.jsonl: no completions to show"
    if files.lost_metrics.is_file():
        lost = sum(1 for _ in objects(files.lost_metrics, []))
        yield f"the run went on from a checkpoint: {lost:,} steps were lost and taken again (metrics_lost.jsonl)"


def _engine_version(log: Path) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        found = ENGINE_VERSION.search(file.read(LOG_START_BYTES))
    return found[1].decode() if found else ""


def _written(files: RunDirectory) -> tuple[datetime, datetime]:
    known = [files.server_config, files.config, files.metrics, files.evaluations, files.summary]
    times = [path.stat().st_mtime for path in known if path.is_file()]
    return datetime.fromtimestamp(min(times)).astimezone(), datetime.fromtimestamp(max(times)).astimezone()
