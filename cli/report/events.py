"""What happened between the steps of a run, and at which of them.

Not covered: how it is marked in the charts (`charts.py`).
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate

from bridge.core import private
from bridge.run.run_directory import RunDirectory

Column = Sequence[float | None]
"""One number a step; None where it is missing or not finite."""
CLOCK_SLACK_S = 60.0
"""How far a file's time and an event's may be apart."""
STEP_SECONDS = ("rollout_s", "train_s", "fence_pause_s", "fence_write_s", "fence_publish_s")
"""What a step's time is the sum of; `fence_prepare_s` is a part of `train_s`."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of `events.log`."""

    time: datetime | None
    """When; None where the line has none."""
    text: str
    """What happened."""
    step: int | None
    """The step before or in which it happened; None where there is no telling."""
    is_estimate: bool
    """Whether that step was estimated from the time, since the line names none."""


def read(files: RunDirectory, steps: Sequence[int], columns: Mapping[str, Column]) -> Iterator[Event]:
    """Yield the events of a run with these steps."""
    if not files.events.is_file():
        return
    ends = _end_times(files.metrics.stat().st_mtime, columns, len(steps))
    shown = private.shown_line(files.events.read_text(errors="replace"))  # older versions wrote it whole
    for line in shown.splitlines():
        stamp, _, text = line.partition(" ")
        time = _time(stamp)
        named = re.search(r"\bstep (\d{1,15})\b", line)
        step = int(named[1]) if named else _step_at(time, ends, steps)
        yield Event(
            time=time,
            text=text if time else line,
            step=step,
            is_estimate=step is not None and not named,
        )


def _time(stamp: str) -> datetime | None:
    try:
        return datetime.fromisoformat(stamp).astimezone()
    except ValueError:
        return None


def _end_times(last: float, columns: Mapping[str, Column], num_steps: int) -> list[float]:
    """Estimate when each step ended, counting back from when the last one was written; pauses are not known."""
    parts = [columns.get(name, [None] * num_steps) for name in STEP_SECONDS]
    seconds = [sum(each or 0.0 for each in row) for row in zip(*parts, strict=True)]
    return [last - after for after in [*accumulate(reversed(seconds[1:]), initial=0.0)][::-1]]


def _step_at(time: datetime | None, ends: Sequence[float], steps: Sequence[int]) -> int | None:
    if time is None or not ends[0] - CLOCK_SLACK_S <= time.timestamp() <= ends[-1] + CLOCK_SLACK_S:
        return None
    return steps[min(bisect_left(ends, time.timestamp()), len(steps) - 1)]
