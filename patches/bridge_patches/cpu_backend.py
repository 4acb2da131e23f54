"""On the CPU: make vLLM's kernels read the shared weights, and fix bugs in its runner and sampler.

GPUs do not need any of this (with `--moe-backend triton`, experts are read as loaded).
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bridge.passes import layers
from bridge_patches import wrap

PINS = """
vllm.model_executor.layers.utils: replace dispatch_cpu_unquantized_gemm(layer, remove_weight)
vllm.model_executor.layers.linear
    UnquantizedLinearMethod.process_weights_after_loading
        imports vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm
vllm.model_executor.layers.vocab_parallel_embedding
    UnquantizedEmbeddingMethod.process_weights_after_loading
        imports vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm
vllm.model_executor.layers.fused_moe.experts.cpu_moe
    if CPUUnquantizedExperts.finalize_weight_and_reduce_impl:
        wrap CPUUnquantizedExperts.process_weights_after_loading(layer)
    if CPUUnquantizedExperts.finalize_weight_and_reduce_impl: wrap CPUUnquantizedExperts.apply(output,
        hidden_states, w1, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input)
vllm.model_executor.layers.fused_moe.config: FusedMoEConfig: is_lora_enabled, __post_init__
vllm.model_executor.layers.mamba.ops.cpu.gdn_attention
    if _causal_conv1d_fwd_cpu: wrap _causal_conv1d_fwd_cpu(weight)
    if _causal_conv1d_update_cpu: wrap _causal_conv1d_update_cpu(weight)
vllm._custom_ops: if causal_conv1d_weight_pack: call causal_conv1d_weight_pack(weight)
vllm.lora.ops.torch_ops.lora_ops
    # Called by position.
    replace bgmv_shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
    replace bgmv_expand(inputs, lora_b_weights, output_tensor, lora_indices_tensor, add_inputs)
    replace bgmv_expand_slice(inputs, lora_b_weights, output_tensor, lora_indices_tensor,
        slice_offset, slice_size, add_inputs)
vllm.lora.punica_wrapper.punica_cpu
    # Calls these kernels through names in its own module.
    PunicaWrapperCPU: _expand_decode, _expand_slice_decode, add_lora_linear, add_lora_logits
vllm.lora.punica_wrapper.punica_base: PunicaWrapperBase: sampler_indices, token_lora_indices
vllm.v1.sample.rejection_sampler
    replace expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)
vllm.v1.worker.gpu_model_runner
    wrap GPUModelRunner.sample_tokens(grammar_output)  # the CPU's runner inherits it
    wrap GPUModelRunner._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
    GPUModelRunner: discard_request_mask, input_batch, num_prompt_logprobs, query_start_loc
vllm.v1.worker.gpu_input_batch: InputBatch: generators, num_reqs, req_id_to_index
vllm.v1.worker.cpu_model_runner: CPUModelRunner
"""
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
CONFIGURATION = "vllm.model_executor.layers.fused_moe.config"
CONVOLVING = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
CONVOLUTIONS = ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu")
MODULAR = "finalize_weight_and_reduce_impl"
"""Method that marks expert classes that get each token's experts as input (since 0.30; earlier ones choose them)."""
APPLY_ARGUMENTS = ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "apply_router_weight_on_input")
"""Arguments of vLLM's experts that `apply_plain` accepts, other than the activation."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}
"""vLLM's names for the functions applied to the first half of the first product."""
FIRST_TOKEN: ContextVar[int | None] = ContextVar("FIRST_TOKEN", default=None)
"""Index within the step of the first token of the request whose prompt log-probabilities are being computed."""


def patch() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.model_executor.layers import utils
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    rejection_sampler.expand_batch_to_tokens = for_each_token
    utils.dispatch_cpu_unquantized_gemm = plain_linear
    patch_experts()
    for name, kernel in LORA_KERNELS.items():
        setattr(lora_ops, name, kernel)
        setattr(punica_cpu, name, kernel)
    wrap(CPUModelRunner, "sample_tokens")(without_unfinished_prompts)
    wrap(CPUModelRunner, "_get_prompt_logprobs_dict")(one_prompt_at_a_time)
    punica_cpu.PunicaWrapperCPU.sampler_indices = adapter_of_one_request(punica_cpu.PunicaWrapperCPU.sampler_indices)


def plain_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001  vLLM's signature
    """Let `layer` read its weight as loaded.

    Symptom: the trainer updates a copy of each linear layer that vLLM no longer reads.
    Cause: vLLM repacks the weight (oneDNN, SGL, zentorch) and drops the shared one.
    Why this is safe: torch's own linear layer, which is also vLLM's fallback, computes the same product.
    Seen in vLLM 0.26 to 0.33.
    """
    layer.cpu_linear = linear()
    if layer.weight.ndim == 3:
        pack_convolutions()


@cache
def pack_convolutions() -> None:
    """Let the convolutions of GatedDeltaNet read their weights as loaded.

    Symptom: noise on CPUs with AVX512-BF16, since `plain_linear` also leaves these weights unpacked.
    Cause: the kernels for these CPUs assume that vLLM packed the weights while loading them.
    Why this is safe: the weights are packed at each call, which moves a few KiB.
    Seen in vLLM 0.32, `vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py`.
    """
    module = import_module(CONVOLVING)
    for name in CONVOLUTIONS:
        if hasattr(module, name):
            wrap(module, name)(_packed_now)


def _packed_now(original: Callable[..., Tensor], *, weight: Tensor, **arguments: Any) -> Tensor:
    from vllm import _custom_ops

    return original(weight=_custom_ops.causal_conv1d_weight_pack(weight.squeeze(1)), **arguments)


def patch_experts() -> None:
    """Let experts read their weights as loaded.

    Symptom: a mixture of experts cannot be shared, because its experts are rewritten.
    Cause: vLLM packs them for its grouped products, and keeps only the packed copy.
    Why this is safe: plain linear layers compute the same products, one expert at a time, with the rounding that linear
    layers have here anyway (`plain_linear`). Experts with unsupported activations are still packed, and refused.
    torch.compile sees a single operator, because the choice of experts depends on values, which a graph cannot capture.
    Seen in vLLM 0.30 to 0.33, `vllm/model_executor/layers/fused_moe/experts/cpu_moe.py`; earlier experts are refused
    by name (`loading.py`).
    """
    experts: Any = getattr(import_module(EXPERTS), "CPUUnquantizedExperts", None) if find_spec(EXPERTS) else None
    if MODULAR in dir(experts):
        wrap(experts, "process_weights_after_loading")(_pack_experts)
        wrap(experts, "apply")(_apply_experts)
        wrap(import_module(CONFIGURATION).FusedMoEConfig, "__post_init__")(_without_lora)


def _without_lora(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
    """Let vLLM choose the CPU kernels for experts even with LoRA.

    Symptom: with LoRA and experts, the first request kills the server: "'triton.language' has no attribute 'bfloat16'".
    Cause: with LoRA, vLLM uses Triton kernels on every platform.
    Why this is safe: experts have no slots (`placement.py`), so their kernels need not support adapters.
    Seen in vLLM 0.26 to 0.33, `vllm/model_executor/layers/fused_moe/oracle/unquantized.py`.
    """
    config.is_lora_enabled = False
    original(config, *args, **kwargs)


def _pack_experts(original: Callable[..., None], experts: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    experts.bridge_plain = is_known(layer)
    if not experts.bridge_plain:
        original(experts, layer, *args, **kwargs)


def _apply_experts(original: Callable[..., None], experts: Any, *, activation: Any, **arguments: Any) -> None:
    if experts.bridge_plain:
        apply_plain(**{name: arguments[name] for name in APPLY_ARGUMENTS}, activation=activation.value)
    else:
        original(experts, activation=activation, **arguments)


def is_known(layer: Any) -> bool:
    """Return whether `apply_plain` computes the same as vLLM's experts in `layer`."""
    return layer.activation.value in ACTIVATIONS and layer.expert_map is None and not hasattr(layer, "w13_bias")


@torch.library.custom_op("bridge::cpu_experts", mutates_args=("output",))
def apply_plain(
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
) -> None:
    """Write the sum of each token's chosen experts to `output`, weighted unless the inputs already were.

    Shapes: [T, H], [E, 2I, H], [E, H, I], [T, K], [T, K] -> [T, H].
    """
    multiply = linear()
    weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
    total = torch.zeros_like(output, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = multiply(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
        product = multiply(ACTIVATIONS[activation](gate) * up, w2[expert])
        total.index_add_(0, tokens, product.float() * weights[tokens, choices].float().unsqueeze(1))
    output.copy_(total)


def linear() -> Callable[..., Tensor]:
    return layers.wide_linear if layers.bf16_is_emulated() else functional.linear


def shrink(
    inputs: Tensor, lora_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, scaling: float = 1.0
) -> None:
    """Write the rows' products with their adapters' A, scaled."""
    products = _by_adapter(inputs, lora_weights, lora_indices_tensor, output_tensor.dtype)
    output_tensor[:, : products.shape[1]] = scaling * products


def expand(
    inputs: Tensor, lora_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, add_inputs: bool = True
) -> None:
    """Write the rows' products with their adapters' B, or add them; either may have padded columns."""
    width = min(lora_weights.shape[-2], output_tensor.shape[1])
    expand_slice(inputs, lora_weights, output_tensor, lora_indices_tensor, 0, width, add_inputs)


def expand_slice(
    inputs: Tensor,
    lora_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Write the rows' products with their adapters' B to a slice of the columns, or add them."""
    products = _by_adapter(inputs, lora_weights, lora_indices_tensor, output_tensor.dtype)[:, :slice_size]
    columns = output_tensor[:, slice_offset : slice_offset + slice_size]
    if add_inputs:
        columns += products
    else:
        columns.copy_(products)


def _by_adapter(inputs: Tensor, lora_weights: Tensor, lora_indices_tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the rows of each adapter by its matrix; rows with index -1 ("no adapter") are zero.

    Symptoms: prompts of a thousand tokens take a minute with an adapter of rank 32; a base-model request that shares a
    step with an adapter's request is answered with the adapter.
    Causes: vLLM's plain-torch kernels copy an adapter's matrix for each token, and interpret the index -1 as the last
    slot.
    Why this is safe: it computes what vLLM documents. GPU kernels skip rows without an adapter; vLLM 0.33 masks them.
    Seen in vLLM 0.26 to 0.32, `vllm/lora/ops/torch_ops/lora_ops.py`.

    Shapes: [T, I], [slots, O, I] or [slots, 1, O, I], [T] -> [T, O].
    """
    multiply = linear()
    products = torch.zeros(len(inputs), lora_weights.shape[-2], dtype=dtype)
    for slot in lora_indices_tensor.unique().tolist():
        if slot == -1:
            continue
        rows = (lora_indices_tensor == slot).nonzero().squeeze(1)
        matrix = lora_weights[slot].reshape(lora_weights.shape[-2:])
        products[rows] = multiply(inputs[rows].to(dtype), matrix.to(dtype))
    return products


def for_each_token(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value for each of its draft tokens, with one value replaced.

    Symptom: with speculative decoding, NaN log-probabilities, and samples from the wrong distribution.
    Cause: vLLM's CPU kernel converts its output to int64 and writes to that copy, so that the returned tensor stays
    uninitialized unless it already is int64, which temperatures are not.
    Why this is safe: it computes what vLLM documents.
    Seen in vLLM 0.32, `vllm/utils/cpu_triton_utils.py`.

    Shapes: [requests], [requests], -> [num_tokens].
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.repeat_interleave(counts, output_size=num_tokens)
    return values.masked_fill(values == replace_from, replace_to)


def without_unfinished_prompts(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the runner's `sample_tokens` without the generators of requests whose token is dropped.

    Symptom: "RuntimeError: CPU Generator does not use offset", which kills the engine. It occurs if a seeded request is
    prefilled in chunks because many prompts, or many in-flight requests at an update, exceed one step's tokens.
    Cause: vLLM samples a token for every request in the step, drops those of unfinished prompts, and rewinds their
    generators by an offset, which only GPU generators have.
    Why this is safe: the dropped token comes from the shared generator, and the request's own does not advance.
    Seen in vLLM 0.32, `vllm/v1/worker/gpu_model_runner.py`; `CPUModelRunner` inherits it.
    """
    generators = runner.input_batch.generators
    dropped = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
    unused = {index: generators.pop(index) for index in dropped if index in generators}
    try:
        return original(runner, *args, **kwargs)
    finally:
        generators.update(unused)


def one_prompt_at_a_time(
    original: Callable[..., dict[str, Any]],
    runner: Any,
    hidden_states: Tensor,
    num_scheduled_tokens: dict[str, int],
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Call the runner's `_get_prompt_logprobs_dict` for one request at a time; used with `adapter_of_one_request`.

    Symptom: with LoRA enabled, two requests for prompt log-probabilities in one step kill the engine, even without an
    adapter: "einsum(): subscript b has size 3 ... does not broadcast".
    Cause: the head's LoRA layer assumes one row per request, each with that request's adapter, but here the rows are
    the tokens of one prompt. A single request works, because its index is broadcast.
    Why this is safe: vLLM computes each request's log-probabilities separately, and all its tokens use one adapter.
    Seen in vLLM 0.26 to 0.33, `vllm/v1/worker/gpu_model_runner.py`; `CPUModelRunner` inherits it.
    """
    requested = runner.num_prompt_logprobs
    logprobs: dict[str, Any] = {}
    try:
        for request in [request for request in requested if request in num_scheduled_tokens]:  # skip preempted requests
            runner.num_prompt_logprobs = {request: requested[request]}
            row = runner.input_batch.req_id_to_index[request]
            token = FIRST_TOKEN.set(int(runner.query_start_loc.np[row]))
            try:
                logprobs |= original(runner, hidden_states, num_scheduled_tokens, *args, **kwargs)
            finally:
                FIRST_TOKEN.reset(token)
            if not runner.num_prompt_logprobs:  # the request's prompt is complete
                del requested[request]
    finally:
        runner.num_prompt_logprobs = requested
    return logprobs


def adapter_of_one_request(original: property) -> property:
    """Return `original`, the adapter of each row of logits, but with a single adapter in `one_prompt_at_a_time`."""

    def sampler_indices(self: Any) -> Tensor:
        first = FIRST_TOKEN.get()
        indices: Tensor = original.__get__(self) if first is None else self.token_lora_indices[first : first + 1]
        return indices

    return property(sampler_indices)


LORA_KERNELS: dict[str, Callable[..., None]] = {
    "bgmv_shrink": shrink, "bgmv_expand": expand, "bgmv_expand_slice": expand_slice,
}  # fmt: skip
"""Functions that compute LoRA products, the last step complete or by slices; `sgmv_*` call them."""
