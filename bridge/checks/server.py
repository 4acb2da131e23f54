"""Check the server that a trainer would use: its manifest, process, GPU, versions, answers and weights.

Not covered: proof that both sides compute the same (`verify.py`).
"""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
from pydantic import ValidationError

from bridge.checks.result import Check, failed, judged, passed, skipped, warned
from bridge.errors import ManifestError, UsageError
from bridge.server import discovery
from bridge.server import manifest as manifests
from bridge.server.client import open_http
from bridge.server.manifest import Manifest, SharedMemoryHandle
from bridge.server.protocol import Finiteness, Status

ANSWER_TIMEOUT_S = 5.0
SCAN_TIMEOUT_S = 60.0
"""Longest wait for the server to scan all of its weights."""
FOUND, PROCESS, OTHERS, FENCE, WEIGHTS, NUMBERS = (
    "Manifest", "Server process", "Other manifests", "Fence", "Server's weights", "Server's numbers"
)  # fmt: skip
START = "bridge serve-vllm --model"


class Examined(NamedTuple):
    """The result of looking for a manifest."""

    checks: list[Check]
    path: Path | None = None
    """The manifest that a trainer would use, if there is one."""
    live: Manifest | None = None
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
        return Examined([check], path)
    readable = passed(FOUND, f"{path} ({manifest.model}, {manifest.backend})", expected)
    expected = "the server that wrote the manifest is running on this host"
    try:
        manifests.check_server(manifest, path)
    except ManifestError as error:
        return Examined([readable, failed(PROCESS, error.message, expected, error.remedy)], path)
    running = passed(PROCESS, f"pid {manifest.server.pid} on {manifest.host}", expected)
    return Examined([readable, running], path, manifest)


def same_versions(manifest: Manifest, here: Mapping[str, str | None]) -> Check:
    """Check that server and trainer have the same packages: the format of torch's handles is not stable."""
    there = {name: version for name, version in manifest.versions.items() if name in here}
    versions = ", ".join(f"{name} {version}" for name, version in there.items())
    other = [f"{name} {here[name] or '(not installed)'}" for name, version in there.items() if here[name] != version]
    found = f"here: {', '.join(other)}" if other else versions
    remedy = "run server and trainer in one virtual environment, or restart the server after an upgrade"
    return judged("Server's versions", not other, found, f"the server's: {versions}", remedy, otherwise="WARN")


def same_gpu(manifest: Manifest, visible: Collection[str]) -> Check:
    name, needed = "Server's GPU", {shard.gpu_uuid for shard in manifest.shards if shard.gpu_uuid}
    if not needed:
        return passed(name, "not needed: the weights are in main memory", "every GPU that holds weights is visible")
    all_needed = ",".join(sorted(needed))
    remedy = f"CUDA_VISIBLE_DEVICES={all_needed} bridge train ... (the trainer must use the server's GPU)"
    found = f"this process sees {', '.join(visible) or 'no GPU'}"
    return judged(name, needed <= set(visible), found, f"visible: {all_needed}", remedy)


def others(used: Path | None) -> Iterator[Check]:
    """Warn about each other manifest on the search path: it would cause trouble if it came first."""
    clean = "no stale or foreign manifest on the search path"
    for path in dict.fromkeys(path.resolve() for path in manifests.search_path()):
        try:
            if (used and path == used.resolve()) or not path.is_file():
                continue
            manifests.check_server(manifests.read(path), path)
        except ManifestError as error:
            yield warned(OTHERS, error.message, clean, f"rm {path}")
        except OSError as error:
            remedy = f"ls -l {path}; or for server and trainer: export LOGDIR=FOLDER of your own"
            yield warned(OTHERS, f"{path}: {error.strerror}", clean, remedy)
        else:
            found, remedy = f"{path} belongs to another live server", f"--vllm-config-path {path} to use it"
            yield warned(OTHERS, found, "one server on the search path", remedy)


def weights_open(manifest: Manifest) -> Check:
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
            with open(path, "r+b", buffering=0) as file:  # noqa: PTH123
                found = os.fstat(file.fileno()).st_size
        except OSError as error:
            return failed(
                WEIGHTS, f"{path}: {error.strerror}", expected, "run as the server's user, in its PID namespace"
            )
        if found < size:
            remedy = f"restart the server, which rewrites the manifest: {START} {manifest.model}"
            return failed(WEIGHTS, f"{path} has {found} bytes", f"at least {size} bytes", remedy)
    return passed(WEIGHTS, f"{len(sizes)} shared file(s), {sum(sizes.values()) / 2**20:.0f} MiB", expected)


def answers(manifest: Manifest) -> list[Check]:
    """Request the server's health, the state of its fence, and a scan of its weights; stop where one fails."""
    checks: list[Check] = []
    with open_http(manifest.url, token=manifest.token, timeout_s=ANSWER_TIMEOUT_S) as client:
        for request in (_health, _fence, _numbers):
            checks.append(request(client, manifest))
            if checks[-1].status != "PASS":
                break
    return checks


def _health(client: httpx.Client, manifest: Manifest) -> Check:
    name, expected = "Server health", f"{manifest.url}/health answers 200"
    remedy = f"look into the server's log, and restart it: {START} {manifest.model}"
    try:
        status = client.get("/health").status_code
    except httpx.TransportError as error:
        return failed(name, _silence(error), expected, remedy)
    except UsageError as error:  # the API key cannot be sent
        return failed(name, error.message, expected, error.remedy)
    is_healthy = status == httpx.codes.OK
    return judged(
        name, is_healthy, f"{manifest.url} {'is healthy' if is_healthy else f'answered {status}'}", expected, remedy
    )


def _fence(client: httpx.Client, manifest: Manifest) -> Check:
    expected = f"{manifest.model} is serving at {manifest.url}"
    try:
        response = client.get("/bridge/status")
        status = Status.model_validate_json(response.content) if response.is_success else None
    except httpx.TransportError as error:
        return failed(FENCE, _silence(error), expected, f"{START} {manifest.model}")
    except ValidationError:
        who = "its /bridge/status is not Bridge's"
    else:
        if status and status.server == manifest.server and status.model == manifest.model:
            return _state(status, expected)
        who = (
            f"{status.model}, pid {status.server.pid}" if status else f"/bridge/status returned {response.status_code}"
        )
    remedy = f"stop that one, or use another port: {START} {manifest.model} --port PORT"
    return failed(FENCE, f"another server answers at {manifest.url}: {who}", expected, remedy)


def _state(status: Status, expected: str) -> Check:
    if status.state == "torn":
        return failed(FENCE, status.torn(), expected, status.remedy())
    if status.state == "paused":
        holder = f"pid {status.holder.pid}" if status.holder else "an unknown process"
        does = "reads" if status.writes == "nothing" else f"writes version {status.version + 1}"
        stop = f"; if it stays paused, stop that process: kill {status.holder.pid}" if status.holder else ""
        expected = f"{expected}; a pause lasts milliseconds, or a step if training uses the KV cache's memory"
        return warned(FENCE, f"paused by {holder}, which {does}", expected, f"bridge doctor again{stop}")
    lease = status.lease
    updated = f", updated by pid {lease.holder.pid} (run {lease.run})" if lease else ""
    return passed(FENCE, f"serving version {status.version} of {status.model}{updated}", expected)


def _numbers(client: httpx.Client, manifest: Manifest) -> Check:
    expected = "every weight is a finite number"
    try:
        response = client.get("/bridge/tensors/finite", timeout=SCAN_TIMEOUT_S)
        found = Finiteness.model_validate_json(response.content)
        status = Status.model_validate_json(client.get("/bridge/status").content)
    except (httpx.TransportError, ValidationError) as error:
        return skipped(NUMBERS, f"no answer: {type(error).__name__}", expected, f"{START} {manifest.model}")
    return judged(NUMBERS, not found.not_finite, found.found(), expected, status.remedy())


def _silence(error: httpx.TransportError) -> str:
    return f"no answer: {str(error) or type(error).__name__}"
