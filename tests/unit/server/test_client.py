"""The control connection: what it sends, and one clear error for every way in which a server can fail."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError, BridgeError, FenceBusyError, ServerUnreachableError, UsageError
from bridge.server import client as client_module
from bridge.server.client import BridgeClient, VllmClient, max_model_len
from bridge.server.protocol import Element, Holder, Status
from bridge.server.receiver import PatchedReceiver
from tests.unit.checks_sample import manifest
from tests.unit.http_server import Answer, Answers, HttpRequest, as_json, serving

ME = Holder.current()
LATE_S = 0.5
STATUS = Status(model="m", version=7, state="paused", holder=ME, server=ProcessIdentity.current()).model_dump()
ELEMENTS = (Element(parameter="w", index=3),)
CALLS: dict[str, Callable[[BridgeClient], object]] = {
    "status": lambda client: client.status(),
    "pause": lambda client: client.pause("keep"),
    "publish": lambda client: client.publish(),
    "resume": lambda client: client.resume(),
    "digests": lambda client: client.digests(),
    "read": lambda client: client.read(ELEMENTS),
    "write": lambda client: client.write(ELEMENTS, (1.0,)),
}


def good(request: HttpRequest) -> Answer:
    return as_json(
        {"/bridge/tensors/digest": {"digests": {"w": "0f"}}, "/bridge/tensors/read": {"values": [1.5]}}.get(
            request.path, STATUS
        )
    )


def error_of(answers: Answers, call: str) -> BridgeError:
    with serving(answers) as server, BridgeClient(manifest(url=server.url), timeout_s=20) as client:
        with pytest.raises(BridgeError) as caught:
            CALLS[call](client)
        assert server.url in caught.value.message or isinstance(caught.value, AttachError)
        return caught.value


def test_each_call_sends_its_route_token_and_holder() -> None:
    with serving(good) as server, BridgeClient(manifest(url=server.url), timeout_s=20) as client:
        answers = [CALLS[name](client) for name in CALLS]
    assert [f"{request.method} {request.path}" for request in server.requests] == [
        "GET /bridge/status", "POST /bridge/pause", "POST /bridge/publish", "POST /bridge/resume",
        "GET /bridge/tensors/digest", "POST /bridge/tensors/read", "POST /bridge/tensors/write",
    ]  # fmt: skip
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}
    holder, element = ME.model_dump(mode="json"), {"parameter": "w", "index": 3, "part": 0}
    own = {"holder": holder, "client": client._name}
    pause = {
        **own, "version": None, "in_flight": "keep", "last_checkpoint": None, "writes": "weights",
        "takeover": False, "sleep": False, "keep_kv": False,
    }  # fmt: skip
    publish = {"holder": holder, "client": "", "after": 7, "version": None}
    assert [request.body for request in server.requests] == [
        None, pause, publish, own,
        None, {"elements": [element]}, {"holder": holder, "client": "", "elements": [element], "values": [1.0]},
    ]  # fmt: skip
    assert answers == [Status.model_validate(STATUS)] * 4 + [{"w": "0f"}, (1.5,), None]


def test_receiver_sends_the_version_it_published() -> None:
    versions = iter([7, 7, 7, 8, 8, 8])  # lease, pause, transfer, publish, pause, resume

    def receiving(_: HttpRequest) -> Answer:
        return as_json({**STATUS, "state": "serving", "version": next(versions, 8), "can_receive_weights": True})

    with serving(receiving) as server:
        exported = manifest(url=server.url)
        receiver = PatchedReceiver(exported, "run", timeout_s=20)
        assert receiver.check(exported.model, exported.versions["vllm"]) == exported.tp_degree
        receiver.pause("keep")
        receiver.transfer("start_weight_update", {})
        receiver.publish(8)
        receiver.pause("abort")
        receiver.resume()
        receiver.check_served()
        receiver.close()
    assert [f"{request.method} {request.path}" for request in server.requests] == [
        "POST /bridge/lease", "POST /bridge/pause", "POST /bridge/transfer", "POST /bridge/publish",
        "POST /bridge/pause", "POST /bridge/resume", "GET /bridge/status", "DELETE /bridge/lease",
    ]  # fmt: skip
    bodies = [request.body for request in server.requests]
    assert [(body["in_flight"], body["version"]) for body in bodies if body and "in_flight" in body] == [
        ("keep", 7), ("abort", 8)
    ]  # fmt: skip
    assert (bodies[2]["call"], bodies[2]["arguments"]) == ("start_weight_update", {})
    assert (bodies[3]["version"], bodies[3]["after"]) == (8, 7)


def test_pause_sends_its_choices_and_an_absolute_path() -> None:
    with serving(good) as server, BridgeClient(manifest(url=server.url), timeout_s=20) as client:
        client.pause("keep", last_checkpoint=Path("saved/step_3"), takeover=True, sleep=True)
        client.publish(3)
    pause, publish = (request.body for request in server.requests)
    assert (pause["takeover"], pause["sleep"]) == (True, True)
    assert pause["last_checkpoint"] == str(Path.cwd() / "saved" / "step_3")
    assert publish["version"] == 3


def test_client_accepts_a_different_url() -> None:
    with serving(good) as server, BridgeClient(manifest(), timeout_s=20, url=server.url) as client:
        assert client.status().version == 7


@pytest.mark.parametrize("call", CALLS)
def test_server_that_exited_is_unreachable(call: str) -> None:
    with serving(good) as server:
        url = server.url
    with BridgeClient(manifest(url=url), timeout_s=20) as client, pytest.raises(ServerUnreachableError, match=url):
        CALLS[call](client)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "answers",
    [
        lambda _: None,
        lambda _: Answer("Internal Server Error", 500),
        lambda _: as_json({"detail": "wrong token"}, 401),
        lambda _: Answer("<html>", 200),
        lambda _: Answer("", 200),
        lambda _: as_json({"more": 1}),
        lambda _: as_json([]),
        lambda _: Answer("<html>", 409),
        lambda _: as_json({"error": "no hint"}, 409),
        lambda _: as_json(["nonsense"], 409),
        lambda _: Answer("not gzip", 200, {"content-encoding": "gzip"}),
    ],
    ids=[
        "dropped", "500", "401", "HTML", "empty", "unknown fields", "list",
        "409 with HTML", "409 without a hint", "409 with a list", "invalid gzip",
    ],
)  # fmt: skip
def test_foreign_response_means_unreachable(call: str, answers: Answers) -> None:
    error = error_of(answers, call)
    assert type(error) is ServerUnreachableError
    assert error.exit_code == 5


@pytest.mark.parametrize(("busy", "kind"), [({}, AttachError), ({"busy": True}, FenceBusyError)])
def test_refusal_keeps_the_servers_message(busy: dict[str, bool], kind: type[AttachError]) -> None:
    error = error_of(lambda _: as_json({"error": "torn", "hint": "restart it", **busy}, 409), "pause")
    assert type(error) is kind
    assert (error.message, error.hint, error.exit_code) == ("torn", "restart it", 4)


def test_servers_error_is_quoted() -> None:
    assert "engine is dead" in error_of(lambda _: Answer("engine is dead", 500), "status").message


@contextmanager
def answering_late() -> Iterator[str]:
    """Run a server that answers after the time limit of a short call."""
    is_over = threading.Event()

    def late(request: HttpRequest) -> Answer:
        is_over.wait(LATE_S)
        return good(request)

    with serving(late) as server:
        yield server.url
        is_over.set()


@pytest.mark.parametrize("call", [*CALLS, "draining pause"])
def test_only_long_calls_use_the_full_timeout(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(client_module, "CONTROL_LIMIT_S", LATE_S / 3)
    with answering_late() as url, BridgeClient(manifest(url=url), timeout_s=20) as client:
        if call == "draining pause":
            assert client.pause("wait").version == 7
        elif call in {"digests", "read", "write"}:
            CALLS[call](client)
        else:
            with pytest.raises(ServerUnreachableError, match="ReadTimeout"):
                CALLS[call](client)


def test_no_call_outlasts_its_timeout() -> None:
    with answering_late() as url, BridgeClient(manifest(url=url), timeout_s=LATE_S / 3) as client:
        for call in CALLS.values():
            with pytest.raises(ServerUnreachableError, match="ReadTimeout"):
                call(client)


@pytest.mark.parametrize("call", CALLS)
def test_call_is_retried_if_its_response_is_lost(call: str) -> None:
    lost = []

    def answers(request: HttpRequest) -> Answer | None:
        lost.append(request.body)
        return good(request) if len(lost) > 1 else None

    with serving(answers) as server, BridgeClient(manifest(url=server.url), timeout_s=20) as client:
        CALLS[call](client)
    assert lost[0] == lost[1]


def test_publication_without_a_pause_is_not_a_repetition() -> None:
    with serving(good) as server, BridgeClient(manifest(url=server.url), timeout_s=20) as client:
        client.publish()
    assert server.requests[0].body["after"] is None


def test_client_returns_only_its_own_lease() -> None:
    with serving(good) as server:
        for run in ("runs/first", None):
            with BridgeClient(manifest(url=server.url), timeout_s=20) as client:
                if run:
                    own = {"holder": ME.model_dump(mode="json"), "client": client._name}
                    assert client.take_lease(run).version == 7
    assert [(request.method, request.path, request.body) for request in server.requests] == [
        ("POST", "/bridge/lease", {**own, "run": "runs/first"}), ("DELETE", "/bridge/lease", own)
    ]  # fmt: skip


def test_returning_the_lease_of_a_dead_server_is_not_an_error() -> None:
    with serving(good) as server:
        client = BridgeClient(manifest(url=server.url), timeout_s=20)
        client.take_lease("runs/first")
    client.close()


def test_invalid_address_is_refused_immediately() -> None:
    with pytest.raises(UsageError, match="not the address of a server"):
        BridgeClient(manifest(), timeout_s=1, url="http://127.0.0.1:none")


def test_proxy_in_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(good) as server, BridgeClient(manifest(url=server.url), timeout_s=20) as client:
        assert client.status().version == 7


@pytest.mark.parametrize(("keepalive_s", "num_connections"), [(20.0, 1), (0.0, 3)])
def test_idle_connection_is_not_reused(
    monkeypatch: pytest.MonkeyPatch, keepalive_s: float, num_connections: int
) -> None:
    monkeypatch.setattr(client_module, "KEEPALIVE_S", keepalive_s)
    with serving(good) as server, BridgeClient(manifest(url=server.url), timeout_s=20) as client:
        for _ in range(3):
            client.status()
    assert len({request.connection for request in server.requests}) == num_connections


def test_closed_connection_is_released() -> None:
    with serving(good) as server:
        client = BridgeClient(manifest(url=server.url), timeout_s=20)
        client.status()
        client.close()
        with pytest.raises(ServerUnreachableError, match="another thread has closed the connection"):
            client.status()


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"data": [{"id": "base", "max_model_len": 512}, {"id": "adapter", "max_model_len": None}]}, 512),
        ({"data": [{"id": "m", "max_model_len": 512}, {"id": "n", "max_model_len": 256}]}, 256),
        ({"data": [{"id": "m"}]}, None),
        ({"data": []}, None),
        ({"error": "no"}, None),
        ({"data": 3}, None),
    ],
)
def test_max_model_len_comes_from_the_model_list(document: object, expected: int | None) -> None:
    with serving(lambda _: as_json(document)) as server:
        assert max_model_len(server.url) == expected


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no address", "http://[half"])
def test_silent_server_has_no_known_length(url: str) -> None:
    assert max_model_len(url) is None


VLLM_CALLS: dict[str, Callable[[VllmClient], object]] = {
    "health": lambda client: client.check_health(),
    "models": lambda client: client.models(),
    "load": lambda client: client.load_adapter("a", Path("/a")),
    "unload": lambda client: client.unload_adapter("a"),
}


@pytest.mark.parametrize("call", VLLM_CALLS)
@pytest.mark.parametrize("answer", [None, Answer("engine is dead", 500)], ids=["dropped", "500"])
def test_dead_or_unhealthy_vllm_is_unreachable(call: str, answer: Answer | None) -> None:
    with (
        serving(lambda _: answer) as server,
        VllmClient(server.url) as client,
        pytest.raises(ServerUnreachableError, match=server.url),
    ):
        VLLM_CALLS[call](client)
    assert len(server.requests) == 1, "a change of adapters is not retried: it would be refused"


@pytest.mark.parametrize("body", ["<html>", "{}", '{"data": []}', '{"data": [{"name": "m"}]}'])
def test_invalid_model_list_is_unreachable(body: str) -> None:
    with (
        serving(lambda _: Answer(body)) as server,
        VllmClient(server.url) as client,
        pytest.raises(ServerUnreachableError, match="not a valid ServedModels"),
    ):
        client.models()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_server_without_health_route_is_healthy(status: int) -> None:
    with serving(lambda _: Answer("not for you", status)) as server, VllmClient(server.url) as client:
        client.check_health()


@pytest.mark.parametrize("fault", [{"message": "no slot\nis free", "code": 400}, "no slot\nis free"])
def test_vllms_own_message_is_quoted_on_one_line(fault: object) -> None:
    answer = as_json({"error": fault}, 400)
    with (
        serving(lambda _: answer) as server,
        VllmClient(server.url) as client,
        pytest.raises(UsageError, match="does not accept the adapter: 400 no slot is free"),
    ):
        client.load_adapter("a", Path("/a"))
