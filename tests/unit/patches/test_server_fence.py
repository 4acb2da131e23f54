"""The server's side of the fence, with an engine that records its calls in order."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import AttachError, FenceBusyError
from bridge.server.manifest import Shard
from bridge.server.protocol import Capabilities, Holder, InFlight, PauseRequest, Written
from bridge_patches import server_fence
from bridge_patches.engine_outputs import SERVE_VERSION
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import dead_holder, elsewhere, holder_of, manifest

ME = Holder.current()
PAUSED = ["pause keep", "synchronize", "reset"]
ASLEEP = [*PAUSED, "sleep"]


class FakeEngine:
    """The parts of vLLM's `AsyncLLM` that the fence uses; `failing` names the call that raises."""

    def __init__(self, *, moved: list[list[str]] | None = None, dropped: bool = True, failing: str = "") -> None:
        self.calls: list[str] = []
        self.paused = False
        self.awake = True
        self.missing: list[str | None] = [None, None]
        """Why each rank cannot wake up, or None."""
        self.version = 0
        self.engine_core = self
        self._moved = moved or [[]]
        self._dropped = dropped
        self.failing = failing

    def repair(self) -> None:
        self._moved, self._dropped, self.failing = [[]], True, ""

    async def pause_scheduler_async(self, *, mode: InFlight, clear_cache: bool) -> None:
        await self._note(f"pause {mode}")
        assert not clear_cache
        self.paused = True

    async def collective_rpc(self, method: str) -> Any:
        await self._note(method.removeprefix("bridge_"))
        answers: dict[str, Callable[[], Any]] = {
            "bridge_synchronize": lambda: self._moved,
            "bridge_sleep": self._sleep,
            "bridge_wake": self._wake,
            "bridge_requantize": lambda: [None, None],
        }
        return answers[method]()

    def _sleep(self) -> list[None]:
        assert self.calls[-2] == "reset", "the KV cache was freed while requests still had blocks of it"
        self.awake = False
        return [None, None]

    def _wake(self) -> list[str | None]:
        self.awake = self.awake or not any(self.missing)
        return self.missing

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        await self._note("reset")
        assert self.paused, "the cache was dropped while the scheduler could still fill it"
        assert reset_connector
        self.kept_kv = not reset_running_requests
        return self._dropped

    async def call_utility_async(self, method: str, version: int) -> None:
        assert method == SERVE_VERSION
        self.version = version

    async def resume_generation(self) -> None:
        await self._note("resume")
        assert self.awake, "tokens would be generated without a KV cache"
        self.paused = False

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)
        if self.failing and call.startswith(self.failing):
            raise RuntimeError(f"{call} failed")


def asking(holder: Holder, in_flight: InFlight, **more: Any) -> PauseRequest:
    return PauseRequest(holder=holder, in_flight=in_flight, **more)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def living() -> subprocess.Popen[bytes]:
    """Start a process that runs until its standard input is closed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_pause_and_publish_call_the_engine_in_order(in_flight: InFlight) -> None:
    versions = []

    class Engine(FakeEngine):
        async def resume_generation(self) -> None:
            versions.append(fence.version)
            await super().resume_generation()

    engine = Engine()
    fence = ServerFence(engine, manifest())

    async def passage() -> None:
        await fence.pause(asking(ME, in_flight))
        assert engine.calls == [f"pause {in_flight}", "synchronize", "reset"]
        await fence.publish(ME)
        assert engine.calls[3:] == ["resume"]
        assert versions == [1], "the version is up before a token is generated"

    run(passage())


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        ({"dropped": False}, AttachError, "prefix cache"),
        ({"moved": [[], ["layer.b", "layer.a"]]}, AttachError, "layer.a, layer.b"),
        ({"failing": "pause"}, RuntimeError, "pause keep failed"),
        ({"failing": "synchronize"}, RuntimeError, "synchronize failed"),
        ({"failing": "reset"}, RuntimeError, "reset failed"),
    ],
    ids=["cache kept", "weights moved", "pause raises", "synchronize raises", "reset raises"],
)
def test_failed_pause_resumes_and_can_be_retried(
    broken: dict[str, Any], error: type[Exception], words: str, takeover: bool
) -> None:
    engine = FakeEngine(**broken)
    fence = ServerFence(engine, manifest())

    async def passage() -> None:
        with pytest.raises(error, match=words):
            await fence.pause(asking(ME, "keep", takeover=takeover))
        assert (fence.state, fence.version, fence.holder) == ("serving", 0, None)
        assert engine.calls[-1] == "resume"
        assert not engine.paused
        engine.repair()
        await fence.pause(asking(ME, "keep", takeover=takeover))
        await fence.publish(ME)
        assert (fence.state, fence.version) == ("serving", 1)

    run(passage())


def test_concurrent_pauses_admit_one_process() -> None:
    child = living()
    other = holder_of(child.pid)
    engine = FakeEngine()
    fence = ServerFence(engine, manifest())

    async def passage() -> None:
        results = await asyncio.gather(
            fence.pause(asking(ME, "keep")), fence.pause(asking(other, "keep")), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), FenceBusyError]
        assert engine.calls == PAUSED

    try:
        run(passage())
    finally:
        end(child)


@asynccontextmanager
async def torn(engine: FakeEngine, last_checkpoint: str | None = None) -> AsyncIterator[ServerFence]:
    """Return a fence whose holder has died."""
    child = living()
    fence = ServerFence(engine, manifest())
    try:
        await fence.pause(asking(holder_of(child.pid), "keep", last_checkpoint=last_checkpoint))
    finally:
        end(child)
    assert fence.state == "torn"
    yield fence


@pytest.mark.parametrize("failing", ["pause", "synchronize", "reset"])
def test_failed_takeover_leaves_weights_torn(failing: str) -> None:
    engine = FakeEngine()

    async def passage() -> None:
        async with torn(engine) as fence:
            before = fence.holder
            engine.failing = failing
            with pytest.raises(RuntimeError):
                await fence.pause(asking(ME, "keep", last_checkpoint="/new", takeover=True))
            assert (fence.state, fence.holder, fence.last_checkpoint) == ("torn", before, None)
            assert engine.paused
            assert "resume" not in engine.calls

    run(passage())


@pytest.mark.parametrize("is_there", [True, False])
def test_torn_refusal_names_the_last_checkpoint(tmp_path: Path, is_there: bool) -> None:
    async def passage() -> None:
        async with torn(FakeEngine(), str(tmp_path) if is_there else None) as fence:
            with pytest.raises(AttachError, match="died inside the fence after version 0") as refused:
                await fence.pause(asking(ME, "keep"))
            assert f"bridge restore {tmp_path if is_there else 'CHECKPOINT'}" in refused.value.hint

    run(passage())


def test_writer_without_a_checkpoint_keeps_the_previous_one() -> None:
    fence = ServerFence(FakeEngine(), manifest())

    async def passage() -> None:
        named = []
        for last in ("/saved/step_1", None, "/saved/step_2"):
            await fence.pause(asking(ME, "keep", last_checkpoint=last))
            await fence.publish(ME)
            named.append(fence.status().last_checkpoint)
        assert named == ["/saved/step_1", "/saved/step_1", "/saved/step_2"]

    run(passage())


def test_versions_never_decrease() -> None:
    fence = ServerFence(FakeEngine(), manifest())

    async def passage() -> None:
        published = []
        for version in (None, 7, 7, 3, None):
            await fence.pause(asking(ME, "keep"))
            await fence.publish(ME, version)
            published.append(fence.version)
        assert published == [1, 7, 8, 9, 10]

    run(passage())


def test_holder_in_another_namespace_is_refused_the_fence() -> None:
    engine = FakeEngine()
    fence = ServerFence(engine, manifest())
    dead = dead_holder()
    unseen = elsewhere()

    async def passage() -> None:
        for holder in (dead, unseen):
            with pytest.raises(AttachError, match="not visible"):
                await fence.pause(asking(holder, "keep"))
        assert (fence.state, engine.calls) == ("serving", [])

    run(passage())


def test_torn_state_is_repaired_only_by_the_same_kind_of_write() -> None:
    engine = FakeEngine()
    child = living()
    fence = ServerFence(engine, manifest())

    async def passage() -> None:
        async with torn(engine) as of_weights:
            with pytest.raises(AttachError, match="the weights may be half-written"):
                await of_weights.pause(asking(ME, "keep", writes="adapter", takeover=True))
            assert of_weights.state == "torn"
        await fence.pause(asking(holder_of(child.pid), "keep", writes="adapter", last_checkpoint="/gone"))
        end(child)
        assert "the adapter may be half-written" in fence.status().torn()
        assert fence.status().hint().startswith("bridge restore ADAPTER (/gone no longer exists")
        with pytest.raises(AttachError, match="the adapter may be half-written"):
            await fence.pause(asking(ME, "keep", takeover=True))
        await fence.pause(asking(ME, "keep", writes="adapter", takeover=True))
        await fence.publish(ME)
        assert (fence.state, fence.version, fence.last_checkpoint) == ("serving", 1, "/gone")
        await fence.pause(asking(ME, "keep"))
        assert fence.last_checkpoint is None, "an adapter does not restore weights"
        await fence.release(ME)

    try:
        run(passage())
    finally:
        end(child)


def sleeper(engine: FakeEngine) -> ServerFence:
    return ServerFence(engine, manifest(), Capabilities(can_sleep=True))


def test_kv_cache_sleeps_until_the_server_resumes() -> None:
    engine = FakeEngine()
    fence = sleeper(engine)

    async def passage() -> None:
        assert fence.status().can_sleep
        await fence.pause(asking(ME, "keep", sleep=True))
        assert (engine.calls, engine.paused, engine.awake) == (ASLEEP, True, False)
        await fence.publish(ME)
        assert (engine.calls, engine.paused, engine.awake) == ([*ASLEEP, "wake", "resume"], False, True)
        assert (fence.state, fence.version) == ("serving", 1)
        await fence.pause(asking(ME, "keep"))
        await fence.publish(ME)
        assert engine.calls[-4:] == [*PAUSED, "resume"], "it was woken without having slept"

    run(passage())


def test_server_that_cannot_sleep_refuses_the_pause() -> None:
    engine = FakeEngine()
    fence = ServerFence(engine, manifest())

    async def passage() -> None:
        with pytest.raises(AttachError, match="cannot free its KV cache") as refused:
            await fence.pause(asking(ME, "keep", sleep=True))
        assert "--kv-sleep never" in refused.value.hint
        assert (engine.calls, fence.state, fence.status().can_sleep) == ([], "serving", False)

    run(passage())


@pytest.mark.parametrize("failing", ["pause", "synchronize", "reset"])
def test_failure_before_the_sleep_wakes_nothing(failing: str) -> None:
    engine = FakeEngine(failing=failing)

    async def passage() -> None:
        with pytest.raises(RuntimeError):
            await sleeper(engine).pause(asking(ME, "keep", sleep=True))
        assert not {"sleep", "wake"} & set(engine.calls)
        assert not engine.paused

    run(passage())


def test_kv_cache_asleep_on_some_ranks_is_woken() -> None:
    engine = FakeEngine(failing="sleep")
    fence = sleeper(engine)

    async def passage() -> None:
        with pytest.raises(RuntimeError, match="sleep failed"):
            await fence.pause(asking(ME, "keep", sleep=True))
        assert engine.calls == [*ASLEEP, "wake", "resume"]
        assert (fence.state, fence.holder) == ("serving", None)

    run(passage())


@pytest.mark.parametrize("ends", [False, True])
def test_failed_pause_retries_until_memory_is_free(ends: bool) -> None:
    engine, child = FakeEngine(failing="sleep"), living()
    fence, holder = sleeper(engine), holder_of(child.pid)

    async def passage() -> None:
        engine.missing = [None, "9.00 GiB are needed, and 2.00 GiB of the GPU are free"]
        with pytest.raises(AttachError, match="cannot allocate its KV cache again"):
            await fence.pause(asking(holder, "keep", sleep=True))
        assert (fence.state, fence.holder, fence.status().writes, engine.paused) == ("paused", holder, "nothing", True)
        if ends:
            end(child)
            while engine.calls.count("wake") < 2:  # noqa: ASYNC110  the fence retries by itself
                await asyncio.sleep(server_fence.POLL_S)
        engine.missing = [None, None]
        if not ends:
            await fence.release(holder)
        assert fence._watcher
        await fence._watcher
        assert (fence.state, fence.holder, fence.version, engine.paused) == ("serving", None, 0, False)

    run(passage())
    end(child)


@pytest.mark.parametrize("leave", [ServerFence.publish, ServerFence.release])
def test_fence_is_held_until_the_kv_cache_has_memory(
    leave: Callable[[ServerFence, Holder], Coroutine[Any, Any, None]], tmp_path: Path
) -> None:
    engine = FakeEngine()
    fence = sleeper(engine)

    async def passage() -> None:
        await fence.pause(asking(ME, "keep", last_checkpoint=str(tmp_path), sleep=True))
        engine.missing = [None, "9.00 GiB are needed, and 2.00 GiB of the GPU are free"]
        for _ in range(2):
            with pytest.raises(AttachError, match=r"does not generate: 9\.00 GiB are needed") as refused:
                await leave(fence, ME)
            assert refused.value.hint.endswith(f"then bridge restore {tmp_path}")
            assert (fence.state, fence.holder, fence.version, engine.paused) == ("paused", ME, 0, True)
        engine.missing = [None, None]
        await leave(fence, ME)
        assert (fence.state, engine.paused, engine.awake) == ("serving", False, True)
        assert engine.calls == [*ASLEEP, "wake", "wake", "wake", "resume"]

    run(passage())


@pytest.mark.parametrize("failing", ["", "synchronize"])
def test_takeover_wakes_the_kv_cache_of_a_dead_holder(failing: str) -> None:
    engine = FakeEngine()
    child = living()
    fence = sleeper(engine)

    async def passage() -> None:
        await fence.pause(asking(holder_of(child.pid), "keep", sleep=True))
        end(child)
        assert (fence.state, engine.awake) == ("torn", False)
        if failing:
            engine.failing = failing
            with pytest.raises(RuntimeError):
                await fence.pause(asking(ME, "keep", takeover=True))
            assert (fence.state, engine.awake, engine.paused) == ("torn", False, True)
            engine.failing = ""
        await fence.pause(asking(ME, "keep", takeover=True))
        assert not engine.awake
        await fence.publish(ME)
        assert (fence.state, fence.version, engine.awake, engine.paused) == ("serving", 1, True, False)

    try:
        run(passage())
    finally:
        end(child)


def test_second_pause_may_put_the_kv_cache_to_sleep() -> None:
    engine = FakeEngine()
    fence = sleeper(engine)

    async def passage() -> None:
        await fence.pause(asking(ME, "keep"))
        await fence.pause(asking(ME, "keep", sleep=True))
        assert engine.calls == [*PAUSED, *ASLEEP]
        await fence.publish(ME)
        assert engine.calls[-2:] == ["wake", "resume"]

    run(passage())


@pytest.mark.parametrize(
    ("keep_kv", "sleep", "can_keep", "kept"),
    [(True, False, True, True), (False, False, True, False), (True, True, True, False), (True, False, False, False)],
)
def test_keys_and_values_are_kept_if_requested_and_possible(
    keep_kv: bool, sleep: bool, can_keep: bool, kept: bool
) -> None:
    engine = FakeEngine()
    fence = ServerFence(engine, manifest(), Capabilities(can_sleep=True, can_keep_kv=can_keep))

    async def passage() -> None:
        await fence.pause(asking(ME, "keep", keep_kv=keep_kv, sleep=sleep))
        await fence.publish(ME)

    run(passage())
    assert (engine.kept_kv, engine.version) == (kept, fence.version)


QUANTIZED = {"quantized": {"w": "fp8_per_block"}}


def test_fp8_is_requantized_between_write_and_next_token() -> None:
    engine = FakeEngine()
    fence = ServerFence(engine, manifest(**QUANTIZED), Capabilities(can_sleep=True))

    async def passage() -> None:
        await fence.pause(asking(ME, "keep", sleep=True))
        await fence.publish(ME)
        assert engine.calls == [*ASLEEP, "requantize", "wake", "resume"]
        await fence.publish(ME, after=0)
        assert engine.calls.count("requantize") == 1, "a repetition does nothing"

    run(passage())


def test_fp8_is_requantized_before_a_release_resumes() -> None:
    engine = FakeEngine(failing="requantize")
    fence = ServerFence(engine, manifest(**QUANTIZED))

    async def passage() -> None:
        await fence.pause(asking(ME, "keep"))
        with pytest.raises(RuntimeError, match="requantize"):
            await fence.release(ME)
        assert (fence.state, fence.holder) == ("paused", ME)
        engine.failing = ""
        await fence.release(ME)
        assert engine.calls == [*PAUSED, "requantize", "requantize", "resume"]
        assert (fence.state, fence.version) == ("serving", 0)

    run(passage())


@pytest.mark.parametrize(
    ("pauses", "published", "made"),
    [
        (["adapter"], True, 0),
        (["nothing"], False, 0),
        (["weights", "adapter"], True, 1),
        (["weights"], False, 1),
    ],
)
def test_fp8_is_requantized_once_if_weights_were_written(pauses: list[Written], published: bool, made: int) -> None:
    engine = FakeEngine()
    fence = ServerFence(engine, manifest(**QUANTIZED))

    async def passage() -> None:
        for writes in pauses:
            await fence.pause(asking(ME, "keep", writes=writes))
        await (fence.publish(ME) if published else fence.release(ME))
        assert engine.calls.count("requantize") == made
        await fence.pause(asking(ME, "keep", writes="adapter"))
        await fence.publish(ME)
        assert engine.calls.count("requantize") == made, "no weight was written since"

    run(passage())


def test_failed_requantization_is_not_published() -> None:
    engine = FakeEngine(failing="requantize")
    fence = ServerFence(engine, manifest(**QUANTIZED))

    async def passage() -> None:
        await fence.pause(asking(ME, "keep"))
        with pytest.raises(RuntimeError, match="requantize"):
            await fence.publish(ME)
        assert (fence.state, fence.version, fence.holder) == ("paused", 0, ME)
        engine.failing = ""
        await fence.publish(ME)
        assert (fence.state, fence.version) == ("serving", 1)

    run(passage())


def test_fp8_is_requantized_if_any_rank_has_it() -> None:
    engine, first = FakeEngine(), manifest()
    second = {**first.shards[0].model_dump(include=set(Shard.model_fields)), **QUANTIZED, "rank": 1}
    fence = ServerFence(engine, manifest(other_shards=(second,)))

    async def passage() -> None:
        await fence.pause(asking(ME, "keep"))
        await fence.publish(ME)
        assert "requantize" in engine.calls

    run(passage())
