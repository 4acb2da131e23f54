"""Symbols of vLLM: what completions for rollouts ask the engine for, and Atropos' `/generate` vLLM's own routes.

Not covered: how adapters are found (`lora.py`).
"""

from patches.pins import Class, Function, Name, Pin

_COMPLETIONS = "vllm.entrypoints.openai.completion.protocol"
_TOKENIZE = "vllm.entrypoints.serve.tokenize"

_ENGINE: tuple[Pin, ...] = (
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.generate",
        use="call",
        parameters=("prompt", "sampling_params", "request_id", "lora_request"),
        is_async=True,
        why="samples; cancelled, it ends its request",
    ),
    Class(
        module="vllm.sampling_params",
        name="SamplingParams",
        attributes=(
            "n", "temperature", "seed", "max_tokens", "logprobs", "flat_logprobs", "detokenize", "output_kind",
        ),
        why="what is sampled, and that nobody decodes it token by token",
    ),
    Class(
        module="vllm.sampling_params",
        name="RequestOutputKind",
        attributes=("FINAL_ONLY",),
        why="one answer, when every completion is whole",
    ),
    Class(module="vllm.outputs", name="RequestOutput", attributes=("outputs",), why="the answer"),
    Class(
        module="vllm.outputs",
        name="CompletionOutput",
        attributes=("index", "token_ids", "logprobs", "finish_reason"),
        why="one completion",
    ),
    Class(
        module="vllm.logprobs",
        name="FlatLogprobs",
        attributes=("start_indices", "logprobs"),
        why="its log-probabilities as plain numbers",
    ),
)  # fmt: skip

_ROUTES: tuple[Pin, ...] = (
    Class(
        module=_COMPLETIONS,
        name="CompletionRequest",
        attributes=(
            "prompt", "model", "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
            "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids",
            "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
            "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs",
            "return_token_ids", "return_tokens_as_token_ids",
        ),
        why="the fields that /generate passes on: vLLM ignores one that it does not know",
    ),
    Class(
        module=_COMPLETIONS,
        name="CompletionResponseChoice",
        attributes=(
            "index", "text", "finish_reason", "token_ids", "logprobs", "prompt_logprobs", "prompt_token_ids",
        ),
        why="one completion",
    ),
    Class(
        module=_COMPLETIONS,
        name="CompletionLogProbs",
        attributes=("token_logprobs", "top_logprobs"),
        why="the log-probabilities of its tokens",
    ),
    Name(module=f"{_TOKENIZE}.api_router", name="detokenize", why="the text of a prompt given as token ids"),
    Class(module=f"{_TOKENIZE}.protocol", name="DetokenizeRequest", attributes=("tokens",), why="asked for it"),
    Class(module=f"{_TOKENIZE}.protocol", name="DetokenizeResponse", attributes=("prompt",), why="its answer"),
)  # fmt: skip

GENERATION: tuple[Pin, ...] = (*_ENGINE, *_ROUTES)
