"""Abort an exchange of tensors that cannot end because another rank failed before it, or exited.

gloo and NCCL would wait for their timeout: both for a rank that failed and still runs, NCCL also for one that exited. A
thread of each rank checks for both and closes this rank's connections; the waiting exchange then raises.

Not run yet: NCCL on several GPUs.

Source: recv(2), MSG_PEEK; `torch.distributed.distributed_c10d.Backend.abort`.
"""

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

PERIOD_S = 0.5
FAILED = "failed_"
"""Prefix of a store's key, before a rank; the value is the number of the phase in which it failed."""


class Watch:
    """The thread of one rank."""

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
