"""Serving an adapter in its own slot, with fakes of vLLM's engine client and serving models."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bridge.errors import AttachError
from bridge.server.client import BridgeClient
from bridge.server.protocol import AdapterSlot, Holder, Refusal, Status
from bridge_patches import routes
from bridge_patches.adapter_slots import Adapters
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import manifest
from tests.unit.http_server import as_json, serving

pytestmark = pytest.mark.anyio

AUTHORISED = {"authorization": "Bearer secret"}
HOLDER = {"holder": Holder.current().model_dump(mode="json")}


def adapter(name: str, number: int) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number)


class FakeEngine:
    """An engine client that loads adapters into slots, and records its calls in order."""

    def __init__(self, num_slots: int | None = 1) -> None:
        self.vllm_config = SimpleNamespace(
            lora_config=None if num_slots is None else SimpleNamespace(max_loras=num_slots)
        )
        self.output_processor = SimpleNamespace(request_states={})
        self.slots: list[int | None] = [None] * (num_slots or 0)
        self.other_rank: list[int | None] = []
        self.drops = True
        self.order: list[str] = []

    async def add_request(self, request: str, *, lora_request: Any = None) -> str:
        self.order.append(f"request {request}")
        return request

    async def add_lora(self, lora_request: Any) -> bool:
        self.order.append(f"load {lora_request.lora_name}")
        self.slots[self.slots.index(None)] = lora_request.lora_int_id
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.order.append(f"remove {lora_id}")
        self.slots = [None if number == lora_id else number for number in self.slots]
        return True

    async def pin_lora(self, lora_id: int) -> bool:
        self.order.append(f"pin {lora_id}")
        return True

    async def abort(self, request_id: list[str], internal: bool = False) -> None:
        assert internal
        self.order.append(f"abort {' '.join(request_id)}")

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests
        assert reset_connector
        self.order.append("drop caches")
        return self.drops

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[int | None]:
        assert method == "bridge_adapter_slot"
        return [self.slots.index(args[0]), *self.other_rank]


class FakeModels:
    """vLLM's serving models: adapters by name, with a new number per load."""

    def __init__(self, engine: FakeEngine) -> None:
        self.lora_requests: dict[str, Any] = {}
        self._engine = engine
        self._last = 0

    async def load_lora_adapter(self, request: Any) -> Any:
        if request.lora_name == "base" or "bad" in request.lora_path:
            return SimpleNamespace(error=SimpleNamespace(message=f"vLLM cannot take {request.lora_name}"))
        self._last += 1
        loaded = adapter(request.lora_name, self._last)
        try:
            await self._engine.add_lora(loaded)
        except ValueError as error:
            return SimpleNamespace(error=SimpleNamespace(message=str(error)))
        self.lora_requests[request.lora_name] = loaded
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> str:
        del self.lora_requests[request.lora_name]
        return "Success"


@pytest.fixture(autouse=True)
def _request_class(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["vllm", "entrypoints", "serve", "lora", "protocol"]
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["vllm.entrypoints.serve.lora.protocol"]).update(LoadLoRAAdapterRequest=SimpleNamespace)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "adapter_config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def models(engine: FakeEngine) -> FakeModels:
    return FakeModels(engine)


@pytest.fixture
def served(engine: FakeEngine, models: FakeModels) -> Adapters:
    return Adapters(engine, models, ServerFence(engine, manifest()))


async def test_adapter_is_loaded_and_pinned_in_the_reported_slot(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str
) -> None:
    assert await served.serve("mine", folder) == 0
    assert engine.order == ["drop caches", "load mine", "pin 1"]
    assert models.lora_requests.keys() == {"mine"}


@pytest.mark.parametrize("second", ["mine", "other"])
async def test_second_adapter_replaces_the_first(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str, second: str
) -> None:
    await served.serve("mine", folder)
    engine.output_processor.request_states.update(
        ours=SimpleNamespace(lora_request=models.lora_requests["mine"]),
        base=SimpleNamespace(lora_request=None),
        too=SimpleNamespace(lora_request=models.lora_requests["mine"]),
    )
    engine.order.clear()
    assert await served.serve(second, folder) == 0
    assert engine.order == ["abort ours too", "remove 1", "drop caches", f"load {second}", "pin 2"]
    assert models.lora_requests.keys() == {second}
    assert engine.slots == [2]


async def test_released_adapter_frees_its_slot(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str
) -> None:
    await served.release()
    assert engine.order == []
    await served.serve("mine", folder)
    engine.order.clear()
    await served.release()
    await served.release()
    await engine.add_lora(adapter("other", 7))
    assert engine.order == ["remove 1", "drop caches", "load other"], "other may have a name that was served before"
    assert models.lora_requests == {}


async def test_adapter_loaded_at_startup_is_removed(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str
) -> None:
    models.lora_requests["mine"] = adapter("mine", 40)
    engine.slots = [40]
    assert await served.serve("mine", folder) == 0
    assert engine.order == ["remove 40", "drop caches", "load mine", "pin 1"]


async def test_unloaded_adapter_frees_its_slot(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str
) -> None:
    await served.serve("mine", folder)
    del models.lora_requests["mine"]
    assert await served.serve("mine", folder) == 0
    assert engine.slots == [2]


async def test_request_for_a_removed_adapter_is_refused(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str
) -> None:
    await served.serve("mine", folder)
    resolved = models.lora_requests["mine"]
    await served.serve("mine", folder)
    with pytest.raises(ValueError, match="send the request again"):
        await engine.add_request("late", lora_request=resolved)
    assert await engine.add_request("now", lora_request=models.lora_requests["mine"]) == "now"
    assert await engine.add_request("base") == "base"
    assert engine.order[-2:] == ["request now", "request base"]


async def test_trained_adapter_cannot_be_replaced(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str
) -> None:
    await served.serve("mine", folder)
    over, beside = [
        await models.load_lora_adapter(SimpleNamespace(lora_name=name, lora_path=folder)) for name in ("mine", "other")
    ]
    assert "trained in place: it cannot be overwritten" in over.error.message
    assert "--max-loras 2" in beside.error.message
    assert engine.slots == [1]
    assert models.lora_requests.keys() == {"mine"}


async def test_spare_slots_serve_other_adapters(folder: str) -> None:
    engine = FakeEngine(num_slots=2)
    models = FakeModels(engine)
    served = Adapters(engine, models, ServerFence(engine, manifest()))
    await served.serve("mine", folder)
    fits, too_many = [
        await models.load_lora_adapter(SimpleNamespace(lora_name=name, lora_path=folder)) for name in ("other", "third")
    ]
    assert fits == "Success"
    assert "--max-loras 3" in too_many.error.message
    assert engine.slots == [1, 2]


async def test_adapter_is_refused_if_too_few_slots_remain(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str
) -> None:
    models.lora_requests["other"] = adapter("other", 40)
    with pytest.raises(AttachError, match="1 LoRA slots for 2 adapters") as caught:
        await served.serve("mine", folder)
    assert "--max-loras 2" in caught.value.hint
    assert engine.order == []


@pytest.mark.parametrize(
    ("name", "subfolder", "words"),
    [
        ("base", "", "vLLM cannot take base"),
        ("mine", "bad", "vLLM cannot take mine"),
        ("mine", "empty", r"no adapter_config\.json in"),
    ],
)
async def test_refused_load_keeps_vllms_message_and_frees_slot(
    served: Adapters, engine: FakeEngine, folder: str, name: str, subfolder: str, words: str
) -> None:
    (Path(folder) / "bad").mkdir()
    (Path(folder) / "bad" / "adapter_config.json").write_text("{}")

    with pytest.raises(AttachError, match=words):
        await served.serve(name, str(Path(folder) / subfolder))
    assert await served.serve("mine", folder) == 0
    assert len([step for step in engine.order if step.startswith("pin")]) == 1


async def test_missing_adapter_keeps_the_previous_one(
    served: Adapters, engine: FakeEngine, models: FakeModels, folder: str
) -> None:
    await served.serve("mine", folder)
    with pytest.raises(AttachError, match=r"no adapter_config\.json"):
        await served.serve("mine", f"{folder}/elsewhere")
    assert engine.slots == [1]
    assert models.lora_requests.keys() == {"mine"}


async def test_failed_cache_reset_loads_no_adapter(served: Adapters, engine: FakeEngine, folder: str) -> None:
    engine.drops = False
    with pytest.raises(AttachError, match="prefix cache"):
        await served.serve("mine", folder)
    assert engine.order == ["drop caches"]


@pytest.mark.parametrize("other_rank", [None, 1])
async def test_ranks_must_agree_on_the_slot(
    served: Adapters, engine: FakeEngine, folder: str, other_rank: int | None
) -> None:
    engine.other_rank = [other_rank]
    with pytest.raises(AttachError, match=r"rank 1 returned (None|1), expected 0"):
        await served.serve("mine", folder)


class Open:
    """A server with open slots, whose requests begin and end when a test says so."""

    def __init__(self, folder: str, num_slots: int) -> None:
        self.folder = folder
        self.engine = FakeEngine(num_slots)
        self.models = FakeModels(self.engine)
        self.adapters = Adapters(self.engine, self.models, ServerFence(self.engine, manifest()))

    async def open(self) -> None:
        assert await self.adapters.open_slots(self.folder) == [*range(len(self.engine.slots))]
        assert not self.models.lora_requests

    async def serve(self, name: str) -> int:
        slot = await self.adapters.reserve(name)
        assert name not in self.models.lora_requests
        self.adapters.serve_reserved(name)
        return slot

    async def begin(self, name: str) -> None:
        """Let a request of an adapter begin."""
        adapter = self.models.lora_requests[name]
        await self.engine.add_request(name, lora_request=adapter)
        self.engine.output_processor.request_states[name] = SimpleNamespace(lora_request=adapter)

    def end(self, name: str) -> None:
        del self.engine.output_processor.request_states[name]


async def waits(task: "asyncio.Task[int]") -> bool:
    await asyncio.sleep(0.05)
    return not task.done()


def test_slot_that_was_reserved_longest_ago_is_reused(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 2)
        await server.open()
        first, second = await server.serve("a"), await server.serve("b")
        assert {first, second} == {0, 1}
        assert await server.serve("c") == first
        assert [*server.models.lora_requests] == ["b", "c"]
        await server.models.unload_lora_adapter(SimpleNamespace(lora_name="c"))
        assert await server.serve("d") == first
        assert [*server.models.lora_requests] == ["b", "d"]
        numbers = {adapter.lora_int_id for adapter in server.models.lora_requests.values()}
        assert numbers == {1, 2}, "vLLM keeps the adapters that it has loaded"

    asyncio.run(scenario())


def test_slot_with_requests_in_flight_is_not_reserved(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 2)
        await server.open()
        slots = {name: await server.serve(name) for name in ("a", "b")}
        await server.begin("a")
        assert await server.serve("c") == slots["b"]
        await server.begin("c")
        waiting = asyncio.ensure_future(server.serve("d"))
        after = asyncio.ensure_future(server.serve("e"))
        assert await waits(waiting)
        assert [*server.models.lora_requests] == ["c"], "a, the oldest, accepts no new requests"
        server.end("c")
        assert await waiting == slots["b"], "the first slot without requests"
        assert await waits(after) is False
        assert await after == slots["b"]
        server.end("a")
        assert await server.serve("f") == slots["a"]

    asyncio.run(scenario())


def test_request_that_the_engine_is_receiving_keeps_its_slot(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 1)
        may_enter = asyncio.Event()

        async def slowly(request: str, *, lora_request: Any = None) -> str:
            await may_enter.wait()
            server.engine.output_processor.request_states[request] = SimpleNamespace(lora_request=lora_request)
            return request

        server.engine.add_request = slowly  # type: ignore[method-assign]
        await server.open()
        await server.serve("a")
        entering = asyncio.ensure_future(
            server.engine.add_request("one", lora_request=server.models.lora_requests["a"])
        )
        waiting = asyncio.ensure_future(server.serve("b"))
        assert await waits(waiting)
        may_enter.set()
        await entering
        assert await waits(waiting)
        server.end("one")
        assert await waiting == 0

    asyncio.run(scenario())


def test_client_that_has_left_reserves_no_slot(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 1)
        left = asyncio.Event()

        async def has_left() -> bool:
            return left.is_set()

        await server.open()
        await server.serve("a")
        await server.begin("a")
        waiting = asyncio.ensure_future(server.adapters.reserve("b", has_left))
        assert await waits(waiting)
        left.set()
        with pytest.raises(AttachError, match="the client that waited for a LoRA slot for b has left"):
            await waiting
        server.end("a")
        assert await server.serve("c") == 0

    asyncio.run(scenario())


def test_slot_that_the_trainer_keeps_is_not_reserved(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 2)
        await server.open()
        first, second = await server.serve("a"), await server.serve("b")
        await server.begin("b")
        waiting = asyncio.ensure_future(server.adapters.reserve("c", keep=("a",)))
        assert await waits(waiting)
        assert [*server.models.lora_requests] == ["a"], "b accepts no new requests"
        server.end("b")
        assert await waiting == second
        assert await server.adapters.reserve("d") == first

    asyncio.run(scenario())


def test_request_of_replaced_contents_is_refused(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 1)
        await server.open()
        await server.serve("a")
        resolved = server.models.lora_requests["a"]
        await server.adapters.reserve("b")
        for name in ("being written", "written"):
            with pytest.raises(ValueError, match="the adapter a was removed or replaced"):
                await server.engine.add_request(name, lora_request=resolved)
            server.adapters.serve_reserved("b")
        await server.begin("b")

    asyncio.run(scenario())


def test_repeated_calls_for_a_slot_have_no_effect(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 2)
        await server.open()
        assert await server.adapters.reserve("a") == await server.adapters.reserve("a")
        for _ in range(2):
            server.adapters.serve_reserved("a")
        assert [*server.models.lora_requests] == ["a"]
        with pytest.raises(AttachError, match="another adapter is served as a"):
            await server.adapters.reserve("a")

    asyncio.run(scenario())


def test_slot_that_cannot_be_reserved_is_refused(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 1)
        with pytest.raises(AttachError, match="the server has 0 open LoRA slots"):
            await server.adapters.reserve("a")
        with pytest.raises(AttachError, match="no LoRA slot is reserved for a"):
            server.adapters.serve_reserved("a")
        await server.open()
        await server.adapters.reserve("a")
        with pytest.raises(AttachError, match="the server has 1 open LoRA slots, and all of them are being written"):
            await server.adapters.reserve("b")
        await server.models.unload_lora_adapter(SimpleNamespace(lora_name="a"))
        await server.serve("b")
        server.models.lora_requests["c"] = adapter("c", 40)
        await server.adapters.reserve("c")
        with pytest.raises(AttachError, match="another adapter is served as c"):
            server.adapters.serve_reserved("c")

    asyncio.run(scenario())


def test_open_slots_leave_other_adapters_alone(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 3)
        await server.models.load_lora_adapter(SimpleNamespace(lora_name="theirs", lora_path=folder))
        assert await server.adapters.open_slots(folder) == [1, 2]
        refused = await server.models.load_lora_adapter(SimpleNamespace(lora_name="more", lora_path=folder))
        assert "2 adapters are trained in place, and 4 adapters need --max-loras 4" in refused.error.message
        for name in ("a", "b", "c"):
            await server.serve(name)
        assert [*server.models.lora_requests] == ["theirs", "b", "c"]
        await server.adapters.release()
        assert [*server.models.lora_requests] == ["theirs"]
        assert server.engine.slots == [1, None, None]

    asyncio.run(scenario())


def test_open_slots_need_a_free_one(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 1)
        server.models.lora_requests["theirs"] = adapter("theirs", 40)
        with pytest.raises(AttachError, match="all 1 LoRA slots of the server hold other adapters: theirs"):
            await server.adapters.open_slots(folder)

    asyncio.run(scenario())


def test_open_slots_after_a_failed_load_can_be_opened_again(folder: str) -> None:
    async def scenario() -> None:
        server = Open(folder, 2)
        pin = server.engine.pin_lora

        async def refuse_the_second(lora_id: int) -> bool:
            if lora_id == 2:
                raise RuntimeError("no memory")
            return await pin(lora_id)

        server.engine.pin_lora = refuse_the_second  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no memory"):
            await server.adapters.open_slots(folder)
        assert server.engine.slots == [None, None]
        assert not server.models.lora_requests
        await server.open()

    asyncio.run(scenario())


@pytest.fixture
def http(engine: FakeEngine, models: FakeModels) -> Iterator[TestClient]:
    app = FastAPI()
    routes.BridgeRoutes().attach_router(app)
    app.state.bridge_manifest = manifest()
    app.state.bridge_fence = ServerFence(engine, manifest())
    app.state.bridge_adapters = Adapters(engine, models, app.state.bridge_fence)
    with TestClient(app, headers=AUTHORISED) as client:
        yield client


def test_http_response_contains_the_slot(http: TestClient, folder: str) -> None:
    answer = http.post("/bridge/adapter", json={**HOLDER, "name": "mine", "path": folder})
    assert AdapterSlot.model_validate_json(answer.content) == AdapterSlot(slot=0)


def test_http_release_stops_serving_the_adapter(http: TestClient, models: FakeModels, folder: str) -> None:
    http.post("/bridge/adapter", json={**HOLDER, "name": "mine", "path": folder})
    answer = http.request("DELETE", "/bridge/adapter", json=HOLDER)
    assert Status.model_validate_json(answer.content).state == "serving"
    assert models.lora_requests == {}
    assert http.app.state.bridge_adapters.expected() is None  # type: ignore[attr-defined]


def test_http_server_without_lora_refuses_with_the_flag(http: TestClient, folder: str) -> None:
    http.app.state.bridge_adapters = Adapters(FakeEngine(None), FakeModels(FakeEngine()), ServerFence(None, manifest()))  # type: ignore[attr-defined]
    answer = http.post("/bridge/adapter", json={**HOLDER, "name": "mine", "path": folder})
    assert answer.status_code == 409
    refusal = Refusal.model_validate_json(answer.content)
    assert "started without LoRA" in refusal.error
    assert "bridge serve-vllm --max-lora-rank 16" in refusal.hint


@pytest.mark.parametrize("body", [{"name": "", "path": "/a"}, {"name": "a", "path": "here"}, {"name": "a"}])
def test_http_invalid_request_is_refused(http: TestClient, body: dict[str, str]) -> None:
    assert http.post("/bridge/adapter", json={**HOLDER, **body}).status_code == 422


def test_client_sends_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        serving(lambda _: as_json({"slot": 3})) as server,
        BridgeClient(manifest(url=server.url), timeout_s=20) as client,
    ):
        assert client.adapter("mine", Path("folder")) == 3
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/bridge/adapter")
    assert request.body == {**HOLDER, "client": "", "name": "mine", "path": f"{tmp_path}/folder"}
