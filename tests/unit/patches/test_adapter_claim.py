"""While a trainer holds the lease, nobody else can load or unload its adapters."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bridge.server.protocol import ADAPTER, TOKEN_HEADER, Holder
from bridge_patches import routes
from bridge_patches.adapter_slots import Adapters
from bridge_patches.admission import Rules
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import dead_holder, manifest
from tests.unit.patches.test_generate import FakeModels

TRAINERS = [{TOKEN_HEADER: "secret"}, {"authorization": "Bearer secret"}]
STRANGERS = [{}, {TOKEN_HEADER: "guessed"}, {"authorization": "Bearer the key"}, {TOKEN_HEADER: ""}]


@pytest.fixture
def fence() -> ServerFence:
    return ServerFence(None, manifest())


@pytest.fixture
def models() -> FakeModels:
    return FakeModels()


@pytest.fixture
def http(fence: ServerFence, models: FakeModels) -> TestClient:
    app = FastAPI()
    routes.BridgeRoutes().attach_router(app)
    app.state.bridge_rules = Rules.of(Namespace(api_key=None, host=None, allowed_origins=[]), {})
    app.state.bridge_manifest, app.state.bridge_adapters = manifest(), Adapters(None, models, fence)

    @app.post("/{action}/{name}")
    async def act(action: str, name: str) -> str:
        method = models.load_lora_adapter if action == "load" else models.unload_lora_adapter
        return await method(SimpleNamespace(lora_name=name))

    return TestClient(app)


@pytest.mark.parametrize("name", [ADAPTER, f"{ADAPTER}-3"])
@pytest.mark.parametrize("headers", STRANGERS)
def test_other_clients_cannot_change_a_live_runs_adapters(
    http: TestClient, models: FakeModels, fence: ServerFence, name: str, headers: dict[str, str]
) -> None:
    models.lora_requests = {name: "trained"}
    fence.take_lease(Holder.current(), "runs/a")
    for action in ("load", "unload"):
        answer = http.post(f"/{action}/{name}", headers=headers)
        assert answer.status_code == 409
        assert "run runs/a) is training" in answer.json()["detail"]
    assert models.lora_requests == {name: "trained"}


@pytest.mark.parametrize("headers", TRAINERS)
def test_trainer_can_change_its_own_adapters(
    http: TestClient, models: FakeModels, fence: ServerFence, headers: dict[str, str]
) -> None:
    fence.take_lease(Holder.current(), "runs/a")
    assert http.post(f"/load/{ADAPTER}", headers=headers).status_code == 200
    assert http.post(f"/unload/{ADAPTER}", headers=headers).status_code == 200
    assert models.lora_requests == {}


def test_other_adapters_can_be_changed_by_anyone(http: TestClient, fence: ServerFence) -> None:
    fence.take_lease(Holder.current(), "runs/a")
    assert http.post("/load/mine").status_code == http.post("/unload/mine").status_code == 200


@pytest.mark.parametrize("ended", [False, True])
def test_adapters_of_a_dead_run_can_be_changed_by_anyone(http: TestClient, fence: ServerFence, ended: bool) -> None:
    if ended:
        fence.take_lease(Holder.current(), "runs/a")
        fence._lease = fence._lease and fence._lease.model_copy(update={"holder": dead_holder()})
    assert http.post(f"/load/{ADAPTER}").status_code == http.post(f"/unload/{ADAPTER}").status_code == 200
