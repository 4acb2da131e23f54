"""Sample completions from an OpenAI-compatible server: token ids, log-probabilities and the version that made them.

Token ids come from the server, never from tokenising text again.

Not covered: rewards (`rewards.py`), retries, several servers.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from bridge.client import unreachable
from bridge.errors import ServerUnreachableError
from bridge.protocol import VERSION_HEADER
from bridge.types import Completion

FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


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

    def sample(self, prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int) -> list[tuple[Completion, ...]]:
        """Return `num_samples` completions per prompt, all sampled at once.

        Raises:
            ServerUnreachableError: the server is gone, refuses, or answers with less than was asked for.
        """
        return asyncio.run(self._sample(prompts, num_samples, seed))

    async def _sample(
        self, prompts: Sequence[tuple[int, ...]], num_samples: int, seed: int
    ) -> list[tuple[Completion, ...]]:
        limits = httpx.Limits(max_connections=len(prompts) + 1)
        async with httpx.AsyncClient(base_url=self._url, timeout=self._timeout_s, limits=limits) as http:
            self._model = self._model or await self._served_name(http)
            tasks = [
                self._group(http, prompt, num_samples, seed * 1_000_003 + index) for index, prompt in enumerate(prompts)
            ]
            return list(await asyncio.gather(*tasks))

    async def _served_name(self, http: httpx.AsyncClient) -> str:
        answer = await self._send(http, "GET", "/v1/models", None)
        name: str = answer.json()["data"][0]["id"]
        return name

    async def _group(
        self, http: httpx.AsyncClient, prompt: tuple[int, ...], num_samples: int, seed: int
    ) -> tuple[Completion, ...]:
        body = {
            **self._request, "model": self._model, "prompt": list(prompt), "n": num_samples, "seed": seed % 2**63
        }
        answer = await self._send(http, "POST", "/v1/completions", body)
        choices = answer.json()["choices"]
        if len(choices) != num_samples:
            raise unreachable(self._url, f"asked for {num_samples} completions, got {len(choices)}")
        version = answer.headers.get(VERSION_HEADER, "")
        return tuple(
            _completion(self._url, choice, version) for choice in sorted(choices, key=lambda choice: choice["index"])
        )

    async def _send(self, http: httpx.AsyncClient, method: str, route: str, body: Any) -> httpx.Response:
        try:
            answer = await http.request(method, route, json=body)
        except httpx.TransportError as error:
            raise unreachable(self._url, f"{type(error).__name__}: {error}") from error
        if not answer.is_success:
            raise unreachable(self._url, f"{route} answered {answer.status_code}: {answer.text[:300]}")
        return answer


def _completion(url: str, choice: dict[str, Any], version: str) -> Completion:
    token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if token_ids is None or logprobs is None or len(token_ids) != len(logprobs):
        raise ServerUnreachableError(
            f"the server at {url} returns no token ids with their log-probabilities",
            remedy="use bridge serve-vllm, or a vLLM of the supported range, which know `return_token_ids`",
        )
    return Completion(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        weight_version=int(version) if version.isdecimal() else None,
    )
