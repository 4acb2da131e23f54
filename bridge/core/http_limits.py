"""Limits for an HTTP server run by uvicorn: the size and duration of a request body, and idle connections.

uvicorn reads a body of any size into memory, waits forever for an incomplete one, and accepts connections until the
process runs out of file descriptors.
"""

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

BODY_LIMIT_BYTES = 128 * 2**20
"""Largest request body; a prompt of a million tokens takes 8 MiB."""
BODY_LIMIT_S = 60.0
"""Longest wait for the complete body."""
MOST_WAITING = 1024
TICK_S = 1.0
"""Upper bound on the time counted for one wait: if a wait took longer, the event loop was blocked."""
START_POLL_S = 0.05
Message = MutableMapping[str, Any]
"""An ASGI event."""


class Refusal(Exception):  # noqa: N818  the client gets it as a response
    """A request that is answered with an error."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


async def read_body(
    headers: Iterable[tuple[bytes, bytes]],
    receive: Callable[[], Awaitable[Message]],
    *,
    limit_bytes: int = BODY_LIMIT_BYTES,
    limit_s: float = BODY_LIMIT_S,
) -> list[Message]:
    """Return a request's ASGI messages up to the end of its body or of the connection.

    Time during which the event loop is blocked does not count: data that arrived meanwhile is not late.

    Raises:
        Refusal: the body is too large or too slow; close the connection, since the remainder may still arrive.
    """
    length = dict(headers).get(b"content-length", b"").decode("latin-1")
    size = int(length) if length.isdecimal() else 0
    received = 0
    messages = list[Message]()
    waited_s = 0.0
    while size <= limit_bytes and (not messages or messages[-1].get("more_body", False)):
        receiving = asyncio.ensure_future(receive())
        try:
            while not receiving.done():
                if waited_s >= limit_s:
                    raise Refusal(f"the body did not arrive within {limit_s:g} s", status=408)
                began = time.monotonic()
                await asyncio.wait({receiving}, timeout=min(TICK_S, limit_s - waited_s))
                waited_s += min(time.monotonic() - began, TICK_S)
        finally:
            receiving.cancel()  # no effect if the body has arrived
        messages.append(receiving.result())
        received += len(messages[-1].get("body", b""))
        size = max(size, received)
    if size > limit_bytes:
        limit = f"the body is larger than {limit_bytes // 2**20} MiB"
        raise Refusal(f"{limit}: split it into several requests", status=413)
    return messages


def most_waiting() -> int:
    """Return how many connections may be idle: at most a quarter of the file descriptors."""
    return min(MOST_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


async def limit_connections(server_of: Callable[[], Any], *, counts_answered: bool = False) -> None:
    """Close the oldest connections without a request whenever there are more than `most_waiting`.

    The newest ones stay open, since a client sends its request right after it connects. With `counts_answered`,
    connections that idle between two requests also count; uvicorn itself closes these only after a while. `server_of`
    returns None until the server exists.
    """
    while (server := server_of()) is None or not server.config.loaded:  # noqa: ASYNC110  vLLM sets no event
        await asyncio.sleep(START_POLL_S)
    protocol_class: Any = server.config.http_protocol_class
    silent = dict[Any, None]()
    """Idle connections, in the order in which they were accepted."""

    class LimitedProtocol(protocol_class):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            silent[self] = None
            if len(silent) <= (most := most_waiting()):
                return
            for known in [known for known in silent if self._is_done_with(known)]:
                del silent[known]
            waiting = [known for known in silent if known.cycle is None or known.cycle.response_complete]
            for oldest in waiting[: max(0, len(waiting) - most)]:
                del silent[oldest]
                oldest.transport.abort()

        def _is_done_with(self, known: Any) -> bool:
            """Return whether a connection no longer counts: it became a websocket, or has sent a request."""
            return known not in self.connections or (known.cycle is not None and not counts_answered)

        def connection_lost(self, error: Exception | None) -> None:
            silent.pop(self, None)
            super().connection_lost(error)

    server.config.http_protocol_class = LimitedProtocol
