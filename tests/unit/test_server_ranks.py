"""A holder of several processes, a trainer's ranks, acts as one: torn by the first death, and gone with the last."""

import asyncio
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from bridge.errors import AttachError, FenceBusyError
from bridge.server.protocol import Holder
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import holder_of, manifest
from tests.unit.test_server_fence import ME, PAUSED, FakeEngine, asking, end, living, run
from tests.unit.test_server_lease import Draining, begun

Processes = tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Two live ranks, the leader first."""
    both = living(), living()
    yield both
    for process in both:
        end(process)


@pytest.fixture
def ranks(processes: Processes) -> Holder:
    return holder_of(*(process.pid for process in processes))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def fence(engine: FakeEngine) -> ServerFence:
    return ServerFence(engine, manifest())


def test_ranks_pause_and_publish_as_one_whichever_of_them_calls(
    fence: ServerFence, engine: FakeEngine, ranks: Holder
) -> None:
    async def passage() -> None:
        fence.take_lease(ranks, "runs/first")
        await fence.pause(asking(ranks, "keep"))
        again = Holder.model_validate_json(ranks.model_dump_json())  # as sent by another rank
        await fence.publish(again, version=7)
        assert (fence.state, fence.version, engine.calls) == ("serving", 7, [*PAUSED, "resume"])
        fence.give_lease_back(again)
        assert fence.lease is None

    run(passage())


def test_one_rank_alone_is_another_holder(fence: ServerFence, ranks: Holder, processes: Processes) -> None:
    async def passage() -> None:
        fence.take_lease(ranks, "runs/first")
        await fence.pause(asking(ranks, "keep"))
        with pytest.raises(AttachError, match="does not hold the fence"):
            await fence.publish(holder_of(processes[0].pid))
        await fence.publish(ranks)

    run(passage())


def test_the_lease_is_free_when_all_ranks_are_gone_and_until_then_the_leader_is_named(
    fence: ServerFence, processes: Processes, ranks: Holder
) -> None:
    fence.take_lease(ranks, "runs/first")
    end(processes[0])
    with pytest.raises(AttachError, match=f"pid {processes[0].pid}, run runs/first"):
        fence.take_lease(ME, "runs/second")
    end(processes[1])
    fence.take_lease(ME, "runs/second")


@pytest.mark.parametrize("leads", [True, False])
def test_ranks_of_which_one_has_died_get_neither_lease_nor_fence(
    fence: ServerFence, engine: FakeEngine, processes: Processes, ranks: Holder, leads: bool
) -> None:
    end(processes[0 if leads else 1])
    with pytest.raises(AttachError, match="could not notice its end"):
        fence.take_lease(ranks, "runs/first")
    with pytest.raises(AttachError, match="could not notice its end"):
        run(fence.pause(asking(ranks, "keep")))
    assert engine.calls == []


Call = Callable[[ServerFence, Holder], Coroutine[Any, Any, None]]


async def _write(fence: ServerFence, holder: Holder) -> None:
    fence.refuse_unless_writing(holder)


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("call", [ServerFence.publish, ServerFence.release, _write])
def test_the_first_rank_to_die_while_they_write_leaves_the_weights_torn_for_the_others_too(
    fence: ServerFence, engine: FakeEngine, processes: Processes, ranks: Holder, leads: bool, call: Call
) -> None:
    async def passage() -> None:
        fence.take_lease(ranks, "runs/first")
        await fence.pause(asking(ranks, "keep", last_checkpoint="/saved"))
        end(processes[0 if leads else 1])
        assert fence.state == "torn"
        with pytest.raises(AttachError, match=f"half-written: process {processes[0].pid} died"):
            await call(fence, ranks)
        assert (fence.state, fence.version, engine.paused) == ("torn", 0, True)

    run(passage())


@pytest.mark.parametrize("leased", [True, False])
def test_nobody_takes_over_torn_weights_while_a_rank_that_may_be_writing_is_alive(
    fence: ServerFence, processes: Processes, ranks: Holder, leased: bool
) -> None:
    async def passage() -> None:
        if leased:
            fence.take_lease(ranks, "runs/first")
        await fence.pause(asking(ranks, "keep"))
        end(processes[0])
        for writes in ("weights", "nothing"):
            with pytest.raises(AttachError if leased and writes == "weights" else FenceBusyError):
                await fence.pause(asking(ME, "keep", writes=writes, takeover=True))
        end(processes[1])
        fence.take_lease(ME, "bridge restore")
        await fence.pause(asking(ME, "keep", takeover=True))
        await fence.publish(ME)
        assert (fence.state, fence.version) == ("serving", 1)

    run(passage())


def test_ranks_of_which_one_dies_while_their_pause_is_pending_do_not_get_it(
    processes: Processes, ranks: Holder
) -> None:
    async def passage() -> None:
        engine = Draining()
        fence = ServerFence(engine, manifest())
        pause = asyncio.ensure_future(fence.pause(asking(ranks, "wait")))
        await begun(engine, pause)
        end(processes[1])
        with pytest.raises(AttachError, match="nothing was written"):
            await pause
        assert (fence.state, engine.paused) == ("serving", False)

    run(passage())


def test_ranks_that_read_hold_the_server_until_the_last_of_them_is_gone(
    fence: ServerFence, engine: FakeEngine, processes: Processes, ranks: Holder
) -> None:
    async def passage() -> None:
        await fence.pause(asking(ranks, "keep", writes="nothing"))
        end(processes[0])
        await asyncio.sleep(0.3)
        assert (fence.state, engine.paused) == ("paused", True)
        end(processes[1])
        assert fence._watcher
        await fence._watcher
        assert (fence.state, fence.version, engine.paused) == ("serving", 0, False)

    run(passage())
