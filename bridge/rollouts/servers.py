"""Requests to the servers that sample: connections, choosing a server, and retrying failures on another one."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import ValidationError

from bridge.errors import AttachError, RejectedRequestError
from bridge.rollouts import openai_api
from bridge.rollouts.distribution import PROTOCOL, WHOLE
from bridge.rollouts.openai_api import Dialect, RequestFailed
from bridge.server.client import (
    LOCKED,
    Answer,
    ServedModel,
    ServedModels,
    error_message,
    key_rejected,
    open_async_http,
    refusal_of,
)
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import VERSION_HEADER

RETRY_AFTER_LIMIT_S = 30.0
"""Longest wait that a server's `Retry-After` can request."""
UNFIT = (400, 413, 422)
"""HTTP statuses for a request that the model cannot serve."""
TRANSIENT = (408, 429, 500, 502, 503, 504)
"""HTTP statuses of a server that is busy or unhealthy, and may recover soon."""
FIRST_COOLDOWN_S = 1.0
"""Cooldown in seconds of a server that failed, if another server answers; doubled after each further failure."""
COOLDOWN_LIMIT_S = 60.0


class Connections:
    """Persistent connections to any number of servers, one per request in flight."""

    def __init__(self) -> None:
        self._idle: dict[str, list[httpx.AsyncClient]] = {}

    async def send(self, method: str, url: str, route: str, body: Any, kind: type[Answer]) -> tuple[Answer, str]:
        """Send a request, and return the response with its version header."""
        try:
            with self._client(url) as http:
                response = await http.request(method, f"{url.rstrip('/')}{route}", json=body)
        except (httpx.TransportError, httpx.InvalidURL, httpx.DecodingError) as error:
            is_bad_url = isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL)
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise RequestFailed(reason, "never" if is_bad_url else "anywhere") from error
        if not response.is_success:
            raise _rejection(url, route, response)
        try:
            return kind.model_validate_json(response.content), response.headers.get(VERSION_HEADER, "")
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(map(str, fault["loc"]))
            why = "; are its weights NaN?" if fault["type"] == "finite_number" else ""
            reason = f"{route} sent an invalid response: {field or 'body'}: {fault['msg']}{why}"
            raise RequestFailed(reason, "once") from error

    async def aclose(self) -> None:
        for client in itertools.chain(*self._idle.values()):
            await client.aclose()
        self._idle.clear()

    @contextmanager
    def _client(self, url: str) -> Iterator[httpx.AsyncClient]:
        """Borrow the most recently used client for `url`.

        A single client with a pool would be simpler, but httpcore 1.0 scans all connections of a pool several times
        whenever a request begins or ends: with 256 requests in flight, that is half of the client's CPU time.
        """
        idle = self._idle.setdefault(url, [])
        client = idle.pop() if idle else open_async_http()  # the caller sets a time limit on the whole response
        try:
            yield client
        finally:
            idle.append(client)


def _rejection(url: str, route: str, response: httpx.Response) -> Exception:
    words = error_message(response)
    status = response.status_code
    if refusal := refusal_of(response):
        return AttachError(f"the server at {url}: {refusal.error}", hint=refusal.hint)
    if status in UNFIT:
        return RejectedRequestError(
            f"the server at {url} rejected the request: {words}",
            hint="shorten the prompts, lower --max-new-tokens, or serve with a larger --max-model-len",
        )
    if status in LOCKED:
        return key_rejected(url, response)
    seconds = response.headers.get("retry-after", "")  # only seconds are supported, not a date
    return RequestFailed(
        f"{route} answered {status}: {words}",
        "anywhere" if status in TRANSIENT else "never",
        retry_after_s=min(float(seconds), RETRY_AFTER_LIMIT_S) if seconds.isdecimal() else 0.0,
    )


@dataclass
class Health:
    """Health of the server at one address."""

    clock: Callable[[], float] = time.monotonic
    in_flight: int = 0
    num_failures: int = 0
    """Failures since the server last answered, except those during its cooldown."""
    cooldown_until: float = 0.0
    """Time at which the cooldown ends."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        except RequestFailed:
            now = self.clock()
            if now >= self.cooldown_until:
                self.cooldown_until = now + min(COOLDOWN_LIMIT_S, FIRST_COOLDOWN_S * 2 ** min(self.num_failures, 16))
                self.num_failures += 1
            raise
        else:
            self.num_failures = 0
            self.cooldown_until = 0.0
        finally:
            self.in_flight -= 1

    def is_well(self) -> bool:
        """Return whether to send the server a request: not during the cooldown after a failure, then one at a time."""
        return not self.num_failures or (not self.in_flight and self.clock() >= self.cooldown_until)


@dataclass(eq=False)
class Server:
    """One server for the duration of one call; by the next call, its address may belong to a different server."""

    endpoint: Endpoint
    health: Health
    """Health of the address, kept across calls."""
    models: tuple[ServedModel, ...] = ()
    """Models that the server lists; empty before the first request."""
    dialect: Dialect = "openai"
    """API of the server, derived from its list of models and that response's version header."""
    reports_versions: bool = True
    """Whether the last response had a version header."""
    last_request: int = 0
    """Sequence number of the server's last request, counted over all servers."""
    listing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the first request lists the models; concurrent requests wait for the result."""

    async def list_models(self, connections: Connections) -> tuple[ServedModel, ...]:
        async with self.listing:
            if not self.models:
                listed, version = await connections.send("GET", self.endpoint.url, "/v1/models", None, ServedModels)
                self.models = listed.data
                if any(model.owned_by == "vllm" for model in self.models):
                    self.dialect = "bridge" if version else "vllm"
            return self.models

    async def complete(self, connections: Connections, body: dict[str, Any]) -> tuple[openai_api.Completions, str]:
        """Request completions, and return them with the version header of the weights that sampled them."""
        route = openai_api.ROUTES[self.dialect]
        answer, header = await connections.send("POST", self.endpoint.url, route, body, openai_api.Completions)
        self.reports_versions = bool(header)
        if self.endpoint.version is None:
            return answer, header
        # The server reports versions of the base model, not of the requested adapter.
        choices = tuple(choice.model_copy(update={"versions": None}) for choice in answer.choices)
        return openai_api.Completions(choices=choices), str(self.endpoint.version)

    def lacks(self, temperature: float) -> Iterator[str]:
        """Yield one sentence for each capability that this server lacks; nothing before its first response."""
        url = self.endpoint.url
        if self.models and self.dialect == "openai":
            own = ", ".join(sorted(WHOLE.keys() - set(PROTOCOL)))
            yield (
                f"{url} is not vLLM: completions may lack their end token, which is then not trained, and the server's"
                f" own defaults for {own} apply, if any, because OpenAI's protocol cannot turn them off"
            )
        if not self.reports_versions and self.endpoint.version is None:
            yield f"{url} does not report which version of the weights sampled a completion: staleness is unknown"
        if not self.reports_versions and temperature != 1.0:
            yield (
                f"{url} must return log-probabilities at temperature {temperature}, but does not report whether it does"
                " (vLLM: --logprobs-mode processed_logprobs)"
            )


_requests = itertools.count(1)


def next_of(servers: Iterable[Server]) -> Server:
    """Return the healthy server with the fewest requests in flight, breaking ties round-robin.

    If none is healthy, return the one whose cooldown ends first.
    """

    def key(server: Server) -> tuple[bool, float, int, int]:
        health = server.health
        is_well = server.health.is_well()
        return not is_well, 0.0 if is_well else health.cooldown_until, health.in_flight, server.last_request

    server = min(servers, key=key)
    server.last_request = next(_requests)
    return server
