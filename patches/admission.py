"""Which HTTP requests are admitted: by key, token, Host and Origin (`Guard`), and by size and time (`Intake`).

vLLM checks its key (`--api-key`) only below `/v1` and a few other paths, and answers `/invocations`, `/metrics` and
others without it. It answers under any `Host`, so a web page whose name is rebound to 127.0.0.1 reaches it, and allows
scripts of every page by default. uvicorn reads a body of any size into memory, and waits forever for the rest of a
request.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.errors import UsageError
from bridge.server.api_key import VARIABLE
from bridge.server.protocol import BRIDGE_ROUTES, TOKEN_HEADER

is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)
"""Whether the current request carries the manifest's token."""
DEV_MODE = "VLLM_SERVER_DEV_MODE"
ANY_ORIGIN = ["*"]
"""vLLM's default of `--allowed-origins`."""
BODY_LIMIT_BYTES = 128 * 2**20
"""Largest body. A prompt of a million tokens takes 8 MiB."""
BODY_LIMIT_S = 60.0
"""Longest wait for the whole body."""
HEAD_LIMIT_S = 60.0
"""Longest wait for a whole request head. uvicorn itself closes a connection that idles between requests."""
SWEEP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Whom one server answers."""

    key_digests: tuple[bytes, ...] = ()
    """SHA-256 of each key; empty: no key is needed."""
    is_on_loopback: bool = False
    """Whether the server listens on a loopback address only."""
    allows_any_origin: bool = True
    """Whether nobody has chosen which web pages may send requests."""

    @classmethod
    def of(cls, args: Namespace, environment: Mapping[str, str] = os.environ) -> Self:
        """Read them from vLLM's arguments; as in vLLM, `--api-key` takes precedence over VLLM_API_KEY."""
        given = [args.api_key] if isinstance(args.api_key, str) else args.api_key
        return cls(
            key_digests=tuple(_digest(key) for key in given or [environment.get(VARIABLE)] if key),
            is_on_loopback=_is_loopback(args.host or ""),
            allows_any_origin=getattr(args, "allowed_origins", ANY_ORIGIN) == ANY_ORIGIN,
        )

    def refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the reason if a request is refused."""
        if self.is_on_loopback and (foreign := self._foreign(headers)):
            return 403, foreign
        is_open = not self.key_digests or path == "/health" or path.startswith(BRIDGE_ROUTES)
        return None if is_open or self._has_key(headers) else (401, "Unauthorized")

    def _foreign(self, headers: Headers) -> str | None:
        """Return why a request to a server on loopback is not from this host; None if it is."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not _is_loopback(_name(f"//{host}")):
            return (
                f"this server listens on loopback, and is not {host[:100]!r}: use http://127.0.0.1:PORT, or have the"
                " proxy send 'Host: localhost'"
            )
        if origin is not None and self.allows_any_origin and not _is_loopback(_name(origin)):
            return (
                f"this server listens on loopback, and refuses web pages of {origin[:100]!r} unless it is started"
                " with: -- --allowed-origins '[\"ORIGIN\"]'"
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        fits = [hmac.compare_digest(_digest(given), key) for key in self.key_digests]  # all: no timing side channel
        return scheme.lower() == "bearer" and any(fits)


class Guard:
    """Middleware that applies the `Rules` in the app's state; vLLM serves nothing until they are there."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rules: Rules | None = getattr(scope["app"].state, "bridge_rules", None)
        if scope["type"] in ("http", "websocket") and rules is not None:
            headers = Headers(scope=scope)
            token = headers.get(TOKEN_HEADER) or headers.get("authorization", "").removeprefix("Bearer ")
            is_ours.set(hmac.compare_digest(_digest(token), _digest(scope["app"].state.bridge_manifest.token)))
            path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
            if refusal := rules.refusal(path, headers):
                status, reason = refusal
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008, "reason": reason[:100]})
                else:
                    await JSONResponse({"error": reason}, status)(scope, receive, send)
                return
        await self._inner(scope, receive, send)


def refuse_dev_mode(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError if vLLM's development routes are on: they pause, resume and call the engine past the fence."""
    value = environment.get(DEV_MODE, "0")
    if value not in ("", "0"):
        raise UsageError(
            f"{DEV_MODE}={value}: vLLM's development routes would call the engine past the fence",
            remedy=f"unset {DEV_MODE}, and start the server again",
        )


class Intake:
    """Middleware that reads a request's body, within its limits, before anything else does."""

    def __init__(self, inner: ASGIApp, *, limit_bytes: int = BODY_LIMIT_BYTES, limit_s: float = BODY_LIMIT_S) -> None:
        self._inner = inner
        self._limit_bytes, self._limit_s = limit_bytes, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if "content-length" not in headers and "transfer-encoding" not in headers:  # no body
            await self._inner(scope, receive, send)
            return
        try:
            messages = await self._read(headers, receive)
        except HTTPException as refused:  # close the connection: the rest of the body may still arrive
            answer = JSONResponse({"error": refused.detail}, refused.status_code, {"connection": "close"})
            await answer(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._inner(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> list[Message]:
        """Return the messages up to the end of the body, or to the end of the connection."""
        length = headers.get("content-length", "")
        size, received, messages = int(length) if length.isdecimal() else 0, 0, list[Message]()
        try:
            async with asyncio.timeout(self._limit_s):
                while size <= self._limit_bytes and (not messages or messages[-1].get("more_body", False)):
                    messages.append(await receive())
                    received += len(messages[-1].get("body", b""))
                    size = max(size, received)
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._limit_s:g} s") from None
        if size > self._limit_bytes:
            limit_mib = self._limit_bytes // 2**20
            raise HTTPException(413, f"the body is larger than {limit_mib} MiB: split it into several requests")
        return messages


Waiting = dict[Any, tuple[Any, float]]
"""uvicorn's connection -> its last request, and since when it has had no other."""


async def sweep_heads(server_of: Callable[[], Any], *, limit_s: float = HEAD_LIMIT_S) -> None:
    """Close connections that wait too long for a request head, for as long as the server runs."""
    waiting: Waiting = {}
    while True:
        await asyncio.sleep(min(SWEEP_S, limit_s))
        if (server := server_of()) is not None:  # vLLM puts it into the app's state when it starts to listen
            waiting = swept(list(server.server_state.connections), waiting, time.monotonic(), limit_s)


def swept(connections: Iterable[Any], before: Waiting, now: float, limit_s: float) -> Waiting:
    """Close each connection that has waited longer than `limit_s`, and return all that wait."""
    waiting: Waiting = {}
    for one in connections:
        # Connections that were upgraded to websockets have no requests.
        if hasattr(one, "cycle") and (one.cycle is None or one.cycle.response_complete):
            last, since = before.get(one, (one.cycle, now))
            waiting[one] = one.cycle, since if last is one.cycle else now
            if now - waiting[one][1] > max(limit_s, one.timeout_keep_alive):
                one.transport.close()
    return waiting


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # unbalanced brackets
        return ""


def _is_loopback(host: str) -> bool:
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
