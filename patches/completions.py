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

from bridge.protocol import COMPLETIONS, CompletionsRequest
from patches.generate import BAD_REQUEST, CLIENT_GONE

UNKNOWN, BROKEN = 404, 500

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
    return Response(status_code=CLIENT_GONE) if answer is None else JSONResponse({"choices": _choices(engine, answer)})


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


def _choices(engine: Any, answer: Any) -> list[dict[str, Any]]:
    """Return the completions in OpenAI's words; those that `bridge.rollouts.openai_api` reads, and no other.

    Raises:
        HTTPException: some log-probabilities are no numbers.
    """
    outputs = sorted(answer.outputs, key=lambda output: output.index)
    logprobs = [_sampled(output.logprobs) for output in outputs]
    if not all(math.isfinite(logprob) for each in logprobs for logprob in each):
        raise HTTPException(BROKEN, "the log-probabilities are no numbers: the weights, or a kernel, are broken")
    texts = _texts(engine.tokenizer, [_told(output) for output in outputs])
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


def _sampled(flat: Any) -> list[float]:
    """Return the log-probability of the token that was sampled at each place: the first one there."""
    return [flat.logprobs[start] for start in flat.start_indices]


def _told(output: Any) -> list[int]:
    """Return the tokens that the text is of: not the one that ended it, which is part of no text of vLLM's."""
    return list(output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids)


def _texts(tokenizer: Any, completions: Sequence[list[int]]) -> list[str]:
    """Decode what vLLM decodes, all at once where the tokenizer is one of Hugging Face's own."""
    if tokenizer is None:  # --skip-tokenizer-init
        return ["" for _ in completions]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]
    return list(backend.decode_batch(completions, skip_special_tokens=True))
