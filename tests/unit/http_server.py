"""A real HTTP server in a thread, with answers provided by the test."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class HttpRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int = 0
    """The client's port."""


@dataclass(frozen=True)
class Answer:
    body: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Answers = Callable[[HttpRequest], Answer | None]
"""None: the connection is dropped without an answer."""


@dataclass(frozen=True)
class HttpServer:
    url: str
    requests: list[HttpRequest]


def as_json(document: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(json.dumps(document), status, {name.replace("_", "-"): value for name, value in headers.items()})


class _Listener(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = False  # closing waits for the threads, so that a test leaves none behind

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def hang_up(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: many tests have a client that gives up."""


@contextmanager
def serving(answers: Answers) -> Iterator[HttpServer]:
    requests: list[HttpRequest] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet per answer, or the kernel waits 40 ms for the second half

        def do_GET(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            body, port = json.loads(content) if content else None, self.client_address[1]
            requests.append(HttpRequest(self.command, self.path, headers, body, port))
            answer = answers(requests[-1])
            if answer is None:
                self.close_connection = True
                return
            data = answer.body.encode()
            self.send_response(answer.status)
            for name, value in {**answer.headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815  http.server's names

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    server = _Listener(Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        yield HttpServer(f"http://127.0.0.1:{server.server_address[1]}", requests)
    finally:
        server.shutdown()
        thread.join()
        server.hang_up()
        server.server_close()


def locked(answers: Answers, key: str) -> Answers:
    """Answer like a server with `--api-key`: everything but `/health` and `/bridge/` needs the key."""

    def locks(request: HttpRequest) -> Answer | None:
        is_open = request.path == "/health" or request.path.startswith("/bridge/")
        if is_open or request.headers.get("authorization") == f"Bearer {key}":
            return answers(request)
        return as_json({"error": "Unauthorized"}, 401)

    return locks


def status_after_disconnecting(app: Callable[..., Any], path: str, body: Any, **headers: str) -> int:
    """Post `body` to an ASGI app, disconnect while it works, and return the status of its answer."""
    sent: list[Any] = []
    unread = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return unread.pop() if unread else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"content-type": "application/json", **headers}
    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1", "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])
