"""Several servers: what each has said of itself, how it has been doing, and which one is asked next.

Not covered: asking it (`connections.py`), what a fault means for the request (`faults.py`).
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bridge.rollouts import openai_api
from bridge.rollouts.connections import Connections
from bridge.rollouts.distribution import PROTOCOL, WHOLE
from bridge.rollouts.faults import Fault
from bridge.rollouts.openai_api import Dialect, Models
from bridge.server.endpoint import Endpoint

FIRST_REST_S = 1.0
"""How long a server that failed is left out, as long as another one answers; each further time twice as long."""
REST_LIMIT_S = 60.0

Clock = Callable[[], float]


@dataclass
class Health:
    """How the server at one address has been doing, in seconds of a clock that never goes back."""

    clock: Clock = time.monotonic
    """What tells the time."""
    under_way: int = 0
    """Requests that wait for its answer."""
    num_failures: int = 0
    """How often it failed since it last answered; what fails while it is left out is not counted."""
    rests_until: float = 0.0
    """Until then it is left out."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count one request, and note how it ends."""
        self.under_way += 1
        try:
            yield
        except Fault:
            self._failed()
            raise
        else:
            self.num_failures, self.rests_until = 0, 0.0
        finally:
            self.under_way -= 1

    def is_well(self) -> bool:
        """Tell whether to ask it: after a failure and a rest it is tried with a single request."""
        return not self.num_failures or (not self.under_way and self.clock() >= self.rests_until)

    def _failed(self) -> None:
        now = self.clock()
        if now >= self.rests_until:
            rest_s = min(REST_LIMIT_S, FIRST_REST_S * 2 ** min(self.num_failures, 16))
            self.num_failures, self.rests_until = self.num_failures + 1, now + rest_s


@dataclass(eq=False)
class Server:
    """One server, as it is asked for one batch."""

    endpoint: Endpoint
    """Whom to ask, and for what."""
    health: Health
    """How it has been doing, in earlier batches too."""
    models: Models | None = None
    """What it lists; None: it has not been asked. Another server may answer at the same address in the next batch."""
    dialect: Dialect = "openai"
    """What it understands, by what it lists and whether it tells a version with that."""
    tells_versions: bool = True
    """Whether its last answer came with a version."""
    asked_at: int = 0
    """When it was asked last: the number of that request among all of the batch."""
    listing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is asked for what it lists, which one request does for all."""

    async def known(self, connections: Connections) -> Models:
        """Return what it lists, and ask it for that once."""
        async with self.listing:
            if self.models is None:
                models, version = await connections.send("GET", self.endpoint.url, "/v1/models", None, Models)
                self.models, self.dialect = models, _dialect(models, version)
            return self.models

    async def sampled(
        self, connections: Connections, body: dict[str, Any]
    ) -> tuple[openai_api.Completions, int | None]:
        """Return its answer to a request for completions, and the version of the weights that made them."""
        url, version, route = self.endpoint.url, self.endpoint.version, openai_api.ROUTES[self.dialect]
        answer, told = await connections.send("POST", url, route, body, openai_api.Completions)
        self.tells_versions = bool(told)
        return answer, version if version is not None else int(told) if told.isdecimal() else None

    def lacks(self, temperature: float) -> Iterator[str]:
        """Yield what training has to do without at this server, a sentence each; none before it has answered."""
        url = self.endpoint.url
        if self.models is not None and not self.models.are_of_vllm():
            own = ", ".join(sorted(WHOLE.keys() - set(PROTOCOL)))
            yield (
                f"{url} is no vLLM: its completions may lack their end token, which is not trained then; its own"
                f" defaults of {own} apply, if it has any: the protocol cannot turn them off"
            )
        if not self.tells_versions and self.endpoint.version is None:
            yield f"{url} does not tell which version of the weights made a completion"
        if not self.tells_versions and temperature != 1.0:
            yield (
                f"{url} has to give log-probabilities at temperature {temperature}, which it does not tell"
                " (vLLM: --logprobs-mode processed_logprobs)"
            )


class Servers:
    """Those that may be asked for one batch."""

    def __init__(self, servers: Sequence[Server]) -> None:
        assert servers, "no server to ask"
        self._servers, self._numbers = servers, itertools.count(1)

    def next(self, avoided: Collection[Server]) -> Server:
        """Return the one with the fewest requests under way, in turns where several have; a sick one if all are.

        Not one of `avoided`, of which there are fewer than servers.
        """
        left = [server for server in self._servers if server not in avoided]
        well = [server for server in left if server.health.is_well()]
        key: Callable[[Server], tuple[float, ...]] = _load if well else _rest
        found = min(well or left, key=key)
        found.asked_at = next(self._numbers)
        return found

    def another_is_well(self, server: Server, avoided: Collection[Server]) -> bool:
        """Tell whether one beside `server` and `avoided` is well."""
        others = (other for other in self._servers if other is not server and other not in avoided)
        return any(other.health.is_well() for other in others)

    def are_all_among(self, avoided: Collection[Server]) -> bool:
        """Tell whether none is left to ask."""
        return all(server in avoided for server in self._servers)

    def lacks(self, temperature: float) -> tuple[str, ...]:
        """Return what training has to do without, a sentence each."""
        return tuple(line for server in self._servers for line in server.lacks(temperature))


def _dialect(models: Models, version: str) -> Dialect:
    if not models.are_of_vllm():
        return "openai"
    return "bridge" if version else "vllm"


def _load(server: Server) -> tuple[float, ...]:
    return server.health.under_way, server.asked_at


def _rest(server: Server) -> tuple[float, ...]:
    return server.health.rests_until, *_load(server)
