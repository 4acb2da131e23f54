"""An OpenAI-compatible server on loopback, inside the trainer, with a separate base URL for each run of an agent.

It runs in the sampler's event loop. A `stream` response is sent as one chunk. A request whose URL belongs to no run is
refused before its body is read.

Not covered: parsing requests (`chat_request.py`), and sampling for them (`agent_runs.py`).
"""

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bridge.agents import chat_request, responses_api
from bridge.core.http_limits import Refusal, limit_connections, read_body

if TYPE_CHECKING:
    import uvicorn

KEPT_S = 60
"""Seconds after which an idle connection is closed."""
CLOSING_S = 1
ACCEPTED_AT_ONCE = 64
"""Connections that the event loop accepts in one go before it serves any of them."""
QUEUED = 2048
"""Connections that may wait in the kernel's backlog."""
ENDED = "this run has ended or never existed"
APIS: Mapping[str, ModuleType] = {"chat/completions": chat_request, "responses": responses_api}
"""Route -> the module that converts its requests to chat-completion requests, and formats the responses."""
EXPECTED = f"expected {' or '.join(f'POST {route}' for route in APIS)} or GET models"
ENDS_CONNECTION = (404, 408, 413)
"""Statuses after which the connection is closed, because the request's body was not read and may still arrive."""
Document = Mapping[str, Any]
Answer = Callable[[Any], Awaitable[Document]]
"""A chat-completion request -> the response's fields `choices` and `usage`; may raise Refusal."""


@dataclass(eq=False)
class _Run:
    answer: Answer
    tasks: set[asyncio.Task[Document]] = field(default_factory=set)


class Recorder:
    """The server. A single event loop uses it, and the first run starts it."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._runs: dict[str, _Run] = {}
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def run(self, answer: Answer) -> AsyncIterator[str]:
        """Answer the requests of one run with `answer`; yield the run's base URL.

        On exit, pending requests get an error, and connections that were last used by this run are closed.
        """
        async with self._starting:
            port = await self._started()
        name = secrets.token_hex(16)
        run = _Run(answer)
        self._runs[name] = run
        try:
            yield f"http://127.0.0.1:{port}/{name}/v1"
        finally:
            del self._runs[name]
            for task in run.tasks:
                task.cancel()
            await asyncio.gather(*run.tasks, return_exceptions=True)
            self._disconnect(name)

    def _disconnect(self, name: str) -> None:
        """Close the connections whose last request belonged to this run, as soon as that request is answered."""
        for protocol in list(self._server.server_state.connections):
            scope: Any = getattr(protocol, "scope", None)
            if scope is not None and scope["path"].startswith(f"/{name}/"):
                protocol.shutdown()

    async def close(self) -> None:
        """Close every connection."""
        if self._socket is not None:
            self._server.force_exit = True  # do not wait for open connections
            await self._server.shutdown([self._socket])
            self._socket = None

    async def _started(self) -> int:
        if self._socket is None:
            import uvicorn  # takes longer to import than everything else here, and most runs have no agent

            listener = socket.create_server(("127.0.0.1", 0))
            config = uvicorn.Config(
                self._serve, interface="asgi3", lifespan="off", ws="none", http="h11",
                log_config=None, access_log=False, proxy_headers=False, date_header=False, server_header=False,
                timeout_keep_alive=KEPT_S, timeout_graceful_shutdown=CLOSING_S, backlog=ACCEPTED_AT_ONCE,
            )  # fmt: skip
            config.load()
            self._server = uvicorn.Server(config)
            self._server.lifespan = config.lifespan_class(config)
            await limit_connections(lambda: self._server, counts_answered=True)
            await self._server.startup([listener])  # not `serve`, which would install signal handlers
            listener.listen(QUEUED)  # asyncio would use `backlog` for both limits
            self._socket = listener
        port: int = self._socket.getsockname()[1]
        return port

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answered(request)
        except Refusal as refusal:
            error = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": None}
            response = _response(json.dumps({"error": error}), status=refusal.status)
        await response(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        name, _, route = request.url.path[1:].partition("/v1/")
        self._run_of(name)
        if (request.method, route) == ("GET", "models"):
            model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "bridge"}
            return _response(json.dumps({"object": "list", "data": [model]}))
        if request.method != "POST" or route not in APIS:
            raise Refusal(f"there is no {request.method} {route} here, {EXPECTED}", status=404)
        api = APIS[route]
        try:
            body = json.loads(await _body(request))
        except (ValueError, RecursionError) as error:
            raise Refusal("the request is not JSON") from error
        run = self._run_of(name)  # the run may have ended while the body arrived
        document = api.as_document(body, await _answer_if_connected(run, api.as_chat(body), request))
        try:
            if body.get("stream"):
                return _response(api.as_stream(document, body), "text/event-stream")
            return _response(json.dumps(document))
        except RecursionError as error:  # the response repeats a field of the request
            raise Refusal("the request is nested too deeply") from error

    def _run_of(self, name: str) -> _Run:
        if name not in self._runs:
            raise Refusal(ENDED, status=404)
        return self._runs[name]


async def _body(request: Request) -> bytes:
    messages = await read_body(request.scope["headers"], request.receive)
    if messages[-1]["type"] == "http.disconnect":
        raise Refusal("the client closed the connection", status=499)
    return b"".join(message.get("body", b"") for message in messages)


async def _answer_if_connected(run: _Run, chat: Any, request: Request) -> Document:
    """Answer the request; raise Refusal if the run ends or the client disconnects first."""
    made: Any = run.answer(chat)
    task: asyncio.Task[Document] = asyncio.create_task(made)
    disconnected = asyncio.ensure_future(request.receive())  # the body was read, so the next message is a disconnect
    run.tasks.add(task)
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal("the client closed the connection", status=499)
        if task.cancelled():
            raise Refusal(ENDED, status=410)
        return task.result()
    finally:
        run.tasks.discard(task)
        task.cancel()
        disconnected.cancel()


def _response(text: str, kind: str = "application/json", *, status: int = 200) -> Response:
    headers = {"x-should-retry": "false"} | ({"connection": "close"} if status in ENDS_CONNECTION else {})
    return Response(text.encode(), status, headers, kind)
