"""Find this user's running servers: the environment and working directory of each process lead to its manifest.

A process that became a server after it started (`bridge/processes/preload.py`) publishes its variables in an open memfd
instead.

Servers of other users or in other containers are not found.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from bridge.errors import ManifestError
from bridge.server import manifest as manifests
from bridge.server.manifest import MANIFEST_NAME, Manifest

SWITCH = "VLLM_ENABLE_SHARED_WEIGHTS"
"""Environment variable that enables Bridge's plugins, which otherwise do nothing when vLLM loads them."""
MANIFEST_PATH = "BRIDGE_MANIFEST_PATH"
"""Environment variable for a manifest path other than the default."""
FOLDER = "LOGDIR"
MEMORY_FILE = "bridge-server-variables"
"""Name of the memfd with the variables that `/proc/PID/environ` lacks."""
MAX_BYTES = 2**16
"""Maximum number of bytes read from that file, since any process can create one with this name."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
"""Seals of a completely written memfd."""


def running() -> dict[Path, Manifest]:
    """Return the manifest of each running server of this user, by its path."""
    servers = {}
    for process in psutil.process_iter():
        # the process has exited, has no manifest, or names an invalid path
        with suppress(psutil.Error, OSError, ManifestError, ValueError):
            if process.uids().effective == os.geteuid() and (path := _manifest_path(process)):
                manifest = manifests.read(path)
                if manifest.server.pid == process.pid and manifest.server.is_alive():
                    servers[path] = manifest
    return servers


def find(given: Path | None = None) -> Path:
    """Return the manifest's path as `manifest.find` does, or that of the only running server if none is found.

    ManifestError if there is no server, or more than one.
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
            hint=f"choose one: {' or '.join(choice(path, servers[path]) for path in sorted(servers))}",
        ) from error


def choice(path: Path, manifest: Manifest) -> str:
    """Return the flag that selects the server of `manifest`, with a description of the server."""
    return f"--vllm-config-path {path} ({manifest.model}, pid {manifest.server.pid})"


def publish_variables(environment: Mapping[str, str]) -> None:
    """Publish the variables that lead to this process's manifest, which were not set when the process started."""
    names = (SWITCH, MANIFEST_PATH, FOLDER)
    content = json.dumps({name: environment[name] for name in names if name in environment})
    file = os.memfd_create(MEMORY_FILE, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # stays open until the process exits
    os.write(file, content.encode())
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)


def _variables(process: psutil.Process) -> dict[str, str]:
    """Return the variables that a process published, otherwise its environment."""
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor was closed in the meantime
            is_named = str(descriptor.readlink()).startswith(f"/memfd:{MEMORY_FILE}")
            if is_named and (published := _published(descriptor)) is not None:
                return published
    return dict(process.environ())


def _published(path: Path) -> dict[str, str] | None:
    """Return what `publish_variables` wrote; None if this is not such a file, or is not complete yet."""
    with path.open("rb") as file:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            return None
        content = file.read(MAX_BYTES + 1)
    with suppress(ValueError, RecursionError):
        variables = json.loads(content) if len(content) <= MAX_BYTES else None
        if isinstance(variables, dict) and all(isinstance(value, str) for value in variables.values()):
            return variables
    return None


def _manifest_path(process: psutil.Process) -> Path | None:
    """Return where a server writes its manifest; None if the process is not one of Bridge's servers."""
    environment = _variables(process)
    if environment.get(SWITCH, "0").lower() not in {"1", "true"}:
        return None
    folder = Path(process.cwd())
    if MANIFEST_PATH in environment:
        return manifests.resolve_path(folder / environment[MANIFEST_PATH])
    return folder / environment.get(FOLDER, "") / MANIFEST_NAME
