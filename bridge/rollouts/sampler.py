"""Sample completions from OpenAI-compatible servers, with token ids, log-probabilities and versions of the weights.

Exactly one response is accepted for each prompt, no matter how many tries failed before. Repeating a call sends the
same seeds, regardless of which server answers.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any

from bridge.config import SamplingConfig
from bridge.config.choices import flag
from bridge.config.rollouts import DEFAULT_NEW_TOKENS
from bridge.core.concurrency import gather_or_cancel
from bridge.errors import UsageError
from bridge.rollouts import openai_api
from bridge.rollouts.distribution import filters
from bridge.rollouts.event_loop import EventLoop
from bridge.rollouts.openai_api import Dialect, RequestFailed
from bridge.rollouts.servers import Connections, Health, Server, next_of
from bridge.rollouts.vocabulary import Vocabulary
from bridge.server.endpoint import Endpoint
from bridge.types import Completion

logger = logging.getLogger(__name__)

AHEAD = 2
"""Prompts admitted per request slot. A prompt that is retried waits behind no more than these for a slot."""
FIRST_WAIT_S = 0.5
"""Longest wait before the first retry, doubled for each further retry up to the limit. With the default number of
retries, the total is less than 8 s, so a dead server is reported soon."""
WAIT_LIMIT_S = 8.0
CALL_SEEDS = 1_000_003
"""Distance between the first seeds of two consecutive calls: larger than the number of completions in any call."""
NUM_CALLS = 2**62 // CALL_SEEDS
"""Number of calls with distinct seeds: a completion's seed stays below 2**63."""
RUN_CALLS = int(NUM_CALLS * (5**0.5 - 1) / 2)
"""Number of calls between two consecutive run seeds: the golden section of `NUM_CALLS`, whose multiples are spread as
far apart as possible."""


def seed_of(run_seed: int, call: int) -> int:
    """Return the seed of call number `call` in a run. Runs with different seeds have different call seeds.

    The first thousand run seeds are 10**9 calls apart, the first million 10**6.
    """
    return (run_seed * RUN_CALLS + call) % NUM_CALLS


def fit_completions(sampling: SamplingConfig, longest: int | None) -> SamplingConfig:
    """Return the same as `fitting`, and log if the default had to be shortened.

    Raises:
        UsageError: see `fitting`.
    """
    fitted = fitting(sampling, longest)
    if fitted is not sampling:
        logger.info(
            f"--max-new-tokens defaults to {fitted.max_new_tokens}, half of the server's longest sequence of {longest}"
            " tokens"
        )
    return fitted


def fitting(sampling: SamplingConfig, longest: int | None) -> SamplingConfig:
    """Return `sampling` with completions short enough for a server whose longest sequence has `longest` tokens.

    By default, half of the sequence is left for the prompt. None means that the length is unknown.

    Raises:
        UsageError: `max_new_tokens` leaves no room for a prompt.
    """
    chosen = sampling.max_new_tokens
    if longest is None:
        return sampling
    half = max(longest // 2, 1)
    if chosen is not None and chosen >= longest:
        raise UsageError(
            f"--max-new-tokens {chosen} leaves no room for a prompt: the server's longest sequence, prompt and"
            f" completion, has {longest} tokens",
            hint=f"--max-new-tokens {half}, or serve with a larger --max-model-len",
        )
    if chosen is not None or half >= DEFAULT_NEW_TOKENS:
        return sampling
    return sampling.model_copy(update={"max_new_tokens": half})


class Sampler(AbstractContextManager["Sampler"]):
    """Samples with the same parameters throughout a run, over persistent connections."""

    def __init__(
        self,
        config: SamplingConfig,
        *,
        vocabulary: Vocabulary | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create the sampler without connecting. `vocabulary` describes the served model's tokens.

        Raises:
            UsageError: a text in `config.stop` can never match.
        """
        self.num_retries = 0
        """Requests that were retried, in all calls so far."""
        self.config = config
        self.vocabulary = vocabulary or Vocabulary()
        self.vocabulary.check_stop(config.stop)
        self._sleep = sleep
        self._health: dict[str, Health] = {}
        self._servers: Sequence[Server] = ()
        self._turns = asyncio.Semaphore(config.max_concurrency)
        self._ahead = asyncio.Semaphore(AHEAD * config.max_concurrency)
        self.loop = EventLoop()
        """Runs coroutines that await `one`; tasks that a coroutine leaves behind keep running."""
        self._connections = Connections()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel the requests in flight, run `last`, and close the connections."""

        async def end() -> None:
            try:
                if last is not None:
                    await last()
            finally:
                await self._connections.aclose()

        self.loop.close(end())

    @property
    def lacks(self) -> tuple[str, ...]:
        """Capabilities that training needs but the servers of the last call lack, one sentence each."""
        lines = [line for server in self._servers for line in server.lacks(self.config.temperature)]
        if self.vocabulary.end_ids:
            lines += [
                f"{server.endpoint.url} does not end completions at {self.vocabulary.end_of_turn}, which ends a turn in"
                " the model's chat template: OpenAI's protocol has no field to request it"
                for server in self._servers
                if server.models and server.dialect == "openai"
            ]
        return tuple(lines)

    def sample(
        self,
        endpoints: Sequence[Endpoint],
        prompts: Sequence[tuple[int, ...]],
        *,
        num_samples: int,
        seed: int,
        are_chat: Sequence[bool] = (),
    ) -> list[tuple[Completion, ...]]:
        """Return `num_samples` completions per prompt, in the prompts' order; `are_chat` has `is_chat` for each."""
        servers = self.servers_at(endpoints)
        requests = (
            self.one(servers, prompt, num_samples=num_samples, seed=seed, index=index, is_chat=is_chat)
            for index, (prompt, is_chat) in enumerate(zip(prompts, are_chat or repeat(False), strict=False))
        )
        return self.loop.run(gather_or_cancel(requests))

    def servers_at(self, endpoints: Sequence[Endpoint]) -> Sequence[Server]:
        """Return the servers at these endpoints, for the requests that follow."""
        self._servers = [Server(endpoint, self._health.setdefault(endpoint.url, Health())) for endpoint in endpoints]
        return self._servers

    async def one(
        self,
        servers: Sequence[Server],
        prompt: tuple[int, ...],
        *,
        num_samples: int,
        seed: int,
        index: int = 0,
        is_chat: bool = False,
        config: SamplingConfig | None = None,
        **other: Any,
    ) -> tuple[Completion, ...]:
        """Return `num_samples` completions of a prompt; `index` numbers the prompts that share a seed.

        With `is_chat`, completions also stop at the end of a turn. `config` replaces the run's configuration for this
        request. `other` are sampling parameters that override the configuration's; a `stop` is added to its texts.

        Raises:
            RejectedRequestError: a server rejects the prompt, or the model has no embedding for one of its tokens.
        """
        config = config or self.config
        self.vocabulary.check_ids(prompt, lambda: "the prompt")
        first = seed * CALL_SEEDS + index * num_samples  # vLLM gives the i-th completion of a request its seed + i
        stop = {
            "stop": [*dict.fromkeys((*config.stop, *other.pop("stop", ())))],
            "stop_token_ids": [*(self.vocabulary.end_ids if is_chat else ())],
        }
        body = {"prompt": prompt, "n": num_samples, "seed": first % 2**62, **other}
        body |= {name: values for name, values in stop.items() if values}
        async with self._ahead:
            return await self._completions(servers, body, config)

    async def longest(self, server: Server) -> int | None:
        """Return a server's longest sequence in tokens; None if it reports none, or does not answer."""
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                models = await server.list_models(self._connections)
        except (RequestFailed, TimeoutError):  # the next request reports and retries this
            return None
        return next((model.max_model_len for model in models if model.max_model_len), None)

    async def _completions(
        self, servers: Sequence[Server], body: dict[str, Any], config: SamplingConfig
    ) -> tuple[Completion, ...]:
        """Return the completions of one prompt, with retries."""
        left = list(servers)
        """Servers that have not timed out on this request."""
        num_failed = num_unusable = 0
        while True:
            try:
                async with self._turns:
                    server = next_of(left)
                    return await self._try(server, body, config)
            except RequestFailed as failure:
                num_failed += 1
                num_unusable += failure.retry == "once"
                others = [candidate for candidate in left if candidate is not server]
                left = others if failure.retry == "elsewhere" else left
                is_used_up = num_failed > config.max_retries or num_unusable > 1 or not left
                if failure.retry == "never" or is_used_up:
                    raise failure.final(server.endpoint.url, num_failed) from failure
                requested_s = 0.0 if any(other.health.is_well() for other in others) else failure.retry_after_s
            await self._sleep(requested_s + wait_s(num_failed))
            self.num_retries += 1

    async def _try(self, server: Server, body: dict[str, Any], config: SamplingConfig) -> tuple[Completion, ...]:
        limit_s = config.answer_limit_s
        with server.health.watched():
            try:
                async with self.loop.timeout(limit_s):
                    return await self._request(server, body, config)
            except TimeoutError as error:
                raise RequestFailed(f"no answer within {limit_s:g} s", "elsewhere") from error

    async def _request(self, server: Server, body: dict[str, Any], config: SamplingConfig) -> tuple[Completion, ...]:
        models = await server.list_models(self._connections)
        if server.dialect != "bridge" and "images" in body:
            raise UsageError(
                f"images need a vLLM that Bridge has patched, and {server.endpoint.url} is not one",
                hint="sample from a server that Bridge started with shared weights (bridge run, bridge serve-vllm)",
            )
        if server.dialect != "bridge" and "prompt_logprobs" in body:
            raise UsageError(
                f"prompt log-probabilities need a vLLM that Bridge has patched, and {server.endpoint.url} is not one",
                hint="sample from a server that Bridge started with shared weights (bridge run, bridge serve-vllm)",
            )
        if server.dialect != "bridge" and (chosen := filters(config)):
            given = " ".join(f"{flag(name)} {value:g}" for name, value in chosen.items())
            raise UsageError(
                f"{given} needs a server that reports which tokens were kept, but {server.endpoint.url} does not",
                hint="sample from a server that Bridge started with shared weights (bridge serve-vllm), or leave it"
                " out",
            )
        body = self._ended(server.dialect, body)
        fields = openai_api.request(server.dialect, config, has_stop="stop" in body)
        if server.endpoint.reports_experts:
            fields["experts"] = 0
        name = server.endpoint.model or models[0].id
        images = {"images": openai_api.sent(body["images"])} if "images" in body else {}  # large: encode it last
        answer, version = await server.complete(self._connections, {**fields, **body, **images, "model": name})
        choices = openai_api.in_order(answer, body["n"])
        url = server.endpoint.url
        num_prompt = len(body["prompt"]) - body.get("experts", 0)
        ids_of = self.vocabulary.ids_of
        made = tuple(openai_api.completion(url, choice, version, ids_of, num_prompt) for choice in choices)
        for completion in made:
            if "prompt_logprobs" in body and len(completion.prompt_logprobs) != len(body["prompt"]):
                received = len(completion.prompt_logprobs)
                raise RequestFailed(
                    f"a prompt of {len(body['prompt'])} tokens with {received} log-probabilities", "once"
                )
            self.vocabulary.check_ids(completion.token_ids, lambda: f"a completion of {url}")
        return made

    def _ended(self, dialect: Dialect, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request that stops at special tokens by their ids; OpenAI's protocol has no field for these."""
        texts = body.get("stop", ())
        special = self.vocabulary.special
        stop = {"stop": [*texts]}
        if dialect != "openai":
            ids = [*body.get("stop_token_ids", ()), *(special[text] for text in texts if text in special)]
            stop = {"stop": [text for text in texts if text not in special], "stop_token_ids": ids}
        kept = {name: value for name, value in body.items() if name not in ("stop", "stop_token_ids")}
        return kept | {name: values for name, values in stop.items() if values}


def wait_s(num_failed: int) -> float:
    """Return how long to wait before retrying a request that has failed `num_failed` times.

    Source: "full jitter" of Marc Brooker, Exponential Backoff And Jitter (AWS Architecture Blog, 2015).
    """
    longest = min(WAIT_LIMIT_S, FIRST_WAIT_S * 2 ** min(num_failed - 1, 16))
    return random.uniform(0.0, longest)  # noqa: S311  a delay, not a secret
