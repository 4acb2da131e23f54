"""Read a run directory: finished, running or killed, and written by any version of Bridge."""

import dataclasses
import io
import json
import re
import shlex
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridge.config import ServeConfig, TrainConfig
from bridge.core import claim, mark, private
from bridge.errors import UsageError
from bridge.run.metrics import StepMetrics
from bridge.run.run_directory import RunDirectory

Column = NDArray[np.float64]
"""One value per step; NaN where it is missing."""
MOST_LAGS = 9
FENCE = ("fence_pause_s", "fence_write_s", "fence_publish_s")
SUMS = {
    "fence_s": FENCE,
    "step_s": ("rollout_s", "train_s", *FENCE),
    "clipped_share": ("clipped_low_share", "clipped_high_share"),
    "older_share": tuple(f"lag_shares/{lag}" for lag in range(1, MOST_LAGS)),
    "logprob_diff_large_share": tuple(f"logprob_diff_histogram/{index}" for index in (5, 6, 7)),
}
"""Derived column -> the columns it adds up."""
RATES = {"generated_per_s": ("tokens_generated", "sampling_s"), "trained_per_s": ("tokens_trained", "train_s")}
"""Derived column -> amount and seconds."""
CLOCK_SLACK_S = 60.0
"""Tolerance between the time of an event and the time of the metrics file."""
ENGINE_VERSION = re.compile(rb"LLM engine \(v(\d[\w.+]*)")
"""vLLM 0.26 to 0.33 log this when the engine starts, within the first `LOG_START_BYTES` of `serve.log`."""
LOG_START_BYTES = 1 << 18
KEPT = "\n\t\u200c\u200d"
"""Invisible characters that stay: white space, and what joins letters and emoji."""
LONGEST_INT = 18
"""Digits. Longer integers are read as text: no float holds them exactly, and the longest fit into none."""


class Event(NamedTuple):
    """One line of `events.log`."""

    time: datetime | None
    text: str
    step: int | None
    """The step that the line names, else the step at that time; None if neither is known."""
    is_estimate: bool
    """Whether the step was derived from the time."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory without its completions (`samples.py`). Whatever it lacks is empty here."""

    path: Path
    steps: list[int]
    columns: Mapping[str, Column]
    """`field`, or `field/item` for lists and mappings, and the derived columns."""
    evaluations: list[dict[str, Any]]
    config: Mapping[str, Any]
    server: Mapping[str, Any]
    derived: Collection[str]
    """Keys of the choices that were derived, not given."""
    summary: Mapping[str, Any]
    """Empty unless the run finished."""
    events: list[Event]
    about: Mapping[str, str]
    """The device, vLLM's version, and when the oldest and the newest file were written; empty where unknown."""
    holder: str | None
    """Pid of the process that is working in the directory."""
    notes: list[str]
    """What is missing or damaged."""

    def column(self, name: str) -> Column:
        """Return a column, all NaN if the run does not have it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))


def read(path: Path) -> Run:
    """Read the run directory `path`.

    Raises:
        UsageError: `path` is not a run directory, or has no complete step.
    """
    files, notes = RunDirectory(path), list[str]()
    if not files.metrics.is_file():
        if inside := sorted(path.glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime):
            command = shlex.join(["bridge", "report", str(inside[-1].parent)])
            raise UsageError(f"{path} is not a run directory, but contains some", remedy=command)
        fault = (
            "is not a run directory, or has no step yet: no metrics.jsonl" if path.is_dir() else "is not a directory"
        )
        raise UsageError(f"{path} {fault}", remedy="bridge train prints the run directory when it starts")
    rows = {row["step"]: row for _, row in json_objects(files.metrics, notes, has_step)}
    if not rows:
        raise UsageError(f"{path}: {files.metrics.name} has no complete step", remedy="wait for the first step")
    steps = sorted(rows)
    columns = _columns([rows[step] for step in steps])
    config, server, summary = (_document(each, notes) for each in (files.config, files.server_config, files.summary))
    choices = private.shown(TrainConfig.written(config))
    evaluated = [row for _, row in json_objects(files.evaluations, notes, has_step)]
    found = {row["step"]: row for row in evaluated if isinstance(row.get("reward_mean"), int | float)}
    notes += _missing(files, rows.values(), choices, has_evaluations=bool(found))
    dated = (files.server_config, files.config, files.metrics, files.evaluations, files.summary)
    times = sorted(datetime.fromtimestamp(each.stat().st_mtime) for each in dated if each.is_file())
    with files.server_log.open("rb") if files.server_log.is_file() else io.BytesIO() as log:
        version = ENGINE_VERSION.search(log.read(LOG_START_BYTES))
    about = {
        "device": str(rows[steps[-1]].get("device", "")),
        "vLLM": version[1].decode() if version else "",
        "written": f"{times[0]:%Y-%m-%d %H:%M} to {times[-1]:%Y-%m-%d %H:%M}",
    }
    return Run(
        path=path, steps=steps, columns=columns, config=choices, notes=notes, about=about,
        evaluations=[found[step] for step in sorted(found)], holder=claim.holder(path.stat().st_ino),
        server=private.shown(ServeConfig.written(server)),
        derived=[*(config.get("derived") or ()), *(server.get("derived") or ())],
        events=list(_events(files, steps, columns)),
        summary=summary if summary.get("steps") == steps[-1] else {},
    )  # fmt: skip


def has_step(row: Mapping[str, Any]) -> bool:
    """Return whether a line names the step that it belongs to."""
    step = row.get("step")
    return isinstance(step, int) and step >= 0


def json_objects(
    path: Path, notes: list[str], is_usable: Callable[[Mapping[str, Any]], bool]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the byte offset and content of each usable JSON object in a file with one per line; note the others."""
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


def visible(text: str) -> str:
    """Return `text` with each character that could hide or reorder others replaced by its code point."""
    return "".join(
        each if each.isprintable() or each in KEPT or unicodedata.category(each) == "Zs" else f"⟨U+{ord(each):04X}⟩"
        for each in text
    )


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for index, row in enumerate(rows):
        for name, value in _flat(row):
            if isinstance(value, int | float):
                columns.setdefault(name, np.full(len(rows), np.nan))[index] = value
    for name, parts in SUMS.items():
        if found := [columns[part] for part in parts if part in columns]:
            columns[name] = np.where(np.isnan(found).all(axis=0), np.nan, np.nansum(found, axis=0))
    columns |= _sampling(columns)
    for name, (amount, seconds) in RATES.items():
        if amount in columns and seconds in columns:
            columns[name] = columns[amount] / np.where(columns[seconds] > 0, columns[seconds], np.nan)
    return columns


def _sampling(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the time in which tokens were sampled: whole steps, if groups are in flight throughout."""
    if "rollout_s" not in columns:
        return {}
    streams = columns["groups_in_flight"] > 0 if "groups_in_flight" in columns else False
    pauses = columns["fence_prepare_s"] > 0 if "fence_prepare_s" in columns else False
    return {"sampling_s": np.where(streams & np.logical_not(pauses), columns["step_s"], columns["rollout_s"])}


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        items = dict(enumerate(value)) if isinstance(value, list) else value
        yield from ((f"{name}/{key}", each) for key, each in (items.items() if isinstance(items, dict) else ()))
        yield name, value


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    found = json_object(path.read_bytes()) if path.is_file() else {}
    if found is None:
        notes.append(f"{path.name} is not a JSON object and was skipped")
    return found or {}


def _missing(
    files: RunDirectory, rows: Collection[Mapping[str, Any]], config: Mapping[str, Any], *, has_evaluations: bool
) -> Iterator[str]:
    is_loop = mark.kind_of(files.path) == "loop"  # which logs what it likes, and has no evaluations of Bridge's
    known = [field.name for field in dataclasses.fields(StepMetrics) if field.type in (int, float) and not is_loop]
    if absent := [name for name in known if not any(name in row for row in rows)]:
        yield f"no step has {', '.join(absent)}: another version of Bridge wrote {files.metrics.name}"
    if not files.config.is_file():
        yield "no config.json: the configuration of the run is unknown"
    if not has_evaluations and not files.summary.is_file() and config.get("eval_samples") != 0 and not is_loop:
        yield "no evaluations.jsonl: the held-out reward is unknown"
    if not files.rollouts.is_file() and config.get("save_rollouts") is not False and not is_loop:
        yield "no rollouts.jsonl: there are no completions to show"
    if lost := sum(1 for _ in json_objects(files.lost_metrics, [], has_step)):
        yield f"the run resumed from a checkpoint: {lost:,} steps were lost and repeated (metrics_lost.jsonl)"


def _events(files: RunDirectory, steps: Sequence[int], columns: Mapping[str, Column]) -> Iterator[Event]:
    seconds = np.nan_to_num(columns.get("step_s", np.zeros(len(steps))))
    end = files.metrics.stat().st_mtime  # of the last step; pauses between steps are unknown
    ends = [end - after for after in accumulate(reversed(seconds[1:]), initial=0.0)][::-1]
    text = files.events.read_text(errors="replace") if files.events.is_file() else ""
    for line in private.shown_line(text).splitlines():  # older versions wrote secrets
        stamp, _, rest = line.partition(" ")
        try:
            time = datetime.fromisoformat(stamp).astimezone()
        except ValueError:
            time, rest = None, line
        named, step = re.search(r"\bstep (\d{1,15})\b", line), None
        if named:
            step = int(named[1])
        elif time and ends[0] - CLOCK_SLACK_S <= time.timestamp() <= ends[-1] + CLOCK_SLACK_S:
            step = steps[min(bisect_left(ends, time.timestamp()), len(steps) - 1)]
        yield Event(time, rest, step, is_estimate=not named)
