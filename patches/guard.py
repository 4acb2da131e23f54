"""Who may ask this server: the key on every route but `/health`, and no foreign web page where it listens on loopback.

vLLM asks for its key (`--api-key`) below `/v1` and a few other paths alone, and answers `/invocations`, `/metrics` and
others without it. It answers under any `Host`, so that a web page whose name is rebound to 127.0.0.1 reaches it, and
allows every page's scripts by default.

Not covered: `/bridge/*`, which takes the manifest's token (`routes.py`); how much a request may send (`intake.py`).
"""

import hashlib
import hmac
import ipaddress
import os
from argparse import Namespace
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from bridge.errors import UsageError
from bridge.server.api_key import VARIABLE
from bridge.server.protocol import TOKEN_HEADER

is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)
"""Whether the request that is answered carries the manifest's token."""
OPEN = frozenset({"/health"})
"""Paths that need no key."""
OWN_TOKEN = "/bridge/"  # noqa: S105  a path
"""Paths below it take the manifest's token instead."""
UNAUTHORISED, FORBIDDEN = 401, 403
DEV_MODE = "VLLM_SERVER_DEV_MODE"
ANY_ORIGIN = ["*"]
"""vLLM's default of `--allowed-origins`."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Whom one server answers."""

    key_digests: tuple[bytes, ...] = ()
    """SHA-256 of each key; none: no key is needed."""
    is_on_loopback: bool = False
    """Whether the server listens on a loopback address alone."""
    allows_any_origin: bool = True
    """Whether nobody has chosen which web pages may ask."""

    @classmethod
    def of(cls, args: Namespace, environment: Mapping[str, str] = os.environ) -> Self:
        """Read them off vLLM's arguments; as for vLLM, `--api-key` comes before VLLM_API_KEY."""
        given = [args.api_key] if isinstance(args.api_key, str) else args.api_key
        keys = [key for key in (given or [environment.get(VARIABLE)]) if key]
        return cls(
            key_digests=tuple(_digest(key) for key in keys),
            is_on_loopback=_is_loopback(args.host or ""),
            allows_any_origin=getattr(args, "allowed_origins", ANY_ORIGIN) == ANY_ORIGIN,
        )

    def refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the reason with which a request is refused; None: it is welcome."""
        if self.is_on_loopback and (foreign := self._foreign(headers)):
            return FORBIDDEN, foreign
        is_closed = bool(self.key_digests) and path not in OPEN and not path.startswith(OWN_TOKEN)
        return (UNAUTHORISED, "Unauthorized") if is_closed and not self._has_key(headers) else None

    def _foreign(self, headers: Headers) -> str | None:
        """Return why a request to a server on loopback is not one of this host's own; None: it is."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not _is_loopback(_name(f"//{host}")):
            return (
                f"this server listens on loopback, and is not {host[:100]!r}: ask http://127.0.0.1:PORT, or have the"
                " proxy send 'Host: localhost'"
            )
        if origin is not None and self.allows_any_origin and not _is_loopback(_name(origin)):
            return (
                f"this server listens on loopback, and web pages of {origin[:100]!r} may not ask it unless it is"
                " started with: -- --allowed-origins '[\"ORIGIN\"]'"
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given)
        fits = [hmac.compare_digest(digest, key) for key in self.key_digests]  # all of them: the time tells nothing
        return scheme.lower() == "bearer" and any(fits)


class Guard:
    """Middleware that refuses requests by the rules in the app's state; before they are there nothing is served."""

    def __init__(self, inner: ASGIApp, app: Starlette) -> None:
        self._inner = inner
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        rules: Rules | None = getattr(self._app.state, "bridge_rules", None)
        if scope["type"] in ("http", "websocket") and rules is not None:
            is_ours.set(self._has_token(Headers(scope=scope)))
            path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
            if refusal := rules.refusal(path, Headers(scope=scope)):
                status, reason = refusal
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008, "reason": reason[:100]})
                else:
                    await JSONResponse({"error": reason}, status_code=status)(scope, receive, send)
                return
        await self._inner(scope, receive, send)

    def _has_token(self, headers: Headers) -> bool:
        token = self._app.state.bridge_manifest.token
        given = headers.get(TOKEN_HEADER) or headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(_digest(given), _digest(token))


def refuse_dev_mode(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse vLLM's development routes, which pause, resume and call the engine beside the fence.

    Raises:
        UsageError: they are on.
    """
    value = environment.get(DEV_MODE, "0")
    if value not in ("", "0"):
        raise UsageError(
            f"{DEV_MODE}={value}: vLLM's development routes would call the engine beside the fence",
            remedy=f"unset {DEV_MODE}, and start the server again",
        )


def _name(url: str) -> str:
    """Return the host in `url`, empty where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # brackets that do not match
        return ""


def _is_loopback(host: str) -> bool:
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
