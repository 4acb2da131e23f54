"""`POST /generate` like Atropos' own vLLM server, answered by vLLM's own `POST /v1/completions`.

Each request is sent to this same server once more, inside this process. So the API key, the checks of every field, the
fence, a client that hangs up and the text of each error are vLLM's own, in every supported version.

Source: `example_trainer/vllm_api_server.py` and `atroposlib/envs/server_handling/vllm_server.py`, atroposlib 0.4.0.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Message, Scope

from bridge.rollouts.distribution import WHOLE
from bridge_patches.adapter import AdapterClaim

PINS = """
vllm.entrypoints.openai.completion.protocol
    # The fields that are passed on: vLLM ignores one that it does not know.
    CompletionRequest: prompt, model, n, max_tokens, min_tokens, temperature, top_p, top_k, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, seed, stop, stop_token_ids, ignore_eos, include_stop_str_in_output,
        skip_special_tokens, spaces_between_special_tokens, logit_bias, allowed_token_ids, bad_words, logprobs,
        prompt_logprobs, return_token_ids, return_tokens_as_token_ids
    CompletionResponseChoice: index, text, finish_reason, token_ids, logprobs, prompt_logprobs, prompt_token_ids
    CompletionLogProbs: token_logprobs, top_logprobs
vllm.entrypoints.serve.tokenize.api_router: detokenize
vllm.entrypoints.serve.tokenize.protocol
    DetokenizeRequest: tokens
    DetokenizeResponse: prompt
"""
CLIENT_GONE = 499
"""Status of an answer that nobody waits for."""
JSON = "application/json"
COMPLETIONS, DETOKENIZE = "/v1/completions", "/detokenize"
UNCUT = {"temperature": 1.0, **WHOLE}
"""Defaults of a request: vLLM would use the model's own."""
PASSED_ON = frozenset(UNCUT) | {
    "model", "n", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs",
}  # fmt: skip
"""Fields that mean the same to Atropos' server and to `/v1/completions`."""
PASSED_KEYS = ("type", "asgi", "http_version", "method", "scheme", "query_string", "root_path", "client", "server")
"""What the inner request takes from the ASGI scope of the outer one."""
OUTER_HEADERS = {b"content-length", b"transfer-encoding", b"accept-encoding"}
"""Headers that describe the outer body, or would have the inner answer compressed."""

router = APIRouter(include_in_schema=False)


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Sample completions of one prompt, from the trained adapter if there is one and no `model` is named."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:  # a web page may send other types without a preflight
        raise HTTPException(415, f"the content-type is {kind[:100]!r}, expected {JSON}")
    asked = _parse(await request.body())
    claim: AdapterClaim = request.app.state.bridge_claim
    trained = None if asked.get("model") else claim.expected()
    named = {"model": trained} if trained else {}
    inner = {**UNCUT, **asked, **named, "return_token_ids": True, "return_tokens_as_token_ids": True}
    try:
        answer = await _ask(request, COMPLETIONS, inner)
        prompt = asked["prompt"]
        if not isinstance(prompt, str):
            prompt = (await _ask(request, DETOKENIZE, {"tokens": prompt}))["prompt"]
    except _OtherAnswer as other:
        return other.response
    return JSONResponse(_reply(asked, sorted(answer["choices"], key=lambda choice: int(choice["index"])), prompt))


class _OtherAnswer(Exception):  # noqa: N818  no error of ours, but what vLLM answers instead
    def __init__(self, response: Response) -> None:
        self.response = response


async def _ask(request: Request, route: str, document: Mapping[str, Any]) -> Any:
    """Return this server's answer to `document`, as if the client of `request` had sent it, or raise _OtherAnswer.

    If the client hangs up, the inner request ends.
    """
    body = json.dumps(document).encode()
    unread, sent, is_gone = [body], list[Message](), False

    async def receive() -> Message:
        nonlocal is_gone
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        message = await request.receive()
        is_gone = is_gone or message["type"] == "http.disconnect"
        return message

    async def send(message: Message) -> None:
        sent.append(message)

    await request.app(_scope(request.scope, route, len(body)), receive, send)
    if is_gone:
        raise _OtherAnswer(Response(status_code=CLIENT_GONE))
    status = next(int(message["status"]) for message in sent if message["type"] == "http.response.start")
    content = b"".join(message.get("body", b"") for message in sent)
    if status != 200:
        raise _OtherAnswer(Response(content, status_code=status, media_type=JSON))
    return json.loads(content)


def _scope(outer: Scope, route: str, length: int) -> Scope:
    path = str(outer["path"]).removesuffix("/generate") + route
    headers = [(name, value) for name, value in outer["headers"] if name.lower() not in OUTER_HEADERS]
    return {
        **{key: outer[key] for key in PASSED_KEYS if key in outer},
        "path": path,
        "raw_path": path.encode(),
        "headers": [*headers, (b"content-length", str(length).encode())],
        "state": {},
    }


def _parse(body: bytes) -> dict[str, Any]:
    """Return the request with its prompt as text or token ids; HTTPException if it asks for anything else."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise HTTPException(400, f"the body is a JSON {type(asked).__name__}, expected an object")
    if unknown := asked.keys() - PASSED_ON - {"prompt", "stream"}:
        known = ", ".join(sorted(PASSED_ON))
        raise HTTPException(400, f"/generate does not know {', '.join(sorted(unknown))}, only {known}")
    if asked.pop("stream", False):
        raise HTTPException(400, f"/generate does not stream; {COMPLETIONS} does")
    prompt = asked.get("prompt")
    if isinstance(prompt, dict) and len(prompt) == 1:  # as vLLM's own engine takes it
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    is_ids = isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)
    if not (isinstance(prompt, str) or is_ids):
        raise HTTPException(400, 'prompt must be one text, or {"prompt_token_ids": [...]} with at least one token')
    return {**asked, "prompt": prompt}


def _reply(asked: Mapping[str, Any], choices: Sequence[Any], prompt: str) -> dict[str, Any]:
    reply = {
        "text": [choice["text"] for choice in choices],
        "prompt": prompt,
        "finish_reasons": [choice["finish_reason"] for choice in choices],
        "token_ids": [choice["token_ids"] for choice in choices],
        "prompt_token_ids": choices[0]["prompt_token_ids"],
    }
    if asked.get("logprobs") is not None:
        reply["logprobs"] = [_logprobs(choice) for choice in choices]
    if asked.get("prompt_logprobs") is not None:  # the first token of the prompt has none
        reply["prompt_logprobs"] = [
            position and {token: found["logprob"] for token, found in position.items()}
            for position in choices[0]["prompt_logprobs"]
        ]
    return reply


def _logprobs(choice: Mapping[str, Any]) -> list[list[dict[int, float]]]:
    """Return per token a list of one dict: the token's own log-probability first, then those of the likeliest."""
    logprobs = choice["logprobs"]
    tops = logprobs["top_logprobs"] or [None] * len(choice["token_ids"])
    positions = zip(choice["token_ids"], logprobs["token_logprobs"], tops, strict=True)
    return [
        [{token: own, **{int(id_.removeprefix("token_id:")): value for id_, value in (top or {}).items()}}]
        for token, own, top in positions
    ]
