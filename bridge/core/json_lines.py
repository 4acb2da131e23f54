"""Files with one JSON object per line, which grow step by step and are truncated when a run resumes.

When `append` returns, the operating system has the line. A killed process can leave half a line at the end.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bridge.core import atomic_file
from bridge.core.atomic_file import one_line_errors
from bridge.core.foreign_code import described

LONGEST_REPR = 10_000
"""Maximum length of the `repr` written for a value that JSON cannot represent."""
DEEPEST = 200
"""Maximum depth at which null values are dropped; Python's recursion ends at 1,000."""
LONGEST_INTEGER = 14_000
"""Bits of the longest integer that Python writes in decimal."""


def line(document: Mapping[str, Any]) -> str:
    """Return `document` as one line of ASCII JSON, so that no reader sees a line break inside it."""
    return json.dumps(plain(document), allow_nan=False)


def parsed(text: str | bytes) -> Any:
    """Parse foreign JSON; an integer with more digits than Python converts stays a string.

    Raises:
        ValueError: the document is not valid JSON, not text, or nested too deeply. Nothing else is raised.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error
    except ValueError:
        return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits


def without_nulls(value: Any, levels: int = DEEPEST) -> Any:
    """Drop keys whose value is null, down to `levels`, because Parquet gives each object the keys of all others."""
    if isinstance(value, Mapping) and levels:
        return {key: without_nulls(item, levels - 1) for key, item in value.items() if item is not None}
    return [without_nulls(item, levels - 1) for item in value] if isinstance(value, list) and levels else value


def append(path: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per document.

    Raises:
        UsageError: the disk is full, or the write fails.
    """
    lines = "".join(line(document) + "\n" for document in documents)
    with one_line_errors(path), path.open("a") as file:
        file.write(lines)


def cut(path: Path, step: int) -> int | None:
    """Move everything from the first line with a step after `step` to `lost(path)`; return the last step kept.

    The lines that are kept are neither loaded into memory nor rewritten.

    Raises:
        UsageError: the disk is full, or the write fails.
    """
    last = None
    end = 0
    if not path.exists():
        return last
    with path.open("rb") as file:
        for line in file:
            if not (line_step := _step_of(line)) <= step:
                break
            last = int(line_step)
            end = end + len(line)
        file.seek(end)
        rest = file.read()
    if rest:
        rest = rest if rest.endswith(b"\n") else rest + b"\n"
        before = lost(path).read_bytes() if lost(path).exists() else b""
        if not before.endswith(rest):  # if it does, a killed process had already moved these lines
            atomic_file.replace(lost(path), before + rest)
        with one_line_errors(path):
            os.truncate(path, end)
    return last


def lost(path: Path) -> Path:
    """Return the file to which `cut` moves lines."""
    return path.with_name(f"{path.stem}_lost{path.suffix}")


def fsync(path: Path) -> None:
    """Flush the file, if it exists, to disk: a power failure must not leave a checkpoint without its step's line."""
    if path.exists():
        with one_line_errors(path), path.open("rb") as file:
            os.fsync(file.fileno())


def plain(value: Any) -> Any:
    """Convert `value` to JSON types: non-finite numbers become null, unknown objects their repr.

    An integer too long for Python to write in decimal becomes a hexadecimal string.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
        return hex(value)
    return value if value is None or isinstance(value, str | int) else described(value, LONGEST_REPR)


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity if the line is incomplete."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
