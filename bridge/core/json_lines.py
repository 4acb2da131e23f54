"""Files of one JSON object a line: they grow step by step, and are cut back where a run goes on from an earlier step.

A line is in the operating system's hands when `append` returns; a killed process can leave half a line, at the end.

Not covered: what the objects say (`bridge/run/metrics.py`, `bridge/run/run_directory.py`).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bridge.core import atomic_file
from bridge.core.atomic_file import one_line_errors


def line(document: Mapping[str, Any]) -> str:
    """Return `document` as a JSON object on one line, in ASCII: no character in it ends a line for any reader."""
    return json.dumps(plain(document), allow_nan=False)


def append(path: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Append one line a document.

    Raises:
        UsageError: the disk is full or refuses.
    """
    lines = "".join(line(document) + "\n" for document in documents)
    with one_line_errors(path), path.open("a") as file:
        file.write(lines)


def cut(path: Path, step: int) -> int | None:
    """Move everything from the first line of a later step than `step` on aside; return the step of the last line kept.

    What is kept is never held in memory, and never written again.

    Raises:
        UsageError: the disk is full or refuses.
    """
    last, end = None, 0
    if not path.exists():
        return last
    with path.open("rb") as file:
        for each in file:
            if not (found := _step_of(each)) <= step:
                break
            last, end = int(found), end + len(each)
        file.seek(end)
        rest = file.read()
    if rest:
        _append_once(lost(path), rest if rest.endswith(b"\n") else rest + b"\n")
        with one_line_errors(path):
            os.truncate(path, end)
    return last


def lost(path: Path) -> Path:
    """Return the file of the lines that were moved aside."""
    return path.with_name(f"{path.stem}_lost{path.suffix}")


def settle(path: Path) -> None:
    """Wait until the lines are on the disk, where there are any."""
    if path.exists():
        with one_line_errors(path), path.open("rb") as file:
            os.fsync(file.fileno())


def plain(value: Any) -> Any:
    """Return what JSON can hold of `value`: a number that is not finite becomes null, an unknown object its repr."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if value is None or isinstance(value, str | int) else repr(value)


def _append_once(path: Path, lines: bytes) -> None:
    """Append `lines`, unless a process that was killed right afterwards has done so."""
    before = path.read_bytes() if path.exists() else b""
    if not before.endswith(lines):
        atomic_file.replace(path, before + lines)


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity where a killed process has cut it short."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
