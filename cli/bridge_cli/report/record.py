"""Read a run directory: finished, running or killed, and written by any version of Bridge."""

import json
import re
import shlex
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridge.checkpoints.metrics import StepMetrics
from bridge.checkpoints.rollout_record import cut
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import ServeConfig, TrainConfig
from bridge.core import folder_claim, redaction
from bridge.errors import UsageError

Column = NDArray[np.float64]
"""One value per step; NaN where it is missing."""
LONGEST_INT = 18
"""Digits. Longer integers stay text: a float cannot hold them exactly, and very long ones overflow."""
NUM_PROBLEMS, NUM_STEPS = 3, 12
"""How many recurring problems to follow, and how many steps to show."""
FEWEST_STEPS = 4
"""A problem that occurs in fewer steps is not followed."""
LONGEST_TEXT = 12_000
"""Characters; longer texts are cut in the middle, because answers are at the end."""
SHORTEST_TURN = 300
"""Characters that are shown of each turn, however many turns there are."""


class Event(NamedTuple):
    """One line of `events.log`."""

    time: datetime | None
    text: str
    step: int | None
    """The step that the line names, if it names one."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory; the fields for missing files are empty."""

    name: str
    path: Path
    steps: list[int]
    columns: Mapping[str, Column]
    """`field`, or `field/item` for lists and mappings, and the derived columns."""
    evaluations: list[dict[str, Any]]
    config: Mapping[str, Any]
    server: Mapping[str, Any]
    derived: Collection[str]
    """Keys of the choices that were derived, not given."""
    starts: list[Mapping[str, str]]
    """What each start of the run ran on; empty for a run of an earlier version."""
    summary: Mapping[str, Any]
    """Empty unless the run finished."""
    events: list[Event]
    about: Mapping[str, str]
    """The loss of the steps and the device, empty if unknown, and when the oldest and the newest file were written."""
    holder: str | None
    """Pid of the process that is working in the directory."""
    samples: "Samples"
    notes: list[str]
    """What is missing or damaged."""

    def column(self, name: str) -> Column:
        """Return a column, all NaN if the run does not have it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))


def read(path: Path, name: str = "", *, num_runs: int = 1) -> Run:
    """Read the run directory `path`, one of `num_runs`, which share the room for completions.

    Raises:
        UsageError: `path` is not a run directory, or has no complete step.
    """
    files = RunDirectory(path)
    notes = list[str]()
    if not files.metrics.is_file():
        if inside := sorted(path.glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime):
            command = shlex.join(["bridge", "report", str(inside[-1].parent)])
            raise UsageError(f"{path} is not a run directory, but contains some", hint=command)
        fault = (
            "is not a run directory, or has no step yet: no metrics.jsonl" if path.is_dir() else "is not a directory"
        )
        raise UsageError(f"{path} {fault}", hint="bridge train prints the run directory when it starts")
    rows = {row["step"]: row for _, row in json_objects(files.metrics, notes, has_step)}
    if not rows:
        raise UsageError(f"{path}: {files.metrics.name} has no complete step", hint="wait for the first step")
    steps = sorted(rows)
    config, server, summary = (_document(file, notes) for file in (files.config, files.server_config, files.summary))
    choices = redaction.redacted(TrainConfig.written(config))
    evaluated = [row for _, row in json_objects(files.evaluations, notes, has_step)]
    evaluations = {row["step"]: row for row in evaluated if isinstance(row.get("reward_mean"), int | float)}
    if lost := sum(1 for _ in json_objects(files.lost_metrics, [], has_step)):
        notes.append(f"the run resumed from a checkpoint: {lost:,} steps were lost and repeated (metrics_lost.jsonl)")
    dated_files = (files.server_config, files.config, files.metrics, files.evaluations, files.summary)
    times = sorted(datetime.fromtimestamp(file.stat().st_mtime) for file in dated_files if file.is_file())
    written = f"{times[0]:%Y-%m-%d %H:%M} to {times[-1]:%Y-%m-%d %H:%M}"
    return Run(
        name=name, path=path, steps=steps,
        samples=samples(files.rollouts, notes, longest=LONGEST_TEXT // num_runs),
        columns=_columns([rows[step] for step in steps]), config=choices, notes=notes,
        about={
            "loss": objectives([rows[step] for step in steps]),
            "device": str(rows[steps[-1]].get("device", "")),
            "written": written,
        },
        evaluations=[evaluations[step] for step in sorted(evaluations)], holder=folder_claim.holder(path.stat().st_ino),
        server=redaction.redacted(ServeConfig.written(server)),
        derived=[*_object(config.get("derived")), *_object(server.get("derived"))],
        starts=[redaction.redacted(row) for _, row in json_objects(files.starts, notes, bool)],
        events=list(_events(files)),
        summary=summary if summary.get("steps") == steps[-1] else {},
    )  # fmt: skip


def objectives(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the loss of a run's steps, with the steps of each if there are several; empty for an older run."""
    phases = [(name, [row["step"] for row in phase]) for name, phase in groupby(rows, lambda row: row.get("objective"))]
    if len(phases) == 1:
        return str(phases[0][0] or "")
    return ", ".join(f"{name or 'unknown'} in steps {steps[0]} to {steps[-1]}" for name, steps in phases)


def has_step(row: Mapping[str, Any]) -> bool:
    """Return whether a line names the step that it belongs to."""
    step = row.get("step")
    return isinstance(step, int) and step >= 0


def json_objects(
    path: Path, notes: list[str], is_usable: Callable[[Mapping[str, Any]], bool]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the byte offset and content of each usable JSON object in a file with one per line; note unusable lines."""
    if not path.is_file():
        return
    offset = skipped = 0
    with path.open("rb") as file:
        for line in file:
            if (row := json_object(line)) and is_usable(row):
                yield offset, row
            elif line.strip():
                skipped += 1
            offset += len(line)
    if skipped:
        notes.append(f"{path.name}: skipped {skipped} incomplete or damaged lines")


def json_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object, with None for NaN and infinity; None if `text` is anything else."""
    try:
        row = json.loads(
            text,
            parse_int=lambda digits: int(digits) if len(digits) <= LONGEST_INT else digits,
            parse_constant=lambda _: None,
        )
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _object(value: object) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object, otherwise an empty one: anybody may have edited the file."""
    return value if isinstance(value, dict) else {}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    columns: dict[str, Column] = defaultdict(lambda: np.full(len(rows), np.nan))
    for index, row in enumerate(rows):
        for metric, item, value in StepMetrics(row).numbers():
            columns[f"{metric.name}/{item}" if item else metric.name][index] = value
    return {**columns}


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    document = json_object(path.read_bytes()) if path.is_file() else {}
    if document is None:
        notes.append(f"{path.name} is not a JSON object and was skipped")
    return document or {}


def _events(files: RunDirectory) -> Iterator[Event]:
    text = files.events.read_text(errors="replace") if files.events.is_file() else ""
    for line in redaction.redact_urls(text).splitlines():  # older versions wrote secrets
        stamp, _, rest = line.partition(" ")
        try:
            time = datetime.fromisoformat(stamp).astimezone()
        except ValueError:
            time = None
            rest = line
        named = re.search(r"\bstep (\d{1,15})\b", line)
        yield Event(time, rest, int(named[1]) if named else None)


class Samples(NamedTuple):
    """Completions of one run."""

    series: Sequence[Mapping[str, Any]] = ()
    """Each has a `problem` and its `steps` as shown; if no problem recurs, one has the run's steps and no problem."""
    num_groups: int = 0
    num_steps: int = 0


def samples(path: Path, notes: list[str], *, longest: int = LONGEST_TEXT) -> Samples:
    """Pick completions from `rollouts.jsonl`: of problems that recur during the run, or of steps spread over the run.

    The file is not loaded as a whole. Damaged lines are noted.
    """
    groups: list[tuple[int, int, int]] = []
    for offset, row in json_objects(path, notes, _is_group):
        if groups and row["step"] < groups[-1][0]:  # the run resumed from a checkpoint and repeated these steps
            del groups[bisect_left(groups, (row["step"],)) :]
        groups.append((row["step"], offset, hash(json.dumps(row["problem"].get("prompt")))))
    if not groups:
        return Samples()
    problems: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    every_step: dict[int, list[int]] = defaultdict(list)
    for step, offset, problem in groups:
        problems[problem][step].append(offset)
        every_step[step].append(offset)
    half = (groups[-1][0] - groups[0][0]) / 2
    recurring = [steps for steps in problems.values() if len(steps) >= FEWEST_STEPS and max(steps) - min(steps) >= half]
    followed = sorted(recurring, key=len, reverse=True)[:NUM_PROBLEMS]
    with path.open("rb") as file:
        series = [_series(file, offsets, longest) for offsets in followed or [every_step]]
    if not followed:
        series = [{**series[0], "problem": {}}]
    return Samples(series, len(groups), len(every_step))


def _is_group(row: Mapping[str, Any]) -> bool:
    """Return whether a line has what the page shows of a group, in the right types."""
    parts = [row.get("completions"), row.get("unscored", [])]  # missing in runs of earlier versions
    are_lists = all(isinstance(part, list) and all(isinstance(sample, dict) for sample in part) for part in parts)
    if not (are_lists and has_step(row) and isinstance(row.get("problem"), dict)):
        return False
    return all(isinstance(sample.get("reward"), int | float | None) for sample in row["completions"])


def _series(file: BinaryIO, offsets: Mapping[int, list[int]], longest: int) -> dict[str, Any]:
    numbers = list(offsets)
    if len(numbers) > NUM_STEPS:
        numbers = [numbers[round(index * (len(numbers) - 1) / (NUM_STEPS - 1))] for index in range(NUM_STEPS)]
    steps = []
    for number in numbers:
        rows = []
        for offset in offsets[number]:
            file.seek(offset)
            rows.append(_bounded(json_object(file.readline()), longest))
        steps.append({"number": number, **_step(rows)})
    return {"problem": rows[-1]["problem"], "steps": steps}


def _step(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rewards of a step, and its best, median, worst and first unscored completion."""
    scored = []
    unscored = []
    for row in rows:
        about = {"problem": row["problem"], "label": "unscored"}
        scored += [sample | about for sample in row.get("completions", []) if sample.get("reward") is not None]
        unscored += [sample | about for sample in row.get("unscored", [])]
    scored.sort(key=lambda sample: sample["reward"])
    rewards = [sample["reward"] for sample in scored]
    picked = {"best": -1, "median": len(scored) // 2, "worst": 0}
    if len(scored) < 3:
        del picked["median"]
    if len(set(rewards)) < 2:
        picked = {"all rewards equal": 0} if scored else {}
    shown = [scored[index] | {"label": label} for label, index in picked.items()]
    return {"rewards": rewards, "num_unscored": len(unscored), "completions": shown + unscored[:1]}


def _bounded(row: Any, longest: int) -> Any:
    """Return a group with truncated texts; the turns of a completion share the limit of one text."""
    for sample in (*row["completions"], *row.get("unscored", ())):
        if (turns := sample.get("turns")) and isinstance(turns, list):
            sample["turns"] = cut(turns, max(longest // len(turns), SHORTEST_TURN))
    return cut(row, longest)
