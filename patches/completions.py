"""`POST /v1/bridge/completions`: what a rollout needs of `POST /v1/completions`, without what it would never read.

vLLM's own route decodes every sampled token for itself in the step that made it, and tells each one's text twice at the
end. For 64 completions at once that keeps the API server as busy as a small model keeps its GPU. Here a completion is
decoded once, when it is whole, and its log-probabilities stay plain numbers.

Not covered: sampling that cuts the distribution, streaming and prompts of text, all of which vLLM's own routes offer.
Source: `vllm/entrypoints/openai/completion/serving.py`, vLLM 0.26 to 0.33.
"""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from bridge.errors import AttachError
from bridge.server.protocol import COMPLETIONS, CompletionsRequest
from patches import tensors
from patches.generate import BAD_REQUEST, CLIENT_GONE

UNKNOWN, BROKEN = 404, 500
TAIL = 32
"""Tokens of the prompt that are decoded before a completion: some tokenizers drop the space that a text begins with."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the first bytes of a character read as."""
MOST_BYTES = 4
"""Of a character, in UTF-8."""

router = APIRouter(include_in_schema=False)


@router.post(COMPLETIONS)
async def complete(body: CompletionsRequest, request: Request) -> Response:
    """Sample completions of one prompt; a client that hangs up ends them."""
    engine, adapter = request.app.state.bridge_engine, _adapter(request, body.model)
    longest = engine.model_config.max_model_len
    if len(body.prompt) + body.max_tokens > longest:
        raise HTTPException(
            BAD_REQUEST,
            f"a prompt of {len(body.prompt)} tokens and max_tokens={body.max_tokens} are more than the {longest} of"
            " the longest sequence",
        )
    try:
        answers = engine.generate(
            {"prompt_token_ids": list(body.prompt)}, _params(body), f"bridge-{uuid.uuid4().hex}", lora_request=adapter
        )
        answer = await _unless_hung_up(request, _last(answers))
    except ValueError as error:  # by which vLLM refuses what a request says
        raise HTTPException(BAD_REQUEST, str(error)) from error
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    try:
        return JSONResponse({"choices": _choices(engine, body.prompt, answer)})
    except _NotFiniteError as error:
        raise await _explained(request) from error


def _adapter(request: Request, name: str) -> Any:
    """Return the adapter of that name; None for the model itself."""
    models = request.app.state.openai_serving_models
    adapter = models.lora_requests.get(name)
    if adapter is None and name not in (served := [path.name for path in models.base_model_paths]):
        names = ", ".join([*served, *models.lora_requests])
        raise HTTPException(UNKNOWN, f"the model {name} does not exist, only {names}")
    return adapter


def _params(body: CompletionsRequest) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=body.n,
        temperature=body.temperature,
        seed=body.seed,
        max_tokens=body.max_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def _last(answers: AsyncIterator[Any]) -> Any:
    last = None
    async for answer in answers:
        last = answer
    return last


async def _unless_hung_up(request: Request, sampling: Coroutine[Any, Any, Any]) -> Any:
    """Return what `sampling` does; None, and end it, if the client hangs up before."""
    sampled, hung_up = asyncio.ensure_future(sampling), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((sampled, hung_up), return_when=asyncio.FIRST_COMPLETED)
        return await sampled if sampled.done() else None
    finally:
        sampled.cancel()
        hung_up.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _choices(engine: Any, prompt: Sequence[int], answer: Any) -> list[dict[str, Any]]:
    """Return the completions in OpenAI's words; those that `bridge.rollouts.openai_api` reads, and no other.

    Raises:
        _NotFiniteError: some log-probabilities are no numbers.
    """
    outputs = sorted(answer.outputs, key=lambda output: output.index)
    logprobs = [_sampled(output.logprobs) for output in outputs]
    if not all(math.isfinite(logprob) for each in logprobs for logprob in each):
        raise _NotFiniteError
    texts = _texts(engine.tokenizer, prompt, [_told(output) for output in outputs])
    return [
        {
            "index": output.index,
            "text": text,
            "finish_reason": output.finish_reason,
            "token_ids": list(output.token_ids),
            "logprobs": {"token_logprobs": each},
        }
        for output, each, text in zip(outputs, logprobs, texts, strict=True)
    ]


class _NotFiniteError(Exception):
    """Some log-probabilities are NaN or infinite."""


async def _explained(request: Request) -> Exception:
    """Return why log-probabilities are no numbers: by the weights, or in spite of them."""
    found = await tensors.finiteness(request.app.state.bridge_engine)
    if not found.not_finite:
        return HTTPException(BROKEN, f"the log-probabilities are no numbers, and {found.found()}: a kernel is broken")
    return AttachError(
        f"the log-probabilities are no numbers, since the weights are none: {found.found()}",
        remedy=request.app.state.bridge_fence.status().mending(),
    )


def _sampled(flat: Any) -> list[float]:
    """Return the log-probability of the token that was sampled at each place: the first one there."""
    return [flat.logprobs[start] for start in flat.start_indices]


def _told(output: Any) -> list[int]:
    """Return the tokens that the text is of: not the one that ended it, which is part of no text of vLLM's."""
    return list(output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids)


def _texts(tokenizer: Any, prompt: Sequence[int], completions: Sequence[list[int]]) -> list[str]:
    """Return what vLLM makes of completions behind their prompt: no special tokens, and no unfinished character."""
    if tokenizer is None:  # --skip-tokenizer-init
        return ["" for _ in completions]
    tail = list(prompt[-TAIL:])
    before, *texts = _decoded(tokenizer, [tail, *(tail + tokens for tokens in completions)])
    return [
        text.removeprefix(before)
        if text.startswith(before) and not text.endswith(UNFINISHED)
        else _text_of_whole_characters(tokenizer, tail, before, tokens)
        for text, tokens in zip(texts, completions, strict=True)
    ]


def _text_of_whole_characters(tokenizer: Any, tail: list[int], before: str, tokens: list[int]) -> str:
    """Decode a completion that ends, or whose prompt ends, inside of a character."""
    text = before
    for length in range(len(tokens), max(-1, len(tokens) - MOST_BYTES), -1):
        (text,) = _decoded(tokenizer, [tail + tokens[:length]])
        if not text.endswith(UNFINISHED):
            break
    return text.removeprefix(before) if text.startswith(before) else _decoded(tokenizer, [tokens])[0]


def _decoded(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    """Decode all at once where the tokenizer is one of Hugging Face's own."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in sequences]
    return list(backend.decode_batch(sequences, skip_special_tokens=True))
