"""Sample completions from an OpenAI-compatible server: token ids, log-probabilities and the version that made them.

Token ids come from the server, never from tokenising text again.

Not covered: rewards (`rewards.py`), retries, several servers.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from bridge.client import unreachable
from bridge.errors import ServerUnreachableError, UsageError
from bridge.protocol import VERSION_HEADER
from bridge.types import Completion, FinishReason

MAX_CONNECTIONS = 256
"""Requests under way at once; a process may open 1,024 files by default."""
REFUSED = (400, 422)


class _Logprobs(BaseModel):
    token_logprobs: tuple[FiniteFloat, ...]


class _Choice(BaseModel):
    index: int
    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs | None = None


class _Completions(BaseModel):
    choices: tuple[_Choice, ...]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: Annotated[tuple[_Model, ...], Field(min_length=1)]


Answer = TypeVar("Answer", bound=BaseModel)


class Sampler:
    """A pooled connection to one server, and how it samples."""

    def __init__(self, url: str, *, max_new_tokens: int, temperature: float, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._request = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        self._model: str | None = None

    def sample(
        self, prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int
    ) -> list[tuple[Completion, ...]]:
        """Return `num_samples` completions per prompt, all sampled at once.

        Raises:
            UsageError: the server refuses a request, such as one that is longer than its model allows.
        ServerUnreachableError: the server is gone, is unwell, or answers something else than what was asked for.
        """
        return asyncio.run(self._sample(prompts, num_samples, seed))

    async def _sample(
        self, prompts: Sequence[tuple[int, ...]], num_samples: int, seed: int
    ) -> list[tuple[Completion, ...]]:
        timeout = httpx.Timeout(self._timeout_s, pool=None)  # waiting for one's turn is no fault of the server
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits, trust_env=False) as http:
            if self._model is None:
                self._model = (await self._send(http, "GET", "/v1/models", None, _Models))[0].data[0].id
            first = seed * 1_000_003  # vLLM gives the i-th completion of a request the request's seed + i
            tasks = [
                self._group(http, prompt, num_samples, first + index * num_samples)
                for index, prompt in enumerate(prompts)
            ]
            return list(await asyncio.gather(*tasks))

    async def _group(
        self, http: httpx.AsyncClient, prompt: tuple[int, ...], num_samples: int, seed: int
    ) -> tuple[Completion, ...]:
        body = {**self._request, "model": self._model, "prompt": list(prompt), "n": num_samples, "seed": seed % 2**62}
        answer, version = await self._send(http, "POST", "/v1/completions", body, _Completions)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(num_samples)):
            raise unreachable(self._url, f"asked for {num_samples} completions, got {len(choices)}")
        return tuple(_completion(self._url, choice, version) for choice in choices)

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


def _completion(url: str, choice: _Choice, version: str) -> Completion:
    if choice.token_ids is None or choice.logprobs is None:
        raise ServerUnreachableError(
            f"the server at {url} returns no token ids with their log-probabilities",
            remedy="use bridge serve-vllm, or a vLLM of the supported range, which know `return_token_ids`",
        )
    if len(choice.token_ids) != len(choice.logprobs.token_logprobs):
        raise unreachable(
            url, f"{len(choice.token_ids)} tokens with {len(choice.logprobs.token_logprobs)} log-probabilities"
        )
    return Completion(
        token_ids=choice.token_ids,
        logprobs=choice.logprobs.token_logprobs,
        text=choice.text,
        finish_reason=choice.finish_reason,
        weight_version=int(version) if version.isdecimal() else None,
    )
