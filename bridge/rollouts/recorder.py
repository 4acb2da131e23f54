"""An OpenAI-compatible server on loopback, inside the trainer, with a base URL for each run of an agent.

It runs in the event loop of the sampler: while that stands still, requests wait. A `stream` is one chunk. A
request without the URL of a run is refused before its body is read.

Not covered: what a request means (`chat_request.py`), and what it becomes (`agent_runs.py`).
"""

import asyncio
import contextvars
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from bridge.core import intake
from bridge.rollouts import responses_api
from bridge.rollouts.chat_request import Refusal

PATH = re.compile(r"/(\w+)/v1/(.+)")
KEPT_S = 3600
"""How long a connection without requests is kept: an agent's tools may take long."""
CLOSING_S = 1
ACCEPTED_AT_ONCE = 64
"""Connections that the event loop accepts before it looks at any of them."""
QUEUED = 2048
"""Connections that wait in the kernel while the event loop is blocked."""
ENDED = "this run has ended, or never was"
METHODS = {"chat/completions": "POST", "responses": "POST", "models": "GET"}
"""Route -> its method."""
EXPECTED = f"expected {' or '.join(f'{method} {route}' for route, method in METHODS.items())}"
NO_HEADERS: Mapping[str, str] = {}
Document = Mapping[str, Any]
Answer = Callable[[Any], Awaitable[Document]]
"""The body of a request -> the fields `choices` and `usage`; it may raise a Refusal."""


@dataclass(eq=False)
class _Run:
    answer: Answer
    context: contextvars.Context
    tasks: set[asyncio.Task[Document]] = field(default_factory=set)


class Recorder:
    """The server; used from one event loop, in which it starts with the first run."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._runs: dict[str, _Run] = {}
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server
        self._limiting: asyncio.Task[None]
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def run(self, answer: Answer) -> AsyncIterator[str]:
        """Answer the requests of one run by `answer`, at the base URL that this yields.

        At the end, those that are still unanswered get an error.
        """
        async with self._starting:
            port = await self._started()
        name, run = secrets.token_hex(16), _Run(answer, contextvars.copy_context())
        self._runs[name] = run
        try:
            yield f"http://127.0.0.1:{port}/{name}/v1"
        finally:
            del self._runs[name]
            for task in run.tasks:
                task.cancel()
            await asyncio.gather(*run.tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close every connection."""
        if self._socket is not None:
            self._limiting.cancel()
            self._server.force_exit = True  # wait for nobody
            await self._server.shutdown([self._socket])
            self._socket = None

    async def _started(self) -> int:
        if self._socket is None:
            listener = socket.create_server(("127.0.0.1", 0))
            config = uvicorn.Config(
                self._asgi, interface="asgi3", lifespan="off", ws="none", http="h11", log_config=None, access_log=False,
                proxy_headers=False, date_header=False, server_header=False, timeout_keep_alive=KEPT_S,
                timeout_graceful_shutdown=CLOSING_S, backlog=ACCEPTED_AT_ONCE,
            )  # fmt: skip
            config.load()
            self._server = uvicorn.Server(config)
            self._server.lifespan = config.lifespan_class(config)
            self._limiting = asyncio.create_task(intake.limit_connections(lambda: self._server))
            await self._server.startup([listener])  # `serve` would take the signals
            listener.listen(QUEUED)  # asyncio takes one number for both
            self._socket = listener
        port: int = self._socket.getsockname()[1]
        return port

    async def _asgi(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request: an application as ASGI has it."""
        try:
            name, route = self._addressed(scope["method"], scope["path"])
            body = await _body(scope["headers"], receive)
        except Refusal as refusal:  # close the connection: the body may still arrive
            await _refuse(send, refusal, {"connection": "close"})
            return
        if body is None:
            return
        try:
            asked, document = await self._answered(name, route, body, receive)
            text, kind = _written(document, asked)
        except Refusal as refusal:
            await _refuse(send, refusal)
            return
        await _send(send, 200, text, kind)

    def _addressed(self, method: str, path: str) -> tuple[str, str]:
        """Return the name of the run that a request is for, and its route.

        Raises:
            Refusal: there is no such run or route.
        """
        found = PATH.fullmatch(path)
        if found is None or found[1] not in self._runs:
            raise Refusal(ENDED, status=404)
        if METHODS.get(found[2]) != method:
            raise Refusal(f"there is no {method} {found[2]} here, {EXPECTED}", status=404)
        return found[1], found[2]

    async def _answered(self, name: str, route: str, body: bytes, receive: Any) -> tuple[Document, Document]:
        """Return the request and its answer."""
        if route == "models":
            model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "bridge"}
            return {}, {"object": "list", "data": [model]}
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refusal("the request is no JSON") from error
        if (run := self._runs.get(name)) is None:  # it ended while the body arrived
            raise Refusal(ENDED, status=404)
        if route == "responses":
            answer = await self._in_time(run, responses_api.as_chat(asked), receive)
            return asked, responses_api.as_response(asked, answer)
        choices = await self._in_time(run, asked, receive)
        named = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.get("model")}
        return asked, {**named, "object": "chat.completion", **choices}

    @staticmethod
    async def _in_time(run: _Run, asked: Any, receive: Any) -> Document:
        """Answer as long as the run lasts, and somebody waits."""
        made: Any = run.answer(asked)
        task: asyncio.Task[Document] = asyncio.get_running_loop().create_task(made, context=run.context.copy())
        gone = asyncio.ensure_future(receive())  # once the connection is closed
        run.tasks.add(task)
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Refusal("nobody waits for the answer", status=499)
            if task.cancelled():
                raise Refusal(ENDED, status=410)
            return task.result()
        finally:
            run.tasks.discard(task)
            task.cancel()
            gone.cancel()


async def _body(headers: Any, receive: Any) -> bytes | None:
    """Return the body of a request; None if the connection was closed before its end.

    Raises:
        Refusal: it is too large or too late.
    """
    try:
        messages = await intake.read_body(headers, receive)
    except intake.RefusedBodyError as error:
        raise Refusal(error.message, status=error.status) from error
    is_whole = messages[-1]["type"] == "http.request"
    return b"".join(message.get("body", b"") for message in messages) if is_whole else None


async def _refuse(send: Any, refusal: Refusal, headers: Mapping[str, str] = NO_HEADERS) -> None:
    error = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": None}
    await _send(send, refusal.status, json.dumps({"error": error}), "application/json", headers)


async def _send(send: Any, status: int, text: str, kind: str, extra: Mapping[str, str] = NO_HEADERS) -> None:
    data = text.encode()
    headers = {"content-type": kind, "content-length": str(len(data)), "x-should-retry": "false", **extra}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})


def _written(document: Document, asked: Document) -> tuple[str, str]:
    """Return an answer as the request `asked` for it, and its content type.

    Raises:
        Refusal: it repeats a field of the request that is nested more deeply than JSON can be written.
    """
    try:
        if asked.get("stream"):
            return _as_stream(document, asked.get("stream_options")), "text/event-stream"
        return json.dumps(document), "application/json"
    except RecursionError as error:
        raise Refusal("the request is nested too deeply") from error


def _as_stream(document: Document, options: Any) -> str:
    """Return an answer as a stream of events: everything in one chunk, then the usage if requested, then the end."""
    if document["object"] == "response":
        return responses_api.as_stream(document)
    (choice,) = document["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    chunk = {**document, "object": "chat.completion.chunk"}
    usage = chunk.pop("usage")
    own = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"], "logprobs": None}
    chunks = [{**chunk, "choices": [own]}]
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**chunk, "choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
