"""Check the server that a trainer would use, its port, and leftovers of other servers. Nothing is stopped here.

vLLM's engine and workers call themselves `VLLM::...`. If the API server is killed with -9, they may keep running and
hold memory, most of it on a GPU.
Not covered: the proof that both sides compute the same (`one_copy_proof.py`).
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import psutil

from bridge.checks import Check, failed, judged, passed, skipped, tried, warned
from bridge.core.foreign_code import shortened
from bridge.errors import BridgeError, ManifestError
from bridge.server import discovery
from bridge.server import manifest as manifests
from bridge.server.client import BridgeClient
from bridge.server.manifest import Manifest, SharedMemoryHandle
from bridge.server.protocol import Status

ANSWER_TIMEOUT_S = 5.0
FOUND, PROCESS, OTHERS, FENCE, WEIGHTS, NUMBERS = (
    "Manifest", "Server process", "Other manifests", "Fence", "Server's weights", "Server's numbers"
)  # fmt: skip
START = "bridge serve-vllm --model"
ENGINE = "VLLM::"
OWNERS = ("vllm", "bridge", "python")
"""Words in the command lines of processes that can own an engine; init's command line has none of them."""


class Examined(NamedTuple):
    """The result of looking for a manifest."""

    checks: list[Check]
    path: Path | None = None
    """The manifest that a trainer would use, if there is one."""
    live: Manifest | None = None
    """The content of that manifest, if its server runs on this host."""


def examine(given: Path | None) -> Examined:
    """Find, read and check the manifest that `bridge train --vllm-config-path given` would use."""
    expected = f"{manifests.MANIFEST_NAME} of a running server"
    path = None
    try:
        path = discovery.find(given)
        manifest = manifests.read(path)
    except ManifestError as error:
        check = failed(FOUND, error.message, expected, error.hint)
        if path is None and given is None:
            found = f"no server yet: {error.message.removeprefix('no manifest: ')}"
            check = skipped(FOUND, found, expected, error.hint)
        return Examined([check], path)
    readable = passed(FOUND, f"{path} ({manifest.model}, {manifest.backend})", expected)
    expected = "the server that wrote the manifest is running on this host"

    def named() -> str:
        manifests.check_server(manifest, path)
        return f"pid {manifest.server.pid} on {manifest.host}"

    lives = tried(PROCESS, named, expected)
    return Examined([readable, lives], path, manifest if lives.status == "PASS" else None)


def same_versions(manifest: Manifest, here: Mapping[str, str | None]) -> Check:
    """Check that server and trainer have the same package versions: the format of torch's handles is not stable."""
    name = "Server's versions"
    there = {package: version for package, version in manifest.versions.items() if package in here}
    versions = ", ".join(f"{package} {version}" for package, version in there.items())
    expected = f"the server's: {versions}"
    other = [
        f"{package} {here[package] or '(not installed)'}"
        for package, version in there.items()
        if here[package] != version
    ]
    if not other:
        return passed(name, versions, expected)
    hint = "run server and trainer in one virtual environment, or restart the server after an upgrade"
    return warned(name, f"here: {', '.join(other)}", expected, hint)


def same_gpu(manifest: Manifest, visible: Collection[str]) -> Check:
    name = "Server's GPU"
    needed = {shard.gpu_uuid for shard in manifest.shards if shard.gpu_uuid}
    if not needed:
        return passed(name, "not needed: the weights are in main memory", "every GPU that holds weights is visible")
    all_needed = ",".join(sorted(needed))
    hint = f"CUDA_VISIBLE_DEVICES={all_needed} bridge train ... (the trainer must run on the server's GPU)"
    found = f"this process sees {', '.join(visible) or 'no GPU'}"
    return judged(name, needed <= set(visible), found, f"visible: {all_needed}", hint)


def others(used: Path | None) -> Iterator[Check]:
    """Warn about every other manifest on the search path, which would cause trouble if it came first."""
    clean = "no stale or foreign manifest on the search path"
    for path in dict.fromkeys(path.resolve() for path in manifests.search_path()):
        try:
            if (used and path == used.resolve()) or not path.is_file():
                continue
            manifests.check_server(manifests.read(path), path)
        except ManifestError as error:
            yield warned(OTHERS, error.message, clean, f"rm {path}")
        except OSError as error:
            hint = f"ls -l {path}; or for server and trainer: export LOGDIR=YOUR_OWN_FOLDER"
            yield warned(OTHERS, f"{path}: {error.strerror}", clean, hint)
        else:
            found = f"{path} belongs to a different live server"
            yield warned(OTHERS, found, "one server on the search path", f"--vllm-config-path {path} to use it")


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
            hint = "run as the server's user, in its PID namespace"
            return failed(WEIGHTS, f"{path}: {error.strerror}", expected, hint)
        if found < size:
            hint = f"restart the server, which rewrites the manifest: {START} {manifest.model}"
            return failed(WEIGHTS, f"{path} has {found} bytes", f"at least {size} bytes", hint)
    return passed(WEIGHTS, f"{len(sizes)} shared file(s), {sum(sizes.values()) / 2**20:.0f} MiB", expected)


def answers(manifest: Manifest) -> list[Check]:
    """Request the server's health, the state of its fence, and a scan of its weights; stop at the first failure."""
    checks: list[Check] = []
    with BridgeClient(manifest, timeout_s=ANSWER_TIMEOUT_S) as client:
        for request in (_health, _fence, _numbers):
            checks.append(request(client, manifest))
            if checks[-1].status != "PASS":
                break
    return checks


def _health(client: BridgeClient, manifest: Manifest) -> Check:
    def health() -> str:
        client.check_health()
        return f"{manifest.url} is healthy"

    return tried("Server health", health, f"{manifest.url}/health answers 200")


def _fence(client: BridgeClient, manifest: Manifest) -> Check:
    expected = f"{manifest.model} is serving at {manifest.url}"
    try:
        status = client.status()
    except BridgeError as error:
        found = error.message
    else:
        if status.server == manifest.server and status.model == manifest.model:
            return _state(status, expected)
        found = f"another server answers at {manifest.url}: {status.model}, pid {status.server.pid}"
    hint = f"stop the process that answers there, or use a different port: {START} {manifest.model} --port PORT"
    return failed(FENCE, found, expected, hint)


def _state(status: Status, expected: str) -> Check:
    if status.state == "torn":
        return failed(FENCE, status.torn(), expected, status.hint())
    if status.state == "paused":
        holder = f"pid {status.holder.pid}" if status.holder else "an unknown process"
        does = "reads" if status.writes == "nothing" else f"writes version {status.version + 1}"
        stop = f"; if it stays paused, stop that process: kill {status.holder.pid}" if status.holder else ""
        expected = f"{expected}; a pause lasts milliseconds, or a step if training uses the KV cache's memory"
        return warned(FENCE, f"paused by {holder}, which {does}", expected, f"bridge doctor again{stop}")
    lease = status.lease
    updated = f", updated by pid {lease.holder.pid} (run {lease.run})" if lease else ""
    return passed(FENCE, f"serving version {status.version} of {status.model}{updated}", expected)


def _numbers(client: BridgeClient, manifest: Manifest) -> Check:
    expected = "every weight is a finite number"
    try:
        scan = client.finiteness()
        status = client.status()
    except BridgeError as error:
        return skipped(NUMBERS, error.message, expected, f"{START} {manifest.model}")
    return judged(NUMBERS, not scan.not_finite, scan.found(), expected, status.hint())


class Process(NamedTuple):
    """One process, with what this user may see of it."""

    pid: int | None
    """None: a process of another user or container."""
    command: str = ""
    """Its command line, or the title of an engine; empty if unreadable."""
    ancestors: tuple[int, ...] = ()
    """The processes that started or adopted it, nearest first."""

    def __str__(self) -> str:
        return f"pid {self.pid}" + (f": {self.command}" if self.command else "")


def listening() -> dict[int, int | None]:
    """Return the TCP ports with a listener, and its pid; None: the listener is another user's or container's."""
    taken: dict[int, int | None] = {}
    for connection in psutil.net_connections(kind="tcp"):
        if connection.laddr and connection.status == psutil.CONN_LISTEN:
            taken[connection.laddr.port] = connection.pid or taken.get(connection.laddr.port)
    return taken


def describe(pid: int | None) -> Process:
    """Return what is known about the process `pid`; a long command line is shortened."""
    if pid is None:
        return Process(pid=None)
    try:
        process = psutil.Process(pid)
        program, *arguments = process.cmdline() or [process.name()]
        ancestors = tuple(parent.pid for parent in process.parents())
    except psutil.Error:
        return Process(pid=pid)
    return Process(pid, shortened(" ".join([Path(program).name, *arguments])), ancestors)


def port(number: int, server_pid: int | None, others: Mapping[int, str] = MappingProxyType({})) -> Check:
    """Check that only the manifest's server listens on a port.

    `others` maps the pid of each other running Bridge server to the server's name in messages.
    """
    taken = listening()
    name = f"Port {number}"
    expected = "free, or taken by the manifest's server"
    if number not in taken:
        found = "free" if server_pid is None else f"free, although the server (pid {server_pid}) is running"
        hint = "see why in its log, and restart it: bridge serve-vllm --model MODEL"
        return judged(name, server_pid is None, found, expected, hint)
    listener = describe(taken[number])
    pids = (listener.pid, *listener.ancestors)
    if server_pid is not None and server_pid in pids:
        return passed(name, f"our server, pid {listener.pid}", expected)
    free = next(candidate for candidate in range(number + 1, number + 1000) if candidate not in taken)
    hint = f"bridge serve-vllm --port {free} ..."
    if listener.pid is None:
        return failed(name, "taken by another user's process, or another container's", expected, hint)
    if ours := next((words for pid, words in others.items() if pid in pids), None):
        found = f"taken by a server of Bridge that was started elsewhere, pid {listener.pid}"
        return warned(name, found, expected, f"to use that server: {ours}; to start a new one: {hint}")
    return failed(
        name, f"taken by {listener}", expected, f"{hint}, or stop that process if it is yours: kill {listener.pid}"
    )


def running() -> Iterator[Process]:
    """Yield every process with a readable command line, and its parent."""
    for process in psutil.process_iter(["ppid", "cmdline"]):
        if process.info["cmdline"]:
            yield Process(process.pid, " ".join(process.info["cmdline"]), (process.info["ppid"],))


def engines_have_servers(processes: Iterable[Process]) -> Check:
    by_pid = {process.pid: process for process in processes}
    engines = [process for process in by_pid.values() if process.command.startswith(ENGINE)]
    lost = [engine for engine in engines if not _is_owned(engine, by_pid)]
    found = f"none; engine processes with their server: {len(engines)}" if engines else "none"
    if lost:
        named = ", ".join(f"pid {engine.pid} {engine.command.strip()}" for engine in lost)
        found = f"{named}: the server is gone, but they still hold its memory"
    hint = f"if they are yours: kill {' '.join(str(engine.pid) for engine in lost)}"
    expected = "every VLLM:: process has its server"
    return judged("Leftover engines", not lost, found, expected, hint, otherwise="WARN")


def _is_owned(engine: Process, by_pid: Mapping[int | None, Process]) -> bool:
    """Return whether the nearest ancestor that is not an engine process can own an engine."""
    parent: Process | None = engine
    while parent and parent.command.startswith(ENGINE):
        parent = by_pid.get(parent.ancestors[0])
    return parent is not None and any(owner in parent.command.lower() for owner in OWNERS)
