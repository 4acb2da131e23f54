"""Check the server that a trainer would use: its manifest, process, GPU and versions, its answers and its weights.

Not covered: proof that both sides compute the same (`verify.py`).
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import ValidationError

from bridge.checks.result import Check, failed, passed, skipped, warned
from bridge.errors import ManifestError, UsageError
from bridge.server import discovery
from bridge.server import manifest as manifests
from bridge.server.client import open_http
from bridge.server.manifest import Manifest, SharedMemoryHandle
from bridge.server.protocol import Finiteness, Status

ANSWER_TIMEOUT_S = 5.0
SCAN_TIMEOUT_S = 60.0
"""Longest wait for the server to scan all of its weights."""
FOUND, PROCESS, VERSIONS, SAME_GPU, OTHERS = (
    "Manifest", "Server process", "Server's versions", "Server's GPU", "Other manifests"
)  # fmt: skip
HEALTH, FENCE, WEIGHTS, NUMBERS = "Server health", "Fence", "Server's weights", "Server's numbers"
START = "bridge serve-vllm --model"


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The result of looking for a manifest."""

    checks: tuple[Check, ...]
    """In the order in which they were made."""
    path: Path | None
    """The manifest that a trainer would use, if there is one."""
    live: Manifest | None
    """Its content, if its server runs on this host."""


def examine(given: Path | None) -> Examined:
    """Find, read and check the manifest that `bridge train --vllm-config-path given` would use."""
    expected = f"{manifests.MANIFEST_NAME} of a running server"
    path = None
    try:
        path = discovery.find(given)
        manifest = manifests.read(path)
    except ManifestError as error:
        check = failed(FOUND, error.message, expected, error.remedy)
        if path is None and given is None:
            found = f"no server yet: {error.message.removeprefix('no manifest: ')}"
            check = skipped(FOUND, found, expected, error.remedy)
        return Examined(checks=(check,), path=path, live=None)
    readable = passed(FOUND, f"{path} ({manifest.model}, {manifest.backend})", expected)
    process = server_process(manifest, path)
    return Examined(checks=(readable, process), path=path, live=manifest if process.status == "PASS" else None)


def server_process(manifest: Manifest, path: Path) -> Check:
    """Check that the server that wrote `manifest` is a live process of this host and boot."""
    expected = "the server that wrote the manifest is running on this host"
    try:
        manifests.check_server(manifest, path)
    except ManifestError as error:
        return failed(PROCESS, error.message, expected, error.remedy)
    return passed(PROCESS, f"pid {manifest.server.pid} on {manifest.host}", expected)


def same_versions(manifest: Manifest, here: Mapping[str, str | None]) -> Check:
    """Check that server and trainer have the same packages: torch's handles are not a stable format."""
    there = {name: version for name, version in manifest.versions.items() if name in here}
    versions = ", ".join(f"{name} {version}" for name, version in there.items())
    other = {name: here[name] for name, version in there.items() if here[name] != version}
    if not other:
        return passed(VERSIONS, versions, f"the server's: {versions}")
    found = "here: " + ", ".join(f"{name} {version or '(not installed)'}" for name, version in other.items())
    remedy = "run server and trainer from one virtual environment, or restart the server after an upgrade"
    return warned(VERSIONS, found, f"the server's: {versions}", remedy)


def same_gpu(manifest: Manifest, visible: Collection[str]) -> Check:
    """Check that this process sees every GPU that holds the server's weights."""
    needed = {shard.gpu_uuid for shard in manifest.shards if shard.gpu_uuid}
    if not needed:
        return passed(SAME_GPU, "not needed: the weights are in main memory", "every GPU that holds weights is visible")
    expected = f"visible: {', '.join(sorted(needed))}"
    found = ", ".join(visible) or "no GPU"
    if needed <= set(visible):
        return passed(SAME_GPU, found, expected)
    remedy = f"CUDA_VISIBLE_DEVICES={','.join(sorted(needed))} bridge train ... (the trainer must use the server's GPU)"
    return failed(SAME_GPU, f"this process sees {found}", expected, remedy)


def others(used: Path | None) -> list[Check]:
    """Warn of each other manifest on the search path that would get in the way if it came first."""
    places = dict.fromkeys(path.resolve() for path in manifests.search_path())
    return [check for path in places if used is None or path != used.resolve() if (check := _other(path))]


def _other(path: Path) -> Check | None:
    try:
        if not path.is_file():
            return None
        manifests.check_server(manifests.read(path), path)
    except ManifestError as error:
        return warned(OTHERS, error.message, "no stale or foreign manifest on the search path", f"rm {path}")
    except OSError as error:
        remedy = f"ls -l {path}; or for server and trainer: export LOGDIR=FOLDER of your own"
        return warned(OTHERS, f"{path}: {error.strerror}", "no stale or foreign manifest on the search path", remedy)
    found, remedy = f"{path} belongs to another live server", f"--vllm-config-path {path} to use it"
    return warned(OTHERS, found, "one server on the search path", remedy)


def weights_open(manifest: Manifest) -> Check:
    """Check that this process can open the whole of the server's shared-memory files."""
    expected = "every shared file of the server opens for writing"
    if manifest.backend != "shared_memory":
        return skipped(WEIGHTS, "in GPU memory: bridge verify opens them", expected)
    sizes: dict[str, int] = {}
    for handle in (handle for shard in manifest.shards for handle in shard.ipc_handles.values()):
        if isinstance(handle, SharedMemoryHandle):
            end = handle.storage_offset + handle.storage_size
            sizes[handle.path] = max(sizes.get(handle.path, 0), end)
    for path, size in sizes.items():
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            remedy = "run as the server's user, in its PID namespace"
            return failed(WEIGHTS, f"{path}: {error.strerror}", expected, remedy)
        found = os.fstat(descriptor).st_size
        os.close(descriptor)
        if found < size:
            remedy = f"restart the server, which rewrites the manifest: {START} {manifest.model}"
            return failed(WEIGHTS, f"{path} has {found} bytes", f"at least {size} bytes", remedy)
    return passed(WEIGHTS, f"{len(sizes)} shared file(s), {sum(sizes.values()) / 2**20:.0f} MiB", expected)


def connect(manifest: Manifest) -> httpx.Client:
    """Open a connection with the manifest's token."""
    return open_http(manifest.url, token=manifest.token, timeout_s=ANSWER_TIMEOUT_S)


def answers(manifest: Manifest) -> list[Check]:
    """Request the server's health, the state of its fence, and a scan of its weights; stop where one fails."""
    with connect(manifest) as client:
        checks = [health(client, manifest)]
        for check in (fence, numbers):
            if checks[-1].status == "PASS":
                checks.append(check(client, manifest))
        return checks


def health(client: httpx.Client, manifest: Manifest) -> Check:
    """Check that the engine behind the manifest's URL is healthy."""
    expected = f"{manifest.url}/health answers 200"
    remedy = f"look into the server's log, and restart it: {START} {manifest.model}"
    try:
        response = client.get("/health")
    except httpx.TransportError as error:
        return failed(HEALTH, f"no answer: {str(error) or type(error).__name__}", expected, remedy)
    except UsageError as error:  # the API key cannot be sent
        return failed(HEALTH, error.message, expected, error.remedy)
    if response.status_code != httpx.codes.OK:
        return failed(HEALTH, f"answered {response.status_code}", expected, remedy)
    return passed(HEALTH, f"{manifest.url} is healthy", expected)


def fence(client: httpx.Client, manifest: Manifest) -> Check:
    """Check that the manifest's own server answers, and that its fence is free."""
    expected = f"{manifest.model} is serving at {manifest.url}"
    foreign = f"another server answers at {manifest.url}"
    remedy = f"stop that one, or use another port: {START} {manifest.model} --port PORT"
    try:
        response = client.get("/bridge/status")
        if response.status_code != httpx.codes.OK:
            return failed(FENCE, f"{foreign}: /bridge/status gave {response.status_code}", expected, remedy)
        status = Status.model_validate_json(response.content)
    except httpx.TransportError as error:
        found = f"no answer: {str(error) or type(error).__name__}"
        return failed(FENCE, found, expected, f"{START} {manifest.model}")
    except ValidationError:
        return failed(FENCE, f"{foreign}: its /bridge/status is not Bridge's", expected, remedy)
    if status.server != manifest.server or status.model != manifest.model:
        return failed(FENCE, f"{foreign}: {status.model}, pid {status.server.pid}", expected, remedy)
    return _state(status, expected)


def _state(status: Status, expected: str) -> Check:
    if status.state == "torn":
        return failed(FENCE, status.torn(), expected, status.mending())
    if status.state == "paused":
        holder = f"pid {status.holder.pid}" if status.holder else "an unknown process"
        does = "reads" if status.writes == "nothing" else f"writes version {status.version + 1}"
        stop = f"; if it stays paused, stop that process: kill {status.holder.pid}" if status.holder else ""
        expected = f"{expected}; a pause lasts milliseconds, or a step if training uses the KV cache's memory"
        return warned(FENCE, f"paused by {holder}, which {does}", expected, f"bridge doctor again{stop}")
    lease = status.lease
    updated = f", updated by pid {lease.holder.pid} (run {lease.run})" if lease else ""
    return passed(FENCE, f"serving version {status.version} of {status.model}{updated}", expected)


def numbers(client: httpx.Client, manifest: Manifest) -> Check:
    """Check that all of the server's weights are finite."""
    expected = "every weight is a finite number"
    try:
        response = client.get("/bridge/tensors/finite", timeout=SCAN_TIMEOUT_S)
        found = Finiteness.model_validate_json(response.content)
        status = Status.model_validate_json(client.get("/bridge/status").content)
    except (httpx.TransportError, ValidationError) as error:
        return skipped(NUMBERS, f"no answer: {type(error).__name__}", expected, f"{START} {manifest.model}")
    if found.not_finite:
        return failed(NUMBERS, found.found(), expected, status.mending())
    return passed(NUMBERS, found.found(), expected)
