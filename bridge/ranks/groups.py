"""Make the process groups of a run: meet at a store, connect the ranks, and watch their connections."""

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bridge.errors import RankError, UsageError

OBJECT_LIMIT = timedelta(hours=24)
"""Longest wait for another rank's object: that rank may be starting a server or sampling."""
DEVICE_LIMIT = timedelta(minutes=5)
"""Longest wait for a tensor of another rank."""
MEET_LIMIT_S = 600.0
"""Longest wait for all ranks."""
SILENCE_S = 30
"""A connection to a host that lost its power is given up after this time; gloo alone would wait for its timeout."""
POLL_S = 0.1
PERIOD_S = 0.5
FAILED = "failed_"
"""Prefix of a store's key, before a rank; the value is the number of the phase in which it failed."""


def meet(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    device: torch.device,
    listener: socket.socket | None,
) -> tuple[Any, set[int]]:
    """Make the default group, and return a store for the watch and the group's connections.

    Raises:
        RankError: another rank did not come.
    """
    is_server, on_gpu = listener is not None, device.type == "cuda"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, world_size, is_server, DEVICE_LIMIT, wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )  # fmt: skip
    store.set(str(rank), "")
    deadline = time.monotonic() + MEET_LIMIT_S
    while not store.check([*map(str, range(world_size))]):
        if time.monotonic() > deadline:
            raise RankError("another rank ended before it was ready", remedy="its output says why")
        time.sleep(POLL_S)
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
    """Compare a choice on which the groups of ranks depend, before they are made.

    Raises:
        UsageError: another rank has another value.
    """
    store.set(f"{name}{rank}", str(value))
    values = [int(store.get(f"{name}{number}")) for number in range(world_size)]
    if differing := [number for number in values if number != values[0]]:
        raise UsageError(
            f"the hosts differ in {name}: {values[0]} and {differing[0]}", remedy="start the same command on each host"
        )


def object_group(members: Sequence[int] | None) -> dist.ProcessGroup:
    """Make the group for the objects of these ranks; None: all ranks."""
    ranks = None if members is None else [*members]
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=OBJECT_LIMIT)
    return group


@contextmanager
def noticing_silence() -> Iterator[None]:
    """Let the kernel end every connection made in the block whose other side does not answer for `SILENCE_S`."""
    before = sockets()
    yield
    for descriptor in sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def sockets() -> set[int]:
    """Return the descriptors of this process that are sockets."""
    descriptors = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()).startswith("socket:"):
                descriptors.add(int(descriptor.name))
    return descriptors


class Watch:
    """Aborts an exchange of tensors that cannot end because another rank failed before it, or exited.

    gloo and NCCL would wait for their timeout: both for a rank that failed and still runs, NCCL also for one that
    exited. A thread of each rank checks for both and closes this rank's connections; the waiting exchange then raises.

    Not run yet: a lost rank under NCCL.

    Source: recv(2), MSG_PEEK; `torch.distributed.distributed_c10d.Backend.abort`.
    """

    def __init__(self, store: Any, device: torch.device, rank: int, phase: Callable[[], int]) -> None:
        """Prepare; `phase` numbers what all ranks do together."""
        self._store = store
        self._device = device
        self._rank = rank
        self._phase = phase
        self._groups: list[Any] = []
        self._connections: list[socket.socket] = []
        self._work: Any = None
        """The last exchange."""
        self._members: Collection[int] = ()
        """Who takes part in it."""
        self._parts: Collection[int] = ()
        """Who computes together with this rank just now, with exchanges in every layer."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of the ranks", daemon=True)

    def add(self, group: Any, descriptors: Collection[int]) -> None:
        """Watch the connections of a group that exchanges tensors."""
        self._groups.append(group)
        self._connections += filter(None, map(_peer, descriptors))

    def start(self) -> None:
        self._thread.start()

    def wait(self, work: Any, members: Collection[int]) -> None:
        """Wait for an exchange that has begun among `members`; on a GPU, its stream waits."""
        self._members = members
        self._work = work
        work.wait()

    @contextmanager
    def computing(self, parts: Collection[int]) -> Iterator[None]:
        """Break off exchanges of these ranks inside the block, too, of which torch alone knows."""
        self._parts = parts
        try:
            yield
        finally:
            self._parts = ()

    def failed(self) -> None:
        """Report to the other ranks that this one leaves the phase."""
        with suppress(RuntimeError):  # the first rank is gone
            self._store.set(f"{FAILED}{self._rank}", str(self._phase()))

    def is_lost(self, ranks: Collection[int]) -> bool:
        """Return whether any rank has ended, or one of these has failed in this phase."""
        if any(map(_is_closed, self._connections)):
            return True
        try:
            return any(map(self._has_failed, ranks))
        except RuntimeError:  # the first rank is gone
            return True

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(2 * PERIOD_S)
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        is_lost = False
        while not self._is_over.wait(PERIOD_S):
            before, is_lost, waits = is_lost, False, False
            with suppress(Exception):  # any error: without this thread, a rank may wait forever
                is_lost = self.is_lost({*self._members, *self._parts})
                waits = bool(self._parts) or (self._work is not None and not self._work.is_completed())
            if is_lost and before and waits:  # twice: the last bytes of an exchange may be on their way
                self._break_off()
                return

    def _has_failed(self, rank: int) -> bool:
        key = f"{FAILED}{rank}"
        return self._store.check([key]) and bytes(self._store.get(key)) == str(self._phase()).encode()

    def _break_off(self) -> None:
        for group in self._groups if self._device.type == "cuda" else ():
            with suppress(RuntimeError):  # the connections of the others are left to close
                group._get_backend(self._device).abort()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _peer(descriptor: int) -> socket.socket | None:
    """Return a handle of our own on a connection to another rank; None if it is none."""
    connection = socket.socket(fileno=os.dup(descriptor))
    with suppress(OSError):
        if connection.type == socket.SOCK_STREAM and connection.getpeername():
            return connection
    connection.close()
    return None


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
