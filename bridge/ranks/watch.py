"""Watch the other ranks of a run, so that a rank does not wait for one that cannot respond."""

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
"""Prefix of a store key, followed by a rank; the value is the number of the phase in which the rank failed."""
BEAT = "beat_"
"""Prefix of a store key, followed by a rank; the value is the number of heartbeats that the rank has sent."""
BEAT_S = 5.0
"""Interval at which a rank sends a heartbeat and checks those of the others."""
SILENT_LIMIT_S = 300.0
"""A rank without a heartbeat for this long is lost: it, or its host, is stopped."""
LATE_LIMIT_S = 300.0
"""Longest wait for a tensor; gloo has the same limit, `DEVICE_LIMIT`."""
ABORT_LIMIT_S = 30.0
"""Longest wait for NCCL to abort its collectives."""


class Watch:
    """Stops waiting for a rank that cannot take part because it failed before an exchange, exited, or hangs.

    Otherwise gloo and NCCL would wait for their timeout: both for a rank that failed but still runs, NCCL also for one
    that exited. For objects, gloo's timeout is as long as another rank may sample. A thread on each rank checks the
    other ranks' connections, failures and heartbeats. If one is lost, it closes this rank's connections, and whatever
    waits for them raises.

    On a GPU, an aborted exchange leaves its tensor unchanged and lets the stream continue. So the host waits for every
    exchange before its result is used, and raises if it was aborted.

    Source: recv(2), MSG_PEEK; `torch.distributed.distributed_c10d.Backend.abort`; `ProcessGroupNCCL.hpp` of torch,
    `ErrorHandlingMode`.
    """

    def __init__(self, store: Any, device: torch.device, rank: int, world_size: int, phase: Callable[[], int]) -> None:
        """Create the watch without starting it; `phase` returns the number of the current phase, equal on all ranks."""
        self._store = store
        self._device = device
        self._rank = rank
        self._phase = phase
        self._groups: list[Any] = []
        self._connections: list[socket.socket] = []
        """Connections that exchange tensors."""
        self._object_connections: list[socket.socket] = []
        """Connections that exchange objects; through them, a failed rank can still report the cause."""
        self._num_exchanges = 0
        self._is_exchanging = False
        """Whether this rank is in an exchange, including its start: NCCL connects to the other ranks on first use."""
        self._members: Collection[int] = ()
        """Ranks that take part in the exchange."""
        self._parts: Collection[int] = ()
        """Tensor- or context-parallel peers of the current pass."""
        self._signs = SignsOfLife(store, rank, world_size)
        self.reason = ""
        """Why waiting was stopped; empty if it was not."""
        self._num_rounds = 0
        """Number of rounds of the watch, each of which queries the store."""
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
        """Start an exchange among `members`, and wait until it completes.

        Raises:
            RuntimeError: the exchange was aborted.
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
        """Inside the block, also abort exchanges with these ranks that layers start directly through torch.

        Raises:
            RuntimeError: an exchange was aborted.
        """
        self._parts = parts
        try:
            yield
            self._check_ended()
        finally:
            self._parts = ()

    def failed(self) -> None:
        """Report to the other ranks that this rank failed in the current phase."""
        with suppress(RuntimeError):  # the first rank has exited
            self._store.set(f"{FAILED}{self._rank}", str(self._phase()))

    def is_lost(self, ranks: Collection[int]) -> bool:
        """Return whether any rank has exited, or one of `ranks` has failed in this phase."""
        if self.reason or any(map(_is_closed, self._connections)):
            return True
        try:
            return any(map(self._has_failed, ranks))
        except RuntimeError:  # the first rank has exited
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
            with suppress(Exception):  # whatever the error: without this thread, a rank may wait forever
                is_lost = self.is_lost({*self._members, *self._parts})
                waits = bool(self._parts) or self._is_exchanging
            late_s = late_s + PERIOD_S if self._is_exchanging and self._num_exchanges == last else 0.0
            last = self._num_exchanges
            if is_lost and before and waits:  # `before`: its last bytes have had time to arrive
                self._break_off("it exited or failed", self._connections)
                return
            if late_s > LATE_LIMIT_S:
                self._break_off(f"it sent no tensor for {late_s:.0f} s", self._connections)
                return
            if (silent := self._signs.silent_rank()) is not None:
                self._give_up(silent)
                return

    def _supervise(self) -> None:
        """Give up on rank 0 if its store does not answer: a store client has no timeout."""
        num_rounds = silent_s = 0.0
        while not self._is_over.wait(BEAT_S) and not self.reason:
            silent_s = 0.0 if self._num_rounds != num_rounds else silent_s + BEAT_S
            num_rounds = self._num_rounds
            if silent_s > SILENT_LIMIT_S:
                self._give_up(0)

    def _give_up(self, rank: int) -> None:
        """Abort all exchanges, including those of objects, because a rank hangs."""
        reason = f"rank {rank} has sent no heartbeat for {SILENT_LIMIT_S:.0f} s"
        self._break_off(reason, [*self._connections, *self._object_connections])

    def _has_failed(self, rank: int) -> bool:
        key = f"{FAILED}{rank}"
        return self._store.check([key]) and bytes(self._store.get(key)) == str(self._phase()).encode()

    def _break_off(self, reason: str, connections: Collection[socket.socket]) -> None:
        """Close connections, including the store's, so that whatever this rank waits for raises `reason`."""
        self.reason = reason
        groups = self._groups if self._device.type == "cuda" else []
        aborts = [threading.Thread(target=self._abort, args=(group,), daemon=True) for group in groups]
        for abort in aborts:  # concurrently: an abort may wait for a device on which another group's exchange hangs
            abort.start()
        for abort in aborts:
            abort.join(ABORT_LIMIT_S)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _abort(self, group: Any) -> None:
        with suppress(RuntimeError):  # a backend that cannot abort: its connections are closed instead
            group._get_backend(self._device).abort()


class SignsOfLife:
    """Heartbeat counters that ranks increment in a store while they run.

    Time is measured in this rank's own heartbeats, so that no rank is lost if all were suspended and resumed together.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._last = {other: b"" for other in range(world_size) if other != rank}
        """The last heartbeat count of every other rank."""
        self._silent_s = dict.fromkeys(self._last, 0.0)
        """Seconds without a heartbeat, by rank."""
        self._count = 0
        self._next = time.monotonic()

    def silent_rank(self) -> int | None:
        """Send a heartbeat if one is due, and return a rank that was silent for too long.

        For a rank that has not sent any heartbeat yet, time counts from this rank's first one.
        """
        if time.monotonic() < self._next:
            return None
        with suppress(RuntimeError):  # the first rank has exited
            self._send_heartbeat()
        self._next = time.monotonic() + BEAT_S
        return next((rank for rank, silent_s in self._silent_s.items() if silent_s > SILENT_LIMIT_S), None)

    def _send_heartbeat(self) -> None:
        self._count += 1
        self._store.set(f"{BEAT}{self._rank}", str(self._count))
        for rank, last in self._last.items():
            key = f"{BEAT}{rank}"
            count = bytes(self._store.get(key)) if self._store.check([key]) else last
            self._silent_s[rank] = 0.0 if count != last else self._silent_s[rank] + BEAT_S
            self._last[rank] = count


def _peer(descriptor: int) -> socket.socket | None:
    """Duplicate a descriptor if it is a connection to another rank; otherwise return None."""
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
