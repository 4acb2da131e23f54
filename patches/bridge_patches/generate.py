"""`POST /generate` as in Atropos' own vLLM server, answered through vLLM's own `POST /v1/completions`.

Each request is sent to this same server again, inside this process. So vLLM itself handles the API key, the validation
of every field, the fence, disconnecting clients and error messages, in every supported version.

An Atropos environment may sample through any of vLLM's routes, from a different distribution than the trainer assumes:
`watch_sampling` logs that.

Source: `example_trainer/vllm_api_server.py` and `atroposlib/envs/server_handling/vllm_server.py`, atroposlib 0.4.0.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Message, Scope

from bridge.rollouts.distribution import NO_DEFAULT, WHOLE, changes, in_words
from bridge_patches import wrap
from bridge_patches.adapter_slots import Adapters
from bridge_patches.engine_outputs import FILTERED

PINS = """
vllm.entrypoints.openai.completion.protocol
    # The fields that are passed on, because vLLM ignores unknown ones.
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
vllm.v1.engine.async_llm: wrap async AsyncLLM.add_request(request_id, prompt, params)
vllm.config.model
    # What a request takes from generation_config.json: Bridge's own requests name all of it (`WHOLE`).
    ModelConfig.get_diff_sampling_param lists available_params: top_p, top_k, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, temperature, max_new_tokens, skip_special_tokens
"""
CLIENT_GONE = 499
"""Status of the response to a client that has disconnected."""
JSON = "application/json"
COMPLETIONS = "/v1/completions"
DETOKENIZE = "/detokenize"
UNCUT = {"temperature": 1.0, **WHOLE}
"""Defaults for a request, in place of the model's own, which vLLM would use."""
PASSED_ON = frozenset(UNCUT) | {
    "model", "n", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs",
}  # fmt: skip
"""Fields that have the same meaning in Atropos' server and in `/v1/completions`."""
PASSED_KEYS = ("type", "asgi", "http_version", "method", "scheme", "query_string", "root_path", "client", "server")
"""Keys of the outer request's ASGI scope that the inner one gets."""
OUTER_HEADERS = {b"content-length", b"transfer-encoding", b"accept-encoding"}
"""Headers to drop: they describe the outer body, or would compress the inner response."""

logger = logging.getLogger("vllm.bridge.sampling")
router = APIRouter(include_in_schema=False)


def _refuse_other_types(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != JSON:  # web pages may send other types without a preflight
        raise HTTPException(415, f"the content-type is {content_type[:100]!r}, expected {JSON}")


@router.post("/generate", dependencies=[Depends(_refuse_other_types)])
async def generate(body: dict[str, Any], request: Request) -> Response:
    """Sample completions of one prompt, by default from the trained adapter if there is one."""
    fields = _checked(body)
    adapters: Adapters = request.app.state.bridge_adapters
    trained = None if fields.get("model") else adapters.expected()
    model = {"model": trained} if trained else {}
    inner = {**UNCUT, **fields, **model, "return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = await _forward(request, COMPLETIONS, inner)
    if answer.status_code != 200:
        return answer
    prompt = fields["prompt"]
    if not isinstance(prompt, str):
        decoded = await _forward(request, DETOKENIZE, {"tokens": prompt})
        if decoded.status_code != 200:
            return decoded
        prompt = json.loads(bytes(decoded.body))["prompt"]
    choices = sorted(json.loads(bytes(answer.body))["choices"], key=lambda choice: int(choice["index"]))
    return JSONResponse(_reply(fields, choices, prompt))


async def _forward(request: Request, route: str, document: Mapping[str, Any]) -> Response:
    """Return this server's response to `document`, as if the client of `request` had sent it.

    If the client disconnects, the inner request is aborted.
    """
    body = json.dumps(document).encode()
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    received: list[Message] = []
    sent: list[Message] = []

    async def receive() -> Message:
        received.append(unread.pop() if unread else await request.receive())
        return received[-1]

    async def send(message: Message) -> None:
        sent.append(message)

    await request.app(_scope(request.scope, route, len(body)), receive, send)
    if any(message["type"] == "http.disconnect" for message in received):
        return Response(status_code=CLIENT_GONE)
    status = next(int(message["status"]) for message in sent if message["type"] == "http.response.start")
    return Response(b"".join(message.get("body", b"") for message in sent), status_code=status, media_type=JSON)


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


def _checked(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with its prompt as a string or token ids; HTTPException if it is invalid."""
    if unknown := body.keys() - PASSED_ON - {"prompt", "stream"}:
        known = ", ".join(sorted(PASSED_ON))
        raise HTTPException(400, f"/generate does not support {', '.join(sorted(unknown))}, only {known}")
    if body.get("stream"):
        raise HTTPException(400, f"/generate does not stream; {COMPLETIONS} does")
    prompt = body.get("prompt")
    if isinstance(prompt, dict) and len(prompt) == 1:  # the format of vLLM's own engine
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    is_ids = isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)
    if not (isinstance(prompt, str) or is_ids):
        raise HTTPException(400, 'prompt must be one string, or {"prompt_token_ids": [...]} with at least one token')
    return {name: value for name, value in body.items() if name != "stream"} | {"prompt": prompt}


def _reply(fields: Mapping[str, Any], choices: Sequence[Any], prompt: str) -> dict[str, Any]:
    reply = {
        "text": [choice["text"] for choice in choices],
        "prompt": prompt,
        "finish_reasons": [choice["finish_reason"] for choice in choices],
        "token_ids": [choice["token_ids"] for choice in choices],
        "prompt_token_ids": choices[0]["prompt_token_ids"],
    }
    if fields.get("logprobs") is not None:
        reply["logprobs"] = [_logprobs(choice) for choice in choices]
    if fields.get("prompt_logprobs") is not None:  # the prompt's first token has no log-probability
        reply["prompt_logprobs"] = [
            position and {token: entry["logprob"] for token, entry in position.items()}
            for position in choices[0]["prompt_logprobs"]
        ]
    return reply


def _logprobs(choice: Mapping[str, Any]) -> list[list[dict[int, float]]]:
    """Return, for each token, a list with one dict: its own log-probability first, then those of the likeliest."""
    logprobs = choice["logprobs"]
    tops = logprobs["top_logprobs"] or [None] * len(choice["token_ids"])
    reply = []
    for token, own, top in zip(choice["token_ids"], logprobs["token_logprobs"], tops, strict=True):
        likeliest = {int(name.removeprefix("token_id:")): value for name, value in (top or {}).items()}
        reply.append([{token: own, **likeliest}])
    return reply


def watch_sampling(engine: Any) -> None:
    """Log each request that samples from a different distribution than the trainer assumes, once per set of fields.

    Requests reach the engine with the model's defaults already filled in.
    """
    logged: set[frozenset[str]] = set()

    @wrap(engine, "add_request")
    async def add_request(original: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        # Without a temperature, a request is greedy or samples nothing; a filtered rollout reports what was kept.
        if getattr(params, "temperature", None) and FILTERED not in request_id:
            changed = changes({name: getattr(params, name, None) for name in (*WHOLE, *NO_DEFAULT)})
            if changed and frozenset(changed) not in logged:
                logged.add(frozenset(changed))
                logger.warning(
                    "Bridge: a request samples with %s if its completions are trained. The request or the model's"
                    " generation_config.json sets this. Further requests with the same fields are not logged.",
                    in_words(changed),
                )
        return await original(request_id, prompt, params, *args, **kwargs)
