"""A fake OpenAI-compatible server: answers that a test bends, and rewards that depend on the tokens it sends."""

from collections.abc import Callable
from typing import Any

from bridge.protocol import VERSION_HEADER
from tests.unit.http_server import Answer, Answers, Asked, as_json

Bend = Callable[[dict[str, Any], Asked], dict[str, Any] | Answer | None]


def choice(index: int, *token_ids: int, finish_reason: str = "stop") -> dict[str, Any]:
    return {
        "index": index,
        "text": "".join(chr(29 + token) for token in token_ids if token > 2),
        "finish_reason": finish_reason,
        "token_ids": list(token_ids),
        "logprobs": {"token_logprobs": [-5.7 for _ in token_ids]},
    }


def unbent(document: dict[str, Any], _: Asked) -> dict[str, Any]:
    return document


def openai(bend: Bend = unbent, *, version: Callable[[], str] = lambda: "3") -> Answers:
    """Answer every completion request with `n` choices, each of other tokens."""

    def answers(asked: Asked) -> Answer | None:
        if asked.path == "/v1/models":
            return as_json({"object": "list", "data": [{"id": "tiny"}]})
        assert asked.path == "/v1/completions"
        choices = [choice(index, 40 + index, 50 + len(asked.body["prompt"]), 2) for index in range(asked.body["n"])]
        bent = bend({"id": "x", "choices": choices, "usage": {}}, asked)
        return as_json(bent, 200, **{VERSION_HEADER: version()}) if isinstance(bent, dict) else bent

    return answers
