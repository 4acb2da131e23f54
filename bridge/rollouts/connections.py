"""One request to a server over connections that are kept: its answer, or the fault that kept it from coming.

Not covered: asking again (`asking.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from bridge.errors import AttachError, UsageError
from bridge.rollouts import faults
from bridge.rollouts.faults import Fault
from bridge.server.client import LOCKED, key_rejected, open_async_http, refusal_of, words_of
from bridge.server.protocol import VERSION_HEADER

UNFIT = (400, 413, 422)

Answer = TypeVar("Answer", bound=BaseModel)


class Connections:
    """Connections to any number of servers, kept between requests; as many as who asks has requests under way."""

    def __init__(self) -> None:
        self._idle: dict[str, list[httpx.AsyncClient]] = {}
        self._clients: list[httpx.AsyncClient] = []

    async def send(self, method: str, url: str, route: str, body: Any, kind: type[Answer]) -> tuple[Answer, str]:
        """Return the answer, and the version of the weights that made it as the server writes it.

        Raises:
            Fault: there is none, or not as it should be.
            UsageError: the server refuses the request for what it says, or for who asks.
            AttachError: it can sample nothing, such as with weights that are NaN.
        """
        try:
            with self._client(url) as http:
                response = await http.request(method, f"{url.rstrip('/')}{route}", json=body)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise Fault(_name(error), "never") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise Fault(_name(error), "anywhere") from error
        if not response.is_success:
            raise _refusal(url, route, response)
        try:
            return kind.model_validate_json(response.content), response.headers.get(VERSION_HEADER, "")
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            why = "; are its weights NaN?" if fault["type"] == "finite_number" else ""
            raise Fault(f"{route} answered nonsense: {place or 'body'}: {fault['msg']}{why}", "once") from error

    async def aclose(self) -> None:
        """Close every connection."""
        clients, self._clients, self._idle = self._clients, [], {}
        for client in clients:
            await client.aclose()

    @contextmanager
    def _client(self, url: str) -> Iterator[httpx.AsyncClient]:
        """Take a client out of those for `url`, the last that was used first.

        One pool for all of them would do, but httpcore 1.0 looks at every connection of a pool, and more than once,
        whenever a request begins or ends: with 256 under way that is half of all time that the client takes.
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


def _refusal(url: str, route: str, response: httpx.Response) -> Exception:
    words, status = words_of(response), response.status_code
    if refusal := refusal_of(response):
        return AttachError(f"the server at {url}: {refusal.error}", remedy=refusal.remedy)
    if status in UNFIT:
        return UsageError(
            f"the server at {url} refuses the request: {words}",
            remedy="shorten the prompts, lower --max-new-tokens, or serve with a larger --max-model-len",
        )
    if status in LOCKED:
        return key_rejected(url, response)
    return faults.of_status(status, f"{route} answered {status}: {words}", response.headers.get("retry-after"))


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
