"""The servers that may sample a call's prompts: what each one understands, how healthy it is, and which one is next."""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bridge.rollouts import openai_api
from bridge.rollouts.connections import Connections, RequestFailed
from bridge.rollouts.distribution import PROTOCOL, WHOLE
from bridge.rollouts.openai_api import Dialect
from bridge.server.client import ServedModel, ServedModels
from bridge.server.endpoint import Endpoint

FIRST_REST_S = 1.0
"""How long a server that failed gets no requests while another one answers; doubled after each further failure."""
REST_LIMIT_S = 60.0


@dataclass
class Health:
    """How healthy the server at one address is."""

    clock: Callable[[], float] = time.monotonic
    """The time in seconds."""
    in_flight: int = 0
    """Requests that wait for its answer."""
    num_failures: int = 0
    """Failures since it last answered; those during a rest are not counted."""
    rests_until: float = 0.0
    """When it gets requests again."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count one request, and whether it fails."""
        self.in_flight += 1
        try:
            yield
        except RequestFailed:
            self._failed()
            raise
        else:
            self.num_failures, self.rests_until = 0, 0.0
        finally:
            self.in_flight -= 1

    def is_well(self) -> bool:
        """Return whether to send it a request: after a failure and a rest it gets a single one."""
        return not self.num_failures or (not self.in_flight and self.clock() >= self.rests_until)

    def _failed(self) -> None:
        now = self.clock()
        if now >= self.rests_until:
            rest_s = min(REST_LIMIT_S, FIRST_REST_S * 2 ** min(self.num_failures, 16))
            self.num_failures, self.rests_until = self.num_failures + 1, now + rest_s


@dataclass(eq=False)
class Server:
    """One server, for the duration of one call: by the next, another one may answer at its address."""

    endpoint: Endpoint
    """Where it answers, and what to request."""
    health: Health
    """Kept across calls."""
    models: tuple[ServedModel, ...] = ()
    """What it lists; empty before it was asked."""
    dialect: Dialect = "openai"
    """What it understands, judged by its list of models and whether a version came with it."""
    reports_versions: bool = True
    """Whether its last answer came with a version."""
    asked_at: int = 0
    """Number of its last request among all of the call."""
    listing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one request lists its models for all others."""

    async def list_models(self, connections: Connections) -> tuple[ServedModel, ...]:
        """Return what it lists; it is asked once."""
        async with self.listing:
            if not self.models:
                listed, version = await connections.send("GET", self.endpoint.url, "/v1/models", None, ServedModels)
                self.models = listed.data
                if any(model.owned_by == "vllm" for model in self.models):
                    self.dialect = "bridge" if version else "vllm"
            return self.models

    async def complete(self, connections: Connections, body: dict[str, Any]) -> tuple[openai_api.Completions, str]:
        """Return its answer to a request for completions, and the version header of the weights that made them."""
        route = openai_api.ROUTES[self.dialect]
        answer, header = await connections.send("POST", self.endpoint.url, route, body, openai_api.Completions)
        self.reports_versions = bool(header)
        return answer, header if self.endpoint.version is None else str(self.endpoint.version)

    def lacks(self, temperature: float) -> Iterator[str]:
        """Yield what training lacks with this server, a sentence each; nothing before its first answer."""
        url = self.endpoint.url
        if self.models and self.dialect == "openai":
            own = ", ".join(sorted(WHOLE.keys() - set(PROTOCOL)))
            yield (
                f"{url} is not vLLM: its completions may lack their end token, which is then not trained; its own"
                f" defaults of {own} apply, if it has any: the protocol cannot turn them off"
            )
        if not self.reports_versions and self.endpoint.version is None:
            yield f"{url} does not report which version of the weights made a completion: staleness is unknown"
        if not self.reports_versions and temperature != 1.0:
            yield (
                f"{url} must return log-probabilities at temperature {temperature}, and does not report whether it does"
                " (vLLM: --logprobs-mode processed_logprobs)"
            )


class Servers:
    """Those that may be asked in one call."""

    def __init__(self, servers: Sequence[Server]) -> None:
        assert servers, "no server to ask"
        self._servers, self._numbers = servers, itertools.count(1)

    def next(self, avoided: Collection[Server]) -> Server:
        """Return the healthy server with the fewest requests in flight, in turns if several have as few.

        If none is healthy, the one whose rest ends first. `avoided` must leave one to choose from.
        """
        left = self.beside(avoided)
        well = [server for server in left if server.health.is_well()]
        key: Callable[[Server], tuple[float, ...]] = _load if well else _rest
        found = min(well or left, key=key)
        found.asked_at = next(self._numbers)
        return found

    def beside(self, avoided: Collection[Server]) -> list[Server]:
        """Return those that are not `avoided`."""
        return [server for server in self._servers if server not in avoided]

    def lacks(self, temperature: float) -> tuple[str, ...]:
        """Return what training lacks with these servers, a sentence each."""
        return tuple(line for server in self._servers for line in server.lacks(temperature))


def _load(server: Server) -> tuple[float, ...]:
    return server.health.in_flight, server.asked_at


def _rest(server: Server) -> tuple[float, ...]:
    return server.health.rests_until, *_load(server)
