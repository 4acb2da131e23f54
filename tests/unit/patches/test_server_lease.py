"""One process updates a server at a time: who gets the lease, who may pause, and the state after a process dies."""

import asyncio
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from bridge.errors import AttachError, FenceBusyError
from bridge.server.protocol import Holder, InFlight
from bridge_patches.server_fence import Phase, ServerFence
from tests.unit.checks_sample import dead_holder, elsewhere, holder_of, manifest
from tests.unit.patches.fake_engine import ME, PAUSED, FakeEngine, asking, end, living

pytestmark = pytest.mark.anyio


class Draining(FakeEngine):
    """An engine whose pauses last until in-flight requests are drained."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.drained = asyncio.Event(), asyncio.Event()

    async def pause_scheduler_async(self, *, mode: InFlight, clear_cache: bool) -> None:
        await super().pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        self.begun.set()
        await self.drained.wait()


async def begun(engine: Draining, pause: "asyncio.Future[None]") -> None:
    """Wait until `pause` has stopped the scheduler and is waiting for in-flight requests."""
    await engine.begun.wait()
    assert not pause.done()


def test_second_trainer_is_refused_naming_the_first(fence: ServerFence, other: Holder) -> None:
    fence.take_lease(other, "runs/first")
    with pytest.raises(AttachError) as refused:
        fence.take_lease(ME, "runs/second")
    assert refused.value.message == f"another trainer (pid {other.pid}, run runs/first) is updating this server"
    assert f"kill -INT {other.pid}" in refused.value.hint
    lease = fence.status().lease
    assert lease is not None
    assert (lease.holder, lease.run) == (other, "runs/first")


def test_only_the_holder_can_return_a_lease(fence: ServerFence, other: Holder) -> None:
    fence.take_lease(other, "runs/first")
    fence.release_lease(ME)
    assert fence.lease
    fence.release_lease(other)
    assert fence.status().lease is None
    fence.take_lease(ME, "runs/second")


def test_lease_of_a_dead_process_is_free(fence: ServerFence, child: subprocess.Popen[bytes], other: Holder) -> None:
    fence.take_lease(other, "runs/first")
    end(child)
    assert fence.status().lease is None
    fence.take_lease(ME, "runs/second")
    assert fence.lease


def test_process_in_another_namespace_gets_no_lease(fence: ServerFence) -> None:
    with pytest.raises(AttachError, match="not visible"):
        fence.take_lease(elsewhere(), "runs/elsewhere")


async def test_reader_that_dies_leaves_nothing_torn(
    fence: ServerFence, engine: FakeEngine, child: subprocess.Popen[bytes], other: Holder
) -> None:
    await fence.pause(asking(ME, "keep", last_checkpoint="/saved"))
    await fence.publish(ME)
    await fence.pause(asking(other, "keep", writes="nothing"))
    end(child)
    assert fence.state == "paused"
    assert fence._watcher
    await fence._watcher
    assert (fence.state, fence.version, fence.last_checkpoint, engine.paused) == ("serving", 1, "/saved", False)
    assert engine.calls == [*PAUSED, "resume", *PAUSED, "resume"]


async def test_lease_is_not_granted_while_another_holds_the_fence(fence: ServerFence, other: Holder) -> None:
    await fence.pause(asking(other, "keep"))
    with pytest.raises(FenceBusyError):
        fence.take_lease(ME, "runs/second")
    await fence.release(other)
    fence.take_lease(ME, "runs/second")


async def test_lease_returned_inside_the_fence_is_kept(
    fence: ServerFence, child: subprocess.Popen[bytes], other: Holder
) -> None:
    fence.take_lease(other, "runs/first")
    await fence.pause(asking(other, "keep"))
    fence.release_lease(other)
    assert fence.lease
    end(child)
    assert fence.status().state == "torn"
    assert fence.status().lease is None
    fence.take_lease(ME, "bridge restore")
    await fence.pause(asking(ME, "keep", takeover=True))
    await fence.publish(ME)
    assert fence.state == "serving"


async def test_trainer_expecting_a_different_version_is_refused(fence: ServerFence, engine: FakeEngine) -> None:
    fence.version = 7
    with pytest.raises(AttachError, match="serves version 7, expected version 5"):
        await fence.pause(asking(ME, "keep", version=5))
    assert engine.calls == []
    await fence.pause(asking(ME, "keep", version=7))
    with pytest.raises(AttachError, match="expected version 5"):
        await fence.publish(ME, after=5)
    await fence.publish(ME, after=7)
    assert fence.version == 8


async def test_publication_with_a_lost_response_happens_once(fence: ServerFence, engine: FakeEngine) -> None:
    await fence.pause(asking(ME, "keep"))
    for _ in range(2):
        await fence.publish(ME, after=0)
    assert (fence.state, fence.version) == ("serving", 1)
    assert engine.calls == [*PAUSED, "resume"]
    for after in (1, None):
        with pytest.raises(AttachError, match="does not hold the fence"):
            await fence.publish(ME, after=after)


async def test_late_publication_retry_does_not_end_a_later_pause(fence: ServerFence, engine: FakeEngine) -> None:
    await fence.pause(asking(ME, "keep"))
    await fence.publish(ME, after=0)
    await fence.pause(asking(ME, "keep", version=1))
    with pytest.raises(AttachError, match="serves version 1, expected version 0"):
        await fence.publish(ME, after=0)
    assert (fence.state, fence.version, engine.paused) == ("paused", 1, True)
    await fence.publish(ME, after=1)
    assert (fence.state, fence.version, engine.paused) == ("serving", 2, False)


async def test_publication_that_could_not_resume_is_retried(fence: ServerFence, engine: FakeEngine) -> None:
    await fence.pause(asking(ME, "keep"))
    engine.failing = "resume"
    with pytest.raises(RuntimeError):
        await fence.publish(ME, after=0)
    assert (fence.state, fence.version) == ("paused", 1)
    engine.failing = ""
    await fence.publish(ME, after=0)
    assert (fence.state, fence.version, engine.paused) == ("serving", 1, False)


async def test_pausing_again_to_read_does_not_end_writing(
    fence: ServerFence, child: subprocess.Popen[bytes], other: Holder
) -> None:
    await fence.pause(asking(other, "keep", writes="adapter"))
    await fence.pause(asking(other, "keep", writes="nothing"))
    assert fence.status().writes == "adapter"
    end(child)
    assert fence.state == "torn"


async def test_suspended_writer_keeps_the_fence(
    fence: ServerFence, child: subprocess.Popen[bytes], other: Holder
) -> None:
    fence.take_lease(other, "runs/first")
    await fence.pause(asking(other, "keep"))
    child.send_signal(signal.SIGSTOP)
    assert fence.state == "paused"
    with pytest.raises(FenceBusyError):
        await fence.pause(asking(ME, "keep", writes="nothing"))
    with pytest.raises(AttachError, match="run runs/first"):
        await fence.pause(asking(ME, "keep", takeover=True))
    child.send_signal(signal.SIGCONT)
    await fence.publish(other)
    assert (fence.state, fence.version) == ("serving", 1)


async def test_holder_death_in_a_pending_pause_resumes_the_server(
    child: subprocess.Popen[bytes], other: Holder
) -> None:
    engine = Draining()
    fence = ServerFence(engine, manifest())
    pause = asyncio.ensure_future(fence.pause(asking(other, "wait")))
    await begun(engine, pause)
    assert fence.state == "serving"
    end(child)
    assert fence.state == "serving", "nothing can have been written"
    with pytest.raises(AttachError, match="nothing was written"):
        await pause
    assert (fence.state, fence.holder, engine.paused) == ("serving", None, False)
    engine.drained.set()
    await fence.pause(asking(ME, "wait"))
    await fence.publish(ME)
    assert fence.version == 1


@pytest.mark.parametrize("drained", [False, True])
async def test_disconnected_trainer_does_not_get_its_pause(drained: bool) -> None:
    engine = Draining()
    fence, left = ServerFence(engine, manifest()), asyncio.Event()

    async def has_left() -> bool:
        return left.is_set()

    pause = asyncio.ensure_future(fence.pause(asking(ME, "wait"), has_left))
    await begun(engine, pause)
    left.set()
    await fence.release(ME)  # sent by a trainer that missed the response
    if drained:
        engine.drained.set()
    with pytest.raises(AttachError, match="nothing was written"):
        await pause
    assert (fence.state, engine.paused) == ("serving", False)


async def test_holder_death_in_a_pending_takeover_leaves_it_torn(child: subprocess.Popen[bytes], other: Holder) -> None:
    engine = Draining()
    fence = ServerFence(engine, manifest())
    dead = dead_holder()
    fence.enter(Phase.WRITING, dead)
    pause = asyncio.ensure_future(fence.pause(asking(other, "keep", takeover=True)))
    await begun(engine, pause)
    end(child)
    with pytest.raises(AttachError, match="nothing was written"):
        await pause
    assert (fence.state, fence.holder, engine.paused) == ("torn", dead, True)


async def test_lease_taken_during_a_pending_pause_wins(other: Holder) -> None:
    engine = Draining()
    fence = ServerFence(engine, manifest())
    pause = asyncio.ensure_future(fence.pause(asking(ME, "wait")))
    await begun(engine, pause)
    fence.take_lease(other, "runs/first")
    engine.drained.set()
    with pytest.raises(AttachError, match="run runs/first"):
        await pause
    assert (fence.state, engine.paused) == ("serving", False)


async def test_holder_death_after_publication_leaves_nothing_torn(
    child: subprocess.Popen[bytes], other: Holder
) -> None:
    reached, resumes = asyncio.Event(), asyncio.Event()

    class Slow(FakeEngine):
        async def resume_generation(self) -> None:
            reached.set()
            await resumes.wait()
            await super().resume_generation()

    fence = ServerFence(Slow(), manifest())
    await fence.pause(asking(other, "keep"))
    publishing = asyncio.ensure_future(fence.publish(other))
    await reached.wait()
    end(child)
    assert (fence.state, fence.version) == ("paused", 1)
    resumes.set()
    await publishing
    assert fence.state == "serving"
    await fence.pause(asking(ME, "keep", version=1))


Processes = tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Start two live ranks, leader first."""
    both = living(), living()
    yield both
    for process in both:
        end(process)


@pytest.fixture
def ranks(processes: Processes) -> Holder:
    return holder_of(*(process.pid for process in processes))


async def test_any_rank_may_pause_and_publish_for_all(fence: ServerFence, engine: FakeEngine, ranks: Holder) -> None:
    fence.take_lease(ranks, "runs/first")
    await fence.pause(asking(ranks, "keep"))
    received = Holder.model_validate_json(ranks.model_dump_json())  # as sent by another rank
    await fence.publish(received, version=7)
    assert (fence.state, fence.version, engine.calls) == ("serving", 7, [*PAUSED, "resume"])
    fence.release_lease(received)
    assert fence.lease is None


async def test_single_rank_is_a_different_holder(fence: ServerFence, ranks: Holder, processes: Processes) -> None:
    fence.take_lease(ranks, "runs/first")
    await fence.pause(asking(ranks, "keep"))
    with pytest.raises(AttachError, match="does not hold the fence"):
        await fence.publish(holder_of(processes[0].pid))
    await fence.publish(ranks)


def test_lease_is_free_when_all_ranks_have_exited(fence: ServerFence, processes: Processes, ranks: Holder) -> None:
    fence.take_lease(ranks, "runs/first")
    end(processes[0])
    with pytest.raises(AttachError, match=f"pid {processes[0].pid}, run runs/first"):
        fence.take_lease(ME, "runs/second")
    end(processes[1])
    fence.take_lease(ME, "runs/second")


@pytest.mark.parametrize("leads", [True, False])
async def test_holder_with_a_dead_rank_gets_no_lease_or_fence(
    fence: ServerFence, engine: FakeEngine, processes: Processes, ranks: Holder, leads: bool
) -> None:
    end(processes[0 if leads else 1])
    with pytest.raises(AttachError, match="could not notice its exit"):
        fence.take_lease(ranks, "runs/first")
    with pytest.raises(AttachError, match="could not notice its exit"):
        await fence.pause(asking(ranks, "keep"))
    assert engine.calls == []


Call = Callable[[ServerFence, Holder], Coroutine[Any, Any, None]]


async def _write(fence: ServerFence, holder: Holder) -> None:
    fence.refuse_unless_writing(holder)


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("call", [ServerFence.publish, ServerFence.release, _write])
async def test_rank_that_dies_writing_leaves_the_weights_torn(
    fence: ServerFence, engine: FakeEngine, processes: Processes, ranks: Holder, leads: bool, call: Call
) -> None:
    fence.take_lease(ranks, "runs/first")
    await fence.pause(asking(ranks, "keep", last_checkpoint="/saved"))
    end(processes[0 if leads else 1])
    assert fence.state == "torn"
    with pytest.raises(AttachError, match=f"half-written: process {processes[0].pid} died"):
        await call(fence, ranks)
    assert (fence.state, fence.version, engine.paused) == ("torn", 0, True)


@pytest.mark.parametrize("leased", [True, False])
async def test_no_takeover_while_a_writing_rank_is_alive(
    fence: ServerFence, processes: Processes, ranks: Holder, leased: bool
) -> None:
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


async def test_holder_losing_a_rank_does_not_get_a_pending_pause(processes: Processes, ranks: Holder) -> None:
    engine = Draining()
    fence = ServerFence(engine, manifest())
    pause = asyncio.ensure_future(fence.pause(asking(ranks, "wait")))
    await begun(engine, pause)
    end(processes[1])
    with pytest.raises(AttachError, match="nothing was written"):
        await pause
    assert (fence.state, engine.paused) == ("serving", False)


async def test_reading_ranks_hold_the_fence_until_the_last_exits(
    fence: ServerFence, engine: FakeEngine, processes: Processes, ranks: Holder
) -> None:
    await fence.pause(asking(ranks, "keep", writes="nothing"))
    end(processes[0])
    await asyncio.sleep(0.3)
    assert (fence.state, engine.paused) == ("paused", True)
    end(processes[1])
    assert fence._watcher
    await fence._watcher
    assert (fence.state, fence.version, engine.paused) == ("serving", 0, False)
