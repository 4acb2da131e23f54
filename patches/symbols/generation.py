"""Symbols of vLLM: what `/generate` asks vLLM's own routes for, and reads of their answers.

Not covered: how the adapter that is trained is found (`lora.py`).
"""

from patches.pins import Class, Name, Pin

_COMPLETIONS = "vllm.entrypoints.openai.completion.protocol"
_TOKENIZE = "vllm.entrypoints.serve.tokenize"

GENERATION: tuple[Pin, ...] = (
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
