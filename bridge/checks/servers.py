"""Manifests of this user's living servers, wherever they were started.

They are found by their processes: a server's environment and its current folder say where its manifest is.

Not covered: the places that are searched first (`manifest.py`), servers of other users and containers.
"""

from collections.abc import Mapping
from pathlib import Path

import psutil

from bridge.errors import ManifestError
from bridge.server import manifest
from bridge.server.manifest import MANIFEST_NAME, Manifest

VARIABLE = "BRIDGE_MANIFEST_PATH"
SWITCH = "VLLM_ENABLE_SHARED_WEIGHTS"


def living() -> dict[Path, Manifest]:
    """Return the manifest of every server of this user that lives, by its path."""
    found = {}
    for process in psutil.process_iter():
        try:
            path = _place(process)
            exported = manifest.read(path) if path else None
        except (psutil.Error, OSError, ManifestError):  # it has ended, is another user's, or has written none
            continue
        if path and exported and exported.server.pid == process.pid and exported.server.is_alive():
            found[path] = exported
    return found


def find(given: Path | None = None) -> Path:
    """Return the path of the manifest to look at: as `manifest.find`, and without one, that of the only living server.

    Raises:
        ManifestError: there is none, or there are several to choose from.
    """
    try:
        return manifest.find(given)
    except ManifestError as error:
        others = living() if given is None else {}
        if len(others) == 1:
            return next(iter(others))
        if not others:
            raise
        raise ManifestError(
            f"{error.message}; {len(others)} servers were started elsewhere",
            remedy=f"name one: {' or '.join(in_words(path, others[path]) for path in sorted(others))}",
        ) from error


def in_words(path: Path, exported: Manifest) -> str:
    """Return how to name the server of the manifest at `path`."""
    return f"--vllm-config-path {path} ({exported.model}, pid {exported.server.pid})"


def _place(process: psutil.Process) -> Path | None:
    """Return where a server writes its manifest; None: the process is no server of Bridge.

    Raises:
        psutil.Error: it has ended, or is another user's.
    """
    environment: Mapping[str, str] = process.environ()
    if environment.get(SWITCH, "0").lower() not in {"1", "true"}:
        return None
    folder = Path(process.cwd())
    if VARIABLE in environment:
        return manifest.resolve_path(folder / environment[VARIABLE])
    return folder / environment.get("LOGDIR", "") / MANIFEST_NAME
