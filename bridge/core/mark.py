"""The mark of a folder that Bridge made: files in a folder without it are never replaced, nor removed.

The file is hidden, so that `cp run/* elsewhere` does not carry the mark along.

Not covered: checkpoints and manifests, which are known by their own content (`bridge/run/checkpoint.py`,
`bridge/server/manifest.py`).
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from bridge.core import atomic_file, claim
from bridge.errors import UsageError

NAME = ".bridge_folder.json"
MADE_BY = "Bridge"
Kind = Literal["run", "demo", "comparison"]
SHOWN = 3
"""Names in an error; a folder may hold thousands of files."""


def put(folder: Path, kind: Kind) -> None:
    """Mark `folder` as one that Bridge made."""
    atomic_file.replace(folder / NAME, (json.dumps({"made_by": MADE_BY, "kind": kind}) + "\n").encode())


def kind_of(folder: Path) -> str | None:
    """Return what Bridge made `folder` for; None: Bridge did not make it."""
    try:
        found = json.loads((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return found.get("kind") if isinstance(found, dict) and found.get("made_by") == MADE_BY else None


def remove_if_alone(folder: Path) -> None:
    """Remove the mark of a folder that holds nothing else."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [NAME]:
            (folder / NAME).unlink()


def refuse_foreign(folder: Path, names: Collection[str], *, flag: str) -> None:
    """Refuse a folder without a mark in which something has one of the `names` that Bridge will write to.

    Raises:
        UsageError: names what would be replaced; `flag` names another folder.
    """
    taken = [path for name in sorted(names) if not _is_free(path := folder / name)]
    if taken and kind_of(folder) is None:
        raise UsageError(
            f"{folder} was not made by Bridge, and these files would be replaced: {_listed(taken)}",
            remedy=f"name a new or empty folder with {flag}",
        )


def make_empty(folder: Path, kind: Kind, names: Collection[str], *, flag: str) -> Path:
    """Empty `folder` of an earlier `kind` of thing, and of nothing else; return the folder, links resolved.

    Raises:
        UsageError: it is a file, Bridge did not make it for that, it holds other files than `names`, or a process is at
            work in it.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a folder", remedy=f"choose a folder with {flag}")
    if not folder.is_dir() or not any(folder.iterdir()):
        return folder
    elsewhere = f"choose another folder with {flag}, or remove this one yourself"
    if kind_of(folder) != kind:
        raise UsageError(f"{folder} is not empty and holds no {kind} of Bridge", remedy=elsewhere)
    foreign = list(_foreign(folder, {*names, NAME}))
    if foreign:
        raise UsageError(f"{folder} also holds files that Bridge did not make: {_listed(foreign)}", remedy=elsewhere)
    claim.make(folder, what="folder", flag=flag)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == NAME):  # the mark last: one that is killed here
        _remove(path)  # can begin again
    return folder


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _foreign(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """Yield what has none of the `names`; a killed process may have left `.NAME.anything` of a file half written."""
    for path in sorted(folder.iterdir()):
        if path.name not in names and not any(path.name.startswith(f".{name}.") for name in names):
            yield path


def _is_free(path: Path) -> bool:
    """Tell whether nothing is at `path` but an empty folder."""
    if path.is_dir() and not path.is_symlink():
        return not any(path.iterdir())
    return not os.path.lexists(path)


def _listed(paths: list[Path]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(path.name for path in paths[:SHOWN]) + more
