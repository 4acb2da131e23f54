"""The middleware for all routes: authorization, limits on the size and duration of a request, and the version header.

vLLM checks its key (`--api-key`) only below `/v1` and a few other paths, and serves `/invocations`, `/metrics` and
others without it. It accepts any `Host`, so a web page whose name is rebound to 127.0.0.1 can reach it, and the origins
that it allows by default depend on its version. `bridge/core/http_limits.py` adds the limits that uvicorn lacks.
"""

import hashlib
import hmac
import ipaddress
import os
from argparse import Namespace
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.core.http_limits import BODY_LIMIT_BYTES, BODY_LIMIT_S, Refusal, read_body
from bridge.errors import UsageError
from bridge.server.api_key import VARIABLE
from bridge.server.protocol import BRIDGE_ROUTES, TOKEN_HEADER, VERSION_HEADER

PINS = """
# Bridge passes its own --allowed-origins; a new default may mean that vLLM checks Origin differently.
vllm.entrypoints.openai.cli_args
    if FrontendArgs: FrontendArgs.allowed_origins = field(default_factory=lambda: ['*'])
vllm.entrypoints.launchers.cli_args
    if FrontendArgs: FrontendArgs.allowed_origins = field(default_factory=lambda: ['*']) | field(default_factory=list)
vllm.entrypoints.common.cli_args
    if FrontendArgs: FrontendArgs.allowed_origins = field(default_factory=list)
"""
is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)
"""Whether the current request carries the manifest's token."""
NOT_IN_MANIFEST = "the bearer token is not the one in this server's manifest"
DEV_MODE = "VLLM_SERVER_DEV_MODE"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which a server accepts requests."""

    key_digests: tuple[bytes, ...] = ()
    """SHA-256 of each accepted key; empty if no key is required."""
    is_on_loopback: bool = False
    """Whether the server listens on a loopback address only."""
    origins: frozenset[str] = frozenset()
    """Origins of web pages that may send requests (`--allowed-origins`); "*": any."""

    @classmethod
    def of(cls, args: Namespace, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the rules from vLLM's arguments; as in vLLM, `--api-key` takes precedence over VLLM_API_KEY."""
        keys = [args.api_key] if isinstance(args.api_key, str) else args.api_key
        origins = [args.allowed_origins] if isinstance(args.allowed_origins, str) else args.allowed_origins
        return cls(
            key_digests=tuple(_digest(key) for key in keys or [environment.get(VARIABLE)] if key),
            is_on_loopback=_is_loopback(args.host or ""),
            origins=frozenset(origins or ()),
        )

    def refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return status and reason if the request is refused."""
        if reason := self._foreign_host(headers.get("host")) or self._foreign_page(headers):
            return 403, reason
        if not self.key_digests or self._has_key(headers):
            return None
        if path == "/health" or path.startswith(BRIDGE_ROUTES):  # Bridge's own routes check the token themselves
            return None if is_ours.get() or not has_body(headers) else (401, NOT_IN_MANIFEST)
        return 401, "Unauthorized"

    def _foreign_host(self, host: str | None) -> str | None:
        """Return why `host` cannot be a name of this server; None if it can."""
        if host is None or not self.is_on_loopback:
            return None
        # A Host header must not contain a user name.
        if "@" not in host and _is_loopback(_parts(f"//{host}").hostname or ""):
            return None
        return (
            f"this server listens on loopback, and is not {host[:100]!r}: use http://127.0.0.1:PORT, or have the"
            " proxy send 'Host: localhost'"
        )

    def _foreign_page(self, headers: Headers) -> str | None:
        """Return why the web page that sends a request may not; None if it may, or if no web page sent it."""
        origin = headers.get("origin")
        if origin is None or not self.origins.isdisjoint({origin, "*"}):
            return None
        page = _parts(origin)
        if _is_loopback(page.hostname or "") or (page.netloc and page.netloc == headers.get("host")):
            return None
        return (
            f"this server refuses web pages of {origin[:100]!r} unless it is started with: -- --allowed-origins"
            " '[\"ORIGIN\"]'"
        )

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Comparing all keys avoids a timing side channel.
        fits = [hmac.compare_digest(_digest(key), digest) for digest in self.key_digests]
        return scheme.lower() == "bearer" and any(fits)


@dataclass(frozen=True)
class Admission:
    """Middleware that applies the `Rules` in the app's state, and then reads the body before anything else does.

    vLLM serves nothing until the rules are set. The middleware adds the version of the weights to every response to an
    admitted request: `3`, or `3-4` if the weights changed in between.
    """

    inner: ASGIApp
    limit_bytes: int = BODY_LIMIT_BYTES
    limit_s: float = BODY_LIMIT_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else Headers()
        refusal = _refusal(scope, headers)
        if refusal and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1][:100]})
        elif refusal:
            await JSONResponse({"error": refusal[1]}, refusal[0])(scope, receive, send)
        elif scope["type"] != "http" or not has_body(headers):
            await self._answer(scope, receive, send)
        else:
            try:
                messages = await read_body(headers.raw, receive, limit_bytes=self.limit_bytes, limit_s=self.limit_s)
            except Refusal as error:
                answer = JSONResponse({"error": error.message}, error.status, {"connection": "close"})
                await answer(scope, receive, send)
                return

            async def replay() -> Message:
                return messages.pop(0) if messages else await receive()

            await self._answer(scope, replay, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        fence: Any = getattr(scope["app"].state, "bridge_fence", None)
        first = fence and fence.version

        async def send_with_version(message: Message) -> None:
            if fence is not None and message["type"] == "http.response.start":
                version = str(first) if first == fence.version else f"{first}-{fence.version}"
                message["headers"] = [*message["headers"], (VERSION_HEADER.encode(), version.encode())]
            await send(message)

        await self.inner(scope, receive, send_with_version)


def _refusal(scope: Scope, headers: Headers) -> tuple[int, str] | None:
    """Return status and reason if a request is refused; set `is_ours`."""
    rules: Rules | None = getattr(scope["app"].state, "bridge_rules", None)
    if rules is None or scope["type"] not in ("http", "websocket"):
        return None
    token = headers.get(TOKEN_HEADER) or headers.get("authorization", "").removeprefix("Bearer ")
    is_ours.set(hmac.compare_digest(_digest(token), _digest(scope["app"].state.bridge_manifest.token)))
    return rules.refusal(str(scope["path"]).removeprefix(str(scope.get("root_path", ""))), headers)


def refuse_dev_mode(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError if vLLM's development routes are enabled: they would bypass the fence."""
    value = environment.get(DEV_MODE, "0")
    if value not in ("", "0"):
        raise UsageError(
            f"{DEV_MODE}={value}: vLLM's development routes would bypass the fence",
            hint=f"unset {DEV_MODE}, and start the server again",
        )


def has_body(headers: Headers) -> bool:
    """Return whether a request announces a body."""
    return "content-length" in headers or "transfer-encoding" in headers


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # unbalanced brackets
        return urlsplit("")


def _is_loopback(host: str) -> bool:
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
