"""Responses that are too large, too slow or compressed, and impossible numbers in them."""

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from bridge.atropos import api
from bridge.atropos.api import AtroposApi
from bridge.errors import AtroposError, BridgeError, ServerUnreachableError
from bridge.rollouts.openai_api import RequestFailed
from bridge.rollouts.servers import Connections
from bridge.server import client, limited_http
from bridge.server.client import BridgeClient, ServedModels, VllmClient, max_model_len
from bridge.server.receiver import StockReceiver
from tests.unit.checks_sample import manifest

LIMIT_S = 1.0


def endless(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b" " * 2**20)


def drip(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.1)


def bomb(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(gzip.compress(b" " * 2**24))


ODD: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {"endless": endless, "drip": drip, "bomb": bomb}
REASONS = {"endless": "more than 1 MiB", "drip": "within 1 s", "bomb": r"compressed \(gzip\)"}


@contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler], None] | bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):
                self.send_response(200)
                if answer is bomb:
                    self.send_header("content-encoding", "gzip")
                self.end_headers()
                body = {"/is_paused": b'{"is_paused": false}', "/version": b'{"version": "0.32.0"}'}.get(self.path)
                if body is not None or isinstance(answer, bytes):
                    self.wfile.write(body or answer)  # type: ignore[arg-type]
                else:
                    answer(self)

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()


def sampled(url: str) -> object:
    async def send() -> object:
        connections = Connections()
        try:
            async with asyncio.timeout(LIMIT_S):
                return await connections.send("GET", url, "/v1/models", None, ServedModels)
        except TimeoutError:
            raise RequestFailed("no complete response within 1 s", "never") from None
        finally:
            await connections.aclose()

    return asyncio.run(send())


READERS: dict[str, Callable[[str], object]] = {
    "control": lambda url: BridgeClient(manifest(url=url), timeout_s=LIMIT_S).status(),
    "models": lambda url: VllmClient(url, timeout_s=LIMIT_S).models(),
    "transfer": lambda url: StockReceiver(url, "run", timeout_s=LIMIT_S).check("m", "0.32.0"),
    "samples": sampled,
    "atropos": lambda url: AtroposApi(url, max_retries=0).info(),
}
"""Every client that reads a server's responses."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("answer", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_endless_response_is_abandoned(monkeypatch: pytest.MonkeyPatch, reader: str, answer: str) -> None:
    small = 2**20
    for transport in (limited_http.LimitedTransport, limited_http.AsyncLimitedTransport):
        monkeypatch.setattr(transport.__init__, "__defaults__", (small,))
    monkeypatch.setattr(api, "MAX_SAMPLED_BYTES", small)
    monkeypatch.setattr(api, "LIMIT_S", LIMIT_S)
    with (
        served(ODD[answer]) as url,
        pytest.raises((ServerUnreachableError, AtroposError, RequestFailed), match=REASONS[answer]),
    ):
        READERS[reader](url)


def test_compressed_response_is_refused() -> None:
    headers = list[str]()

    def record(handler: BaseHTTPRequestHandler) -> None:
        headers.append(handler.headers["accept-encoding"])
        handler.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())

    with served(record) as url:
        assert [model.id for model in VllmClient(url).models()] == ["m"]
        sampled(url)
    assert headers == ["identity"] * 2


def info(**counts: Any) -> bytes:
    parallel = {"world_size": 1, "data_parallel_size": 1, **counts}
    served_model, engine = {"model": "m"}, {"backend": "nccl"}
    config = {"model_config": served_model, "parallel_config": parallel, "weight_transfer_config": engine}
    return json.dumps({"vllm_config": config}).encode()


@pytest.mark.parametrize("number", [0, -3, 10**9, 10**400, 1.5, "two", None])
@pytest.mark.parametrize("name", ["world_size", "data_parallel_size"])
def test_impossible_worker_count_is_refused(name: str, number: Any) -> None:
    with served(info(**{name: number})) as url, StockReceiver(url, "run", timeout_s=20) as receiver:
        with pytest.raises(BridgeError, match=f"not a valid _ServerInfo: .*{name}: Input should be") as caught:
            receiver.check("m", "0.32.0")
        assert "\n" not in caught.value.message


def test_workers_of_all_engines_are_counted() -> None:
    with served(info(world_size=2, data_parallel_size=3)) as url, StockReceiver(url, "run", timeout_s=20) as receiver:
        assert receiver.check("m", "0.32.0") == 6


@pytest.mark.parametrize(("length", "known"), [(0, None), (-1, None), (10**400, None), (1, 1), (32_768, 32_768)])
def test_impossible_max_model_len_is_treated_as_unknown(length: int, known: int | None) -> None:
    with served(json.dumps({"data": [{"id": "m", "max_model_len": length}]}).encode()) as url:
        assert max_model_len(url) == known
    assert client.ServedModel(id="m").max_model_len is None
