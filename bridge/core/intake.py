"""Limits of an HTTP server that uvicorn runs: the size and time of a request, and connections without a request.

uvicorn reads a body of any size into memory, waits forever for the rest of a request, and accepts connections until
the process has no file descriptors left.
"""

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

BODY_LIMIT_BYTES = 128 * 2**20
"""Largest body. A prompt of a million tokens takes 8 MiB."""
BODY_LIMIT_S = 60.0
"""Longest wait for the whole body."""
HEAD_LIMIT_S = 60.0
"""Longest wait for a whole request head. uvicorn itself closes a connection that idles between requests."""
MOST_WAITING = 1024
SWEEP_S = 5.0
TICK_S = 1.0
"""A wait counts for at most this long: a longer one means that the event loop was blocked."""
START_POLL_S = 0.05
Message = MutableMapping[str, Any]
"""An ASGI event."""
Waiting = dict[Any, tuple[Any, float]]
"""uvicorn's connection -> its last request, and since when it has had no other."""


class RefusedBodyError(Exception):
    """The body is too large or too late; the connection should be closed, since the rest may still arrive."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


async def read_body(
    headers: Iterable[tuple[bytes, bytes]],
    receive: Callable[[], Awaitable[Message]],
    *,
    limit_bytes: int = BODY_LIMIT_BYTES,
    limit_s: float = BODY_LIMIT_S,
) -> list[Message]:
    """Return a request's messages up to the end of its body, or to the end of the connection.

    Time in which the event loop is blocked does not count: what arrived meanwhile is not late.

    Raises:
        RefusedBodyError: the body is too large or too late.
    """
    length = dict(headers).get(b"content-length", b"").decode("latin-1")
    size, received, messages = int(length) if length.isdecimal() else 0, 0, list[Message]()
    waited_s = 0.0
    while size <= limit_bytes and (not messages or messages[-1].get("more_body", False)):
        receiving = asyncio.ensure_future(receive())
        try:
            while not receiving.done():
                if waited_s >= limit_s:
                    raise RefusedBodyError(408, f"the body did not arrive within {limit_s:g} s")
                began = time.monotonic()
                await asyncio.wait({receiving}, timeout=min(TICK_S, limit_s - waited_s))
                waited_s += min(time.monotonic() - began, TICK_S)
        finally:
            receiving.cancel()  # without effect once it is done
        messages.append(receiving.result())
        received += len(messages[-1].get("body", b""))
        size = max(size, received)
    if size > limit_bytes:
        limit = f"the body is larger than {limit_bytes // 2**20} MiB"
        raise RefusedBodyError(413, f"{limit}: split it into several requests")
    return messages


def most_waiting() -> int:
    """Return how many connections may wait for their first request: a quarter of the file descriptors at most."""
    return min(MOST_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


async def limit_connections(server_of: Callable[[], Any], *, limit_s: float = HEAD_LIMIT_S) -> None:
    """Close connections that wait too long for a request head, or are too many, for as long as the server runs.

    `server_of` returns None until there is a server.
    """
    while (server := server_of()) is None or not server.config.loaded:  # noqa: ASYNC110  vLLM sets no event
        await asyncio.sleep(START_POLL_S)
    limit_silent(server)
    waiting: Waiting = {}
    while True:
        await asyncio.sleep(min(SWEEP_S, limit_s))
        waiting = swept(list(server.server_state.connections), waiting, time.monotonic(), limit_s)


def limit_silent(server: Any) -> None:
    """Close the oldest connection without a request whenever there are more than `most_waiting` of them.

    The newest stay, since a client sends its request right after it connects.
    """
    silent = dict[Any, None]()
    """In the order in which they were accepted."""

    class LimitedProtocol(server.config.http_protocol_class):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            silent[self] = None
            if len(silent) <= (most := most_waiting()):
                return
            for known in [known for known in silent if known.cycle is not None or known not in self.connections]:
                del silent[known]  # it has sent a request, or became a websocket
            for oldest in list(silent)[: max(0, len(silent) - most)]:
                del silent[oldest]
                oldest.transport.abort()

        def connection_lost(self, error: Exception | None) -> None:
            silent.pop(self, None)
            super().connection_lost(error)

    server.config.http_protocol_class = LimitedProtocol


def swept(connections: Iterable[Any], before: Waiting, now: float, limit_s: float) -> Waiting:
    """Close each connection that has waited longer than `limit_s`, and return all that wait.

    Between two requests a connection may wait for as long as uvicorn keeps it.
    """
    waiting: Waiting = {}
    for one in connections:
        # Connections that were upgraded to websockets have no requests.
        if hasattr(one, "cycle") and (one.cycle is None or one.cycle.response_complete):
            last, since = before.get(one, (one.cycle, now))
            waiting[one] = one.cycle, since if last is one.cycle else now
            longest = limit_s if one.cycle is None else max(limit_s, one.timeout_keep_alive)
            if now - waiting[one][1] > longest:
                one.transport.close()
    return waiting
