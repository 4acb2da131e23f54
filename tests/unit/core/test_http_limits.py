"""Limits on the size and duration of requests, tested against a real uvicorn."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from bridge.core import http_limits
from bridge.core.http_limits import limit_connections
from bridge_patches.admission import Admission

LIMIT_BYTES, LIMIT_S = 1000, 0.3
POST = b"POST /length HTTP/1.1\r\nhost: x\r\n"


def app(limit_s: float = LIMIT_S) -> FastAPI:
    made = FastAPI()

    @made.post("/length")
    async def length(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @made.get("/length")
    async def nothing() -> dict[str, int]:
        return {"length": 0}

    made.add_middleware(Admission, limit_bytes=LIMIT_BYTES, limit_s=limit_s)
    return made


@contextlib.contextmanager
def listening(served: FastAPI) -> Iterator[tuple[str, int]]:
    """Serve in a thread, as vLLM does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(served, log_level="error"))
        server.config.load()

        async def serve() -> None:
            limiting = asyncio.create_task(limit_connections(lambda: server))
            await server.serve(sockets=[listener])
            limiting.cancel()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def exchanged(address: tuple[str, int], sent: bytes) -> bytes:
    """Send bytes, keep the connection open, and return all that arrives until the server closes it."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_body_up_to_the_limit_arrives_completely() -> None:
    http = TestClient(app())
    for size in (0, 1, LIMIT_BYTES):
        assert http.post("/length", content=b"x" * size).json() == {"length": size}
    assert http.post("/length", content=iter([b"x" * 400, b"x" * 500])).json() == {"length": 900}
    assert http.get("/length").json() == {"length": 0}


CHUNK = b"190\r\n" + b"x" * 400 + b"\r\n"


@pytest.mark.parametrize("body", [b"content-length: 1001\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n" + 3 * CHUNK])
def test_body_that_is_too_large_is_refused_immediately(body: bytes) -> None:
    with listening(app()) as address:
        answer = exchanged(address, POST + body)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body is larger than" in answer


@pytest.mark.parametrize(
    "body", [b"content-length: 10\r\n\r\nhalf", b"transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"]
)
def test_half_a_body_times_out(body: bytes) -> None:
    with listening(app()) as address:
        answer = exchanged(address, POST + body)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"error": "the body did not arrive within 0.3 s"}


def test_body_that_arrives_while_the_loop_blocks_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "TICK_S", 0.05)

    async def main() -> list[Any]:
        arrived = asyncio.Queue[Any]()
        reading = asyncio.create_task(http_limits.read_body([], arrived.get, limit_s=LIMIT_S))
        await asyncio.sleep(0)
        time.sleep(2 * LIMIT_S)  # noqa: ASYNC251  blocks the event loop, like a training step
        for left in (2, 1, 0):
            arrived.put_nowait({"body": b"x", "more_body": left > 0})
        return await reading

    assert len(asyncio.run(main())) == 3


def test_body_in_many_small_pieces_times_out() -> None:
    async def piece() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"body": b"x", "more_body": True}

    with pytest.raises(http_limits.Refusal, match=r"did not arrive within 0\.3 s"):
        asyncio.run(asyncio.wait_for(http_limits.read_body([], piece, limit_s=LIMIT_S), 10))


def test_idle_connections_do_not_lock_clients_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "most_waiting", lambda: 4)
    with listening(app()) as address, contextlib.ExitStack() as opened, httpx.Client() as client:
        url = f"http://{address[0]}:{address[1]}/length"
        assert client.get(url).json() == {"length": 0}
        silent = [opened.enter_context(socket.create_connection(address, timeout=30)) for _ in range(20)]
        assert [one.recv(1) for one in silent[:16]] == [b""] * 16, "the oldest are closed"
        assert client.get(url).json() == {"length": 0}, "one that has sent a request stays"
        assert httpx.get(url).json() == {"length": 0}
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
