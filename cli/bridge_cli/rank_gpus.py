"""Decide how many ranks a run has, which of them share a server, and which GPUs the ranks of this host use."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.checks import model
from bridge.config import ServeConfig
from bridge.errors import UsageError
from bridge.processes import accelerator
from bridge.server.manifest import Manifest

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_PORT = 65535


@dataclass(frozen=True)
class RankLayout:
    """The ranks of one host, and how they meet the ranks of other hosts."""

    tp_size: int
    """Number of ranks that share a server."""
    device: str
    gpus: Sequence[str | None]
    """CUDA_VISIBLE_DEVICES for each rank and its server; None: unchanged."""
    hosts: int = 1
    rendezvous: str | None = None
    """`--rendezvous`, where several hosts meet."""
    restarts: int = 0
    cp_size: int = 1
    """Number of ranks that split each training pass among them."""

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return len(self.gpus) * self.hosts


def check_cuts(name: str, num_slices: int) -> None:
    """Check that training passes of the model `name` can be cut into `num_slices`.

    Raises:
        UsageError: the passes cannot be cut this way.
    """
    described = model.read(name) if num_slices > 1 else None
    if described is not None and (reason := model.uncut(described, num_slices)):
        fitting = max(number for number in range(1, num_slices) if number == 1 or not model.uncut(described, number))
        raise UsageError(
            f"--context-parallel-size {num_slices} {reason} of {name}",
            hint=f"--context-parallel-size {fitting}" if fitting > 1 else "leave it out",
        )


def check_divides(name: str, parts: int, num_slices: int = 1) -> None:
    """Check that vLLM can cut the model `name` into `parts`, and the trainer its passes into `num_slices`.

    Raises:
        UsageError: the weights or the passes cannot be cut this way.
    """
    check_cuts(name, num_slices)
    described = model.read(name) if parts > 1 else None
    if undivided := model.undivided(described, parts):
        fitting = max(number for number in range(1, parts) if not model.undivided(described, number))
        raise UsageError(
            f"--tensor-parallel-size {parts} does not divide the {undivided} of {name}",
            hint=f"--tensor-parallel-size {fitting}",
        )


def of_started(
    serve: ServeConfig,
    tp_size: int,
    dp_size: int,
    *,
    gpus: int = 1,
    cp_size: int = 1,
    hosts: int = 1,
    rendezvous: str | None = None,
    restarts: int = 0,
    samples_here: bool = True,
) -> RankLayout:
    """Return the layout of this host's ranks, one per GPU, for the `dp_size` servers that it starts.

    `tp_size` ranks train on one server, on consecutive GPUs. `gpus` is `--gpus`. Unless the run `samples_here`, its
    servers have fixed ports, which other programs know.

    Raises:
        UsageError: the host has too few GPUs, or they do not divide evenly among servers.
    """
    if hosts == 1 and rendezvous is not None:
        raise UsageError(f"--rendezvous {rendezvous} has no effect on one host", hint="add --hosts H")
    check_divides(serve.model, serve.tensor_parallel_size, cp_size)
    most = MOST_PORT + 1 - dp_size * hosts
    if not samples_here and serve.port > most:  # the servers use consecutive ports
        raise UsageError(
            f"--port {serve.port}: the servers of all replicas use consecutive ports, up to {MOST_PORT}",
            hint=f"--port {most} or lower",
        )
    device = ""
    visible: list[str | None] = [None]
    if tp_size * dp_size * hosts > 1:
        device, _ = accelerator.choose(serve.device)
        visible = _visible(tp_size * dp_size, tp_size, gpus, device)
    return RankLayout(tp_size, device, visible, hosts, rendezvous, restarts, cp_size)


def of_running(
    servers: Sequence[Manifest], tp_size_of: Callable[[int], int], *, cp_size: int, restarts: int
) -> RankLayout:
    """Return the layout of the ranks for running servers: one rank per shard of a server's weights, on the shard's GPU.

    If the trained weights are not in the server's memory, each server has one rank. `tp_size_of` returns the number
    of ranks that train on a server with this many shards.

    Raises:
        UsageError: the trained weights cannot be sharded.
    """
    if not servers:
        return RankLayout(1, "", [None], cp_size=cp_size)
    tp_size = tp_size_of(len(servers[0].shards))
    if servers[0].backend == "shared_memory":
        return RankLayout(tp_size, "cpu", [None] * (tp_size * len(servers)), restarts=restarts, cp_size=cp_size)
    visible = [",".join(str(shard.gpu_uuid) for shard in server.shards) for server in servers]
    gpus = [uuids for uuids in visible for _ in range(tp_size)]
    return RankLayout(tp_size, "cuda", gpus if len(gpus) > 1 else [None], restarts=restarts, cp_size=cp_size)


def _visible(count: int, tp_size: int, requested: int, device: str) -> list[str | None]:
    """Return the GPUs visible to each of `count` ranks: the GPUs of its replica; `requested` is `--gpus`."""
    if device != "cuda" or count == 1:
        return [None] * count
    num_gpus = len(accelerator.gpu_memory_bytes())
    if count > num_gpus:
        wanted = f"--tensor-parallel-size {tp_size}"
        fitting = []
        if requested > 1:
            wanted = f"--gpus {count}"
            whole_replicas = num_gpus // tp_size * tp_size
            fitting.append(f"--gpus {max(whole_replicas, min(tp_size, num_gpus))}")
        if tp_size > num_gpus:
            fitting.append(f"--tensor-parallel-size {num_gpus}")
        raise UsageError(f"{wanted}: this host has only {num_gpus} visible", hint=" ".join(fitting))
    given = os.environ.get(VISIBLE)
    numbers = given.split(",") if given else [*map(str, range(num_gpus))]
    replicas = [",".join(numbers[first : first + tp_size]) for first in range(0, count, tp_size)]
    return [replicas[rank // tp_size] for rank in range(count)]
