"""No rank keeps waiting for the tensors of a rank that failed or exited.

Not covered: NCCL, whose communicator is aborted in place of gloo's connections.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

from bridge.errors import RankError, UsageError
from bridge.passes.cut_layers import reduced
from bridge.ranks import watch
from bridge.ranks.watch import FAILED, PERIOD_S, SignsOfLife, Watch
from bridge.ranks.world import Ranks
from tests.unit.several_ranks import LIMIT_S, on_ranks


def fails(ranks: Ranks, who: int, error: Exception) -> tuple[str, bool]:
    """Raise an error on one rank while all exchange tensors; return what each rank raised."""

    def act() -> None:
        for those in {id(group): group for group in (ranks, ranks.tp_group, ranks.dp_group)}.values():
            those.all_reduce(torch.ones(2))
        if ranks.rank == who:
            raise error
        (ranks.tp_group if ranks.tp_size > ranks.tp_rank + 1 else ranks.dp_group).all_reduce(torch.ones(2))

    with pytest.raises(type(error)) as met:
        ranks.run_on_all(lambda: ranks.run_on_all(act))
    return str(met.value), ranks.is_broken


@pytest.mark.parametrize(("size", "num_parts", "who"), [(3, 1, 0), (3, 1, 2), (4, 2, 3)])
def test_error_inside_an_exchange_is_raised_on_all_ranks(size: int, num_parts: int, who: int) -> None:
    error = UsageError("no room for the gradients of this slab", hint="--micro-batch-tokens 512")
    for message, is_broken in on_ranks(size, fails, who, error, tp_size=num_parts):
        assert message.startswith("no room for the gradients of this slab")
        assert is_broken


def computes(ranks: Ranks, who: int, error: Exception) -> str:
    """Raise an error on one rank of a replica while both compute a layer; return what each rank raised."""

    def act() -> None:
        with ranks.in_pass():
            reduced(torch.ones(2), "sum", ranks.tp_group.process_group.group_name)
            if ranks.rank == who:
                raise error
            reduced(torch.ones(2), "sum", ranks.tp_group.process_group.group_name)

    with pytest.raises(type(error)) as met:
        ranks.run_on_all(act)
    return str(met.value)


def test_error_inside_a_layer_is_raised_on_all_ranks() -> None:
    error = UsageError("no layer like this", hint="another one")
    for message in on_ranks(4, computes, 2, error, tp_size=2):
        assert message.startswith("no layer like this")


def exchange_after_errors(ranks: Ranks) -> float:
    """Fail outside any exchange, and exchange tensors afterward."""
    for rank in range(ranks.world_size):
        with pytest.raises(UsageError):
            ranks.run_on_all(lambda rank=rank: fail_if(ranks.rank == rank))  # type: ignore[misc]
        time.sleep(3 * PERIOD_S * (ranks.rank == 0))  # the others wait for its tensors meanwhile
        ranks.all_reduce(torch.ones(2))
    return ranks.all_reduce(torch.ones(2)).sum().item()


def fail_if(it_should: bool) -> None:
    if it_should:
        raise UsageError("a server died", hint="it is started again")


def test_error_outside_an_exchange_does_not_break_the_group() -> None:
    assert on_ranks(2, exchange_after_errors) == [4.0, 4.0]


def stops(ranks: Ranks, who: int, what: str) -> str:
    """Suspend one rank, as with SIGSTOP or a frozen host, while the others wait for its object or tensor."""
    pids = ranks.all_gather_object(os.getpid())
    if ranks.rank == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with pytest.raises(RankError) as caught:
            ranks.all_reduce(torch.ones(2)) if what == "tensor" else ranks.barrier()
    finally:
        if ranks.rank != who:
            os.kill(pids[who], signal.SIGCONT)
    return caught.value.message


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("what", ["tensor", "object"])
def test_stopped_rank_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, who: int, what: str) -> None:
    monkeypatch.setattr(watch, "BEAT_S", 0.2)
    monkeypatch.setattr(watch, "SILENT_LIMIT_S", 2.0)
    message = on_ranks(2, stops, who, what, limit_s=30)[1 - who]
    assert message == f"rank {1 - who} of 2 lost another rank: rank {who} has sent no heartbeat for 2 s"


def test_ranks_suspended_together_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    store = Store()
    ranks = [SignsOfLife(store, rank, 2) for rank in range(2)]
    for pause_s in (watch.BEAT_S, 10 * watch.SILENT_LIMIT_S, watch.BEAT_S):
        assert [rank.silent_rank() for rank in ranks] == [None, None]
        clock[0] += pause_s
    for _ in range(int(watch.SILENT_LIMIT_S / watch.BEAT_S) + 2):
        clock[0] += watch.BEAT_S
        silent = ranks[0].silent_rank()
    assert silent == 1


class Endless:
    """An exchange that lasts as long as a test wants."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def wait(self) -> None:
        self.end.wait()


@contextmanager
def exchanging(watch: Watch, work: Endless, members: Sequence[int]) -> Iterator[None]:
    """Wait for `work` concurrently with the block, with the watch running; then stop both."""
    waiting = threading.Thread(target=lambda: suppressed(lambda: watch.exchange(lambda: work, members)))
    watch.start()
    waiting.start()
    try:
        yield
    finally:
        work.end.set()
        waiting.join()
        watch.close()


def suppressed(act: Callable[[], None]) -> None:
    with suppress(RuntimeError):
        act()


class Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[tuple[Pair, Pair]]:
    """Yield two connections, each with both ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as opened:
        ends = []
        for _ in range(2):
            ends.append(opened.enter_context(socket.create_connection(listener.getsockname())))
            ends.append(opened.enter_context(listener.accept()[0]))
        yield (ends[0], ends[1]), (ends[2], ends[3])


def broken(connection: socket.socket, *, within_s: float) -> bool:
    """Return whether the other end of a connection was shut down."""
    connection.settimeout(within_s)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    "cause",
    [
        "failed",
        "failed before",
        "failed elsewhere",
        "ended",
        "ended, exchange done",
        "nothing",
        "noise",
        "noise, failed",
    ],
)
def test_exchange_is_aborted_if_a_rank_cannot_take_part(pairs: tuple[Pair, Pair], cause: str) -> None:
    ((one, other), (its, closed)), store, work = pairs, Store(), Endless()
    own = Watch(store, torch.device("cpu"), 0, 3, lambda: 7)
    own.add(None, {one.fileno(), its.fileno()})
    if cause.endswith("done"):
        work.end.set()
    with exchanging(own, work, (0, 1)):
        if cause.startswith("failed"):
            phase = {"failed": 7, "failed before": 6, "failed elsewhere": 5}[cause]
            Watch(store, torch.device("cpu"), 2, 3, lambda: 7).failed()
            Watch(store, torch.device("cpu"), 1, 3, lambda: phase).failed()
        if cause.startswith("noise"):  # from a client that reaches the store without knowing the key
            for noise in (b"garbage", b"", b"\xff", b"77"):
                store[f"{FAILED}1"] = noise
                assert not own.is_lost({1})
        if cause == "noise, failed":
            time.sleep(2 * PERIOD_S)
            Watch(store, torch.device("cpu"), 1, 3, lambda: 7).failed()
        if cause.startswith("ended"):
            closed.close()
        ends = cause in {"failed", "ended", "noise, failed"}
        assert broken(other, within_s=LIMIT_S if ends else 6 * PERIOD_S) is ends


def test_watch_survives_a_store_that_raises(pairs: tuple[Pair, Pair]) -> None:
    ((one, other), _), store = pairs, Store()
    store[f"{FAILED}1"] = None  # type: ignore[assignment]
    own = Watch(store, torch.device("cpu"), 0, 3, lambda: 7)
    own.add(None, {one.fileno()})
    with exchanging(own, Endless(), (0, 1)):
        time.sleep(2 * PERIOD_S)
        Watch(store, torch.device("cpu"), 1, 3, lambda: 7).failed()
        assert broken(other, within_s=LIMIT_S)
