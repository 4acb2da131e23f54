"""How many ranks a host has, which of them share a server, and which GPUs they have."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.checks import model
from bridge.config import ServeConfig, TrainConfig
from bridge.errors import UsageError
from bridge.processes import accelerator

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_PORT = 65535


@dataclass(frozen=True)
class Layout:
    """The ranks of one host."""

    tp_size: int
    """Ranks that share a server."""
    device: str
    gpus: Sequence[str | None]
    """For each rank, what CUDA_VISIBLE_DEVICES is for it and its server; None: unchanged."""


def tp_size(train: TrainConfig, serve: ServeConfig) -> int:
    """Return the number of ranks that train on one server: as many as it has GPUs, if its memory is trained.

    Raises:
        UsageError: what is trained, or the model, cannot be cut into parts.
    """
    if (parts := serve.tensor_parallel_size) == 1:
        return 1
    flag = f"--tensor-parallel-size {parts}"
    described = model.read(serve.model)
    if undivided := model.undivided(described, parts):
        fitting = max(number for number in range(1, parts) if not model.undivided(described, number))
        raise UsageError(
            f"{flag} does not divide the {undivided} of {serve.model}", remedy=f"--tensor-parallel-size {fitting}"
        )
    if train.trains_in_server:
        if alone := [name for name, chosen in train.on_one_gpu().items() if chosen]:
            raise UsageError(f"{alone[0]} trains on one GPU, found {flag}", remedy=f"leave out {alone[0]} or {flag}")
        if train.optimizer.gradient_release:
            raise UsageError(
                f"--gradient-release trains on servers of one GPU each, found {flag}",
                remedy=f"leave out --gradient-release or {flag}",
            )
        return parts
    if train.replicas > 1:
        raise UsageError(
            f"--mode {train.mode}: each of several servers has one GPU, found {flag}", remedy="leave it out"
        )
    return 1


def dp_size(train: TrainConfig, parts: int) -> int:
    """Return the number of replicas on each host, of `parts` GPUs each.

    Raises:
        UsageError: their GPUs are not those of `--gpus`, or a batch cannot be dealt out to the replicas of all hosts.
    """
    if train.gpus % parts and train.gpus > 1:
        raise UsageError(
            f"--gpus {train.gpus} is not a multiple of --tensor-parallel-size {parts}",
            remedy=f"--gpus {max(1, train.gpus // parts) * parts}",
        )
    count = max(1, train.gpus // parts)  # --gpus 1 is the default
    group_size, size = train.sampling.group_size, count * train.hosts
    num_groups = train.rollouts.batch_size // group_size
    if train.rollouts.samples_here and num_groups % size:
        least = math.lcm(size, train.optimizer.updates_per_batch)
        raise UsageError(
            f"{size} replicas do not divide the {num_groups} groups of a batch",
            remedy=f"--batch-size {group_size * least * -(-num_groups // least)}",
        )
    return count


def num_gpus(train: TrainConfig, serve: ServeConfig) -> int:
    """Return the number of GPUs of each host that a run takes; UsageError as `tp_size` and `dp_size`."""
    return dp_size(train, tp_size(train, serve)) * serve.tensor_parallel_size


def of(train: TrainConfig, serve: ServeConfig) -> Layout:
    """Return the ranks of this host.

    Raises:
        UsageError: there are fewer GPUs, or no whole number of servers has them.
    """
    parts = tp_size(train, serve)
    count = parts * dp_size(train, parts)
    most = MOST_PORT + 1 - count // parts * train.hosts
    if not train.rollouts.samples_here and serve.port > most:  # each server has the port after the one before
        raise UsageError(
            f"--port {serve.port}: the servers of all replicas have ports in a row, up to {MOST_PORT}",
            remedy=f"--port {most} or lower",
        )
    if count * train.hosts == 1:
        return Layout(1, "", [None])
    device, _ = accelerator.choose(serve.device)
    if device != "cuda" or count == 1:
        return Layout(parts, device, [None] * count)
    shown = len(accelerator.gpu_memory_bytes())
    if count > shown:
        wanted = f"--gpus {count}" if train.gpus > 1 else f"--tensor-parallel-size {parts}"
        fitting = [f"--gpus {max(shown // parts * parts, min(parts, shown))}"] if train.gpus > 1 else []
        fitting += [f"--tensor-parallel-size {shown}"] if parts > shown else []
        raise UsageError(f"{wanted}: this host shows {shown}", remedy=" ".join(fitting))
    visible = os.environ.get(VISIBLE)
    numbers = visible.split(",") if visible else [*map(str, range(shown))]
    replicas = [",".join(numbers[first : first + parts]) for first in range(0, count, parts)]
    return Layout(parts, device, [replicas[rank // parts] for rank in range(count)])
