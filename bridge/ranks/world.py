"""The ranks of a run, in torch's terms, and the objects and outcomes that they exchange.

Every rank makes the same sequence of calls, whatever its data. A single rank has no process group and copies nothing.

Not covered: tensors (`tensors.py`), the encoding of objects (`messages.py`), how ranks are started
(`cli/bridge_cli/rank_launcher.py`).
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bridge.core.interrupt import deferred_interrupt
from bridge.core.process import sockets
from bridge.errors import RankError, first_line
from bridge.ranks import messages, process_groups
from bridge.ranks.messages import AGREED, OF_TENSORS, Outcome
from bridge.ranks.tensors import Tensors
from bridge.ranks.watch import Watch
from bridge.types import Result

FENCE_LIMIT = timedelta(minutes=10)
"""Longest wait for another rank's object inside the fence, where servers are paused."""
LOOPBACK = "127.0.0.1"
INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that name the network interface on which ranks listen."""


class Ranks(Tensors):
    """This process in a group of ranks: all ranks of a run, or its `tp_group`, `cp_group` or `dp_group`."""

    def __init__(self, rank: int = 0, world_size: int = 1, tp_size: int = 1, cp_size: int = 1) -> None:
        super().__init__(rank, world_size, tp_size, cp_size)
        self.dp_rank = rank // tp_size
        self.tp_rank = rank % tp_size
        self.dp_size = world_size // tp_size
        self._objects: dist.ProcessGroup | None = None
        """gloo group for objects; the same one inside a fence, so that a rank outside it can report its failure."""
        self._limit = process_groups.OBJECT_LIMIT
        self._num_exchanges = 0
        """Number of object exchanges so far, equal on all ranks."""
        alone = self if world_size == 1 else ALONE
        self.tp_group: Ranks = alone
        """The ranks of this rank's replica."""
        self.cp_group: Ranks = alone
        """The ranks that split the tokens of a micro-batch."""
        self.dp_group: Ranks = self if tp_size == 1 else alone
        """The ranks with the same part of the weights, in replica order."""

    @classmethod
    def join(
        cls,
        rank: int,
        world_size: int,
        *,
        tp_size: int = 1,
        cp_size: int = 1,
        port: int,
        device: torch.device,
        host: str = LOOPBACK,
        listener: socket.socket | None = None,
    ) -> "Ranks":
        """Join the other ranks at `port` of `host`, where rank 0 listens with `listener`.

        Raises:
            RankError: a rank did not join in time.
            UsageError: the ranks were started with a different `tp_size` or `cp_size`.
        """
        assert tp_size == 1 or cp_size == 1, "refused by the configuration"
        ranks = cls(rank, world_size, tp_size, cp_size)
        with ranks._errors_of_torch(), process_groups.tcp_keepalive():
            store, connections = process_groups.rendezvous(rank, world_size, host, port, device, listener)
            process_groups.check_same(store, rank, world_size, "--tensor-parallel-size", tp_size)
            process_groups.check_same(store, rank, world_size, "--context-parallel-size", cp_size)
            ranks._watch = Watch(store, device, rank, world_size, lambda: ranks._num_exchanges)
            ranks._watch.add(dist.group.WORLD, connections)
            before = sockets()
            ranks._objects = process_groups.object_group(None)
            ranks._watch.add_objects(sockets() - before)
            numbers = range(world_size)
            if tp_size > 1:
                ranks.tp_group = ranks._one_of([numbers[first : first + tp_size] for first in numbers[::tp_size]])
                ranks.dp_group = ranks._one_of([numbers[part::tp_size] for part in range(tp_size)])
            if cp_size > 1:
                ranks.cp_group = ranks._one_of([numbers[first : first + cp_size] for first in numbers[::cp_size]])
            ranks._watch.start()
        return ranks

    def _one_of(self, divisions: Sequence[range]) -> "Ranks":
        """Return this rank's group out of `divisions`; every rank creates all groups, in this order."""
        assert self._watch is not None, "the watch is created first"
        mine = ALONE
        for members in divisions:
            if len(members) == 1:
                continue
            before = sockets()
            tensors = dist.new_group([*members], timeout=process_groups.DEVICE_LIMIT)
            connections = sockets() - before
            objects = process_groups.object_group(members)
            object_connections = sockets() - before - connections
            if self.rank in members:
                mine = Ranks(members.index(self.rank), len(members))
                mine._all = self
                mine._members = members
                mine._tensors = tensors
                mine._objects = objects
                self._watch.add(tensors, connections)
                self._watch.add_objects(object_connections)
        return mine

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank logs and saves on behalf of all ranks."""
        return self.rank == 0

    @property
    def is_tp_rank_zero(self) -> bool:
        """Whether this rank calls its replica's server."""
        return self.tp_rank == 0

    @property
    def pass_group(self) -> "Ranks":
        """The ranks that compute a pass together: they train on one share of a batch and communicate in every layer."""
        return self.cp_group if self.cp_size > 1 else self.tp_group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch process group for tensors; only with several ranks."""
        assert self._tensors is not None, self.world_size
        return self._tensors

    def one_per_replica(self, results: Sequence[Result]) -> list[Result]:
        """Return the results of the first rank of each replica."""
        return [*results[:: self.tp_size]]

    def close(self) -> None:
        """Leave the process groups without waiting for the other ranks."""
        if self._objects is not None:
            assert self._watch is not None, "the watch is created with the groups"
            self._watch.close()
            for ranks in (self, self.tp_group, self.cp_group, self.dp_group):
                ranks._objects = None
            dist.destroy_process_group()

    @contextmanager
    def in_fence(self) -> Iterator[None]:
        """Limit the wait for other ranks to `FENCE_LIMIT` inside the block."""
        before = self._all._limit
        self._all._limit = FENCE_LIMIT
        try:
            yield
        finally:
            self._all._limit = before

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """Compute with the ranks of `pass_group`, which communicate in every layer: if one rank fails, all stop.

        Raises:
            RankError: this rank is out of memory, or another rank failed.
        """
        if self.pass_size == 1:
            yield
            return
        assert self._watch is not None
        try:
            with self._watch.computing(self.pass_group._members):
                yield
        except RuntimeError as error:  # out of memory, or torch's error about a rank that exited
            self.is_broken = True
            is_memory = isinstance(error, torch.OutOfMemoryError)
            what = "is out of memory" if is_memory else "stopped in a pass"
            reported = RankError(
                f"rank {self.rank} of {self.world_size} {what}: {first_line(error)}",
                hint="use --resume with --kv-sleep always, --gradient-checkpointing or a lower --micro-batch-tokens"
                if is_memory
                else "continue with --resume; the rank that exited first says why",
            )
            setattr(reported, OF_TENSORS, True)
            raise reported from error

    def check_abort(self) -> None:
        """Raise if another rank has failed or exited; call this during long operations, such as a server start.

        Raises:
            RankError: a rank has failed; its own error, if it can report it, takes precedence when the phase ends.
        """
        watch = self._all._watch
        if watch is not None and watch.is_lost(range(self._all.world_size)):
            error = RankError(
                f"rank {self.rank} of {self.world_size} stopped, since another rank failed",
                hint="the rank that exited first says why",
            )
            setattr(error, OF_TENSORS, True)
            raise error

    def all_gather_object(self, mine: Result) -> list[Result]:
        """Return every rank's object, in rank order; raises the same errors as `run_and_gather`."""
        return self.run_and_gather(lambda: mine)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather_object(None)

    def run_and_gather(self, act: Callable[[], Result], *, undo: Callable[[], object] | None = None) -> list[Result]:
        """Run `act` on every rank, and return all results; if it raises on any rank, raise that error on every rank.

        `undo` is called on the ranks on which `act` succeeded if it failed on another one. Calls nest: an error that
        an inner call raised on all ranks passes through the outer calls, so an error anywhere ends all ranks together.

        Raises:
            KeyboardInterrupt: a rank was interrupted.
            BridgeError: the error of the first rank that failed.
            RankError: that rank raised any other error, or a rank exited.
        """
        if self.world_size == 1:
            return [act()]
        mine = self._outcome(act)
        outcomes, interrupt = self._exchange_outcomes(mine)
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome.failed]
        if not failed and interrupt is None:
            return [outcome.result for outcome in outcomes]
        if mine.raised is None and undo is not None:
            undo()
        if interrupt is not None and not failed:
            raise interrupt
        self._all.is_broken |= any(isinstance(outcome.error, RankError) for outcome in outcomes)
        first = min(failed, key=lambda rank: (outcomes[rank].kind, rank))
        error = mine.raised if first == self.rank else outcomes[first].error
        if error is None:
            error = RankError(
                f"rank {first} of {self.world_size} failed: {outcomes[first].fault}",
                hint="its traceback is in its log; the other ranks stopped with it",
            )
        if error is not mine.raised:
            error.__context__ = mine.raised
        setattr(error, AGREED, self.world_size)
        raise error

    def run_on_all(self, act: Callable[[], Result], *, undo: Callable[[], object] | None = None) -> Result:
        """Run `act` on every rank, and return this rank's result, of any type; raises the same as `run_and_gather`."""
        mine = list[Result]()
        self.run_and_gather(lambda: mine.append(act()), undo=undo)
        return mine[0]

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Wait until all ranks have left the block. If any rank raised, raise on all; raises like `run_and_gather`."""
        raised: BaseException | None = None

        def outcome() -> None:
            if raised is not None:
                raise raised

        try:
            try:
                yield
            except BaseException as error:  # noqa: BLE001  raised again on every rank
                raised = error
            self.run_and_gather(outcome)
        finally:
            raised = None  # the error's traceback references this frame, and thus its tensors

    def run_on_rank_zero(self, act: Callable[[], Result]) -> Result:
        """Run `act` on rank 0, and return its result, or raise its error, on every rank."""
        return self.run_and_gather(lambda: act() if self.is_rank_zero else None)[0]  # type: ignore[return-value]

    def _outcome(self, act: Callable[[], Any]) -> Outcome:
        """Run `act`, and return its outcome; raise an error that all ranks are already raising."""
        try:
            result = act()
            return Outcome(result=result, message=messages.dumps([result]))
        except BaseException as error:
            is_reported = isinstance(error, RankError) and not hasattr(error, OF_TENSORS)
            if is_reported or getattr(error, AGREED, 0) >= self.world_size:
                raise
            if self._all._watch is not None:
                self._all._watch.failed()
            return Outcome.of(error)

    def _exchange_outcomes(self, mine: Outcome) -> tuple[list[Outcome], BaseException | None]:
        """Return every rank's outcome, and an interrupt that was deferred because other ranks wait for this one."""
        outcomes: list[Outcome] = []
        try:
            with deferred_interrupt(), self._errors_of_torch():
                assert self._objects is not None, "a single rank exchanges nothing"
                self._objects.set_timeout(self._all._limit)
                received = messages.exchange(mine.dumps(), self._objects, self.world_size)
                self._num_exchanges += 1
                outcomes += (mine if number == self.rank else Outcome.loads(one) for number, one in enumerate(received))
        except KeyboardInterrupt as interrupt:
            return outcomes, interrupt
        return outcomes, None


ALONE = Ranks()
"""The ranks of a single-process run."""
