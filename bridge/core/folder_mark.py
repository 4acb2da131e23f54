"""The marker file in a folder that Bridge created. Without it, Bridge never replaces or removes files in a folder.

The file is hidden, so that `cp run/* elsewhere` does not copy it. Checkpoints and manifests have no marker: they are
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
    """Mark `folder` as created by Bridge; `names` lists its files if they depend on the model."""
    document = {"made_by": MADE_BY, "kind": kind} | ({"files": sorted(names)} if names else {})
    atomic_file.replace(folder / NAME, (json.dumps(document) + "\n").encode())


def kind_of(folder: Path) -> str | None:
    """Return what Bridge created `folder` for; None if Bridge did not create it."""
    kind = _read(folder).get("kind")
    return kind if isinstance(kind, str) else None


def names_of(folder: Path) -> list[str]:
    """Return the names of the files that Bridge wrote into `folder`, if its marker lists them."""
    names = _read(folder).get("files")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _read(folder: Path) -> dict[str, Any]:
    try:
        document = json_lines.parsed((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) and document.get("made_by") == MADE_BY else {}


def remove_if_alone(folder: Path) -> None:
    """Remove the marker if it is the only file in `folder`."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [NAME]:
            (folder / NAME).unlink()


def refuse_foreign(folder: Path, names: Collection[str], *, flag: str) -> None:
    """Raise UsageError if `folder` has no marker and already contains files with these `names`.

    `flag` is the option that chooses a different folder.
    """
    taken = [path for name in sorted(names) if not _is_free(path := folder / name)]
    if taken and kind_of(folder) is None:
        raise UsageError(
            f"{folder} was not created by Bridge, and these files would be replaced: {_listed(taken)}",
            hint=f"choose a new or empty folder with {flag}",
        )


def make_empty(folder: Path, kind: Kind, names: Collection[str], *, flag: str) -> None:
    """Empty `folder` if Bridge created it for the same `kind`.

    Raises:
        UsageError: `folder` is a file, was not created for `kind`, contains files other than `names`, or is in use.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a folder", hint=f"choose a folder with {flag}")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    elsewhere = f"choose a different folder with {flag}, or remove this one yourself"
    if kind_of(folder) != kind:
        raise UsageError(f"{folder} is not empty and does not contain a Bridge {kind}", hint=elsewhere)
    ours = (*names, NAME)
    half_written = tuple(f".{name}." for name in ours)  # left by a killed process
    paths = sorted(folder.iterdir(), key=lambda path: (path.name == NAME, path))
    foreign = [path for path in paths if not (path.name in ours or path.name.startswith(half_written))]
    if foreign:
        raise UsageError(f"{folder} also contains files that Bridge did not create: {_listed(foreign)}", hint=elsewhere)
    folder_claim.make(folder, what="folder", flag=flag)
    for path in paths:  # the marker comes last, so that an interrupted removal can be repeated
        if _is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_free(path: Path) -> bool:
    """Return whether `path` does not exist or is an empty folder."""
    return not any(path.iterdir()) if _is_folder(path) else not os.path.lexists(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _listed(paths: list[Path]) -> str:
    """Return the names of the first few files as text; a folder may contain thousands."""
    return first_few([path.name for path in paths], separator=", ")
