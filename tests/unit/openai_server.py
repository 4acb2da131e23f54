"""Fake OpenAI-compatible servers: one like vLLM, whose answers a test can alter, and one limited to the protocol."""

from collections.abc import Callable
from typing import Any

from bridge.server.protocol import COMPLETIONS, VERSION_HEADER
from tests.unit.http_server import Answer, Answers, HttpRequest, as_json

PROTOCOL = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "n", "seed",
    "logprobs",
}  # fmt: skip
Bend = Callable[[dict[str, Any], HttpRequest], dict[str, Any] | Answer | None]


def choice(index: int, *token_ids: int, finish_reason: str = "stop") -> dict[str, Any]:
    return {
        "index": index,
        "text": "".join(chr(29 + token) for token in token_ids if token > 2),
        "finish_reason": finish_reason,
        "token_ids": list(token_ids),
        "logprobs": {"token_logprobs": [-5.7 for _ in token_ids]},
        "prompt_logprobs": None,  # as vLLM's own route sends it
    }


def unbent(document: dict[str, Any], _: HttpRequest) -> dict[str, Any]:
    return document


def openai(
    bend: Bend = unbent,
    *,
    version: Callable[[], str] = lambda: "3",
    is_bridge: bool = False,
    max_model_len: int | None = None,
) -> Answers:
    """Answer completion requests with `n` distinct choices, like a vLLM with or without Bridge.

    With Bridge the route is Bridge's own, and every answer carries the weight version.
    """
    route = COMPLETIONS if is_bridge else "/v1/completions"

    def answers(request: HttpRequest) -> Answer | None:
        if request.path == "/v1/models":
            headers = {VERSION_HEADER: version()} if is_bridge else {}
            listed = {"id": "tiny", "owned_by": "vllm", "max_model_len": max_model_len}
            return as_json({"object": "list", "data": [listed]}, 200, **headers)
        assert request.path == route
        choices = [choice(index, 40 + index, 50 + len(request.body["prompt"]), 2) for index in range(request.body["n"])]
        bent = bend({"id": "x", "choices": choices, "usage": {}}, request)
        return as_json(bent, 200, **{VERSION_HEADER: version()}) if isinstance(bent, dict) else bent

    return answers


def plain(text_of: Callable[[int], str]) -> Answers:
    """Answer like a server that refuses unknown fields and returns tokens only as text."""

    def answers(request: HttpRequest) -> Answer:
        if request.path == "/v1/models":
            return as_json({"object": "list", "data": [{"id": "tiny", "owned_by": "somebody"}]})
        unknown = sorted(request.body.keys() - PROTOCOL)
        if unknown:
            return as_json({"error": {"message": f"Unrecognized request argument supplied: {unknown[0]}"}}, 400)
        sampled = [(40 + index, 50 + len(request.body["prompt"])) for index in range(request.body["n"])]
        return as_json({"choices": [_with_token_texts(index, ids, text_of) for index, ids in enumerate(sampled)]})

    return answers


def _with_token_texts(index: int, token_ids: tuple[int, ...], text_of: Callable[[int], str]) -> dict[str, Any]:
    """Leave out the end token, as such a server does."""
    tokens = [text_of(token_id) for token_id in token_ids]
    logprobs = {"tokens": tokens, "token_logprobs": [-5.7 for _ in tokens], "top_logprobs": None, "text_offset": []}
    return {"index": index, "text": "".join(tokens), "finish_reason": "stop", "logprobs": logprobs}
