"""The mark of a folder that Bridge made. Without it, files in a folder are never replaced or removed.

The file is hidden, so that `cp run/* elsewhere` leaves it behind. Checkpoints and manifests have no mark: they are
recognized by their content (`bridge/checkpoints/checkpoint.py`, `bridge/server/manifest.py`).
"""

import json
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from bridge.core import atomic_file, folder_claim, json_lines
from bridge.errors import UsageError, first_few

NAME = ".bridge_folder.json"
MADE_BY = "Bridge"
Kind = Literal["run", "loop", "demo", "export"]


def put(folder: Path, kind: Kind, *, names: Collection[str] = ()) -> None:
    """Mark `folder` as made by Bridge, with the `names` of the files in it where these differ from model to model."""
    document = {"made_by": MADE_BY, "kind": kind} | ({"files": sorted(names)} if names else {})
    atomic_file.replace(folder / NAME, (json.dumps(document) + "\n").encode())


def kind_of(folder: Path) -> str | None:
    """Return what Bridge made `folder` for; None if it did not."""
    kind = _read(folder).get("kind")
    return kind if isinstance(kind, str) else None


def names_of(folder: Path) -> list[str]:
    """Return the names of the files that Bridge wrote into `folder`, if its mark lists them."""
    names = _read(folder).get("files")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _read(folder: Path) -> dict[str, Any]:
    try:
        document = json_lines.parsed((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) and document.get("made_by") == MADE_BY else {}


def remove_if_alone(folder: Path) -> None:
    """Remove the mark if `folder` holds nothing else."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [NAME]:
            (folder / NAME).unlink()


def refuse_foreign(folder: Path, names: Collection[str], *, flag: str) -> None:
    """Raise UsageError if `folder` has no mark and Bridge would replace files in it that have these `names`.

    `flag` is the option that chooses another folder.
    """
    taken = [path for name in sorted(names) if not _is_free(path := folder / name)]
    if taken and kind_of(folder) is None:
        raise UsageError(
            f"{folder} was not made by Bridge, and these files would be replaced: {_listed(taken)}",
            hint=f"choose a new or empty folder with {flag}",
        )


def make_empty(folder: Path, kind: Kind, names: Collection[str], *, flag: str) -> None:
    """Empty `folder` if Bridge wrote it for the same `kind`.

    Raises:
        UsageError: it is a file, Bridge did not write it for `kind`, it holds files other than `names`, or is in use.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a folder", hint=f"choose a folder with {flag}")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    elsewhere = f"choose another folder with {flag}, or remove this one yourself"
    if kind_of(folder) != kind:
        raise UsageError(f"{folder} is not empty and holds no {kind} of Bridge", hint=elsewhere)
    ours = (*names, NAME)
    half_written = tuple(f".{name}." for name in ours)  # by a process that was killed
    paths = sorted(folder.iterdir(), key=lambda path: (path.name == NAME, path))
    foreign = [path for path in paths if not (path.name in ours or path.name.startswith(half_written))]
    if foreign:
        raise UsageError(f"{folder} also holds files that Bridge did not make: {_listed(foreign)}", hint=elsewhere)
    folder_claim.make(folder, what="folder", flag=flag)
    for path in paths:  # the mark comes last, so that this can be repeated if it is interrupted
        if _is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_free(path: Path) -> bool:
    """Return whether nothing is at `path`, or an empty folder."""
    return not any(path.iterdir()) if _is_folder(path) else not os.path.lexists(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _listed(paths: list[Path]) -> str:
    """Return the names of a few files as text; a folder may hold thousands."""
    return first_few([path.name for path in paths], separator=", ")
