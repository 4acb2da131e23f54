"""The routes as clients see them: who may call them, how requests are refused, and the version on every response."""

import asyncio
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bridge.errors import ServerUnreachableError
from bridge.server import fence
from bridge.server import manifest as manifests
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.server.protocol import VERSION_HEADER, Capabilities, Digests, Finiteness, Holder, Refusal, Status, Values
from bridge_patches import exporter, routes
from bridge_patches.server_fence import ServerFence
from tests.fenced import publish
from tests.unit import http_server
from tests.unit.checks_sample import holder_of, manifest
from tests.unit.patches.test_fence_states import listening

ME = Holder.current()
HOLDER = {"holder": ME.model_dump(mode="json")}
AUTHORISED = {"authorization": "Bearer secret"}
ELEMENT = {"parameter": "w", "index": 3}


def after(version: int) -> dict[str, Any]:
    """Return a publication that must follow `version`."""
    return {**HOLDER, "after": version}


class FakeEngine:
    """An engine whose weights are a dict; `num_ranks` ranks give the same answer, followed by the answers `more`."""

    def __init__(self, num_ranks: int = 1, *more: Any) -> None:
        self.engine_core = self
        self.num_ranks, self.more = num_ranks, more
        self.weights = {3: 1.5}
        self.drops = True
        self.awake = True
        self.lacks: str | None = None

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        """Do nothing."""

    async def call_utility_async(self, method: str, version: int) -> None:
        """Do nothing."""

    async def resume_generation(self) -> None:
        """Do nothing."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        return self.drops

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        return [*(getattr(self, method)(*args, **(kwargs or {})) for _ in range(self.num_ranks)), *self.more]

    def update_weights(self, update_info: dict[str, float]) -> None:
        self.weights[3] = update_info["value"]

    def bridge_synchronize(self) -> list[str]:
        return []

    def bridge_sleep(self) -> None:
        self.awake = False

    def bridge_wake(self) -> str | None:
        self.awake = not self.lacks
        return self.lacks

    def bridge_digests(self) -> dict[str, str]:
        return {"w": "00ff"}

    def bridge_finiteness(self) -> tuple[int, list[str]]:
        return 2, [] if all(map(math.isfinite, self.weights.values())) else ["w"]

    def bridge_read(self, elements: list[dict[str, Any]]) -> list[float]:
        return [self.weights[element["index"]] for element in elements]

    def bridge_write(self, elements: list[dict[str, Any]], values: list[float]) -> None:
        self.weights.update({element["index"]: value for element, value in zip(elements, values, strict=True)})


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    routes.BridgeRoutes().attach_router(app)
    app.state.bridge_manifest = manifest()
    app.state.bridge_engine = FakeEngine()
    app.state.bridge_fence = ServerFence(app.state.bridge_engine, app.state.bridge_manifest)

    @app.get("/v1/quick")
    async def quick() -> str:
        return "done"

    @app.get("/v1/updated")
    async def updated() -> str:
        app.state.bridge_fence.version += 1
        return "done"

    return app


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, headers=AUTHORISED) as client:
        yield client


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Bearer secret2", "secret", "Bearer schl\u00fcssel"]
)
@pytest.mark.parametrize(("method", "route"), [("GET", "status"), ("POST", "pause"), ("GET", "tensors/digest")])
def test_requests_without_the_manifests_token_are_refused(
    app: FastAPI, given: str | None, method: str, route: str
) -> None:
    headers = {} if given is None else {b"authorization": given.encode()}
    answer = TestClient(app).request(method, f"/bridge/{route}", headers=headers, json=HOLDER)
    assert answer.status_code == 401
    assert "secret" not in answer.text
    assert app.state.bridge_fence.state == "serving"


def test_every_bridge_route_requires_the_token() -> None:
    assert routes.router.routes
    for route in routes.router.routes:
        calls = [dependency.call for dependency in route.dependant.dependencies]  # type: ignore[attr-defined]
        assert routes._authorize in calls, route


def test_update_over_http(http: TestClient) -> None:
    before = Status.model_validate_json(http.get("/bridge/status").content)
    assert (before.version, before.state, before.holder, before.server) == (0, "serving", None, ME.processes[0])
    paused = Status.model_validate_json(http.post("/bridge/pause", json=HOLDER).content)
    assert (paused.version, paused.state, paused.holder) == (0, "paused", ME)
    published = Status.model_validate_json(http.post("/bridge/publish", json=after(0)).content)
    assert (published.version, published.state, published.holder) == (1, "serving", None)


def test_update_with_a_sleeping_kv_cache_over_http(http: TestClient, app: FastAPI) -> None:
    asking, engine = {**HOLDER, "sleep": True}, app.state.bridge_engine
    assert http.get("/bridge/status").json()["can_sleep"] is False
    refused = http.post("/bridge/pause", json=asking)
    assert (refused.status_code, http.get("/bridge/status").json()["state"]) == (409, "serving")
    app.state.bridge_fence = ServerFence(engine, app.state.bridge_manifest, Capabilities(can_sleep=True))
    paused = http.post("/bridge/pause", json=asking).json()
    assert (paused["state"], paused["can_sleep"], engine.awake) == ("paused", True, False)
    engine.lacks = "too little memory"
    refused = http.post("/bridge/publish", json=after(0))
    assert (refused.status_code, engine.awake) == (409, False)
    assert "too little memory" in Refusal.model_validate_json(refused.content).error
    engine.lacks = None
    assert http.post("/bridge/publish", json=after(0)).json()["version"] == 1
    assert engine.awake


def test_lease_over_http(http: TestClient, app: FastAPI) -> None:
    parent = {"holder": holder_of(os.getppid()).model_dump(mode="json")}
    taken = Status.model_validate_json(http.post("/bridge/lease", json={**HOLDER, "run": "runs/first"}).content)
    assert taken.lease
    assert (taken.lease.holder, taken.lease.run) == (ME, "runs/first")
    for method, route, body in (
        ("POST", "lease", {"run": "runs/second"}),
        ("POST", "pause", {}),
        ("POST", "adapter", {"name": "mine", "path": "/there"}),
        ("DELETE", "adapter", {}),
    ):
        refused = http.request(method, f"/bridge/{route}", json={**parent, **body})
        assert refused.status_code == 409
        refusal = Refusal.model_validate_json(refused.content)
        assert refusal.error == f"another trainer (pid {os.getpid()}, run runs/first) is updating this server"
        assert not refusal.busy
    assert http.post("/bridge/pause", json={**parent, "writes": "nothing"}).json()["holder"] == parent["holder"]
    busy = Refusal.model_validate_json(http.post("/bridge/pause", json=HOLDER).content)
    assert busy.busy
    written = http.post("/bridge/tensors/write", json={**parent, "elements": [ELEMENT], "values": [2.5]})
    assert written.status_code == 409
    assert "paused the server to read" in written.json()["error"]
    assert http.post("/bridge/resume", json=parent).json()["state"] == "serving"
    assert http.request("DELETE", "/bridge/lease", json=HOLDER).json()["lease"] is None


def test_abandoned_pending_pause_leaves_the_server_serving(app: FastAPI) -> None:
    class Busy(FakeEngine):
        paused = False

        async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
            self.paused = True
            await asyncio.sleep(3600 if mode == "wait" else 0)

        async def resume_generation(self) -> None:
            self.paused = False

    engine = Busy()
    app.state.bridge_fence = ServerFence(engine, app.state.bridge_manifest)
    with listening(app) as url, BridgeClient(manifest(url=url), timeout_s=60) as client:
        with (
            BridgeClient(manifest(url=url), timeout_s=1) as hasty,
            pytest.raises(ServerUnreachableError, match="ReadTimeout"),
        ):
            publish(fence.publish(hasty, Update(), in_flight="wait"), lambda: pytest.fail("it wrote"))
        assert publish(fence.publish(client, Update(), served=0)).version == 1
        assert client.status().state == "serving"
    assert not engine.paused


def test_status_has_the_checkpoint_and_version_only_rises(http: TestClient) -> None:
    paused = http.post("/bridge/pause", json={**HOLDER, "last_checkpoint": "/saved/step_6"})
    assert paused.json()["last_checkpoint"] == "/saved/step_6"
    assert http.post("/bridge/publish", json={**after(0), "version": 6}).json()["version"] == 6
    http.post("/bridge/pause", json=HOLDER)
    published = http.post("/bridge/publish", json={**after(6), "version": 6}).json()
    assert (published["version"], published["last_checkpoint"]) == (7, "/saved/step_6")
    assert http.post("/bridge/publish", json={**after(7), "version": -1}).status_code == 422


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_reads_and_digests_come_from_the_first_rank(http: TestClient, app: FastAPI, num_ranks: int) -> None:
    app.state.bridge_engine = FakeEngine(num_ranks)
    values = Values.model_validate_json(http.post("/bridge/tensors/read", json={"elements": [ELEMENT]}).content)
    assert values.values == (1.5,)
    assert Digests.model_validate_json(http.get("/bridge/tensors/digest").content).digests == {"w": "00ff"}


def test_each_rank_answers_for_its_own_part(http: TestClient, app: FastAPI) -> None:
    app.state.bridge_manifest = manifest().model_copy(update={"other_shards": (manifest(),), "tp_degree": 2})
    app.state.bridge_engine = FakeEngine(1, [1.25])
    elements = [{**ELEMENT, "part": 1}, ELEMENT]
    values = Values.model_validate_json(http.post("/bridge/tensors/read", json={"elements": elements}).content)
    assert values.values == (1.25, 1.5)
    answer = http.post("/bridge/tensors/read", json={"elements": [{**ELEMENT, "part": 2}]})
    assert answer.status_code == 422
    assert "2 ranks, and no rank 2" in answer.json()["detail"]
    app.state.bridge_engine = FakeEngine(1, {"w": "00fe"})
    assert http.get("/bridge/tensors/digest?part=1").json() == {"digests": {"w": "00fe"}}
    assert http.get("/bridge/tensors/digest?part=2").status_code == 404


def test_rank_with_a_different_tensor_count_is_named(http: TestClient, app: FastAPI) -> None:
    app.state.bridge_engine = FakeEngine(1, (3, []))
    assert "rank 1 returned 3, expected 2" in http.get("/bridge/tensors/finite").json()["error"]


def test_non_finite_tensor_on_any_rank_is_named_once(http: TestClient, app: FastAPI) -> None:
    app.state.bridge_engine = FakeEngine(1, (2, ["v"]), (2, ["w", "v"]))
    assert http.get("/bridge/tensors/finite").json() == {"num_tensors": 2, "not_finite": ["v", "w"]}


def test_only_the_fence_holder_can_transfer_weights(http: TestClient, app: FastAPI) -> None:
    body = {**HOLDER, "call": "update_weights", "arguments": {"update_info": {"value": 2.5}}}
    assert http.post("/bridge/transfer", json=body).status_code == 409
    http.post("/bridge/pause", json=HOLDER)
    stranger = {"holder": holder_of(1).model_dump(mode="json")}
    assert http.post("/bridge/transfer", json={**body, **stranger}).status_code == 409
    assert http.post("/bridge/transfer", json={**body, "call": "reset_weights"}).status_code == 422
    assert app.state.bridge_engine.weights == {3: 1.5}
    assert http.post("/bridge/transfer", json=body).status_code == 200
    assert app.state.bridge_engine.weights == {3: 2.5}


@pytest.mark.parametrize(
    ("element", "status", "words"),
    [
        ({"parameter": "model.w\x1b[2J", "index": 0}, 404, "is not a parameter of tiny"),
        ({"parameter": "w", "index": 4}, 422, "w has 4 elements, and none at index 4"),
        ({"parameter": "w", "index": 10**30}, 422, "w has 4 elements"),
    ],
)
def test_elements_that_the_model_does_not_have_are_refused(
    http: TestClient, element: dict[str, Any], status: int, words: str
) -> None:
    http.post("/bridge/pause", json=HOLDER)
    elements = {"elements": [ELEMENT, element]}
    for route, body in {"read": elements, "write": {**HOLDER, **elements, "values": [1.0, 2.0]}}.items():
        answer = http.post(f"/bridge/tensors/{route}", json=body)
        assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text
        assert "\x1b" not in answer.text


@pytest.mark.parametrize(
    "values", ["[]", "[1.0, 2.0]", "[NaN]", "[Infinity]", "[1e39]", "[1e999]", '["NaN"]', "[null]", "1.0"]
)
def test_values_that_do_not_fit_are_refused(http: TestClient, app: FastAPI, values: str) -> None:
    http.post("/bridge/pause", json=HOLDER)
    body = json.dumps({**HOLDER, "elements": [ELEMENT]})[:-1] + f', "values": {values}}}'
    answer = http.post("/bridge/tensors/write", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert app.state.bridge_engine.weights == {3: 1.5}


@pytest.mark.parametrize("version", [2**53, 10**30, -1, 1.5])
def test_version_too_large_for_json_readers_is_refused(http: TestClient, version: float) -> None:
    http.post("/bridge/pause", json=HOLDER)
    for body in ({"version": version, "after": 0}, {"after": version}):
        assert http.post("/bridge/publish", json={**HOLDER, **body}).status_code == 422
    assert (
        http.post("/bridge/publish", json={**HOLDER, "after": 0, "version": 2**53 - 1}).json()["version"] == 2**53 - 1
    )


def test_non_finite_weights_are_read_and_named(http: TestClient, app: FastAPI) -> None:
    app.state.bridge_engine = FakeEngine(2)
    assert http.get("/bridge/tensors/finite").json() == {"num_tensors": 2, "not_finite": []}
    app.state.bridge_engine.weights = {3: float("nan"), 2: float("-inf")}
    elements = [ELEMENT, {**ELEMENT, "index": 2}]
    read = Values.model_validate_json(http.post("/bridge/tensors/read", json={"elements": elements}).content)
    assert [str(value) for value in read.values] == ["nan", "-inf"]
    finiteness = Finiteness.model_validate_json(http.get("/bridge/tensors/finite").content)
    assert finiteness.found() == "NaN or infinity in 1 of 2 tensors, the first: w"


@pytest.mark.parametrize(
    "body",
    [
        {"elements": [{**ELEMENT, "index": -1}]},
        {"elements": [{"parameter": "w"}]},
        {"elements": [ELEMENT], "more": 1},
        [],
    ],
)
def test_malformed_request_is_not_a_server_error(http: TestClient, body: Any) -> None:
    assert http.post("/bridge/tensors/read", json=body).status_code == 422


def test_every_response_has_the_version_or_version_range(http: TestClient, app: FastAPI) -> None:
    app.state.bridge_fence.version = 3
    assert http.get("/v1/quick").headers[VERSION_HEADER] == "3"
    assert http.get("/v1/updated").headers[VERSION_HEADER] == "3-4"
    assert http.get("/v1/quick").headers[VERSION_HEADER] == "4"
    assert http.get("/v1/none").headers[VERSION_HEADER] == "4"


def test_responses_have_no_version_until_the_engine_is_ready(app: FastAPI) -> None:
    del app.state.bridge_fence
    answer = TestClient(app).get("/v1/quick")
    assert answer.status_code == 200
    assert VERSION_HEADER not in answer.headers


def write_when_listening(url: str, path: Path) -> None:
    exported = manifest(url=url)
    asyncio.run(asyncio.wait_for(exporter.write_when_listening(exported, path), 20))


def test_manifest_is_written_once_the_server_is_healthy(tmp_path: Path) -> None:
    path = tmp_path / manifests.MANIFEST_NAME
    was_written: list[bool] = []

    def answers(_: http_server.HttpRequest) -> http_server.Answer | None:
        was_written.append(path.exists())
        return [None, http_server.as_json({}, 503), http_server.as_json({})][min(len(was_written) - 1, 2)]

    with http_server.serving(answers) as server:
        write_when_listening(server.url, path)
    assert was_written == [False, False, False]
    assert manifests.load(path).url == server.url


def test_unhealthy_server_is_polled_with_pauses(tmp_path: Path) -> None:
    num_asked = 0

    def answers(_: http_server.HttpRequest) -> http_server.Answer:
        nonlocal num_asked
        num_asked += 1
        return http_server.as_json({}, 503)

    async def watch(url: str) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(exporter.write_when_listening(manifest(url=url), tmp_path / "m"), 0.3)

    with http_server.serving(answers) as server:
        asyncio.run(watch(server.url))
    assert 1 <= num_asked <= 16  # every 20 ms
    assert not (tmp_path / "m").exists()


def test_proxy_in_the_environment_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with http_server.serving(lambda _: http_server.as_json({})) as server:
        write_when_listening(server.url, tmp_path / "m")
    assert (tmp_path / "m").exists()


def test_unwritable_manifest_stops_the_server_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    (tmp_path / "file").write_text("")
    with http_server.serving(lambda _: http_server.as_json({})) as server:
        write_when_listening(server.url, tmp_path / "file" / "m")
    assert raised == [signal.SIGTERM]
    error, empty, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: cannot use the manifest")
    assert (empty, hint[:6]) == ("", "hint: ")


@pytest.mark.parametrize(
    ("sleep_mode", "backend", "num_blocks", "connector", "engine", "expected"),
    [
        (True, "cumem", 8, None, None, Capabilities(can_sleep=True, kv_tokens=128, can_keep_kv=True)),
        (False, "cumem", 8, "connector", "ipc", Capabilities(can_sleep=False, kv_tokens=128, can_keep_kv=False)),
        (True, "cuda_checkpoint", None, None, "nccl", Capabilities(can_receive_weights=True)),
    ],
)
def test_capabilities_come_from_vllms_config(
    sleep_mode: bool,
    backend: str,
    num_blocks: int | None,
    connector: str | None,
    engine: str | None,
    expected: Capabilities,
) -> None:
    cache_config = SimpleNamespace(num_gpu_blocks=num_blocks, block_size=16)
    transfer = None if engine is None else SimpleNamespace(backend=engine)
    client = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleep_mode, sleep_mode_backend=backend),
        vllm_config=SimpleNamespace(
            cache_config=cache_config, kv_transfer_config=connector, weight_transfer_config=transfer
        ),
    )
    assert routes.capabilities(client) == expected
