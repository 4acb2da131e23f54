"""The ranks of a run: what they tell each other, and the tensors that they exchange.

Every rank makes the same sequence of calls, whatever its data. Tensors travel as bytes: neither NCCL nor gloo takes
every dtype. A single rank has no process group, and copies nothing.

Not covered: how a message is protected (`messages.py`).

Shape suffixes: R blocks, B elements of a block.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bridge.core.interrupt import deferred_interrupt
from bridge.errors import BridgeError, RankError
from bridge.ranks.messages import Messages, gather_bytes, noticing_silence, sockets
from bridge.ranks.outcome import AGREED, OF_TENSORS, Outcome
from bridge.ranks.watch import Watch

Result = TypeVar("Result")
TOLD_LIMIT = timedelta(hours=24)
"""Longest wait for what another rank tells: it may start a server, or sample, for as long as it likes."""
FENCE_LIMIT = timedelta(minutes=10)
"""The same inside the fence, where servers stand still: a checkpoint is loaded in it at most."""
DEVICE_LIMIT = timedelta(minutes=5)
"""Longest wait for a tensor of another rank, which has agreed to send it."""
POLL_S = 0.1
LOOPBACK = "127.0.0.1"
INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Variables that name the network interface on which ranks listen for each other."""


class Ranks:
    """This process among the ranks of a run, or among some of them: those of its replica, or its peers.

    Rank r is part r % `tp_size` of replica r // `tp_size`.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, tp_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.tp_size = tp_size
        self.dp_rank, self.tp_rank = divmod(rank, tp_size)
        self.dp_size = world_size // tp_size
        self.is_broken = False
        """Whether a rank is gone: nothing can be agreed on any more."""
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called on the rank that a person interrupts, to interrupt the others."""
        self._telling: dist.ProcessGroup | None = None
        """To tell each other things: one, since a rank outside a fence may tell those inside why it does not come."""
        self._tensors: dist.ProcessGroup | None = None
        """To exchange tensors; None: the default group."""
        self._limit = TOLD_LIMIT
        self._messages = Messages(rank, world_size, b"")
        self._watch: Watch | None = None
        self._all = self
        self._members: Sequence[int] = range(world_size)
        """Their numbers among all ranks."""
        self._tp_group: Ranks | None = None
        self._dp_group: Ranks | None = None

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        *,
        tp_size: int = 1,
        port: int,
        device: torch.device,
        key: bytes,
        host: str = LOOPBACK,
        listener: socket.socket | None = None,
        can_come: Callable[[], bool] = lambda: True,
    ) -> "Ranks":
        """Meet the other ranks at `port` of `host`, where rank 0 listens with `listener`; `key` is secret to them.

        Each waits for as long as all that it knows of `can_come`; an interrupt ends that.

        Raises:
            RankError: one did not come.
        """
        ranks, on_gpu = cls(rank, size, tp_size), device.type == "cuda"
        ranks._messages = Messages(rank, size, key)
        with ranks._whole(), noticing_silence():
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, size, listener is not None, DEVICE_LIMIT, wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )  # fmt: skip
            store.set(str(rank), "")
            while not store.check([*map(str, range(size))]):
                if not can_come():
                    raise RankError("another rank ended before it was ready", remedy="see what it wrote")
                time.sleep(POLL_S)
            before = sockets()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=DEVICE_LIMIT,
                device_id=device if on_gpu else None,
            )
            own = dist.TCPStore(host, port, size, False, DEVICE_LIMIT, wait_for_workers=False)  # type: ignore[attr-defined]
            ranks._watch = Watch(own, device, rank, lambda: ranks._messages.count, key)
            ranks._watch.add(dist.group.WORLD, sockets() - before)
            ranks._telling = _telling(None)
            if tp_size > 1:
                each = range(size)
                ranks._tp_group = ranks._one_of([each[start : start + tp_size] for start in each[::tp_size]], key)
                ranks._dp_group = ranks._one_of([each[part::tp_size] for part in range(tp_size)], key)
            ranks._watch.start()
        return ranks

    def _one_of(self, groups: Sequence[range], key: bytes) -> "Ranks":
        """Return this rank among those of its group; all ranks make all groups, in this order."""
        assert self._watch is not None, "it was made for all ranks"
        mine = ALONE
        for members in groups:
            if len(members) == 1:
                continue
            before = sockets()
            tensors = dist.new_group([*members], timeout=DEVICE_LIMIT)
            held, telling = sockets() - before, _telling(members)
            if self.rank in members:
                mine = Ranks(members.index(self.rank), len(members))
                mine._all, mine._members, mine._tensors, mine._telling = self, members, tensors, telling
                mine._messages = Messages(mine.rank, mine.world_size, key + str(members).encode())
                self._watch.add(tensors, held)
        return mine

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank reports and saves for all."""
        return self.rank == 0

    @property
    def is_tp_rank_zero(self) -> bool:
        """Whether this rank talks to its replica's server, for all parts."""
        return self.tp_rank == 0

    @property
    def tp_group(self) -> "Ranks":
        """The parts of this rank's replica, by their numbers."""
        return self._tp_group or ALONE

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group in which these ranks exchange tensors, of several."""
        assert self._tensors is not None, self.world_size
        return self._tensors

    @property
    def dp_group(self) -> "Ranks":
        """The ranks that hold the same part, by their replicas' numbers."""
        return self if self.tp_size == 1 else self._dp_group or ALONE

    def one_per_replica(self, each: Sequence[Result]) -> list[Result]:
        """Return what the first part of every replica has told."""
        return [*each[:: self.tp_size]]

    def close(self) -> None:
        """Leave the group; the others are not waited for."""
        if self._telling is not None:
            assert self._watch is not None, "it was made with them"
            self._watch.close()
            for ranks in (self, self.tp_group, self.dp_group):
                ranks._telling = None
            dist.destroy_process_group()

    @contextmanager
    def in_fence(self) -> Iterator[None]:
        """Wait no longer for other ranks than in a fence, inside the block."""
        before, self._all._limit = self._all._limit, FENCE_LIMIT
        try:
            yield
        finally:
            self._all._limit = before

    @contextmanager
    def tp_pass(self) -> Iterator[None]:
        """Compute what the parts of a replica compute together: they meet in every layer, so none goes on without one.

        Raises:
            RankError: this part is out of memory, or another one stopped; the one that failed may tell why.
        """
        if self.tp_size == 1:
            yield
            return
        assert self._watch is not None
        try:
            with self._watch.computing(self.tp_group._members):
                yield
        except RuntimeError as error:  # out of memory, or torch's, of a part that is gone
            self.is_broken = True
            is_memory = isinstance(error, torch.OutOfMemoryError)
            what = "is out of memory" if is_memory else "stopped in a pass"
            found = RankError(
                f"rank {self.rank} of {self.world_size} {what}: {str(error).strip().partition(chr(10))[0]}",
                remedy="continue with --resume and a lower --micro-batch-tokens, or --gradient-checkpointing"
                if is_memory
                else "continue with --resume; the rank that ended first says why",
            )
            setattr(found, OF_TENSORS, True)
            raise found from error

    def check_abort(self) -> None:
        """End something long, such as a server's start, whose result another rank's end has made useless.

        Raises:
            RankError: a rank has failed in what all do now, or is gone; if it can, it tells why.
        """
        watch = self._all._watch
        if watch is not None and watch.is_lost(range(self._all.world_size)):
            found = RankError(
                f"rank {self.rank} of {self.world_size} stopped, since another rank failed",
                remedy="the rank that ended first says why",
            )
            setattr(found, OF_TENSORS, True)
            raise found

    def all_gather_object(self, mine: Result) -> list[Result]:
        """Return what every rank sends, in the order of the ranks; raises as `run_and_gather` does."""
        return self.run_and_gather(lambda: mine)

    def run_and_gather(self, act: Callable[[], Result], *, undo: Callable[[], object] | None = None) -> list[Result]:
        """Run `act` on every rank, and return all results; if it raises on any, raise that on every rank.

        `undo` is called where `act` did not raise and another rank's did. Agreements nest: what one has raised
        everywhere passes through those around it. So an error anywhere inside ends all ranks together.

        Raises:
            KeyboardInterrupt: a rank was interrupted.
            BridgeError: that of the first rank that failed.
            RankError: that rank met something else, or one is gone.
        """
        if self.world_size == 1:
            return [act()]
        mine = self._tried(act)
        outcomes, interrupted = self._tell(mine)
        failed = [place for place, each in enumerate(outcomes) if each.failed]
        if not failed and interrupted is None:
            return [each.result for each in outcomes]
        if mine.raised is None and undo is not None:
            undo()
        if not failed:
            assert interrupted is not None
            raise interrupted
        self._all.is_broken |= any(isinstance(each.error, RankError) for each in outcomes)
        first = min(failed, key=lambda place: (outcomes[place].kind, place))
        error = mine.raised if first == self.rank else outcomes[first].error
        if error is None:
            error = RankError(
                f"rank {first} of {self.world_size} failed: {outcomes[first].fault}",
                remedy="its traceback is in its log; the other ranks ended with it",
            )
        if error is not mine.raised:
            error.__context__ = mine.raised
        setattr(error, AGREED, self.world_size)
        raise error

    def run_on_all(self, act: Callable[[], Result], *, undo: Callable[[], object] | None = None) -> Result:
        """Return this rank's result of `act`, whatever it is, once all have theirs; raises as `run_and_gather`."""
        mine = list[Result]()
        self.run_and_gather(lambda: mine.append(act()), undo=undo)
        return mine[0]

    def run_on_rank_zero(self, act: Callable[[], Result]) -> Result:
        """Run `act` on rank 0 and return its result on every rank; if it raises, raise that on every rank."""
        return self.run_and_gather(lambda: act() if self.is_rank_zero else None)[0]  # type: ignore[return-value]

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of every rank's numbers, place by place."""
        return [max(each) for each in zip(*self.all_gather_object([*numbers]), strict=True)]

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """Return the sum of every rank's `numbers`, added up in the order of the ranks."""
        return numbers if self.world_size == 1 else in_order(self._each(numbers))

    def all_reduce_dp(self, numbers: Tensor) -> Tensor:
        """Return the sum of every replica's `numbers`, which its parts have alike, in the order of the replicas."""
        return numbers if self.world_size == 1 else in_order(self._each(numbers)[:: self.tp_size])

    def all_reduce_tp(self, numbers: Tensor) -> Tensor:
        """Return the sum of the `numbers` of the parts of one replica, which every replica has alike."""
        return numbers if self.tp_size == 1 else in_order(self._each(numbers)[: self.tp_size])

    def _each(self, numbers: Tensor) -> Tensor:
        return self.all_gather(numbers.reshape(1, -1).contiguous()).view(self.world_size, *numbers.shape)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill `tensor`, in host memory, with that of rank 0."""
        with self._whole():
            dist.broadcast(tensor, 0, group=self._limited())

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor of this shape [R, ...] after each other: [ranks * R, ...]."""
        whole = mine.new_empty((self.world_size * len(mine), *mine.shape[1:]))
        self._exchange(gather_bytes, _bytes(whole), _bytes(mine))
        return whole

    def all_gather_into(self, whole: Tensor) -> None:
        """Fill `whole` [ranks * R, ...] in place, of which every rank has made its own R rows."""
        each = len(whole) // self.world_size
        self._exchange(gather_bytes, _bytes(whole), _bytes(whole[self.rank * each : (self.rank + 1) * each]))

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Return the sum over the ranks of this rank's rows of `whole` [ranks * R, ...], as float32 [R, ...].

        Each rank gets its rows from all others, in their own dtype, and adds them up in the order of the ranks: the
        result does not depend on a library's algorithm.
        """
        received = torch.empty_like(whole)
        self._exchange(dist.all_to_all_single, _bytes(received), _bytes(whole))
        return in_order(received.view(self.world_size, -1, *whole.shape[1:]))

    def _tried(self, act: Callable[[], Any]) -> Outcome:
        """Run `act`, and return how it went; what all ranks raise already is raised."""
        try:
            return Outcome(result=act())
        except BaseException as error:
            is_told = isinstance(error, RankError) and not hasattr(error, OF_TENSORS)
            if is_told or getattr(error, AGREED, 0) >= self.world_size:
                raise
            if self._all._watch is not None:
                self._all._watch.failed()
            if isinstance(error, KeyboardInterrupt):
                self._all.on_interrupt()
            return Outcome.of(error)

    def _tell(self, mine: Outcome) -> tuple[list[Outcome], BaseException | None]:
        """Return every rank's outcome, and the interrupt that came meanwhile: the others count on an answer."""
        seen: list[Any] = []
        try:
            with deferred_interrupt(), self._whole():
                seen += self._messages.exchanged(mine, self._limited())
        except KeyboardInterrupt as interrupt:
            return seen, interrupt
        return seen, None

    def _limited(self) -> dist.ProcessGroup:
        """Return the group to tell things in, which waits as long as this rank does now."""
        assert self._telling is not None, "one rank tells nothing"
        self._telling.set_timeout(self._all._limit)
        return self._telling

    def _exchange(self, act: Callable[..., Any], received: Tensor, sent: Tensor) -> None:
        """Exchange tensors with every rank."""
        watch = self._all._watch
        assert watch is not None, "one rank exchanges nothing"
        try:
            with self._whole():
                watch.wait(act(received, sent, group=self._tensors, async_op=True), self._members)
        except RankError as error:
            setattr(error, OF_TENSORS, True)
            raise

    def _whole(self) -> "_Whole":
        return _Whole(self)


@dataclass
class _Whole:
    """Turns what torch raises when a rank is gone into an error of ours."""

    ranks: Ranks

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        world = self.ranks._all
        if isinstance(error, RankError):
            world.is_broken = True
        elif isinstance(error, RuntimeError) and not isinstance(error, BridgeError | torch.OutOfMemoryError):
            world.is_broken = True
            reason = str(error).partition(". This is")[0].splitlines()[0]
            raise RankError(
                f"rank {world.rank} of {world.world_size} lost another rank: {reason}",
                remedy="continue with --resume; the rank that ended first says why",
            ) from error


ALONE = Ranks()
"""A run of one process."""


def _telling(members: Sequence[int] | None) -> dist.ProcessGroup:
    """Make the group in which these ranks tell each other things; None: all ranks."""
    ranks = None if members is None else [*members]
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=TOLD_LIMIT)
    return group


def in_order(each: Tensor) -> Tensor:
    """Add up tensors [ranks, ...] in their order, in float32 at least."""
    total = each[0].float() if each.dtype == torch.bfloat16 else each[0].clone()
    for one in each[1:]:
        total += one
    return total


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
