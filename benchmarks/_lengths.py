"""Completions with prescribed lengths, the same for both sides of `grpo.py`: each completion has its own cap.

vLLM applies a request's limit to all of its completions. Imported by a server as `--middleware
benchmarks._lengths.Capped`, this module gives each completion its own limit instead, which depends on the prompt and
the completion's index. A client that requests completions one by one gets the same limits, in order of its requests.

Source: `ParentRequest` in `vllm/v1/engine/parallel_sampling.py`, vLLM 0.26 to 0.33.
"""

import json
import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

VARIABLE = "BENCHMARK_LENGTHS"
"""Environment variable with the lengths, for the server."""
MIDDLEWARE = "benchmarks._lengths.Capped"
"""Name by which vLLM's `--middleware` imports this module."""
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Lognormal:
    """Lengths in tokens with a lognormal distribution, up to a cap."""

    median: float
    sigma: float
    """Standard deviation of the logarithms."""
    cap: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "lognormal:MEDIAN:SIGMA:CAP".

        Raises:
            ValueError: the text has a different form.
        """
        kind, *numbers = text.split(":")
        if kind != "lognormal" or len(numbers) != 3:
            raise ValueError(f"{text!r} is not lognormal:MEDIAN:SIGMA:CAP")
        parsed = cls(float(numbers[0]), float(numbers[1]), int(numbers[2]))
        if not (parsed.median >= 1 and parsed.sigma >= 0 and parsed.cap >= 1):
            raise ValueError(f"{text!r}: MEDIAN and CAP are at least 1 token, and SIGMA is at least 0")
        return parsed

    def of(self, prompt: Sequence[int], number: int) -> int:
        """Return the length of completion `number` of a prompt; it is deterministic."""
        chance = random.Random(f"{list(prompt)}/{number}")  # noqa: S311  a length, not a secret
        return min(max(round(chance.lognormvariate(math.log(self.median), self.sigma)), 1), self.cap)

    def of_each(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return one completion's length per prompt; repetitions of a prompt are its successive completions."""
        numbers: Counter[tuple[int, ...]] = Counter()
        lengths = []
        for prompt in map(tuple, prompts):
            lengths.append(self.of(prompt, numbers[prompt]))
            numbers[prompt] += 1
        return lengths


def limit(lengths: Lognormal) -> None:
    """Patch this process's vLLM to give each completion its own limit."""
    from vllm.v1.engine.parallel_sampling import ParentRequest  # noqa: PLC0415  TRL's side has none of it

    begin, child = ParentRequest.__init__, ParentRequest._get_child_sampling_params

    @wraps(begin)
    def remember(self: Any, request: Any) -> None:
        begin(self, request)
        self.prompt = tuple(request.prompt_token_ids)

    @wraps(child)
    def limited(self: Any, index: int) -> Any:
        sampling = copy(child(self, index))  # without a seed, all completions share one object
        sampling.max_tokens = min(sampling.max_tokens, lengths.of(self.prompt, index))
        return sampling

    ParentRequest.__init__ = remember
    ParentRequest._get_child_sampling_params = limited


class Capped:
    """Middleware that lowers `max_tokens` in requests for a single completion."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._numbers: Counter[tuple[int, ...]] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if VARIABLE not in os.environ or scope.get("path") != COMPLETIONS:
            await self._app(scope, receive, send)
            return
        message = {"more_body": True}
        body = b""
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        capped = iter([{"type": "http.request", "body": json.dumps(self._capped(json.loads(body))).encode()}])

        async def receive_capped() -> Any:
            return next(capped, None) or await receive()

        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        await self._app({**scope, "headers": headers}, receive_capped, send)

    def _capped(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("n", 1) > 1:  # `limit` handles these
            return request
        prompt = tuple(request["prompt"])
        number = self._numbers[prompt]
        self._numbers[prompt] += 1
        cap = Lognormal.parse(os.environ[VARIABLE]).of(prompt, number)
        return {**request, "max_tokens": min(request["max_tokens"], cap)}


if VARIABLE in os.environ:
    limit(Lognormal.parse(os.environ[VARIABLE]))
