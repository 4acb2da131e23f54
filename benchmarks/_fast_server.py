"""A fake server that responds immediately, in the format of vLLM's route, so that only the client takes time.

`python -m benchmarks._fast_server 8 256` prints its port, and returns 8 completions of 256 tokens per request until its
stdin closes. A few responses are generated before the first request, and repeated.
"""

import asyncio
import json
import random
import sys
from typing import Any

NUM_ANSWERS = 16
PROMPT_TOKENS = 120
VOCABULARY = 150_000
MODELS = {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "vllm"}]}


def choice(index: int, num_tokens: int, chance: random.Random) -> dict[str, Any]:
    """Return one completion with all fields that vLLM 0.33 returns."""
    ids = chance.choices(range(VOCABULARY), k=num_tokens)
    tokens, logprobs = [f" t{token_id}" for token_id in ids], [-8 * chance.random() for _ in ids]
    return {
        "index": index, "text": "".join(tokens), "finish_reason": "length", "stop_reason": None, "token_ids": ids,
        "logprobs": {
            "text_offset": [7 * index for index in range(num_tokens)], "token_logprobs": logprobs, "tokens": tokens,
            "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
        },
        "prompt_logprobs": None, "prompt_token_ids": chance.choices(range(VOCABULARY), k=PROMPT_TOKENS),
    }  # fmt: skip


def answer(num_samples: int, num_tokens: int, chance: random.Random) -> bytes:
    """Return a complete HTTP response."""
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num_samples * num_tokens}
    choices = [choice(index, num_tokens, chance) for index in range(num_samples)]
    document = {"id": "cmpl-0", "object": "text_completion", "model": "fake", "choices": choices, "usage": usage}
    return _http(document, "x-bridge-weight-version: 3\r\n")


def _http(document: Any, headers: str = "") -> bytes:
    body = json.dumps(document, separators=(",", ":")).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


class Answering(asyncio.Protocol):
    """One connection, which responds to each request once it is complete."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers, self._models, self._received, self._number = answers, _http(MODELS), b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Respond if the request is complete; the client does not pipeline."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = next((line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b"0")
        if not end or len(body) < int(length):
            return
        self._received, self._number = b"", self._number + 1
        answers = [self._models] if head.startswith(b"GET") else self._answers
        self._transport.write(answers[self._number % len(answers)])


async def serve(num_samples: int, num_tokens: int) -> None:
    """Serve on a free port until stdin closes."""
    chance = random.Random(0)  # noqa: S311  tokens, not secrets
    answers = [answer(num_samples, num_tokens, chance) for _ in range(NUM_ANSWERS)]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answering(answers), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:])))
