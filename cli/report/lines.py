"""Files of one JSON object a line, as a process that was killed may have left them.

Not covered: what the objects mean (`record.py`, `samples.py`).
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def objects(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file that has one a line, if it is there; note how many lines are none."""
    yield from (row for _, row in objects_at(path, notes))


def objects_at(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield where each JSON object of a file begins, in bytes, and the object."""
    if not path.is_file():
        return
    offset, broken, last = 0, 0, True
    with path.open("rb") as file:
        for line in file:
            row = parsed(line)
            last = row is not None
            if row is not None:
                yield offset, row
            elif line.strip():
                broken += 1
            offset += len(line)
    if broken == 1 and not last:
        notes.append(f"the last line of {path.name} was cut short, and is left out")
    elif broken:
        notes.append(f"{broken} lines of {path.name} are no JSON objects, and are left out")


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object that `line` is; None if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def number(value: object) -> float | None:
    """Return `value` where it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
