"""Sample completions from OpenAI-compatible servers: token ids, log-probabilities and the versions that made them.

Each prompt gets exactly one accepted answer, however many tries failed before it. The same call sends the same seeds,
whichever server answers.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from bridge.config import SamplingConfig
from bridge.rollouts import openai_api
from bridge.rollouts.connections import Connections, RequestFailed
from bridge.rollouts.event_loop import EventLoop
from bridge.rollouts.openai_api import IdsOf
from bridge.rollouts.servers import Health, Server, Servers
from bridge.server.endpoint import Endpoint
from bridge.types import Completion

Result = TypeVar("Result")
Sleep = Callable[[float], Awaitable[None]]
Arrival = tuple[int, tuple[Completion, ...]]
"""The index of a prompt, and its completions."""
AHEAD = 2
"""Prompts begun and not yet yielded, for each request that may be in flight: a caller that is busy for a moment does
not stall the servers, and a slow one is not flooded."""
FIRST_WAIT_S = 0.5
"""Longest wait before the first retry, doubled for each further one up to the limit. With the default number of retries
that is less than 8 s in all: whoever runs a server wants to know soon that it is dead."""
WAIT_LIMIT_S = 8.0
CALL_SEEDS = 1_000_003
"""Between the first seeds of one call and the next: more than any call has completions."""
NUM_CALLS = 2**62 // CALL_SEEDS
"""Calls with seeds of their own: a completion's seed stays below 2**63."""
RUN_CALLS = int(NUM_CALLS * (5**0.5 - 1) / 2)
"""Calls between two neighboring run seeds: the golden section of all calls, whose multiples keep the largest distance
from one another that so many points can."""


@dataclass
class _Opened:
    """What lives from the first call until the sampler is closed."""

    turns: asyncio.Semaphore
    """Limits the requests in flight."""
    loop: EventLoop = field(default_factory=EventLoop)
    connections: Connections = field(default_factory=Connections)


def seed_of(run_seed: int, call: int) -> int:
    """Return the seed of a run's call number `call`: runs with different seeds share none.

    The first thousand run seeds are 10**9 calls apart, the first million 10**6.
    """
    return (run_seed * RUN_CALLS + call) % NUM_CALLS


class Sampler:
    """Samples with the same parameters throughout a run, over connections that are kept."""

    def __init__(
        self,
        *,
        max_new_tokens: int,
        temperature: float,
        timeout_s: float,
        max_retries: int = 4,
        max_concurrency: int = 256,
        ids_of: IdsOf | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Open no connection yet.

        `timeout_s` limits one try of a request. `ids_of` looks up tokens for servers that return them as text.
        """
        self.num_retries = 0
        """Requests that were sent again, in all calls so far."""
        self._max_new_tokens, self._temperature, self._timeout_s = max_new_tokens, temperature, timeout_s
        self._max_retries, self._max_concurrency = max_retries, max_concurrency
        self._ids_of, self._sleep = ids_of, sleep
        self._health: dict[str, Health] = {}
        self._servers: Servers | None = None
        self._opened: _Opened | None = None

    @classmethod
    def of(cls, config: SamplingConfig, *, ids_of: IdsOf) -> Self:
        """Return the sampler of a run."""
        return cls(
            max_new_tokens=config.longest,
            temperature=config.temperature,
            timeout_s=config.request_timeout_s,
            max_retries=config.max_retries,
            max_concurrency=config.max_concurrency,
            ids_of=ids_of,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is in flight, and close the connections; a later call opens new ones."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.loop.close(opened.connections.aclose())

    @property
    def lacks(self) -> tuple[str, ...]:
        """What training lacks with the servers of the last call, a sentence each."""
        return () if self._servers is None else self._servers.lacks(self._temperature)

    def sample(
        self, endpoints: Sequence[Endpoint], prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int
    ) -> list[tuple[Completion, ...]]:
        """Return `num_samples` completions per prompt, in the order of the prompts.

        Raises:
            UsageError: a server rejects a request, such as one that is too long for its model, or returns no token ids.
            ServerUnreachableError: no server answers a request properly, however often it is retried.
        """

        async def gathered() -> dict[int, tuple[Completion, ...]]:
            groups = self.stream(endpoints, prompts, num_samples=num_samples, seed=seed)
            return {index: group async for index, group in groups}

        found = self.run(gathered())
        return [found[index] for index in range(len(prompts))]

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine that may `stream`; Ctrl-C cancels it. When it has ended, no request is in flight."""
        return self._open().loop.run(coroutine)

    async def stream(
        self, endpoints: Sequence[Endpoint], prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int
    ) -> AsyncIterator[Arrival]:
        """Yield each prompt's index and its `num_samples` completions as they arrive, in a coroutine under `run`.

        Raises:
            BridgeError: as `sample`; the other requests are cancelled then.
        """
        opened = self._open()
        servers = Servers([Server(one, self._health.setdefault(one.url, Health())) for one in endpoints])
        self._servers = servers
        first = seed * CALL_SEEDS  # vLLM gives the i-th completion of a request the request's seed + i

        async def arrival(index: int, prompt: tuple[int, ...]) -> Arrival:
            body = {"prompt": prompt, "n": num_samples, "seed": (first + index * num_samples) % 2**62}
            return index, await self._completions(opened, servers, body)

        arrivals = (arrival(index, prompt) for index, prompt in enumerate(prompts))
        async with aclosing(opened.loop.each(arrivals, at_once=AHEAD * self._max_concurrency)) as groups:
            async for group in groups:
                yield group

    def _open(self) -> _Opened:
        if self._opened is None:
            self._opened = _Opened(asyncio.Semaphore(self._max_concurrency))
        return self._opened

    async def _completions(self, opened: _Opened, servers: Servers, body: dict[str, Any]) -> tuple[Completion, ...]:
        """Return the completions of one prompt, retrying while there are tries left."""
        tries = _Tries(servers, self._max_retries)
        while True:
            try:
                async with opened.turns:
                    return await self._try(opened.connections, tries.next_server(), body)
            except RequestFailed as failure:
                delay_s = tries.wait_after(failure)
            await self._sleep(delay_s)
            self.num_retries += 1

    async def _try(self, connections: Connections, server: Server, body: dict[str, Any]) -> tuple[Completion, ...]:
        with server.health.watched():
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._request(connections, server, body)
            except TimeoutError as error:
                raise RequestFailed(f"no answer within {self._timeout_s:g} s", "elsewhere") from error

    async def _request(self, connections: Connections, server: Server, body: dict[str, Any]) -> tuple[Completion, ...]:
        models = await server.list_models(connections)
        fields = openai_api.request(server.dialect, max_new_tokens=self._max_new_tokens, temperature=self._temperature)
        name = server.endpoint.model or models[0].id
        answer, version = await server.complete(connections, {**fields, **body, "model": name})
        choices = openai_api.in_order(answer, body["n"])
        url = server.endpoint.url
        return tuple(openai_api.completion(url, choice, version, self._ids_of) for choice in choices)


class _Tries:
    """The tries of one request, at all servers together."""

    def __init__(self, servers: Servers, max_retries: int) -> None:
        self._servers, self._max_retries = servers, max_retries
        self._slow: set[Server] = set()
        """Servers that took too long for this request, and would again."""
        self._last: Server | None = None
        self._num_failed = self._num_unusable = 0

    def next_server(self) -> Server:
        self._last = self._servers.next(self._slow)
        return self._last

    def wait_after(self, failure: RequestFailed) -> float:
        """Return how many seconds to wait before the next try.

        Raises:
            ServerUnreachableError: there is no next try.
        """
        assert self._last is not None, "nothing was tried"
        self._num_failed += 1
        self._num_unusable += failure.retry == "once"
        if failure.retry == "elsewhere":
            self._slow.add(self._last)
        is_used_up = self._num_failed > self._max_retries or not self._servers.beside(self._slow)
        if failure.retry == "never" or self._num_unusable > 1 or is_used_up:
            raise failure.final(self._last.endpoint.url, self._num_failed) from failure
        others = self._servers.beside({*self._slow, self._last})
        requested_s = 0.0 if any(other.health.is_well() for other in others) else failure.retry_after_s
        return requested_s + wait_s(self._num_failed)


def wait_s(num_failed: int) -> float:
    """Return how long to wait after a request has failed `num_failed` times.

    Source: "full jitter" of Marc Brooker, Exponential Backoff And Jitter (AWS Architecture Blog, 2015).
    """
    longest = min(WAIT_LIMIT_S, FIRST_WAIT_S * 2 ** min(num_failed - 1, 16))
    return random.uniform(0.0, longest)  # noqa: S311  a delay, not a secret
