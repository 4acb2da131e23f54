"""Who may use a server with Bridge's routes: the API key, and the Host and Origin headers."""

import asyncio
from argparse import Namespace
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from bridge.errors import UsageError
from bridge_patches import admission, routes
from bridge_patches.admission import Rules
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import manifest
from tests.unit.patches.test_routes import AUTHORISED, FakeEngine

KEYS = ["the key", "another key"]
CLOSED = ["/invocations", "/adapters", "/metrics", "/v1/models", "/version", "/health/more", "/ping", "/openapi.json"]


def vllm(**args: Any) -> FastAPI:
    """Return an app with Bridge's routes and some of vLLM's, started with `args`."""
    app = FastAPI()
    app.state.bridge_rules = Rules.of(
        Namespace(**{"api_key": None, "host": "127.0.0.1", "allowed_origins": [], **args}), {}
    )
    for path in {"/health", *CLOSED} - {"/openapi.json"}:
        app.add_api_route(path, lambda: "done", methods=["GET"])

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    routes.BridgeRoutes().attach_router(app)
    app.state.bridge_manifest = manifest()
    app.state.bridge_fence = ServerFence(FakeEngine(), app.state.bridge_manifest)
    return app


def status_of(app: FastAPI, path: str, **headers: str) -> int:
    http = TestClient(app, base_url="http://127.0.0.1:9001")
    return http.get(path, headers=headers).status_code


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("given", [None, "", "the key", "Bearer", "Bearer ", "Bearer the ke", "Bearer the key2", "x"])
def test_configured_key_is_required_on_every_route(path: str, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    assert status_of(vllm(api_key=KEYS), path, **headers) == 401


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("given", ["Bearer the key", "Bearer another key", "bearer the key"])
def test_each_configured_key_is_accepted_on_every_route(path: str, given: str) -> None:
    assert status_of(vllm(api_key=KEYS), path, authorization=given) == 200


def test_health_needs_no_key_and_bridge_routes_need_the_token() -> None:
    app = vllm(api_key=KEYS)
    assert status_of(app, "/health") == 200
    assert status_of(app, "/bridge/status", **AUTHORISED) == 200
    assert status_of(app, "/bridge/status") == 401
    assert status_of(app, "/bridge/status", authorization="Bearer the key") == 401
    assert status_of(app, "/v1/models", **AUTHORISED) == 401


def test_root_path_does_not_change_which_routes_are_open() -> None:
    http = TestClient(vllm(api_key=KEYS), base_url="http://127.0.0.1", root_path="/behind")
    assert [http.get(f"/behind{path}").status_code for path in ("/health", "/version")] == [200, 401]


def test_websocket_requires_the_key() -> None:
    http = TestClient(vllm(api_key=KEYS), base_url="http://127.0.0.1")
    here = {"host": "localhost"}
    with pytest.raises(WebSocketDisconnect), http.websocket_connect("/v1/realtime", headers=here):
        pass
    with http.websocket_connect("/v1/realtime", headers={**here, "authorization": "Bearer the key"}):
        pass


def test_every_route_is_open_without_a_configured_key() -> None:
    assert status_of(vllm(), "/invocations") == 200


@pytest.mark.parametrize(
    ("given", "environment", "opens"),
    [
        (["a"], "b", ["a"]),
        ("a", "b", ["a"]),
        (None, "b", ["b"]),
        ([], "b", ["b"]),
        (["", "a"], None, ["a"]),
        (None, "", []),
        (["schlüssel"], None, ["schlüssel"]),
    ],
)
def test_key_is_read_from_the_same_settings_as_in_vllm(given: Any, environment: str | None, opens: list[str]) -> None:
    variables = {} if environment is None else {"VLLM_API_KEY": environment}
    rules = Rules.of(Namespace(api_key=given, host=None, allowed_origins=None), variables)
    assert rules.key_digests == tuple(admission._digest(key) for key in opens)


HERE = [
    "127.0.0.1",
    "127.0.0.1:9001",
    "localhost",
    "LOCALHOST:1",
    "localhost.",
    "[::1]:9001",
    "127.8.8.8",
    "a.localhost",
]
FOREIGN = [
    "evil.example",
    "evil.example:9001",
    "127.0.0.1.evil.example",
    "evil.example\\@127.0.0.1",
    "localhost.evil",
    "10.0.0.1",
    "[::2]",
    "[",
    "",
]


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_server_on_loopback_accepts_only_loopback_hosts(listens_on: str) -> None:
    app = vllm(host=listens_on)
    assert {host: status_of(app, "/health", host=host) for host in HERE} == dict.fromkeys(HERE, 200)
    assert {host: status_of(app, "/bridge/status", host=host, **AUTHORISED) for host in FOREIGN} == dict.fromkeys(
        FOREIGN, 403
    )


@pytest.mark.parametrize("listens_on", [None, "", "0.0.0.0", "::", "10.0.0.1", "gpu7.example"])
def test_server_on_a_public_address_accepts_any_host(listens_on: str | None) -> None:
    assert status_of(vllm(host=listens_on), "/health", host="gpu7.example:9001") == 200


PAGES = ["https://evil.example", "null", "http://[", "http://localhost.evil", ""]


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("listed", [[], ["https://ui.example"], "https://ui.example", None])
def test_web_page_is_refused_unless_its_origin_is_allowed(listens_on: str, listed: Any) -> None:
    app = vllm(host=listens_on, allowed_origins=listed)
    assert {page: status_of(app, "/version", origin=page) for page in PAGES} == dict.fromkeys(PAGES, 403)
    assert status_of(app, "/version", origin="https://ui.example") == (200 if listed else 403)


@pytest.mark.parametrize("page", [*PAGES, "https://ui.example"])
def test_star_allows_every_origin(page: str) -> None:
    assert status_of(vllm(allowed_origins=["*"]), "/version", origin=page) == 200


@pytest.mark.parametrize("page", ["http://localhost:3000", "http://127.0.0.1:8080"])
def test_web_page_on_this_host_is_accepted(page: str) -> None:
    assert status_of(vllm(), "/version", origin=page) == 200


def test_web_page_of_the_server_itself_is_accepted() -> None:
    app, here = vllm(host="0.0.0.0"), "gpu7.example:9001"
    assert status_of(app, "/version", host=here, origin=f"http://{here}") == 200
    assert status_of(app, "/version", host=here, origin="http://gpu7.example:9002") == 403


def test_refused_request_gets_a_hint() -> None:
    http = TestClient(vllm(), base_url="http://evil.example")
    answer = http.get("/health")
    assert "evil.example" in answer.json()["error"]
    assert "http://127.0.0.1:PORT" in answer.json()["error"]


@pytest.mark.parametrize("value", ["1", "2", "01", "true"])
def test_development_routes_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE"):
        admission.refuse_dev_mode({"VLLM_SERVER_DEV_MODE": value})


@pytest.mark.parametrize("variables", [{}, {"VLLM_SERVER_DEV_MODE": ""}, {"VLLM_SERVER_DEV_MODE": "0"}])
def test_disabled_development_routes_are_not_refused(variables: dict[str, str]) -> None:
    admission.refuse_dev_mode(variables)


@pytest.mark.parametrize("path", ["/invocations", "/health", "/bridge/lease", "/bridge/none"])
def test_body_of_a_refused_request_is_not_read(path: str) -> None:
    reads: list[str] = []
    app = vllm(api_key=KEYS)

    async def receive() -> Any:
        reads.append("body")
        return {"type": "http.request", "body": b"", "more_body": False}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"5")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert (sent[0]["status"], reads) == (401, [])
