"""Find the running servers of this user by their processes: environment and working folder lead to the manifest.

Servers of other users and containers are not found.
"""

from contextlib import suppress
from pathlib import Path

import psutil

from bridge.errors import ManifestError
from bridge.server import manifest as manifests
from bridge.server.manifest import MANIFEST_NAME, Manifest

VARIABLE = "BRIDGE_MANIFEST_PATH"
SWITCH = "VLLM_ENABLE_SHARED_WEIGHTS"


def running() -> dict[Path, Manifest]:
    """Return the manifest of each running server of this user, by its path."""
    servers = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, ManifestError):  # it has ended, is another user's, or has no manifest
            if path := _manifest_path(process):
                manifest = manifests.read(path)
                if manifest.server.pid == process.pid and manifest.server.is_alive():
                    servers[path] = manifest
    return servers


def find(given: Path | None = None) -> Path:
    """Return the manifest's path as `manifest.find` does, or else that of the only running server.

    ManifestError if there is none, or several servers.
    """
    try:
        return manifests.find(given)
    except ManifestError as error:
        servers = running() if given is None else {}
        if len(servers) == 1:
            return next(iter(servers))
        if not servers:
            raise
        raise ManifestError(
            f"{error.message}; {len(servers)} servers were started elsewhere",
            remedy=f"choose one: {' or '.join(choice(path, servers[path]) for path in sorted(servers))}",
        ) from error


def choice(path: Path, manifest: Manifest) -> str:
    """Return the flag that chooses the server of `manifest`, and a description of the server."""
    return f"--vllm-config-path {path} ({manifest.model}, pid {manifest.server.pid})"


def _manifest_path(process: psutil.Process) -> Path | None:
    """Return where a server writes its manifest; None if the process is not one of Bridge's servers."""
    environment: dict[str, str] = process.environ()
    if environment.get(SWITCH, "0").lower() not in {"1", "true"}:
        return None
    folder = Path(process.cwd())
    if VARIABLE in environment:
        return manifests.resolve_path(folder / environment[VARIABLE])
    return folder / environment.get("LOGDIR", "") / MANIFEST_NAME
