"""What the recorder refuses, and what it costs the trainer: bodies, silent connections, and paths of no run."""

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from bridge.agents import recorder
from bridge.agents.recorder import Recorder
from bridge.core import http_limits

USAGE = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 1)
ANSWERED = {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}], "usage": USAGE}


def with_a_run(act: Callable[[int, str], Awaitable[Any]]) -> Any:
    """Return `act(port, path of a run)`, while the run lasts."""

    async def answer(_: Any) -> Any:
        return ANSWERED

    async def main() -> Any:
        server = Recorder("model")
        try:
            async with server.run(answer) as url:
                address = re.fullmatch(r"http://127.0.0.1:(\d+)(/.*)", url)
                assert address is not None
                return await act(int(address[1]), address[2])
        finally:
            await server.close()

    return asyncio.run(asyncio.wait_for(main(), 30))


async def exchanged(port: int, path: str, body: bytes, *, length: int | None = None) -> tuple[int, dict[str, str], Any]:
    """Post `body` and nothing more; return the status, the headers and the document of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    size = len(body) if length is None else length
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    document = json.loads(await reader.readexactly(int(headers["content-length"])))
    if headers.get("connection") == "close":
        assert await reader.read() == b""
    writer.close()
    return int(status.split()[1]), headers, document


@pytest.mark.parametrize("route", ["/0123/v1/chat/completions", "/", "RUN/completions", "RUN/chat/completions/x"])
def test_a_path_of_no_run_is_refused_before_its_body_is_read(route: str) -> None:
    status, headers, _ = with_a_run(lambda port, path: exchanged(port, route.replace("RUN", path), b"", length=10**9))
    assert (status, headers["connection"], headers["x-should-retry"]) == (404, "close", "false")


def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async def act(port: int, path: str) -> Any:
        return await exchanged(port, f"{path}/chat/completions", b"", length=http_limits.BODY_LIMIT_BYTES + 1)

    status, headers, answer = with_a_run(act)
    assert (status, headers["connection"], headers["x-should-retry"]) == (413, "close", "false")
    assert answer["error"]["message"].startswith("the body is larger than 128 MiB")


def test_half_a_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "read_body", partial(http_limits.read_body, limit_s=0.1))
    status, headers, _ = with_a_run(lambda port, path: exchanged(port, f"{path}/chat/completions", b"{", length=9))
    assert (status, headers["connection"], headers["x-should-retry"]) == (408, "close", "false")


@pytest.mark.parametrize("sent", [b"", b"POST /x HTTP/1.1\r\nhost"], ids=["nothing", "half a head"])
def test_silent_connections_are_limited(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "most_waiting", lambda: 4)

    async def act(port: int, path: str) -> tuple[int, list[bytes]]:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in silent:
            writer.write(sent)
        oldest = [await reader.read() for reader, _ in silent[:16]]
        status, _, _ = await exchanged(port, f"{path}/chat/completions", b"{}")
        for _, writer in silent:
            writer.close()
        return status, oldest

    assert with_a_run(act) == (200, [b""] * 16)


DEEP = b"[" * 100_000
BODIES = {"deep": DEEP, "deep inside": b'{"a": ' + DEEP, "no text": b"\xff", "half": b"{", "none": b""}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_json_is_a_clients_fault(body: bytes) -> None:
    status, headers, answer = with_a_run(lambda port, path: exchanged(port, f"{path}/chat/completions", body))
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert answer["error"]["message"] == "the request is not JSON"


@pytest.mark.parametrize(("route", "field"), [("chat/completions", "model"), ("responses", "metadata")])
def test_no_depth_of_a_field_that_is_repeated_is_a_fault(route: str, field: str) -> None:
    """The answer repeats it a few levels deeper, and both are limited by what JSON can be read and written."""

    async def statuses(port: int, path: str) -> set[int]:
        statuses = set[int]()
        limit = sys.getrecursionlimit()  # other tests' libraries raise it
        for depth in range(limit - 120, limit):
            body = f'{{"input": "x", "stream": true, "{field}": {"[" * depth}{"]" * depth}}}'.encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST {path}/{route} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
            statuses.add(int((await reader.readline()).split()[1]))
            writer.close()
        return statuses

    assert with_a_run(statuses) == {200, 400}
