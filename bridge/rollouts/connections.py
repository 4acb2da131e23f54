"""One request to a server: its answer, or why it failed and where it may be retried."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from bridge.errors import AttachError, ServerUnreachableError, UsageError
from bridge.server.client import LOCKED, key_rejected, open_async_http, refusal_of, unreachable, words_of
from bridge.server.protocol import VERSION_HEADER

RETRY_AFTER_LIMIT_S = 30.0
"""Longest wait that a server can request."""
UNFIT = (400, 413, 422)
"""Statuses of a request that does not fit the model."""
TRANSIENT = (408, 429, 500, 502, 503, 504)
"""Statuses of a server that is busy or unhealthy, and may recover soon."""

Answer = TypeVar("Answer", bound=BaseModel)
Retry = Literal["anywhere", "elsewhere", "once", "never"]
"""Where a failed request may be retried: at any server; at another one, because this one would take as long again; at
any one but only once, because two answers that cannot be used are no accident; nowhere."""


class RequestFailed(Exception):  # noqa: N818  a retry may succeed: no error yet
    """One request failed by the server's fault."""

    def __init__(self, reason: str, retry: Retry, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.retry, self.retry_after_s = reason, retry, retry_after_s

    def final(self, url: str, num_tries: int) -> ServerUnreachableError:
        """Return the error that a person sees when there is no further try."""
        tries = "tried once" if num_tries == 1 else f"tried {num_tries} times"
        error = unreachable(url, f"{self.reason}; {tries}")
        if self.retry != "elsewhere":
            return error
        remedy = f"{error.remedy}; or raise --request-timeout-s, or lower --max-new-tokens"
        return ServerUnreachableError(error.message, remedy=remedy)


class Connections:
    """Connections to any number of servers, kept between requests; one per request in flight."""

    def __init__(self) -> None:
        self._idle: dict[str, list[httpx.AsyncClient]] = {}
        self._clients: list[httpx.AsyncClient] = []

    async def send(self, method: str, url: str, route: str, body: Any, kind: type[Answer]) -> tuple[Answer, str]:
        """Return the answer, and the version header that came with it.

        Raises:
            RequestFailed: there is no answer, or not of this `kind`.
            UsageError: the server rejects the request because of its content or its key.
            AttachError: the server cannot sample, for example because its weights are NaN.
        """
        try:
            with self._client(url) as http:
                response = await http.request(method, f"{url.rstrip('/')}{route}", json=body)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise RequestFailed(_name(error), "never") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise RequestFailed(_name(error), "anywhere") from error
        if not response.is_success:
            raise _rejection(url, route, response)
        try:
            return kind.model_validate_json(response.content), response.headers.get(VERSION_HEADER, "")
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            why = "; are its weights NaN?" if fault["type"] == "finite_number" else ""
            raise RequestFailed(f"{route} answered nonsense: {place or 'body'}: {fault['msg']}{why}", "once") from error

    async def aclose(self) -> None:
        """Close every connection."""
        clients, self._clients, self._idle = self._clients, [], {}
        for client in clients:
            await client.aclose()

    @contextmanager
    def _client(self, url: str) -> Iterator[httpx.AsyncClient]:
        """Borrow the client for `url` that was used last.

        A single client with a pool would do, but httpcore 1.0 scans all connections of a pool several times whenever a
        request begins or ends: with 256 in flight that is half of the client's CPU time.
        """
        idle = self._idle.setdefault(url, [])
        client = idle.pop() if idle else self._new()
        try:
            yield client
        finally:
            idle.append(client)

    def _new(self) -> httpx.AsyncClient:
        client = open_async_http()  # the caller limits the answer as a whole
        self._clients.append(client)
        return client


def _rejection(url: str, route: str, response: httpx.Response) -> Exception:
    words, status = words_of(response), response.status_code
    if refusal := refusal_of(response):
        return AttachError(f"the server at {url}: {refusal.error}", remedy=refusal.remedy)
    if status in UNFIT:
        return UsageError(
            f"the server at {url} rejects the request: {words}",
            remedy="shorten the prompts, lower --max-new-tokens, or serve with a larger --max-model-len",
        )
    if status in LOCKED:
        return key_rejected(url, response)
    return RequestFailed(
        f"{route} answered {status}: {words}",
        "anywhere" if status in TRANSIENT else "never",
        retry_after_s=_seconds(response.headers.get("retry-after")),
    )


def _seconds(retry_after: str | None) -> float:
    """Return the wait that a server requests, within limits; 0 if it requests none, or an unreadable one.

    Source: RFC 9110, 10.2.3: a number of seconds, or a date.
    """
    if retry_after is None:
        return 0.0
    try:
        seconds = float(retry_after) if retry_after.isdecimal() else _until(retry_after)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), RETRY_AFTER_LIMIT_S)


def _until(date: str) -> float:
    moment = parsedate_to_datetime(date)
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
