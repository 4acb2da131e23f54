"""Sample completions from OpenAI-compatible servers: token ids, log-probabilities and the version that made them.

Every prompt has one answer that is accepted, whatever was sent before it and failed; the same call asks for the same
seeds, whichever server answers.

Not covered: how one prompt is asked for (`asking.py`), and what is made of the answer (`openai_api.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from bridge.rollouts.asking import Asking, Sleep
from bridge.rollouts.connections import Connections
from bridge.rollouts.event_loop import EventLoop
from bridge.rollouts.openai_api import IdsOf
from bridge.rollouts.servers import Health, Server, Servers
from bridge.server.endpoint import Endpoint
from bridge.types import Completion

Result = TypeVar("Result")
Arrival = tuple[int, tuple[Completion, ...]]
"""The index of a prompt, and its completions."""
AHEAD = 2
"""Prompts that are asked for or whose completions wait to be taken, for each request that may be under way: a caller
who is busy for a moment keeps no server waiting, and one who is slow is not flooded."""
CALL_SEEDS = 1_000_003
"""Between the first seeds of one call and the next: more than any call has completions."""
NUM_CALLS = 2**62 // CALL_SEEDS
"""Calls with seeds of their own: a completion's seed stays below 2**63."""
RUN_CALLS = int(NUM_CALLS * (5**0.5 - 1) / 2)
"""Calls between two neighbouring run seeds: the golden section of all calls, whose multiples keep the largest distance
from one another that so many points can."""


@dataclass
class _Opened:
    """What lasts from the first call until the sampler is closed."""

    turns: asyncio.Semaphore
    """As many as requests may be under way."""
    loop: EventLoop = field(default_factory=EventLoop)
    connections: Connections = field(default_factory=Connections)


def seed_of(run_seed: int, call: int) -> int:
    """Return the seed of a run's call number `call`: runs with different seeds share none.

    The first thousand run seeds are 10**9 calls apart, the first million 10**6.
    """
    return (run_seed * RUN_CALLS + call) % NUM_CALLS


class Sampler:
    """How completions are sampled, over connections that are kept; made once per run."""

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
        self.num_retries = 0
        """Requests that were sent again, in all calls so far."""
        self._max_new_tokens, self._temperature, self._timeout_s = max_new_tokens, temperature, timeout_s
        self._max_retries, self._max_concurrency = max_retries, max_concurrency
        self._ids_of, self._sleep = ids_of, sleep
        self._health: dict[str, Health] = {}
        self._servers: Servers | None = None
        self._opened: _Opened | None = None

    def __enter__(self) -> Self:
        """Use the connections in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """End what is under way, and close the connections; a later call opens new ones."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.loop.close(opened.connections.aclose())

    @property
    def lacks(self) -> tuple[str, ...]:
        """What training has to do without at the servers of the last call, a sentence each."""
        return () if self._servers is None else self._servers.lacks(self._temperature)

    def sample(
        self, endpoints: Sequence[Endpoint], prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int
    ) -> list[tuple[Completion, ...]]:
        """Return `num_samples` completions per prompt, in the order of the prompts.

        Raises:
            UsageError: a server refuses a request, such as one that is longer than its model allows, or tells no ids.
            ServerUnreachableError: no server answers a request as it should, however often it is asked.
        """

        async def gathered() -> dict[int, tuple[Completion, ...]]:
            groups = self.stream(endpoints, prompts, num_samples=num_samples, seed=seed)
            return {index: group async for index, group in groups}

        found = self.run(gathered())
        return [found[index] for index in range(len(prompts))]

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine that may `stream`; Ctrl-C cancels it. No request is under way once it has ended."""
        return self._open().loop.run(coroutine)

    async def stream(
        self, endpoints: Sequence[Endpoint], prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int
    ) -> AsyncIterator[Arrival]:
        """Yield each prompt's index and its `num_samples` completions as they arrive, in a coroutine under `run`.

        Raises:
            BridgeError: as `sample`; the other requests are ended then.
        """
        opened, asking = self._open(), self._asking(endpoints)
        first = seed * CALL_SEEDS  # vLLM gives the i-th completion of a request the request's seed + i

        async def arrival(index: int, prompt: tuple[int, ...]) -> Arrival:
            seed = (first + index * num_samples) % 2**62
            return index, await asking.group(prompt, num_samples=num_samples, seed=seed)

        arrivals = (arrival(index, prompt) for index, prompt in enumerate(prompts))
        async with aclosing(opened.loop.each(arrivals, at_once=AHEAD * self._max_concurrency)) as groups:
            async for group in groups:
                yield group

    def _open(self) -> _Opened:
        if self._opened is None:
            self._opened = _Opened(asyncio.Semaphore(self._max_concurrency))
        return self._opened

    def _asking(self, endpoints: Sequence[Endpoint]) -> Asking:
        opened = self._open()
        self._servers = Servers([Server(one, self._health.setdefault(one.url, Health())) for one in endpoints])
        return Asking(
            max_new_tokens=self._max_new_tokens,
            temperature=self._temperature,
            timeout_s=self._timeout_s,
            max_retries=self._max_retries,
            ids_of=self._ids_of,
            sleep=self._sleep,
            turns=opened.turns,
            connections=opened.connections,
            servers=self._servers,
            retrying=self._count,
        )

    def _count(self) -> None:
        self.num_retries += 1
