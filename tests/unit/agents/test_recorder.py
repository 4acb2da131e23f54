"""What the recorder refuses, and the resources it uses: bodies, silent connections, and unknown paths."""

import asyncio
import gc
import json
import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from bridge.agents import chat_request, recorder
from bridge.agents.agent_runs import conversations
from bridge.agents.recorder import Recorder
from bridge.agents.recording import Recording
from bridge.core import http_limits
from bridge.types import Completion
from tests.models import chat, tiny

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
    """Post only `body`; return the status, the headers and the JSON document of the response."""
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


async def asked(port: int, path: str, kept: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Return a connection on which a request was answered; `kept` is an existing connection to reuse."""
    reader, writer = kept or await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0]))
    return reader, writer


@pytest.mark.parametrize("route", ["/0123/v1/chat/completions", "/", "RUN/completions", "RUN/chat/completions/x"])
def test_unknown_run_is_refused_before_its_body_is_read(route: str) -> None:
    status, headers, _ = with_a_run(lambda port, path: exchanged(port, route.replace("RUN", path), b"", length=10**9))
    assert (status, headers["connection"], headers["x-should-retry"]) == (404, "close", "false")


def test_oversized_body_is_refused_before_it_is_sent() -> None:
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


def test_idle_connections_of_a_run_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "most_waiting", lambda: 4)

    async def act(port: int, path: str) -> list[bytes]:
        idle = [await asked(port, path) for _ in range(20)]
        closed = [await reader.read() for reader, _ in idle[:15]]
        await asked(port, path, idle[-1])
        return closed

    assert with_a_run(act) == [b""] * 15


def test_connections_of_a_run_close_when_it_ends() -> None:
    async def answer(_: Any) -> Any:
        return ANSWERED

    async def main() -> None:
        server = Recorder("model")
        try:
            async with server.run(answer) as other:
                port, other_path = int(other.split(":")[2].split("/")[0]), other.split("/", 3)[3]
                async with server.run(answer) as url:
                    path = url.split("/", 3)[3]
                    idle = [await asked(port, f"/{path}") for _ in range(20)]
                    shared = await asked(port, f"/{other_path}", await asked(port, f"/{path}"))
                    assert len(server._server.server_state.connections) == 21
                assert [await reader.read() for reader, _ in idle] == [b""] * 20
                await asked(port, f"/{other_path}", shared)  # it serves a run that lasts
                assert len(server._server.server_state.connections) == 1
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def text_kept(root: object) -> int:
    """Return the total number of characters and digest bytes that an object refers to."""
    seen, left, size = set[int](), [root], 0
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        size += len(value) if isinstance(value, str | bytes) else 0
        left += gc.get_referents(value)
    return size


def test_memory_of_a_run_grows_with_its_text(tmp_path: Path) -> None:
    tiny.qwen2(600).save_pretrained(tmp_path)
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    known = conversations(tokenizer, str(tmp_path))
    text, schema = "I see.", {"type": "function", "function": {"name": "act", "description": "d" * 2000}}
    ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    completion = Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), text=text, finish_reason="stop")

    def kept(num_turns: int) -> int:
        recording = Recording(known)
        messages: list[dict[str, Any]] = []
        for number in range(num_turns):
            messages.append({"role": "user", "content": f"{number} " + "word " * 200})
            body = json.loads(json.dumps({"messages": messages, "tools": [schema]}))
            messages.append(recording.add(recording.begin(chat_request.read(body)), completion))
        assert len(recording.sequences()) == 1
        return text_kept([recording.turns, recording._known, recording._tools])

    few, many = kept(5), kept(40)
    assert many < 40 / 5 * few
    assert many < 40 * 3000 + 10_000


DEEP = b"[" * 100_000
BODIES = {"deep": DEEP, "deep inside": b'{"a": ' + DEEP, "no text": b"\xff", "half": b"{", "none": b""}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_invalid_json_body_is_a_client_error(body: bytes) -> None:
    status, headers, answer = with_a_run(lambda port, path: exchanged(port, f"{path}/chat/completions", body))
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert answer["error"]["message"] == "the request is not JSON"


@pytest.mark.parametrize(("route", "field"), [("chat/completions", "model"), ("responses", "metadata")])
def test_deeply_nested_field_gets_an_error_response(route: str, field: str) -> None:
    """The response repeats the field a few levels deeper; JSON's reader and writer limit the depth of both."""

    async def statuses(port: int, path: str) -> set[int]:
        statuses = set[int]()
        limit = sys.getrecursionlimit()  # libraries of other tests raise the limit
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
