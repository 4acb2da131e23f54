"""Find the running servers that `bridge train` trains on. It neither starts nor stops them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bridge.config import ServerConfig
from bridge.core import paths
from bridge.errors import ManifestError, UsageError
from bridge.server import discovery
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest
from bridge_cli.layout import Layout

SAME: dict[str, Callable[[Manifest], Any]] = {
    "model": lambda manifest: manifest.model,
    "dtype": lambda manifest: manifest.dtype,
    "number of tensor-parallel ranks": lambda manifest: manifest.tp_degree,
    "backend": lambda manifest: manifest.backend,
    "version of vLLM": lambda manifest: manifest.versions.get("vllm"),
}
"""What all servers of a run must have in common."""


class Running(NamedTuple):
    """A live server of Bridge."""

    path: Path
    """Of its manifest."""
    manifest: Manifest


def running(server: ServerConfig, *, attaches: bool) -> list[Running]:
    """Return the servers to train on, one for each replica; none if the mode does not attach, or there is none.

    Raises:
        ManifestError: one that was named is not running, or was not started by Bridge.
        UsageError: they cannot be trained together.
    """
    names = server.servers
    if not attaches:
        return []
    if not names:
        with suppress(ManifestError):  # the mode raises it, after what is wrong with the command itself
            path = manifests.find(server.config_path)
            return [Running(path, manifests.load(path))]
        return []
    replicas = [_running(name) for name in names]
    _check(names, replicas)
    return replicas


def layout(servers: Sequence[Running], tp_size_of: Callable[[int], int], restarts: int) -> Layout:
    """Return one rank for each part of each server's weights, on the part's GPU; one a server if it trains elsewhere.

    `tp_size_of` returns the number of ranks that train on a server with this many shards.

    Raises:
        UsageError: what is trained cannot be cut into parts.
    """
    if not servers:
        return Layout(1, "", [None])
    first = servers[0].manifest
    tp_size = tp_size_of(len(first.shards))
    if first.backend == "shared_memory":
        return Layout(tp_size, "cpu", [None] * (tp_size * len(servers)), restarts=restarts)
    visible = [",".join(str(shard.gpu_uuid) for shard in server.manifest.shards) for server in servers]
    gpus = [uuids for uuids in visible for _ in range(tp_size)]
    return Layout(tp_size, "cuda", gpus if len(gpus) > 1 else [None], restarts=restarts)


def check_free(servers: Sequence[Running], timeout_s: float, *, resumes: bool) -> None:
    """Check that no trainer updates the servers, and that their weights are complete unless a checkpoint replaces them.

    Raises:
        AttachError: another trainer updates one, or its weights may be half-written.
    """
    from bridge.server.client import BridgeClient

    for server in servers:
        with BridgeClient(server.manifest, timeout_s=timeout_s) as client:
            status = client.status()
        if status.lease is not None:
            raise status.lease.refusal()
        if not resumes:
            status.refuse_torn()


def _running(name: str) -> Running:
    """Return the server of a manifest, by its path, or of an address."""
    port = name.rpartition(":")[2]
    if not port.isdecimal() or paths.expanded(name).exists():
        path = manifests.find(paths.expanded(name))
        return Running(path, manifests.load(path))
    listed = {manifest.url: Running(path, manifest) for path, manifest in discovery.running().items()}
    same_port = {url: server for url, server in listed.items() if url.rpartition(":")[2] == port}
    if name.isdecimal() and len(same_port) == 1:
        return next(iter(same_port.values()))
    url = name if "://" in name else f"http://{name}"
    if url not in listed:
        raise ManifestError(
            f"--servers {name}: no server of Bridge listens there"
            + (f", but at {', '.join(listed)}" if listed else ""),
            hint="start it with bridge serve-vllm on this host, or name its manifest",
        )
    return listed[url]


def _check(names: Sequence[str], servers: Sequence[Running]) -> None:
    for number, server in enumerate(servers):
        same = [names[other] for other in range(number) if servers[other].manifest.server == server.manifest.server]
        if same:
            raise UsageError(
                f"--servers: {same[0]} and {names[number]} are the same server (pid {server.manifest.server.pid})",
                hint="name each server once",
            )
        for what, of in SAME.items():
            expected, other = of(servers[0].manifest), of(server.manifest)
            if other != expected:
                raise UsageError(
                    f"the servers differ in their {what}: {expected} at {names[0]}, {other} at {names[number]}",
                    hint="start all of them with the same model and flags",
                )
