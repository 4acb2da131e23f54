"""Watch the other ranks of a run, so that none waits for one that cannot answer."""

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

PERIOD_S = 0.5
FAILED = "failed_"
"""Prefix of a store's key, before a rank; the value is the number of the phase in which it failed."""
BEAT = "beat_"
"""Prefix of a store's key, before a rank; the value is how often it has shown that it runs."""
BEAT_S = 5.0
"""Period in which a rank shows that it runs, and looks at the others."""
SILENT_LIMIT_S = 300.0
"""A rank that showed no sign of life for so long is lost: it is stopped, or its host is."""
LATE_LIMIT_S = 300.0
"""Longest wait for a tensor; gloo has the same, `DEVICE_LIMIT`."""
ABORT_LIMIT_S = 30.0
"""Longest wait for NCCL to abort what it exchanges."""


class Watch:
    """Ends the waiting for a rank that cannot take part: it failed before an exchange, exited, or stopped running.

    gloo and NCCL would wait for their timeout: both for a rank that failed and still runs, NCCL also for one that
    exited; and for an object, gloo waits as long as another rank may sample. A thread of each rank looks at the others'
    connections, failures and signs of life, and closes this rank's connections; what waits for them then raises.

    On a GPU an aborted exchange leaves its tensor as it was and lets the stream continue, so every exchange is waited
    for on the host before its result is used, and raises if it was aborted.

    Source: recv(2), MSG_PEEK; `torch.distributed.distributed_c10d.Backend.abort`; `ProcessGroupNCCL.hpp` of torch,
    `ErrorHandlingMode`.
    """

    def __init__(self, store: Any, device: torch.device, rank: int, world_size: int, phase: Callable[[], int]) -> None:
        """Prepare; `phase` numbers what all ranks do together."""
        self._store = store
        self._device = device
        self._rank = rank
        self._phase = phase
        self._groups: list[Any] = []
        self._connections: list[socket.socket] = []
        """Connections that exchange tensors."""
        self._object_connections: list[socket.socket] = []
        """Connections that exchange objects; a rank that failed still reports why."""
        self._num_exchanges = 0
        self._is_exchanging = False
        """Whether this rank is in an exchange, its beginning included: NCCL connects to the others at first use."""
        self._members: Collection[int] = ()
        """Ranks in the exchange."""
        self._parts: Collection[int] = ()
        """Tensor- or context-parallel peers of the current pass."""
        self._signs = SignsOfLife(store, rank, world_size)
        self.reason = ""
        """Why the waiting was ended; empty while it was not."""
        self._num_rounds = 0
        """Rounds of the watch, each of which asks the store."""
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=act, name="watch of the ranks", daemon=True) for act in (self._run, self._supervise)
        ]

    def add(self, group: Any, descriptors: Collection[int]) -> None:
        """Watch the connections of a group that exchanges tensors."""
        self._groups.append(group)
        self._connections += filter(None, map(_peer, descriptors))

    def add_objects(self, descriptors: Collection[int]) -> None:
        """Watch the connections of a group that exchanges objects."""
        self._object_connections += filter(None, map(_peer, descriptors))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def exchange(self, begin: Callable[[], Any], members: Collection[int]) -> None:
        """Begin an exchange among `members`, and wait until it has ended.

        Raises:
            RuntimeError: it was broken off.
        """
        self._members = members
        self._num_exchanges += 1
        self._is_exchanging = True
        try:
            begin().wait()
            self._check_ended()
        finally:
            self._is_exchanging = False

    @contextmanager
    def computing(self, parts: Collection[int]) -> Iterator[None]:
        """Break off exchanges of these ranks inside the block, too, of which torch alone knows.

        Raises:
            RuntimeError: one was broken off.
        """
        self._parts = parts
        try:
            yield
            self._check_ended()
        finally:
            self._parts = ()

    def failed(self) -> None:
        """Report to the other ranks that this one leaves the phase."""
        with suppress(RuntimeError):  # the first rank is gone
            self._store.set(f"{FAILED}{self._rank}", str(self._phase()))

    def is_lost(self, ranks: Collection[int]) -> bool:
        """Return whether any rank has ended, or one of these has failed in this phase."""
        if self.reason or any(map(_is_closed, self._connections)):
            return True
        try:
            return any(map(self._has_failed, ranks))
        except RuntimeError:  # the first rank is gone
            return True

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * PERIOD_S)
        for connection in (*self._connections, *self._object_connections):
            connection.close()

    def _check_ended(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self.reason:
            raise RuntimeError(self.reason)

    def _run(self) -> None:
        is_lost = False
        late_s = 0.0
        last = 0
        while not self._is_over.wait(PERIOD_S):
            self._num_rounds += 1
            before = is_lost
            is_lost = False
            waits = False
            with suppress(Exception):  # any error: without this thread, a rank may wait forever
                is_lost = self.is_lost({*self._members, *self._parts})
                waits = bool(self._parts) or self._is_exchanging
            late_s = late_s + PERIOD_S if self._is_exchanging and self._num_exchanges == last else 0.0
            last = self._num_exchanges
            if is_lost and before and waits:  # twice: the last bytes of an exchange may be on their way
                self._break_off("it ended, or failed", self._connections)
                return
            if late_s > LATE_LIMIT_S:
                self._break_off(f"it sent no tensor for {late_s:.0f} s", self._connections)
                return
            if (silent := self._signs.silent_rank()) is not None:
                self._give_up(silent)
                return

    def _supervise(self) -> None:
        """Give up rank 0 if its store does not answer: a store's client waits without a limit."""
        num_rounds = silent_s = 0.0
        while not self._is_over.wait(BEAT_S) and not self.reason:
            silent_s = 0.0 if self._num_rounds != num_rounds else silent_s + BEAT_S
            num_rounds = self._num_rounds
            if silent_s > SILENT_LIMIT_S:
                self._give_up(0)

    def _give_up(self, rank: int) -> None:
        """Break off everything, objects included, because of a rank that is stopped."""
        reason = f"rank {rank} showed no sign of life for {SILENT_LIMIT_S:.0f} s"
        self._break_off(reason, [*self._connections, *self._object_connections])

    def _has_failed(self, rank: int) -> bool:
        key = f"{FAILED}{rank}"
        return self._store.check([key]) and bytes(self._store.get(key)) == str(self._phase()).encode()

    def _break_off(self, reason: str, connections: Collection[socket.socket]) -> None:
        """Close connections, the store's included, and raise `reason` wherever this rank waits."""
        self.reason = reason
        groups = self._groups if self._device.type == "cuda" else []
        aborts = [threading.Thread(target=self._abort, args=(group,), daemon=True) for group in groups]
        for abort in aborts:  # side by side: one waits for the device, on which the exchange of another hangs
            abort.start()
        for abort in aborts:
            abort.join(ABORT_LIMIT_S)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _abort(self, group: Any) -> None:
        with suppress(RuntimeError):  # the connections are left to close
            group._get_backend(self._device).abort()


class SignsOfLife:
    """Counts that ranks raise at a store while they run.

    Time is counted in this rank's own beats: if all ranks were stopped together and continue, none is lost.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._last = {other: b"" for other in range(world_size) if other != rank}
        """The last count of every other rank."""
        self._silent_s = dict.fromkeys(self._last, 0.0)
        """Seconds without a change, by rank."""
        self._count = 0
        self._next = time.monotonic()

    def silent_rank(self) -> int | None:
        """Beat, if it is time, and return a rank that was silent for too long.

        A rank that has not beaten yet counts from this rank's first beat.
        """
        if time.monotonic() < self._next:
            return None
        with suppress(RuntimeError):  # the first rank is gone
            self._beat()
        self._next = time.monotonic() + BEAT_S
        return next((rank for rank, silent_s in self._silent_s.items() if silent_s > SILENT_LIMIT_S), None)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"{BEAT}{self._rank}", str(self._count))
        for rank, last in self._last.items():
            key = f"{BEAT}{rank}"
            count = bytes(self._store.get(key)) if self._store.check([key]) else last
            self._silent_s[rank] = 0.0 if count != last else self._silent_s[rank] + BEAT_S
            self._last[rank] = count


def _peer(descriptor: int) -> socket.socket | None:
    """Duplicate a descriptor if it is a connection to another rank; else return None."""
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
