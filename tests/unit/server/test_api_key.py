"""A server that requires a key: every client sends it, in every mode, and says how to fix a wrong one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bridge.atropos import atropos_stream, feeder
from bridge.checks import server as checks
from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.modes import WAYS
from bridge.modes.mode import RunContext
from bridge.processes.server_process import health
from bridge.server import api_key
from bridge.server.client import BridgeClient, VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update
from tests.fenced import publish
from tests.unit.checks_sample import manifest
from tests.unit.http_server import Answer, HttpRequest, HttpServer, as_json, locked, serving
from tests.unit.modes.lora_runs import RANK, World, world_in
from tests.unit.openai_server import openai
from tests.unit.rollouts.test_sampler import sampled

KEY = "the key"


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with serving(locked(answers, KEY)) as server:
        yield server


def answers(one: HttpRequest) -> Answer | None:
    return openai()(one) if one.path in {"/v1/completions", "/v1/models"} else as_json({})


def adapters(url: str) -> None:
    with VllmClient(url, token="token") as client:
        client.unload_earlier_adapters()
        client.unload_adapter("an adapter")


CLIENTS: dict[str, Callable[[str], object]] = {
    "rollouts": lambda url: sampled(Endpoint(url=url)),
    "endpoints": lambda url: feeder.endpoints([url]),
    "adapters": adapters,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_each_client_sends_the_key(server: HttpServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    CLIENTS[name](server.url)
    assert server.requests


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("key", ["", "another"])
def test_wrong_key_error_says_what_to_do(
    server: HttpServer, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(api_key.VARIABLE, key)
    with pytest.raises(UsageError) as refusal:
        CLIENTS[name](server.url)
    assert refusal.value.message.startswith(f"the server at {server.url} rejected the request with status 401")
    assert refusal.value.hint == "export VLLM_API_KEY=KEY, the key that the server was started with"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A patched server that accepts adapters, samples and requires a key."""
    with world_in(tmp_path, monkeypatch) as world:

        def answers(one: HttpRequest) -> Answer | None:
            return openai()(one) if one.path == "/v1/completions" else world.server(one)

        with serving(locked(answers, KEY)) as world.http:
            world.export()
            yield world


class Restarted:
    """A server process whose restart does nothing."""

    def restart(self, model: str | Path) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "way",
    [way for way in WAYS if way != ("none", "transfer")],  # tests/unit/modes/test_transfer.py
    ids=lambda way: " ".join(way).strip(),
)
def test_every_mode_trains_behind_a_key(world: World, way: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    mode, choice = way
    choices: dict[str, Any] = {"model_name": world.server.toy.manifest.model, "mode": mode, "vllm_port": world.port}
    more: dict[str, dict[str, Any]] = {"lora_only": {"lora_handover": choice, "lora_r": RANK}}
    choices |= more.get(mode, {}) | ({"reload": choice} if mode == "none" else {})
    context = RunContext(name="runs/ours", scratch=world.scratch, process=Restarted())
    opened = WAYS[way](TrainConfig.of(**choices), context)
    try:
        opened.open()
        sampled(opened.endpoint)
        version = opened.version
        assert publish(opened.publish(Update())).version == opened.version == version + 1
        sampled(opened.endpoint)
    finally:
        opened.close()
    for one in world.http.requests:
        given, token = one.headers.get("authorization"), one.headers.get("x-bridge-token")
        if one.path.startswith("/bridge/"):
            assert (given, token) == ("Bearer secret", None), one
        else:
            names_the_holder = one.path.endswith("lora_adapter")
            assert (given, token or names_the_holder) == (f"Bearer {KEY}", "secret" if token else names_the_holder), one


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_adapter_is_not_published_without_the_key(world: World, handover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(api_key.VARIABLE, raising=False)
    mode = world.made(handover)
    with pytest.raises(UsageError, match="rejected the request with status 401"):
        mode.open()
    mode.close()


def test_health_check_on_another_route_sends_the_key(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = urlsplit(server.url)
    watched = str(address.hostname), int(address.port or 0), "/v1/models"
    assert health(*watched, limit_s=20) == "unwell"
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    assert health(*watched, limit_s=20) == "well"


def test_max_model_len_request_sends_the_key(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_model_len(server.url) is None
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    atropos_stream.longest_sequence(server.url, 1024)
    assert server.requests[-1].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("name", CLIENTS)
def test_url_credentials_are_sent_to_the_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    with serving(answers) as server:
        CLIENTS[name](server.url.replace("http://", "http://user:pass@"))
        assert {one.headers["authorization"] for one in server.requests} == {"Basic dXNlcjpwYXNz"}


def test_fence_requests_carry_only_the_manifests_token(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    with BridgeClient(manifest(url=server.url), timeout_s=20) as client, pytest.raises(Exception, match="valid Status"):
        client.status()
    assert server.requests[-1].headers["authorization"] == "Bearer secret"


def test_doctor_sends_both_key_and_token(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    checks.answers(manifest(url=server.url))
    given = {one.path: one.headers["authorization"] for one in server.requests}
    assert given == {"/health": f"Bearer {KEY}", "/bridge/status": "Bearer secret"}
    monkeypatch.setenv(api_key.VARIABLE, "broken\n")
    (check,) = checks.answers(manifest(url=server.url))
    assert (check.status, api_key.VARIABLE in check.found) == ("FAIL", True)


@pytest.mark.parametrize("key", ["k-e-y\n", " k-e-y", "k-\ne-y", "schlüssel", "k-e-y\t"])
def test_key_that_cannot_be_sent_in_a_header_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="VLLM_API_KEY") as refusal:
        api_key.headers({api_key.VARIABLE: key})
    assert key.strip() not in str(refusal.value)


def test_no_header_is_sent_without_a_key() -> None:
    assert api_key.headers({}) == api_key.headers({api_key.VARIABLE: ""}) == {}
