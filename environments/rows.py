"""Rows of data: a JSONL file, a local folder in the hub's layout, or a data set of the Hugging Face hub.

Not covered: what the columns mean (`gsm8k.py`, `jsonl.py`).
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.core.foreign_code import shortened
from bridge.errors import RewardError, UsageError
from bridge.types import Problem

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
MAX_SHOWN_ROWS = 10
"""Bad rows that an error names; the others it counts."""


class BadRowError(ValueError):
    """One row is no problem; becomes part of an error that names them all."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, whether it is a problem or not."""

    place: str
    """Where it stands, `line 7`."""
    values: Any
    """What it holds: column -> value, unless it is a bad one."""
    fault: str = ""
    """Why it could not be read."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one source."""

    source: str
    """What a person calls it: the file, or the data set and the split."""
    rows: Sequence[Row]
    """All of them."""

    def problems(self, make: Callable[[dict[str, Any]], Problem]) -> list[Problem]:
        """Return what `make` makes of each row's values.

        Raises:
            RewardError: `make` refused rows with a `BadRowError`, or they could not be read; all of them at once.
        """
        problems, faults = [], []
        for row in self.rows:
            try:
                problems.append(make(_values(row)))
            except BadRowError as error:
                faults.append(f"{row.place} {error}")
        if faults:
            raise self._refusal(faults)
        if not problems:
            raise RewardError(f"{self.source} has no rows", remedy="give it one problem a row")
        return problems

    def _refusal(self, faults: list[str]) -> RewardError:
        more = f"; and {len(faults) - MAX_SHOWN_ROWS} more" if len(faults) > MAX_SHOWN_ROWS else ""
        shown = "; ".join(faults[:MAX_SHOWN_ROWS])
        return RewardError(
            f"{self.source}: {len(faults)} of {len(self.rows)} rows are bad: {shown}{more}",
            remedy="mend these rows, or name the columns to read with --prompt-column and --answer-column",
        )


def column(values: Mapping[str, Any], name: str) -> Any:
    """Return what the row has in the column `name`.

    Raises:
        BadRowError: it has no such column.
    """
    if name not in values:
        raise BadRowError(f"has no column {name!r}, found {shortened(', '.join(values)) or 'none'}")
    return values[name]


def _values(row: Row) -> dict[str, Any]:
    if row.fault:
        raise BadRowError(row.fault)
    values: dict[str, Any] = row.values
    return values


def read(source: str, subset: str | None, flag: str) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those held out, if there are any: the splits `train` and `test`.

    A file has no splits. `subset` is the configuration of a data set on the hub, and its folder in a local copy.

    Raises:
        UsageError: there is no such file, folder or data set, or it cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return read_file(path), None
    if path.is_dir():
        folder = path / subset if subset and (path / subset).is_dir() else path
        if (folder / "train.jsonl").is_file():
            test = folder / "test.jsonl"
            return read_file(folder / "train.jsonl"), read_file(test) if test.is_file() else None
        return _data_set(str(path), flag, data_dir=None if folder == path else subset)
    if not HUB_NAME.fullmatch(source) or path.suffix in (".json", ".jsonl", ".parquet"):
        raise UsageError(
            f"{flag} {source}: there is no such file or folder, seen from {Path.cwd()}",
            remedy=f"{flag} path/to/problems.jsonl, or a name on the hub such as openai/gsm8k",
        )
    return _data_set(source, flag, name=subset)


def read_file(path: Path) -> Rows:
    """Return the rows of a JSONL file, one per line that is not blank.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", remedy="name a file that can be read") from error
    rows = [_row(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return Rows(source=str(path), rows=rows)


def _row(number: int, line: bytes) -> Row:
    place = f"line {number}"
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Row(place=place, values=None, fault=f"is no UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return Row(place=place, values=None, fault=f"is no JSON ({error.msg} at column {error.colno})")
    except RecursionError:
        return Row(place=place, values=None, fault="is nested too deeply")
    if not isinstance(values, dict):
        return Row(place=place, values=None, fault=f"is {shortened(repr(values))}, expected a JSON object")
    return Row(place=place, values=values)


def _data_set(source: str, flag: str, **place: str | None) -> tuple[Rows, Rows | None]:
    datasets = _datasets(source, flag)
    try:
        splits = datasets.load_dataset(source, **place)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"{flag} {source}: cannot be loaded: {shortened(error, 300)}",
            remedy=f"look at its name and at the network, or give a local copy: {flag} path/to/folder",
        ) from error
    if "train" not in splits:
        raise UsageError(
            f"{flag} {source} has no split train, found {', '.join(splits)}",
            remedy=f"write the split to a JSONL file, and give that: {flag} path/to/problems.jsonl",
        )
    held_out = _split(source, "test", splits["test"]) if "test" in splits else None
    return _split(source, "train", splits["train"]), held_out


def _datasets(source: str, flag: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{flag} {source} is read with the library datasets, which is not installed",
            remedy=f"pip install datasets, or {flag} path/to/problems.jsonl",
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _split(source: str, name: str, split: Any) -> Rows:
    rows = [Row(place=f"row {number}", values=values) for number, values in enumerate(split.to_list(), start=1)]
    return Rows(source=f"{source}, split {name}", rows=rows)
