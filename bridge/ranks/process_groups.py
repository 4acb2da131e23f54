"""Create the process groups of a run: a rendezvous through a store, then the connections between ranks."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bridge.core.process import sockets
from bridge.errors import RankError, UsageError

OBJECT_LIMIT = timedelta(hours=24)
"""Longest wait for another rank's object: that rank may be starting a server or sampling."""
DEVICE_LIMIT = timedelta(minutes=5)
"""Longest wait for another rank's tensor."""
RENDEZVOUS_LIMIT_S = 600.0
"""Longest wait for all ranks to join."""
SILENCE_S = 30
"""TCP keepalive: a connection to a host that lost power is dropped after this time, not after gloo's timeout."""
POLL_S = 0.1
NCCL_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable of NCCL's watchdog, which by default kills the process if a collective is aborted or times
out. It is disabled: `Watch` aborts the collective, so that the run can still save."""


def rendezvous(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    device: torch.device,
    listener: socket.socket | None,
) -> tuple[Any, set[int]]:
    """Create the default group; return a store for the watch, and the group's connections.

    Raises:
        RankError: another rank did not join in time.
    """
    is_server = listener is not None
    on_gpu = device.type == "cuda"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, world_size, is_server, DEVICE_LIMIT, wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )  # fmt: skip
    store.set(str(rank), "")
    deadline = time.monotonic() + RENDEZVOUS_LIMIT_S
    while not store.check([*map(str, range(world_size))]):
        if time.monotonic() > deadline:
            raise RankError("another rank exited before it was ready", hint="its output says why")
        time.sleep(POLL_S)
    os.environ.setdefault(NCCL_WATCHDOG, "0")
    before = sockets()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=DEVICE_LIMIT,
        device_id=device if on_gpu else None,
    )
    own = dist.TCPStore(host, port, world_size, False, DEVICE_LIMIT, wait_for_workers=False)  # type: ignore[attr-defined]
    return own, sockets() - before


def check_same(store: Any, rank: int, world_size: int, name: str, value: int) -> None:
    """Check that all ranks have the same value of a setting that the process groups depend on.

    Raises:
        UsageError: another rank has a different value.
    """
    store.set(f"{name}{rank}", str(value))
    values = [int(store.get(f"{name}{number}")) for number in range(world_size)]
    store.set(f"{name}{rank} read", "")
    if rank == 0:  # rank 0 hosts the store
        store.wait([f"{name}{number} read" for number in range(world_size)])
    if differing := [number for number in values if number != values[0]]:
        raise UsageError(
            f"the hosts differ in {name}: {values[0]} and {differing[0]}", hint="start the same command on each host"
        )


def object_group(members: Sequence[int] | None) -> dist.ProcessGroup:
    """Create a gloo group in which these ranks exchange objects; None: all ranks."""
    ranks = None if members is None else [*members]
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=OBJECT_LIMIT)
    return group


@contextmanager
def tcp_keepalive() -> Iterator[None]:
    """Enable TCP keepalive, with a timeout of `SILENCE_S`, on every connection that the block opens."""
    before = sockets()
    yield
    for descriptor in sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
