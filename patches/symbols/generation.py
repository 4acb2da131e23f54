"""Symbols of vLLM: completions for rollouts, how their log-probabilities leave the engine, and Atropos' `/generate`.

Not covered: how adapters are found (`lora.py`).
"""

from bridge.rollouts.distribution import WHOLE
from patches.pins import Class, Function, Listed, Name, Pin

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

_WIRE: tuple[Pin, ...] = (
    Function(
        module="vllm.v1.engine.core",
        name="EngineCoreProc.process_output_sockets",
        use="wrap",
        why="the thread that encodes what a process of the engine sends",
    ),
    Class(
        module="vllm.v1.outputs",
        name="LogprobsLists",
        attributes=("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens"),
        why="a step's log-probabilities: three arrays, and where each request's rows begin",
    ),
    Function(
        module="vllm.v1.outputs",
        name="LogprobsLists.slice_request",
        use="replace",
        parameters=("req_idx", "num_positions"),
        why="cuts a request's part out, which is then sent",
    ),
    Name(module="vllm.v1.serial_utils", name="CUSTOM_TYPE_RAW_VIEW", why="the mark of bytes that are an array's"),
    Function(
        module="vllm.v1.serial_utils",
        name="MsgpackEncoder._encode_ndarray",
        use="call",
        parameters=("obj",),
        why="makes of an array what we make of it",
    ),
    Function(
        module="vllm.v1.serial_utils",
        name="MsgpackDecoder._decode_ndarray",
        use="call",
        parameters=("arr",),
        why="reads it",
    ),
)

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

_DEFAULTS: tuple[Pin, ...] = (
    Listed(
        module="vllm.config.model",
        name="ModelConfig.get_diff_sampling_param",
        variable="available_params",
        known=frozenset({*WHOLE, "temperature", "max_new_tokens", "skip_special_tokens"}),
        why="what a request takes from the model's generation_config.json: ours name all of it",
    ),
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.add_request",
        use="wrap",
        parameters=("request_id", "prompt", "params"),
        is_async=True,
        why="every request with its sampling parameters, defaults filled in",
    ),
)

_CPU_SEEDS: tuple[Pin, ...] = (
    Function(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner.sample_tokens",
        use="wrap",
        parameters=("grammar_output",),
        why="the CPU's runner inherits it; it would set back generators that cannot be set back",
    ),
    Class(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner",
        attributes=("discard_request_mask", "input_batch"),
        why="the requests of a step whose token is dropped",
    ),
    Class(
        module="vllm.v1.worker.gpu_input_batch",
        name="InputBatch",
        attributes=("generators", "num_reqs"),
        why="the generators of seeded requests",
    ),
)

GENERATION: tuple[Pin, ...] = (*_ENGINE, *_WIRE, *_ROUTES, *_DEFAULTS, *_CPU_SEEDS)
