"""Sample completions from an OpenAI-compatible server: token ids, log-probabilities and the version that made them.

Token ids come from the server, never from tokenising text again.

Not covered: what is asked for and how an answer is read (`openai_api.py`), rewards (`rewards.py`), retries, several
servers.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from bridge.client import unreachable
from bridge.errors import UsageError
from bridge.protocol import VERSION_HEADER
from bridge.rollouts import openai_api
from bridge.rollouts.endpoint import Endpoint
from bridge.rollouts.openai_api import Completions, IdsOf, Models
from bridge.types import Completion

MAX_CONNECTIONS = 256
"""Requests under way at once; a process may open 1,024 files by default."""
REFUSED = (400, 422)

Answer = TypeVar("Answer", bound=BaseModel)


class Sampler:
    """A pooled connection to one server, and how it samples."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        max_new_tokens: int,
        temperature: float,
        timeout_s: float,
        ids_of: IdsOf | None = None,
    ) -> None:
        self._url, self._version, self._name = endpoint.url, endpoint.version, endpoint.model
        self._max_new_tokens, self._temperature, self._timeout_s = max_new_tokens, temperature, timeout_s
        self._ids_of = ids_of
        self._models: Models | None = None
        self._tells_versions = True

    def sample(
        self, prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int
    ) -> list[tuple[Completion, ...]]:
        """Return `num_samples` completions per prompt, all sampled at once.

        Raises:
            UsageError: the server refuses a request, such as one that is longer than its model allows, or tells no ids.
            ServerUnreachableError: the server is gone, is unwell, or answers something else than what was asked for.
        """
        return asyncio.run(self._sample(prompts, num_samples, seed))

    @property
    def lacks(self) -> tuple[str, ...]:
        """What training has to do without at this server, a sentence each; known once it has sampled."""
        if self._models is None:
            return ()
        sentences = []
        if not self._models.are_of_vllm():
            sentences.append(
                f"{self._url} is no vLLM: its completions may lack their end token, which is not trained then"
            )
        if not self._tells_versions and self._version is None:
            sentences.append(f"{self._url} does not tell which version of the weights made a completion")
        if not self._tells_versions and self._temperature != 1.0:
            sentences.append(
                f"{self._url} has to give log-probabilities at temperature {self._temperature}, which it does not tell"
                " (vLLM: --logprobs-mode processed_logprobs)"
            )
        return tuple(sentences)

    async def _sample(
        self, prompts: Sequence[tuple[int, ...]], num_samples: int, seed: int
    ) -> list[tuple[Completion, ...]]:
        timeout = httpx.Timeout(self._timeout_s, pool=None)  # waiting for one's turn is no fault of the server
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits, trust_env=False) as http:
            if self._models is None:
                self._models = (await self._send(http, "GET", "/v1/models", None, Models))[0]
            common = self._common(self._models)
            first = seed * 1_000_003  # vLLM gives the i-th completion of a request the request's seed + i
            tasks = [
                self._group(http, {**common, "prompt": list(prompt), "n": num_samples}, first + index * num_samples)
                for index, prompt in enumerate(prompts)
            ]
            return list(await asyncio.gather(*tasks))

    def _common(self, models: Models) -> dict[str, Any]:
        fields = openai_api.request(
            max_new_tokens=self._max_new_tokens, temperature=self._temperature, of_vllm=models.are_of_vllm()
        )
        return {**fields, "model": self._name or models.data[0].id}

    async def _group(self, http: httpx.AsyncClient, body: dict[str, Any], seed: int) -> tuple[Completion, ...]:
        answer, told = await self._send(http, "POST", "/v1/completions", {**body, "seed": seed % 2**62}, Completions)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(body["n"])):
            raise unreachable(self._url, f"asked for {body['n']} completions, got {len(choices)}")
        self._tells_versions = bool(told)
        version = self._version if self._version is not None else int(told) if told.isdecimal() else None
        return tuple(openai_api.completion(self._url, choice, version, self._ids_of) for choice in choices)

    async def _send(
        self, http: httpx.AsyncClient, method: str, route: str, body: Any, kind: type[Answer]
    ) -> tuple[Answer, str]:
        """Return the answer, and the version of the weights that made it as the server writes it."""
        try:
            response = await http.request(method, route, json=body)
        except (httpx.TransportError, httpx.DecodingError, httpx.InvalidURL) as error:
            raise unreachable(self._url, f"{type(error).__name__}: {error}") from error
        if response.status_code in REFUSED:
            raise UsageError(
                f"the server at {self._url} refuses the request: {_words(response)}",
                remedy="shorten the prompts, lower --max-new-tokens, or serve with a larger --max-model-len",
            )
        if not response.is_success:
            raise unreachable(self._url, f"{route} answered {response.status_code}: {_words(response)}")
        try:
            return kind.model_validate_json(response.content), response.headers.get(VERSION_HEADER, "")
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            raise unreachable(self._url, f"{route} answered nonsense: {place or 'body'}: {fault['msg']}") from error


def _words(response: httpx.Response) -> str:
    """Return the server's own message, on one line."""
    try:
        words = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        words = response.text
    return " ".join(words.split())[:300]
