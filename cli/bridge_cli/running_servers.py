"""The running servers that `bridge train` trains on: which they are, and whether they can be trained together."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import SamplingConfig, ServerConfig
from bridge.core import paths
from bridge.errors import ManifestError, UsageError
from bridge.processes.server_command import StartCommand
from bridge.processes.server_process import StartedServer
from bridge.processes.start_checks import check_reachable
from bridge.server import discovery
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest
from bridge_cli import console
from bridge_cli.launch import ReplicaServer, Servers

if TYPE_CHECKING:
    from bridge.ranks.world import Ranks

SAME: dict[str, Callable[[Manifest], Any]] = {
    "model": lambda manifest: manifest.model,
    "dtype": lambda manifest: manifest.dtype,
    "number of tensor-parallel ranks": lambda manifest: manifest.tp_degree,
    "backend": lambda manifest: manifest.backend,
    "version of vLLM": lambda manifest: manifest.versions.get("vllm"),
}
"""What all servers of a run must have in common."""


class RunningServer(NamedTuple):
    """A live server that Bridge started."""

    path: Path
    """Its manifest's path."""
    manifest: Manifest


class RunningServers(Servers):
    """A running server for each replica, or the one that `--start-command` starts and restarts."""

    def __init__(
        self, replicas: Sequence[RunningServer], command: StartCommand | None, *, server: ServerConfig, model_name: str
    ) -> None:
        self._replicas = replicas
        self._server = server
        self._model_name = model_name
        self._command = command

    @property
    def tp_degree(self) -> int:
        return max((server.manifest.tp_degree for server in self._replicas), default=1)

    @property
    def max_model_len(self) -> int | None:
        lengths = (server.manifest.max_model_len for server in self._replicas)
        return min((length for length in lengths if length), default=None)

    def check(self) -> None:
        from bridge.modes.shared_vllm import manifest_of

        if self._replicas:
            manifest_of(self._server, self._model_name, self._replicas[0].manifest)

    def prepare(self, sampling: SamplingConfig) -> SamplingConfig:
        check_reachable(self._model_name)
        return sampling

    @contextlib.contextmanager
    def serving(self, world: "Ranks", sampling: SamplingConfig, run: RunDirectory) -> Iterator[ReplicaServer]:  # noqa: ARG002  as inherited
        choices = {"vllm_config_path": self._replicas[world.dp_rank].path} if self._replicas else {}
        if self._command is None:
            yield ReplicaServer(choices, None)
            return
        with StartedServer(self._command, run.server_log, waiting=console.waiting).running() as process:
            yield ReplicaServer(choices, process)


def find(server: ServerConfig, *, attaches: bool) -> list[RunningServer]:
    """Return the servers to train on, one per replica; empty if the mode does not attach or no server is running.

    Raises:
        ManifestError: a named server is not running, or was not started by Bridge.
        UsageError: they cannot be trained together.
    """
    names = server.servers
    if not attaches:
        return []
    if not names:
        with contextlib.suppress(ManifestError):  # the mode raises it later, after errors in the command line
            path = manifests.find(server.config_path)
            return [RunningServer(path, manifests.load(path))]
        return []
    replicas = [_named(name) for name in names]
    _check(names, replicas)
    return replicas


def check_free(servers: Sequence[RunningServer], timeout_s: float, *, resumes: bool) -> None:
    """Check that no trainer updates the servers, and that their weights are complete unless a checkpoint replaces them.

    Raises:
        AttachError: another trainer updates one of the servers, or weights may be half-written.
    """
    from bridge.server.client import BridgeClient

    for server in servers:
        with BridgeClient(server.manifest, timeout_s=timeout_s) as client:
            status = client.status()
        if status.lease is not None:
            raise status.lease.refusal()
        if not resumes:
            status.refuse_torn()


def _named(name: str) -> RunningServer:
    """Return the server that `name` identifies, which is the path of its manifest, its address or its port."""
    port = name.rpartition(":")[2]
    if not port.isdecimal() or paths.expanded(name).exists():
        path = manifests.find(paths.expanded(name))
        return RunningServer(path, manifests.load(path))
    listed = {manifest.url: RunningServer(path, manifest) for path, manifest in discovery.running().items()}
    same_port = {url: server for url, server in listed.items() if url.rpartition(":")[2] == port}
    if name.isdecimal() and len(same_port) == 1:
        return next(iter(same_port.values()))
    url = name if "://" in name else f"http://{name}"
    if url not in listed:
        raise ManifestError(
            f"--servers {name}: no server of Bridge listens there"
            + (f", only at {', '.join(listed)}" if listed else ""),
            hint="start it with bridge serve-vllm on this host, or name its manifest",
        )
    return listed[url]


def _check(names: Sequence[str], servers: Sequence[RunningServer]) -> None:
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
