"""How much one request may send, and how long it may take: a body by its size and a deadline, a head by a deadline.

uvicorn bounds neither: it reads a body of any size into memory, and waits for the rest of a request for ever.

Not covered: who may ask (`guard.py`); how long an answer takes.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_LIMIT_BYTES = 128 * 2**20
"""Largest body. A prompt of a million tokens takes 8 MiB."""
BODY_LIMIT_S = 60.0
"""Longest wait for the whole body."""
HEAD_LIMIT_S = 60.0
"""Longest life of a connection without a whole request head. uvicorn itself closes one that idles between requests."""
SWEEP_S = 5.0
TOO_LATE, TOO_LARGE = 408, 413


class Intake:
    """Middleware that reads a request's body before anybody else does."""

    def __init__(self, inner: ASGIApp, *, limit_bytes: int = BODY_LIMIT_BYTES, limit_s: float = BODY_LIMIT_S) -> None:
        self._inner = inner
        self._limit_bytes, self._limit_s = limit_bytes, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or refuse it."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if "content-length" not in headers and "transfer-encoding" not in headers:  # it has no body
            await self._inner(scope, receive, send)
            return
        try:
            messages = await self._read(headers, receive)
        except _Refused as refused:
            await refused.answer()(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._inner(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> list[Message]:
        """Return the messages up to the end of the body, or to the end of the connection."""
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._limit_bytes:
            raise self._too_large()
        messages, size = list[Message](), 0
        try:
            async with asyncio.timeout(self._limit_s):
                while not messages or messages[-1].get("more_body", False):
                    messages.append(await receive())
                    size += len(messages[-1].get("body", b""))
                    if size > self._limit_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise _Refused(TOO_LATE, f"the body was not there within {self._limit_s:g} s") from None
        return messages

    def _too_large(self) -> "_Refused":
        return _Refused(TOO_LARGE, f"the body is larger than {self._limit_bytes // 2**20} MiB: send several requests")


class _Refused(Exception):  # noqa: N818  an answer
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self._status, self._reason = status, reason

    def answer(self) -> JSONResponse:
        """Return the answer, after which the connection is closed: the rest of the body may still be on its way."""
        return JSONResponse({"error": self._reason}, status_code=self._status, headers={"connection": "close"})


class HeadSweeper:
    """Closes connections on which no whole request head has come for too long."""

    def __init__(self, *, limit_s: float = HEAD_LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._waiting: dict[Any, tuple[Any, float]] = {}
        """Connection -> the request that it had last, and since when it has had no other."""

    def sweep(self, connections: Iterable[Any]) -> None:
        """Look at uvicorn's open connections once; those that are upgraded to websockets have no requests."""
        now = self._clock()
        idle = {one: one.cycle for one in connections if hasattr(one, "cycle") and _is_idle(one.cycle)}
        before = self._waiting
        self._waiting = {}
        for one, cycle in idle.items():
            last, since = before.get(one, (cycle, now))
            self._waiting[one] = (cycle, since if last is cycle else now)
            if now - self._waiting[one][1] > max(self._limit_s, one.timeout_keep_alive):
                one.transport.close()


def _is_idle(cycle: Any) -> bool:
    return cycle is None or cycle.response_complete


async def sweep_heads(server_of: Callable[[], Any], *, limit_s: float = HEAD_LIMIT_S) -> None:
    """Close connections that wait too long for a head, for as long as the server runs."""
    sweeper = HeadSweeper(limit_s=limit_s)
    while True:
        await asyncio.sleep(min(SWEEP_S, limit_s))
        server = server_of()  # vLLM puts it into the app's state when it starts to listen
        if server is not None:
            sweeper.sweep(list(server.server_state.connections))
