"""`POST /v1/bridge/completions`: the part of `POST /v1/completions` that rollouts need.

Symptom: with 64 concurrent completions of a small model, the API server is as busy as the GPU.
Cause: vLLM's own route decodes each token in the step that sampled it, and sends each token's text twice at the end.
What is done: a completion is decoded once, when it is complete, and its log-probabilities remain plain numbers.
Source: `vllm/entrypoints/openai/completion/serving.py`, vLLM 0.26 to 0.33.
"""

import asyncio
import base64
import math
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from bridge.errors import AttachError
from bridge.rollouts.distribution import filters
from bridge.server.protocol import COMPLETIONS, CompletionsRequest
from bridge_patches import expanded_images, exporter
from bridge_patches.engine_outputs import AT_ONCE, FILTERED, ROLLOUT
from bridge_patches.filter_thresholds import COUNT_BITS, unpack
from bridge_patches.generate import CLIENT_GONE
from bridge_patches.routed_experts import ROUTED

PINS = """
vllm.v1.engine.async_llm
    AsyncLLM: model_config, tokenizer, vllm_config
    call async AsyncLLM.generate(prompt, sampling_params, request_id, lora_request)  # cancelling it aborts its request
vllm.config.model
    ModelConfig: max_model_len
    call ModelConfig.get_vocab_size()
vllm.config.vllm: VllmConfig: speculative_config
vllm.entrypoints.openai.models.serving: OpenAIServingModels: lora_requests, base_model_paths
vllm.sampling_params
    SamplingParams: n, temperature, top_k, top_p, min_p, seed, max_tokens, stop,
        stop_token_ids, logprobs, prompt_logprobs, flat_logprobs, detokenize, output_kind
    RequestOutputKind: FINAL_ONLY
vllm.outputs
    RequestOutput: outputs, prompt_token_ids, prompt_logprobs
    CompletionOutput: index, token_ids, logprobs, finish_reason, stop_reason, routed_experts
vllm.logprobs: FlatLogprobs: start_indices, logprobs, ranks
"""
TAIL = 32
"""Prompt tokens to decode with a completion, because some tokenizers drop a text's leading space."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What an incomplete character decodes to."""
MOST_BYTES = 4
"""Bytes of the longest UTF-8 character."""

router = APIRouter(include_in_schema=False)


@router.post(COMPLETIONS)
async def complete(body: CompletionsRequest, request: Request) -> Response:
    """Sample completions of one prompt; they are cancelled if the client disconnects."""
    engine = request.app.state.bridge_engine
    adapter = _adapter(request, body.model)
    num_tokens = len(body.prompt)
    longest = engine.model_config.max_model_len
    if num_tokens + body.max_tokens > longest:
        wanted = f"a prompt of {num_tokens} tokens and max_tokens={body.max_tokens}"
        raise HTTPException(400, f"{wanted} exceed the server's --max-model-len {longest}")
    kept_by = _filters(body, engine)
    marks = (AT_ONCE if body.stop else "") + ("" if body.experts is None else f"{ROUTED}{body.experts}-")
    request_id = f"{FILTERED if kept_by else ROLLOUT}{marks}{uuid.uuid4().hex}"
    prompt = expanded_images.prompt(engine, body.prompt, body.images)
    answers = engine.generate(prompt, _params(body, kept_by), request_id, lora_request=adapter)
    try:
        answer = await _unless_disconnected(request, answers)
    except ValueError as error:  # vLLM refuses the request
        raise HTTPException(400, str(error)) from error
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    _check_same(answer.prompt_token_ids, body.prompt)
    outputs = sorted(answer.outputs, key=lambda output: output.index)
    # At each position, the first number belongs to the sampled token.
    logprobs = [[output.logprobs.logprobs[start] for start in output.logprobs.start_indices] for output in outputs]
    of_prompt = _of_prompt(answer.prompt_logprobs, num_tokens) if body.prompt_logprobs else []
    if not all(math.isfinite(logprob) for several in (*logprobs, of_prompt[1:]) for logprob in several):
        raise await _not_finite_error(request)
    # vLLM never includes the stop token in the text; stop strings are not stop tokens.
    texts = _texts(
        engine.tokenizer,
        body.prompt,
        [list(output.token_ids[: -1 if _has_stop_token(output) else None]) for output in outputs],
    )
    version = request.app.state.bridge_fence.version
    choices = [  # in OpenAI's format: the fields that `bridge.rollouts.openai_api` reads
        {
            "index": output.index,
            "text": text,
            "finish_reason": output.finish_reason,
            "token_ids": list(output.token_ids),
            "logprobs": {"token_logprobs": token_logprobs},
            **_origins(output.logprobs, version, is_filtered=bool(kept_by)),
            **({} if body.experts is None else _experts(output, num_tokens - body.experts)),
            **({"prompt_logprobs": of_prompt} if body.prompt_logprobs else {}),
        }
        for output, token_logprobs, text in zip(outputs, logprobs, texts, strict=True)
    ]
    return JSONResponse({"choices": choices})


def _filters(body: CompletionsRequest, engine: Any) -> dict[str, float]:
    """Return the filters that can drop any token; AttachError if vLLM would not report what they keep."""
    active = filters(body) if body.temperature else {}  # greedy sampling always takes the likeliest token
    if active.get("top_k", 0) >= engine.model_config.get_vocab_size():
        del active["top_k"]
    if active and engine.vllm_config.speculative_config is not None:
        raise AttachError(
            f"{', '.join(active)} cannot be combined with speculation: vLLM does not report which tokens were kept",
            hint="restart the server without --speculative-config, or sample from the full distribution",
        )
    return active


def _check_same(used: Sequence[int], sent: Sequence[int]) -> None:
    """Check that vLLM sampled from the prompt that the trainer sent: it must not have expanded image tokens again."""
    if tuple(used) != tuple(sent):
        raise AttachError(
            f"vLLM sampled from a prompt of {len(used)} tokens, but a different one of {len(sent)} tokens was sent",
            hint="report this bug, with the versions that bridge doctor shows",
        )


def _of_prompt(logprobs: Any, num_tokens: int) -> list[float | None]:
    """Return the log-probability of each prompt token; None for the first one, since nothing precedes it.

    AttachError if vLLM returned log-probabilities for a different number of tokens.
    """
    starts = [] if logprobs is None else list(logprobs.start_indices)
    if len(starts) != num_tokens:
        raise AttachError(
            f"vLLM returned the log-probabilities of {len(starts)} tokens for a prompt of {num_tokens}",
            hint="report this bug, with the versions that bridge doctor shows",
        )
    return [None, *(logprobs.logprobs[start] for start in starts[1:])]


def _has_stop_token(output: Any) -> bool:
    return output.finish_reason == "stop" and not isinstance(output.stop_reason, str)


def _origins(logprobs: Any, version: int, *, is_filtered: bool) -> dict[str, Any]:
    """Return what the engine sends in place of the tokens' ranks: versions, and which tokens the filters kept.

    For a filtered request, only the low bits of the versions arrive. These are enough, since no version is later than
    `version`. AttachError if the sampler did not report which tokens were kept.
    """
    ranks = [logprobs.ranks[start] for start in logprobs.start_indices]
    if not is_filtered:
        return {"versions": _runs(ranks)}
    versions, thresholds, counts = unpack(ranks)
    if not counts.all():
        raise AttachError(
            "this server's sampler does not report what top_k, top_p and min_p keep",
            hint="restart it without custom vLLM samplers, such as watermarks, or leave out the filters",
        )
    ages = (version - versions) % 2**COUNT_BITS
    kept = [*zip(thresholds.tolist(), counts.tolist(), strict=True)]
    return {"versions": _runs((version - ages).tolist()), "kept": kept}


def _experts(output: Any, num_prompt: int) -> dict[str, Any]:
    """Return the experts of the last `num_prompt` prompt tokens, and of all completion tokens except the last.

    AttachError if they were not reported.
    """
    if output.finish_reason == "abort":  # aborted before its experts were known
        return {}
    rows = output.routed_experts
    num_rows = num_prompt + len(output.token_ids) - 1
    if rows is None or len(rows) < num_rows:
        raise AttachError(
            f"this server reported the experts of {0 if rows is None else len(rows)} tokens, expected {num_rows}",
            hint="leave `experts` out of the request (bridge train --no-router-replay)",
        )
    content = base64.b64encode(rows[:num_rows].tobytes()).decode()
    return {"experts": {"kind": str(rows.dtype), "content": content}}


def _runs(versions: Iterable[int]) -> list[tuple[int, int]]:
    """Return each run of equal versions as (version, number of consecutive tokens)."""
    return [(version, sum(1 for _ in run)) for version, run in groupby(versions)]


def _adapter(request: Request, name: str) -> Any:
    """Return the adapter called `name`; None if it is the base model's name."""
    models = request.app.state.openai_serving_models
    adapter = models.lora_requests.get(name)
    if adapter is None and name not in (served := [path.name for path in models.base_model_paths]):
        names = ", ".join([*served, *models.lora_requests])
        raise HTTPException(404, f"the model {name} does not exist, only {names}")
    return adapter


def _params(body: CompletionsRequest, filters: Mapping[str, float]) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        **body.model_dump(include={"n", "temperature", "seed", "max_tokens"}),
        **filters,
        **({"prompt_logprobs": 0} if body.prompt_logprobs else {}),
        stop=list(body.stop),
        stop_token_ids=list(body.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(body.stop),  # vLLM searches for stop strings in the text
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def _unless_disconnected(request: Request, answers: AsyncGenerator[Any, None]) -> Any:
    """Return the last of `answers`; if the client disconnects first, cancel the request and return None."""

    async def sample() -> Any:
        last = None
        async with aclosing(answers):
            async for answer in answers:
                last = answer
        return last

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    sampling = asyncio.ensure_future(sample())
    waiting = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({sampling, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return await sampling if sampling.done() else None
    finally:
        sampling.cancel()
        waiting.cancel()


async def _not_finite_error(request: Request) -> Exception:
    """Return the error for non-finite log-probabilities; it says whether the weights are the cause."""
    scan = await exporter.finiteness(request.app.state.bridge_engine)
    if not scan.not_finite:
        return HTTPException(500, f"log-probabilities are not finite, but {scan.found()}: a kernel is broken")
    return AttachError(
        f"log-probabilities are not finite because of the weights: {scan.found()}",
        hint=request.app.state.bridge_fence.status().hint(),
    )


def _texts(tokenizer: Any, prompt: Sequence[int], completions: Sequence[list[int]]) -> list[str]:
    """Decode completions of `prompt` as vLLM does, without special tokens and incomplete characters."""
    if tokenizer is None:  # --skip-tokenizer-init
        return ["" for _ in completions]
    tail = list(prompt[-TAIL:])
    before, *texts = _decoded(tokenizer, [tail, *(tail + tokens for tokens in completions)])
    decoded = []
    for text, tokens in zip(texts, completions, strict=True):
        if text.startswith(before) and not text.endswith(UNFINISHED):
            decoded.append(text.removeprefix(before))
        else:
            decoded.append(_whole_characters(tokenizer, tail, before, tokens))
    return decoded


def _whole_characters(tokenizer: Any, tail: list[int], before: str, tokens: list[int]) -> str:
    """Decode a completion that ends, or whose prompt ends, in the middle of a character."""
    text = before
    for length in range(len(tokens), max(-1, len(tokens) - MOST_BYTES), -1):
        (text,) = _decoded(tokenizer, [tail + tokens[:length]])
        if not text.endswith(UNFINISHED):
            break
    return text.removeprefix(before) if text.startswith(before) else _decoded(tokenizer, [tokens])[0]


def _decoded(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    """Decode the sequences, in one batch if the tokenizer is a Hugging Face fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in sequences]
    return list(backend.decode_batch(sequences, skip_special_tokens=True))
