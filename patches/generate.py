"""`POST /generate` as Atropos' own vLLM server has it, answered by vLLM's own `POST /v1/completions`.

Each request is put to this same server once more, in this process: the bearer token of `--api-key`, every check of a
field, the fence, a client that hangs up and the words of each error are then vLLM's own, in every supported version.

Source: `example_trainer/vllm_api_server.py` and `atroposlib/envs/server_handling/vllm_server.py`, atroposlib 0.4.0.
Not covered: streaming, which `/v1/completions` offers, and the version on the answer (`routes.py`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Message, Scope

from bridge.rollouts.distribution import WHOLE
from patches.adapter_claim import AdapterClaim

OK, BAD_REQUEST, CLIENT_GONE = 200, 400, 499
COMPLETIONS, DETOKENIZE = "/v1/completions", "/detokenize"
UNCUT = {"temperature": 1.0, **WHOLE}
"""What a request that leaves them out samples with: vLLM would take the model's own defaults."""
PASSED_ON = frozenset(UNCUT) | {
    "model", "n", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs",
}  # fmt: skip
"""Fields that mean the same to Atropos' server and to `/v1/completions`."""
PASSED_KEYS = ("type", "asgi", "http_version", "method", "scheme", "query_string", "root_path", "client", "server")
"""What the request inside takes over of the ASGI scope of the one from outside."""
OF_THE_OUTSIDE = {b"content-length", b"transfer-encoding", b"accept-encoding"}
"""Headers that tell of the body from outside, or would have the answer inside compressed."""

router = APIRouter(include_in_schema=False)


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Sample completions of one prompt, by the adapter that is trained if there is one and no `model` is named."""
    asked = _asked(await request.body())
    try:
        answer = await _ask(request, COMPLETIONS, _completion_request(asked, _trained(asked, request)))
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        prompt = asked["prompt"]
        if not isinstance(prompt, str):
            prompt = (await _ask(request, DETOKENIZE, {"tokens": prompt}))["prompt"]
    except _OtherAnswer as other:
        return other.response
    return JSONResponse(_reply(asked, choices, prompt))


class _OtherAnswer(Exception):  # noqa: N818  no mistake of ours: what vLLM answers instead
    """The server answered something else than what was asked for."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


async def _ask(request: Request, route: str, document: Mapping[str, Any]) -> Any:
    """Let this same server answer `document`, as if the client of `request` had sent it, and return its answer.

    Raises:
        _OtherAnswer: it refuses, is unwell, or the client has hung up, which ends what it asked for.
    """
    body = json.dumps(document).encode()
    unread, sent, is_alone = [body], list[Message](), False

    async def receive() -> Message:
        nonlocal is_alone
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        message = await request.receive()
        is_alone = is_alone or message["type"] == "http.disconnect"
        return message

    async def send(message: Message) -> None:
        sent.append(message)

    await request.app(_scope(request.scope, route, len(body)), receive, send)
    if is_alone:
        raise _OtherAnswer(Response(status_code=CLIENT_GONE))
    status = next(int(message["status"]) for message in sent if message["type"] == "http.response.start")
    content = b"".join(message.get("body", b"") for message in sent)
    if status != OK:
        raise _OtherAnswer(Response(content, status_code=status, media_type="application/json"))
    return json.loads(content)


def _scope(outer: Scope, route: str, length: int) -> Scope:
    """Return the ASGI scope of a request for `route` in the place of the one for `/generate`."""
    path = str(outer["path"]).removesuffix("/generate") + route
    headers = [(name, value) for name, value in outer["headers"] if name.lower() not in OF_THE_OUTSIDE]
    kept = {key: outer[key] for key in PASSED_KEYS if key in outer}
    return {
        **kept,
        "path": path,
        "raw_path": path.encode(),
        "headers": [*headers, (b"content-length", str(length).encode())],
        "state": {},
    }


def _asked(body: bytes) -> dict[str, Any]:
    """Return the request with its prompt as text or token ids.

    Raises:
        HTTPException: it is no request, or asks for what `/generate` does not do.
    """
    try:
        asked = json.loads(body)
    except ValueError as error:
        raise _refused(f"the body is no JSON: {error}") from error
    if not isinstance(asked, dict):
        raise _refused(f"the body is a JSON {type(asked).__name__}, expected an object")
    if unknown := asked.keys() - PASSED_ON - {"prompt", "stream"}:
        raise _refused(f"/generate does not know {', '.join(sorted(unknown))}, only {', '.join(sorted(PASSED_ON))}")
    if asked.pop("stream", False):
        raise _refused(f"/generate does not stream; {COMPLETIONS} does")
    return {**asked, "prompt": _prompt(asked.get("prompt"))}


def _prompt(given: Any) -> str | list[int]:
    if isinstance(given, dict) and len(given) == 1:  # a prompt as vLLM's own engine takes it
        given = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(item) is int for item in given)):
        return given
    raise _refused('prompt must be one text, or {"prompt_token_ids": [...]} with at least one token')


def _refused(line: str) -> HTTPException:
    return HTTPException(BAD_REQUEST, line)


def _trained(asked: Mapping[str, Any], request: Request) -> str | None:
    """Return the name of the adapter that is trained, where the request names no model and there is one."""
    claim: AdapterClaim = request.app.state.bridge_claim
    return None if asked.get("model") else claim.expected()


def _completion_request(asked: Mapping[str, Any], trained: str | None) -> dict[str, Any]:
    named = {"model": trained} if trained else {}
    return {**UNCUT, **asked, **named, "return_token_ids": True, "return_tokens_as_token_ids": True}


def _reply(asked: Mapping[str, Any], choices: Sequence[Any], prompt: str) -> dict[str, Any]:
    reply = {
        "text": [choice["text"] for choice in choices],
        "prompt": prompt,
        "finish_reasons": [choice["finish_reason"] for choice in choices],
        "token_ids": [choice["token_ids"] for choice in choices],
        "prompt_token_ids": choices[0]["prompt_token_ids"],
    }
    if asked.get("logprobs") is not None:
        reply["logprobs"] = [_sampled(choice) for choice in choices]
    if asked.get("prompt_logprobs") is not None:
        reply["prompt_logprobs"] = [_of_prompt(position) for position in choices[0]["prompt_logprobs"]]
    return reply


def _sampled(choice: Mapping[str, Any]) -> list[list[dict[int, float]]]:
    """Return one list of one dict per token: its own log-probability first, then those of the likeliest."""
    told = choice["logprobs"]
    tops = told["top_logprobs"] or [None] * len(choice["token_ids"])
    positions = zip(choice["token_ids"], told["token_logprobs"], tops, strict=True)
    return [[{token_id: logprob, **_likeliest(top)}] for token_id, logprob, top in positions]


def _likeliest(top: Mapping[str, float] | None) -> dict[int, float]:
    return {int(token.removeprefix("token_id:")): logprob for token, logprob in (top or {}).items()}


def _of_prompt(position: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Return the log-probabilities of one token of the prompt; the first one has none."""
    return None if position is None else {token_id: told["logprob"] for token_id, told in position.items()}
