"""One prompt: asked for at one server or another until its completions are there, or no try is left.

Not covered: many prompts (`sampler.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bridge.rollouts import openai_api
from bridge.rollouts.connections import Connections
from bridge.rollouts.faults import Fault
from bridge.rollouts.openai_api import IdsOf
from bridge.rollouts.retries import Tries
from bridge.rollouts.servers import Server, Servers
from bridge.types import Completion

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How the prompts of one batch are asked for."""

    max_new_tokens: int
    """Longest completion in tokens."""
    temperature: float
    """Sampling temperature."""
    timeout_s: float
    """Seconds until one try is given up."""
    max_retries: int
    """How often the request of one prompt is sent again."""
    ids_of: IdsOf | None
    """The ids of a token's text, for servers that tell no ids."""
    sleep: Sleep
    """What waits between two tries."""
    turns: asyncio.Semaphore
    """As many as requests may be under way."""
    connections: Connections
    """What sends them."""
    servers: Servers
    """Whom to ask."""
    retrying: Callable[[], None]
    """Hears of every try but the first of each prompt."""

    async def group(self, prompt: tuple[int, ...], *, num_samples: int, seed: int) -> tuple[Completion, ...]:
        """Return `num_samples` completions of one prompt, of which the i-th has the seed `seed` + i.

        Raises:
            UsageError: a server refuses the request, or tells no token ids.
            ServerUnreachableError: the tries are used up.
        """
        body = {"prompt": prompt, "n": num_samples, "seed": seed}
        tries = Tries(self.servers, self.max_retries)
        while True:
            try:
                return await self._once(tries, body)
            except Fault as fault:
                delay_s = tries.after(fault)
            await self.sleep(delay_s)
            self.retrying()

    async def _once(self, tries: Tries, body: dict[str, Any]) -> tuple[Completion, ...]:
        async with self.turns:
            server = tries.next_server()
            with server.health.watched():
                try:
                    async with asyncio.timeout(self.timeout_s):
                        return await self._asked(server, body)
                except TimeoutError as error:
                    raise Fault(f"no answer within {self.timeout_s:g} s", "elsewhere") from error

    async def _asked(self, server: Server, body: dict[str, Any]) -> tuple[Completion, ...]:
        models = await server.known(self.connections)
        fields = openai_api.request(server.dialect, max_new_tokens=self.max_new_tokens, temperature=self.temperature)
        name = server.endpoint.model or models.data[0].id
        answer, version = await server.sampled(self.connections, {**fields, **body, "model": name})
        choices = openai_api.in_order(answer, body["n"])
        return tuple(openai_api.completion(server.endpoint.url, choice, version, self.ids_of) for choice in choices)
