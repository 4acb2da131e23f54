"""Ranks of a program started by torchrun, or by any launcher that sets torch's environment variables.

Source: "Environment Variables" of torchrun (PyTorch's documentation).
"""

import os
import socket
from contextlib import closing, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from bridge.errors import UsageError
from bridge.ranks.world import INTERFACES, LOOPBACK, Ranks

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORT_KEY = "bridge/port"
"""Store key under which rank 0 writes its port."""
LIMIT = timedelta(minutes=10)
"""Longest wait for rank 0."""


def world_size() -> int:
    """Return the number of processes that were started together; 1 without a launcher.

    Raises:
        UsageError: the variables are incomplete or inconsistent: the processes would train independently of each
            other, or wait for a rank that does not exist.
    """
    size = _number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
    if size == 1:
        return 1
    if missing := [name for name in NAMES if name not in os.environ]:
        raise _not_a_launcher(f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set")
    if size < 1 or not 0 <= _number("RANK") < size:
        raise _not_a_launcher(f"RANK is {os.environ['RANK']} of WORLD_SIZE {size}")
    if not 0 < _number("MASTER_PORT") < 2**16:
        raise _not_a_launcher(f"MASTER_PORT is {os.environ['MASTER_PORT']}")
    return size


def rank() -> int:
    """Return the rank of this process; 0 without a launcher."""
    return _number("RANK") if world_size() > 1 else 0


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise _not_a_launcher(f"{name} is {os.environ[name]!r}, expected an integer") from None


def _not_a_launcher(what: str) -> UsageError:
    return UsageError(
        f"the environment variables of a launcher are inconsistent: {what}",
        hint="start all processes with torchrun --nproc-per-node N; for one process, unset WORLD_SIZE",
    )


def join(device: torch.device, *, tp_size: int) -> Ranks:
    """Join the other processes; each `tp_size` consecutive ranks train on one server.

    Raises:
        UsageError: the number of processes is not a multiple of `tp_size`, or they have already joined.
        RankError: a process did not join in time.
    """
    number = rank()
    size = world_size()
    if size % tp_size:
        raise UsageError(
            f"{size} processes were started, but the server's tensor-parallel size is {tp_size}",
            hint=f"use torchrun --nproc-per-node {tp_size}, or a multiple of it, with one server per {tp_size} ranks",
        )
    if dist.is_initialized():
        raise UsageError(
            "this process has already initialized torch.distributed, but a policy must do that itself",
            hint="attach one policy per process, before init_process_group; attach any others with reads_only=True",
        )
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size)
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if is_one_host:
        os.environ.update({name: os.environ.get(name, "lo") for name in INTERFACES})
    own_host = LOOPBACK if is_one_host else ""
    listener = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens at that port
        store = dist.TCPStore(host, port, is_master=False, timeout=LIMIT)  # type: ignore[attr-defined]
        key = f"{PORT_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if number == 0:
            listener = socket.create_server((own_host, 0))
            store.set(key, str(listener.getsockname()[1]))
        port = int(store.get(key))
    elif number == 0:
        listener = socket.create_server((own_host, port))
    with nullcontext() if listener is None else closing(listener):
        return Ranks.join(
            number, size, tp_size=tp_size, port=port, device=device, host=LOOPBACK if is_one_host else host,
            listener=listener,
        )  # fmt: skip
