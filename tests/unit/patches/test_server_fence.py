"""The server's side of the fence, with an engine that records its calls in order."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import AttachError, FenceBusyError
from bridge.server.manifest import Shard
from bridge.server.protocol import Capabilities, Holder, InFlight, Written
from bridge_patches import server_fence
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import dead_holder, elsewhere, holder_of, manifest
from tests.unit.patches.fake_engine import ASLEEP, ME, PAUSED, FakeEngine, asking, end, living

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
async def test_pause_and_publish_call_the_engine_in_order(in_flight: InFlight) -> None:
    versions = []

    class Engine(FakeEngine):
        async def resume_generation(self) -> None:
            versions.append(fence.version)
            await super().resume_generation()

    engine = Engine()
    fence = ServerFence(engine, manifest())
    await fence.pause(asking(ME, in_flight))
    assert engine.calls == [f"pause {in_flight}", "synchronize", "reset"]
    await fence.publish(ME)
    assert engine.calls[3:] == ["resume"]
    assert versions == [1], "the version is up before a token is generated"


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
async def test_failed_pause_resumes_and_can_be_retried(
    broken: dict[str, Any], error: type[Exception], words: str, takeover: bool
) -> None:
    engine = FakeEngine(**broken)
    fence = ServerFence(engine, manifest())
    with pytest.raises(error, match=words):
        await fence.pause(asking(ME, "keep", takeover=takeover))
    assert (fence.state, fence.version, fence.holder) == ("serving", 0, None)
    assert engine.calls[-1] == "resume"
    assert not engine.paused
    engine.repair()
    await fence.pause(asking(ME, "keep", takeover=takeover))
    await fence.publish(ME)
    assert (fence.state, fence.version) == ("serving", 1)


async def test_concurrent_pauses_admit_one_process(
    fence: ServerFence, engine: FakeEngine, child: subprocess.Popen[bytes]
) -> None:
    other = holder_of(child.pid)
    results = await asyncio.gather(
        fence.pause(asking(ME, "keep")), fence.pause(asking(other, "keep")), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), FenceBusyError]
    assert engine.calls == PAUSED


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
async def test_failed_takeover_leaves_weights_torn(engine: FakeEngine, failing: str) -> None:
    async with torn(engine) as fence:
        before = fence.holder
        engine.failing = failing
        with pytest.raises(RuntimeError):
            await fence.pause(asking(ME, "keep", last_checkpoint="/new", takeover=True))
        assert (fence.state, fence.holder, fence.last_checkpoint) == ("torn", before, None)
        assert engine.paused
        assert "resume" not in engine.calls


@pytest.mark.parametrize("is_there", [True, False])
async def test_torn_refusal_names_the_last_checkpoint(tmp_path: Path, is_there: bool) -> None:
    async with torn(FakeEngine(), str(tmp_path) if is_there else None) as fence:
        with pytest.raises(AttachError, match="died inside the fence after version 0") as refused:
            await fence.pause(asking(ME, "keep"))
        assert f"bridge restore {tmp_path if is_there else 'CHECKPOINT'}" in refused.value.hint


async def test_writer_without_a_checkpoint_keeps_the_previous_one(fence: ServerFence) -> None:
    named = []
    for last in ("/saved/step_1", None, "/saved/step_2"):
        await fence.pause(asking(ME, "keep", last_checkpoint=last))
        await fence.publish(ME)
        named.append(fence.status().last_checkpoint)
    assert named == ["/saved/step_1", "/saved/step_1", "/saved/step_2"]


async def test_versions_never_decrease(fence: ServerFence) -> None:
    published = []
    for version in (None, 7, 7, 3, None):
        await fence.pause(asking(ME, "keep"))
        await fence.publish(ME, version)
        published.append(fence.version)
    assert published == [1, 7, 8, 9, 10]


async def test_holder_in_another_namespace_is_refused_the_fence(fence: ServerFence, engine: FakeEngine) -> None:
    dead = dead_holder()
    unseen = elsewhere()
    for holder in (dead, unseen):
        with pytest.raises(AttachError, match="not visible"):
            await fence.pause(asking(holder, "keep"))
    assert (fence.state, engine.calls) == ("serving", [])


async def test_torn_state_is_repaired_only_by_the_same_kind_of_write(
    engine: FakeEngine, child: subprocess.Popen[bytes]
) -> None:
    fence = ServerFence(engine, manifest())
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


def sleeper(engine: FakeEngine) -> ServerFence:
    return ServerFence(engine, manifest(), Capabilities(can_sleep=True))


async def test_kv_cache_sleeps_until_the_server_resumes(engine: FakeEngine) -> None:
    fence = sleeper(engine)
    assert fence.status().can_sleep
    await fence.pause(asking(ME, "keep", sleep=True))
    assert (engine.calls, engine.paused, engine.awake) == (ASLEEP, True, False)
    await fence.publish(ME)
    assert (engine.calls, engine.paused, engine.awake) == ([*ASLEEP, "wake", "resume"], False, True)
    assert (fence.state, fence.version) == ("serving", 1)
    await fence.pause(asking(ME, "keep"))
    await fence.publish(ME)
    assert engine.calls[-4:] == [*PAUSED, "resume"], "it was woken without having slept"


async def test_server_that_cannot_sleep_refuses_the_pause(fence: ServerFence, engine: FakeEngine) -> None:
    with pytest.raises(AttachError, match="cannot free its KV cache") as refused:
        await fence.pause(asking(ME, "keep", sleep=True))
    assert "--kv-sleep never" in refused.value.hint
    assert (engine.calls, fence.state, fence.status().can_sleep) == ([], "serving", False)


@pytest.mark.parametrize("failing", ["pause", "synchronize", "reset"])
async def test_failure_before_the_sleep_wakes_nothing(failing: str) -> None:
    engine = FakeEngine(failing=failing)
    with pytest.raises(RuntimeError):
        await sleeper(engine).pause(asking(ME, "keep", sleep=True))
    assert not {"sleep", "wake"} & set(engine.calls)
    assert not engine.paused


async def test_kv_cache_asleep_on_some_ranks_is_woken() -> None:
    engine = FakeEngine(failing="sleep")
    fence = sleeper(engine)
    with pytest.raises(RuntimeError, match="sleep failed"):
        await fence.pause(asking(ME, "keep", sleep=True))
    assert engine.calls == [*ASLEEP, "wake", "resume"]
    assert (fence.state, fence.holder) == ("serving", None)


@pytest.mark.parametrize("ends", [False, True])
async def test_failed_pause_retries_until_memory_is_free(child: subprocess.Popen[bytes], ends: bool) -> None:
    engine = FakeEngine(failing="sleep")
    fence, holder = sleeper(engine), holder_of(child.pid)
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


@pytest.mark.parametrize("leave", [ServerFence.publish, ServerFence.release])
async def test_fence_is_held_until_the_kv_cache_has_memory(
    engine: FakeEngine, leave: Callable[[ServerFence, Holder], Coroutine[Any, Any, None]], tmp_path: Path
) -> None:
    fence = sleeper(engine)
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


@pytest.mark.parametrize("failing", ["", "synchronize"])
async def test_takeover_wakes_the_kv_cache_of_a_dead_holder(
    engine: FakeEngine, child: subprocess.Popen[bytes], failing: str
) -> None:
    fence = sleeper(engine)
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


async def test_second_pause_may_put_the_kv_cache_to_sleep(engine: FakeEngine) -> None:
    fence = sleeper(engine)
    await fence.pause(asking(ME, "keep"))
    await fence.pause(asking(ME, "keep", sleep=True))
    assert engine.calls == [*PAUSED, *ASLEEP]
    await fence.publish(ME)
    assert engine.calls[-2:] == ["wake", "resume"]


@pytest.mark.parametrize(
    ("keep_kv", "sleep", "can_keep", "kept"),
    [(True, False, True, True), (False, False, True, False), (True, True, True, False), (True, False, False, False)],
)
async def test_keys_and_values_are_kept_if_requested_and_possible(
    engine: FakeEngine, keep_kv: bool, sleep: bool, can_keep: bool, kept: bool
) -> None:
    fence = ServerFence(engine, manifest(), Capabilities(can_sleep=True, can_keep_kv=can_keep))
    await fence.pause(asking(ME, "keep", keep_kv=keep_kv, sleep=sleep))
    await fence.publish(ME)
    assert (engine.kept_kv, engine.version) == (kept, fence.version)


QUANTIZED = {"quantized": {"w": "fp8_per_block"}}


async def test_fp8_is_requantized_between_write_and_next_token(engine: FakeEngine) -> None:
    fence = ServerFence(engine, manifest(**QUANTIZED), Capabilities(can_sleep=True))
    await fence.pause(asking(ME, "keep", sleep=True))
    await fence.publish(ME)
    assert engine.calls == [*ASLEEP, "requantize", "wake", "resume"]
    await fence.publish(ME, after=0)
    assert engine.calls.count("requantize") == 1, "a repetition does nothing"


async def test_fp8_is_requantized_before_a_release_resumes() -> None:
    engine = FakeEngine(failing="requantize")
    fence = ServerFence(engine, manifest(**QUANTIZED))
    await fence.pause(asking(ME, "keep"))
    with pytest.raises(RuntimeError, match="requantize"):
        await fence.release(ME)
    assert (fence.state, fence.holder) == ("paused", ME)
    engine.failing = ""
    await fence.release(ME)
    assert engine.calls == [*PAUSED, "requantize", "requantize", "resume"]
    assert (fence.state, fence.version) == ("serving", 0)


@pytest.mark.parametrize(
    ("pauses", "published", "made"),
    [
        (["adapter"], True, 0),
        (["nothing"], False, 0),
        (["weights", "adapter"], True, 1),
        (["weights"], False, 1),
    ],
)
async def test_fp8_is_requantized_once_if_weights_were_written(
    engine: FakeEngine, pauses: list[Written], published: bool, made: int
) -> None:
    fence = ServerFence(engine, manifest(**QUANTIZED))
    for writes in pauses:
        await fence.pause(asking(ME, "keep", writes=writes))
    await (fence.publish(ME) if published else fence.release(ME))
    assert engine.calls.count("requantize") == made
    await fence.pause(asking(ME, "keep", writes="adapter"))
    await fence.publish(ME)
    assert engine.calls.count("requantize") == made, "no weight was written since"


async def test_failed_requantization_is_not_published() -> None:
    engine = FakeEngine(failing="requantize")
    fence = ServerFence(engine, manifest(**QUANTIZED))
    await fence.pause(asking(ME, "keep"))
    with pytest.raises(RuntimeError, match="requantize"):
        await fence.publish(ME)
    assert (fence.state, fence.version, fence.holder) == ("paused", 0, ME)
    engine.failing = ""
    await fence.publish(ME)
    assert (fence.state, fence.version) == ("serving", 1)


async def test_fp8_is_requantized_if_any_rank_has_it() -> None:
    engine, first = FakeEngine(), manifest()
    second = {**first.shards[0].model_dump(include=set(Shard.model_fields)), **QUANTIZED, "rank": 1}
    fence = ServerFence(engine, manifest(other_shards=(second,)))
    await fence.pause(asking(ME, "keep"))
    await fence.publish(ME)
    assert "requantize" in engine.calls
