"""Check that the manifest's server answers, is that very server, is serving, and that its weights can be opened.

Not covered: the manifest itself (`manifest.py`), proof that both sides compute the same (`bridge verify`).
"""

import os

import httpx
from pydantic import ValidationError

from bridge.checks.result import Check, failed, passed, skipped, warned
from bridge.server.manifest import Manifest, SharedMemoryHandle
from bridge.server.protocol import Finiteness, Status

ANSWER_TIMEOUT_S = 5.0
SCAN_TIMEOUT_S = 60.0
"""Longest wait for the server to look at all of its weights."""
HEALTH, FENCE, WEIGHTS, NUMBERS = "Server health", "Fence", "Server's weights", "Server's numbers"
RESTART = "bridge serve-vllm --model"


def connect(manifest: Manifest) -> httpx.Client:
    """Open a connection with the manifest's token, past any proxy: the server is on this host."""
    headers = {"authorization": f"Bearer {manifest.token}"}
    return httpx.Client(base_url=manifest.url, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False)


def answers(manifest: Manifest) -> list[Check]:
    """Ask the server for its health and for the state of its fence."""
    with connect(manifest) as client:
        checks = [health(client, manifest)]
        for check in (fence, numbers):
            if checks[-1].status == "PASS":
                checks.append(check(client, manifest))
        return checks


def health(client: httpx.Client, manifest: Manifest) -> Check:
    """Check that the engine behind the manifest's URL is well."""
    expected = f"{manifest.url}/health answers 200"
    remedy = f"look into the server's log, and restart it: {RESTART} {manifest.model}"
    try:
        response = client.get("/health")
    except httpx.TransportError as error:
        return failed(HEALTH, f"no answer: {str(error) or type(error).__name__}", expected, remedy)
    if response.status_code != httpx.codes.OK:
        return failed(HEALTH, f"answered {response.status_code}", expected, remedy)
    return passed(HEALTH, f"{manifest.url} is well", expected)


def fence(client: httpx.Client, manifest: Manifest) -> Check:
    """Check that it is the manifest's own server, and that nobody holds or tore its fence."""
    expected = f"{manifest.model} is serving at {manifest.url}"
    foreign = f"another server answers at {manifest.url}"
    remedy = f"stop that one, or take another port: {RESTART} {manifest.model} --port PORT"
    try:
        response = client.get("/bridge/status")
        if response.status_code != httpx.codes.OK:
            return failed(FENCE, f"{foreign}: /bridge/status gave {response.status_code}", expected, remedy)
        status = Status.model_validate_json(response.content)
    except httpx.TransportError as error:
        return failed(
            FENCE, f"no answer: {str(error) or type(error).__name__}", expected, f"{RESTART} {manifest.model}"
        )
    except ValidationError:
        return failed(FENCE, f"{foreign}: its /bridge/status is not Bridge's", expected, remedy)
    if status.server != manifest.server or status.model != manifest.model:
        return failed(FENCE, f"{foreign}: {status.model}, pid {status.server.pid}", expected, remedy)
    return _state(status, expected)


def numbers(client: httpx.Client, manifest: Manifest) -> Check:
    """Check that the server's weights are numbers."""
    expected = "every weight is a finite number"
    try:
        response = client.get("/bridge/tensors/finite", timeout=SCAN_TIMEOUT_S)
        found = Finiteness.model_validate_json(response.content)
        status = Status.model_validate_json(client.get("/bridge/status").content)
    except (httpx.TransportError, ValidationError) as error:
        return skipped(NUMBERS, f"no answer: {type(error).__name__}", expected, f"{RESTART} {manifest.model}")
    if found.not_finite:
        return failed(NUMBERS, found.found(), expected, status.mending())
    return passed(NUMBERS, found.found(), expected)


def _state(status: Status, expected: str) -> Check:
    if status.state == "torn":
        return failed(FENCE, status.torn(), expected, status.mending())
    if status.state == "paused":
        holder = f"pid {status.holder.pid}" if status.holder else "an unknown process"
        does = "reads" if status.writes == "nothing" else f"writes version {status.version + 1}"
        found = f"paused by {holder}, which {does}"
        end_it = f"; if it stays so, end that process: kill {status.holder.pid}" if status.holder else ""
        return warned(
            FENCE,
            found,
            f"{expected}; a pause lasts milliseconds, or a step where training has the KV cache's memory",
            f"bridge doctor again{end_it}",
        )
    lease = status.lease
    updated = f", updated by pid {lease.holder.pid} (run {lease.run})" if lease else ""
    return passed(FENCE, f"serving version {status.version} of {status.model}{updated}", expected)


def weights_open(manifest: Manifest) -> Check:
    """Check that this process may open the server's shared-memory files, whole."""
    expected = "every shared file of the server opens for writing"
    if manifest.backend != "shared_memory":
        return skipped(WEIGHTS, "in GPU memory: bridge verify opens them", expected)
    sizes = _sizes(manifest)
    for path, size in sizes.items():
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return failed(
                WEIGHTS, f"{path}: {error.strerror}", expected, "run as the server's user, in its pid namespace"
            )
        found = os.fstat(descriptor).st_size
        os.close(descriptor)
        if found < size:
            remedy = f"restart the server, which writes the manifest anew: {RESTART} {manifest.model}"
            return failed(WEIGHTS, f"{path} has {found} bytes", f"at least {size} bytes", remedy)
    return passed(WEIGHTS, f"{len(sizes)} shared file(s), {sum(sizes.values()) / 2**20:.0f} MiB", expected)


def _sizes(manifest: Manifest) -> dict[str, int]:
    """Return how large each shared file has to be at least."""
    sizes: dict[str, int] = {}
    for shard in (manifest, *manifest.other_shards):
        for handle in shard.ipc_handles.values():
            if isinstance(handle, SharedMemoryHandle):
                end = handle.storage_offset + handle.storage_size
                sizes[handle.path] = max(sizes.get(handle.path, 0), end)
    return sizes
