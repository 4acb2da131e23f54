"""A real HTTP server in a thread that can fail at any point of a response, and detects when a client gives up."""

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.unit.http_server import Answer, HttpRequest


@dataclass(frozen=True)
class Cut:
    """The connection closes in the middle of this response."""

    answer: Answer


@dataclass(frozen=True)
class Hang:
    """The server never responds."""


Script = Callable[[HttpRequest], Answer | Cut | Hang | None]
"""None: the connection is dropped without an answer."""


@dataclass
class FaultyServer:
    url: str
    stop: Callable[[], None]
    """Refuse new connections, and drop the open ones."""
    requests: list[HttpRequest] = field(default_factory=list)
    given_up: list[HttpRequest] = field(default_factory=list)
    """Requests that the client abandoned."""
    connections: set[int] = field(default_factory=set)
    """The client's ports."""

    @property
    def completions(self) -> list[dict[str, Any]]:
        """The completion requests, in order of arrival."""
        return [request.body for request in self.requests if request.method == "POST"]


class _Listener(socketserver.ThreadingTCPServer):
    request_queue_size = 256
    daemon_threads = False  # closing waits for them, so that a test leaves no thread behind

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self._open = script, list[socket.socket]()
        self.noted = FaultyServer(f"http://127.0.0.1:{self.server_address[1]}", self.stop)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        self.noted.connections.add(client_address[1])
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: many tests have a client that gives up."""

    def stop(self) -> None:
        self.shutdown()
        self.socket.close()
        for connection in self._open:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(socketserver.StreamRequestHandler):
    server: _Listener

    def handle(self) -> None:
        while (request := self._request()) is not None:
            self.server.noted.requests.append(request)
            made = self.server.script(request)
            if isinstance(made, Hang) and not self.rfile.read(1):
                self.server.noted.given_up.append(request)
            if isinstance(made, Cut):
                whole = _http(made.answer)
                self.wfile.write(whole[: len(whole) * 2 // 3])
            if not isinstance(made, Answer):
                return
            self.wfile.write(_http(made))

    def _request(self) -> HttpRequest | None:
        line = self.rfile.readline().decode().split()
        if not line:
            return None
        fields = [field.decode().partition(":") for field in iter(self.rfile.readline, b"\r\n")]
        headers = {name.lower(): value.strip() for name, _, value in fields}
        content = self.rfile.read(int(headers.get("content-length", 0)))
        return HttpRequest(line[0], line[1], headers, json.loads(content) if content else None, self.client_address[1])


@contextmanager
def faulty(script: Script) -> Iterator[FaultyServer]:
    listener = _Listener(script)
    thread = threading.Thread(target=lambda: listener.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        yield listener.noted
    finally:
        listener.stop()
        thread.join()
        listener.server_close()


def _http(answer: Answer) -> bytes:
    body = answer.body.encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **answer.headers}
    head = [f"HTTP/1.1 {answer.status} Whatever", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(head).encode() + body
