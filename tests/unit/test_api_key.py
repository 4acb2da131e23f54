"""Every client of ours sends the server's key, and says what to do where it is not the right one."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bridge.atropos import asked, registration
from bridge.errors import UsageError
from bridge.modes import handover
from bridge.server import api_key
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from cli.watchdog import Address
from tests.unit.checks_sample import manifest
from tests.unit.http_server import Answer, Asked, HttpServer, as_json, locked, serving
from tests.unit.openai_server import openai
from tests.unit.test_rollouts import sampled

KEY = "the key"
ROOT = Path(__file__).parents[2]
NO_KEY_NEEDED = {
    "bridge/server/client.py": "the manifest's token",
    "bridge/checks/server.py": "the manifest's token, and /health",
    "bridge/atropos/client.py": "an Atropos API, which must not see the key",
    "patches/exporter.py": "/health",
}

OPENING = {"httpx.Client", "httpx.AsyncClient", "httpx.get", "httpx.post", "httpx.request", "httpx.stream"}


@pytest.fixture
def server() -> Iterator[HttpServer]:
    def answers(one: Asked) -> Answer | None:
        return openai()(one) if one.path in {"/v1/completions", "/v1/models"} else as_json({})

    with serving(locked(answers, KEY)) as server:
        yield server


def adapters(url: str) -> None:
    with handover.opened(url, 20, "token") as http:
        handover.unload_earlier(http)
        handover.unload(http, "an adapter")


CLIENTS: dict[str, Callable[[str], object]] = {
    "rollouts": lambda url: sampled(Endpoint(url=url)),
    "endpoints": asked.endpoints,
    "adapters": adapters,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_each_client_sends_the_key(server: HttpServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    CLIENTS[name](server.url)
    assert server.asked


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("key", ["", "another"])
def test_without_the_right_one_it_says_what_to_do(
    server: HttpServer, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(api_key.VARIABLE, key)
    with pytest.raises(UsageError) as refusal:
        CLIENTS[name](server.url)
    assert refusal.value.message.startswith(f"the server at {server.url} rejected the request with status 401")
    assert refusal.value.remedy == "export VLLM_API_KEY=KEY, the key that the server was started with"


def test_a_server_that_is_watched_by_another_route_than_health_is_sent_it(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = urlsplit(server.url)
    watched = Address(str(address.hostname), int(address.port or 0), "/v1/models")
    assert watched.health(limit_s=20) == "unwell"
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    assert watched.health(limit_s=20) == "well"


def test_the_longest_sequence_is_asked_for_with_the_key(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    registration.longest_sequence(server.url, 1024)
    assert server.asked[-1].headers["authorization"] == f"Bearer {KEY}"


def test_the_fence_is_asked_by_the_manifests_token_alone(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    with BridgeClient(manifest(url=server.url), timeout_s=20) as client, pytest.raises(Exception, match="no Status"):
        client.status()
    assert server.asked[-1].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("key", ["k-e-y\n", " k-e-y", "k-\ne-y", "schlüssel", "k-e-y\t"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="VLLM_API_KEY") as refusal:
        api_key.headers({api_key.VARIABLE: key})
    assert key.strip() not in str(refusal.value)


def test_without_a_key_there_is_no_header() -> None:
    assert api_key.headers({}) == api_key.headers({api_key.VARIABLE: ""}) == {}


def test_no_client_is_opened_without_thinking_of_the_key() -> None:
    found = {}
    for file in (path for part in ("bridge", "cli", "patches") for path in (ROOT / part).rglob("*.py")):
        opened = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        if any(ast.unparse(node.func) in OPENING for node in opened) and "api_key" not in file.read_text():
            found[str(file.relative_to(ROOT))] = True
    assert found.keys() == NO_KEY_NEEDED.keys()
