"""Check the manifest that a trainer would use: found, whole, ours, of a live server here, on a GPU that we see.

Not covered: whether that server answers (`server.py`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.checks import servers
from bridge.checks.result import Check, failed, passed, skipped, warned
from bridge.errors import ManifestError
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest

FOUND, SERVER, VERSIONS, SAME_GPU, OTHERS = (
    "Manifest", "Server process", "Server's versions", "Server's GPU", "Other manifests"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What came of looking for a manifest."""

    checks: tuple[Check, ...]
    """The findings, in the order in which they were made."""
    path: Path | None
    """The manifest that a trainer would use; None: there is none."""
    live: Manifest | None
    """Its content, if its server lives on this host."""


def examine(given: Path | None) -> Examined:
    """Find, read and check the manifest that `bridge train --vllm-config-path given` would use."""
    expected = f"{manifests.MANIFEST_NAME} of a running server"
    path = None
    try:
        path = servers.find(given)
        manifest = manifests.read(path)
    except ManifestError as error:
        if path is None and given is None:
            found = f"no server yet: {error.message.removeprefix('no manifest: ')}"
            return Examined(checks=(skipped(FOUND, found, expected, error.remedy),), path=None, live=None)
        return Examined(checks=(failed(FOUND, error.message, expected, error.remedy),), path=path, live=None)
    except OSError as error:
        check = failed(FOUND, f"{error.filename}: {error.strerror}", expected, unreadable_remedy(path))
        return Examined(checks=(check,), path=path, live=None)
    readable = passed(FOUND, f"{path} ({manifest.model}, {manifest.backend})", expected)
    process = server_process(manifest, path)
    live = manifest if process.status == "PASS" else None
    return Examined(checks=(readable, process), path=path, live=live)


def unreadable_remedy(path: Path | None) -> str:
    """Name what mends a manifest that may not be read."""
    return f"ls -l {path or manifests.DEFAULT_FOLDER}; or for server and trainer: export LOGDIR=FOLDER of your own"


def server_process(manifest: Manifest, path: Path) -> Check:
    """Check that the server that wrote `manifest` is a live process of this host and boot."""
    expected = "the server that wrote the manifest still runs, on this host"
    try:
        manifests.check_server(manifest, path)
    except ManifestError as error:
        return failed(SERVER, error.message, expected, error.remedy)
    return passed(SERVER, f"pid {manifest.server.pid} on {manifest.host}", expected)


def same_versions(manifest: Manifest, here: Mapping[str, str | None]) -> Check:
    """Check that server and trainer run one version of each package: torch's handles are no stable format."""
    there = {name: version for name, version in manifest.versions.items() if name in here}
    expected = "the server's: " + ", ".join(f"{name} {version}" for name, version in there.items())
    other = {name: here[name] for name, version in there.items() if here[name] != version}
    if not other:
        return passed(VERSIONS, expected.removeprefix("the server's: "), expected)
    found = "here: " + ", ".join(f"{name} {version or '(not installed)'}" for name, version in other.items())
    remedy = "run server and trainer from one virtual environment, or restart the server after an upgrade"
    return warned(VERSIONS, found, expected, remedy)


def same_gpu(manifest: Manifest, visible: Collection[str]) -> Check:
    """Check that this process sees every GPU that holds the server's weights."""
    needed = {shard.gpu_uuid for shard in (manifest, *manifest.other_shards) if shard.gpu_uuid}
    if not needed:
        return passed(SAME_GPU, "not needed: the weights are in main memory", "every GPU that holds weights is visible")
    expected = f"visible: {', '.join(sorted(needed))}"
    found = ", ".join(visible) or "no GPU"
    if needed <= set(visible):
        return passed(SAME_GPU, found, expected)
    remedy = f"CUDA_VISIBLE_DEVICES={','.join(sorted(needed))} bridge train ... (the trainer must use the server's GPU)"
    return failed(SAME_GPU, f"this process sees {found}", expected, remedy)


def others(used: Path | None) -> list[Check]:
    """Warn of each manifest elsewhere on the search path that would get in the way if it came first."""
    places = dict.fromkeys(path.resolve() for path in manifests.search_path())
    return [check for path in places if used is None or path != used.resolve() if (check := _other(path))]


def _other(path: Path) -> Check | None:
    expected = "no stale or foreign manifest on the search path"
    try:
        if not path.is_file():
            return None
        manifests.check_server(manifests.read(path), path)
    except ManifestError as error:
        return warned(OTHERS, error.message, expected, f"rm {path}")
    except OSError as error:
        return warned(OTHERS, f"{path}: {error.strerror}", expected, unreadable_remedy(path))
    return warned(
        OTHERS,
        f"{path} is of another live server",
        "one server on the search path",
        f"--vllm-config-path {path} to use it",
    )
