"""Report with each sampled token what top-k, top-p and min-p kept: a threshold on the logits, and the number of words.

Symptom: log-probabilities are normalized over the words that a filter kept, but the trainer cannot know which.
Cause: vLLM only has them as the logits that are not -inf, and discards these. From 0.28 on, one of its two model
runners can return their ids, but only up to a top-k that each request must then set.
What is done: all three filters keep the likeliest words, so two numbers identify them. The threshold is the midpoint
between the smallest kept logit and the largest dropped one, divided by the temperature, so that a different engine's
logits, which round differently, mostly fall on the same sides; the number of words shows whether they do.
Why this is safe: nothing is computed for a step without such a request. Both numbers share 64 bits with the token's
vocabulary rank, and `engine_outputs.py` separates them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridge_patches import wrap

PINS = """
vllm.platforms: current_platform
vllm.platforms.interface: call Platform.is_cpu()
vllm.v1.outputs: LogprobsTensors: selected_token_ranks
# V1, on the GPU and the CPU.
vllm.v1.sample.sampler
    wrap Sampler.forward(logits, sampling_metadata)
    wrap Sampler.sample(logits, sampling_metadata)  # returns log-probabilities of the kept tokens, -inf for others
vllm.v1.sample.metadata: SamplingMetadata: temperature, top_k, top_p, logitsprocs, max_num_logprobs
vllm.v1.sample.logits_processor.state: LogitsProcessors: argmax_invariant
vllm.v1.sample.logits_processor.builtin: MinPLogitsProcessor: min_p_count
vllm.v1.outputs: SamplerOutput: logprobs_tensors
# V2, on the GPU.
vllm.v1.worker.gpu.sample.sampler
    wrap Sampler.__call__(logits, input_batch)
    wrap Sampler.sample(logits)  # returns logits, -inf for dropped tokens
    Sampler: sampling_states
vllm.v1.worker.gpu.sample.states: SamplingStates: temperature, top_k, top_p, min_p, vocab_size
vllm.v1.worker.gpu.sample.output: SamplerOutput: logprobs_tensors
vllm.v1.worker.gpu.input_batch: InputBatch: expanded_idx_mapping, idx_mapping_np
"""
COUNT_BITS = 20
"""Bits for the number of kept words, and for a rank: vocabularies have fewer than a million words."""
THRESHOLD_BITS = 24
"""Leading bits of a float32 that are kept: for a logit of 20, the error is below 0.0006."""
RANK_SHIFT = THRESHOLD_BITS + COUNT_BITS
"""Position of the rank, which comes first, followed by the number of words and the threshold."""
KEPT_MASK = 2**RANK_SHIFT - 1
KEEP_ALL = float(np.finfo(np.float32).min)
"""Threshold if nothing was dropped, because JSON has no infinity."""
GREEDY = 1e-5
"""Below this temperature, vLLM samples the likeliest token and divides by 1."""


def patch() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler

    wrap_sampler(Sampler, "forward", "sampling_metadata", _temperatures)
    if not current_platform.is_cpu():
        from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

        wrap_sampler(SamplerV2, "__call__", "input_batch", _temperatures_v2)


def unpack(numbers: Any) -> tuple[Any, Any, Any]:
    """Unpack `numbers` into three arrays: ranks (or versions in their place), thresholds, and counts of kept words."""
    packed = np.asarray(numbers, dtype=np.int64)
    thresholds = ((packed & (2**THRESHOLD_BITS - 1)) << 32 - THRESHOLD_BITS).astype(np.uint32).view(np.float32)
    counts = (packed >> THRESHOLD_BITS) & (2**COUNT_BITS - 1)
    return (packed >> RANK_SHIFT) & (2**COUNT_BITS - 1), thresholds, counts


def wrap_sampler(
    sampler: type[Any], method: str, parameters: str, temperatures_of: Callable[[Any, Any], Tensor | None]
) -> None:
    """Wrap `method` of `sampler`; its argument named `parameters` has the sampling parameters of the logits."""
    processed: list[Tensor] = []
    """The current step's logits after the filters."""

    @wrap(sampler, "sample")
    def sample(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sampled = original(*args, **kwargs)
        processed[:] = [sampled[1]]
        return sampled

    @wrap(sampler, method)
    def report(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(("logits", parameters), args, strict=False)) | kwargs
        temperatures = temperatures_of(self, arguments[parameters])
        before = None if temperatures is None else arguments["logits"].clone()  # vLLM modifies the logits in place
        output = original(self, *args, **kwargs)
        tensors = output.logprobs_tensors
        has_ranks = tensors is not None and len(tensors.selected_token_ranks)  # none with the full vocabulary
        if temperatures is not None and before is not None and processed and has_ranks:
            packed = pack(tensors.selected_token_ranks, *kept(before.float(), processed[0], temperatures))
            output.logprobs_tensors = tensors._replace(selected_token_ranks=packed)
        processed.clear()
        return output


def kept(logits: Tensor, processed: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the thresholds and the numbers of kept words.

    A threshold is the midpoint between the smallest kept logit and the largest dropped one, over the temperature.

    Shapes: [N, V], [N, V] with -inf for dropped words, [N] -> [N] float32, [N] int64.
    """
    is_kept = processed > -torch.inf
    least = torch.where(is_kept, logits, torch.inf).amin(dim=1)
    greatest = torch.where(is_kept, -torch.inf, logits).amax(dim=1)
    divisors = torch.where(temperatures < GREEDY, 1.0, temperatures)
    return ((least + greatest) / 2 / divisors).clamp(min=KEEP_ALL), is_kept.sum(dim=1)


def pack(ranks: Tensor, thresholds: Tensor, counts: Tensor) -> Tensor:
    """Pack each rank, threshold and count into one int64; `unpack` is the inverse."""
    bits = (thresholds.view(torch.int32).to(torch.int64) >> 32 - THRESHOLD_BITS) & (2**THRESHOLD_BITS - 1)
    packed: Tensor = (ranks << RANK_SHIFT) | (counts << THRESHOLD_BITS) | bits
    return packed


def _temperatures(_: Any, metadata: Any) -> Tensor | None:
    """Return the temperature of each row; None if no request in the step is filtered or wants log-probabilities."""
    if metadata.max_num_logprobs is None:
        return None
    is_min_p = any(getattr(processor, "min_p_count", 0) for processor in metadata.logitsprocs.argmax_invariant)
    is_filtered = metadata.top_k is not None or metadata.top_p is not None or is_min_p
    return metadata.temperature if is_filtered else None  # vLLM's temperature is None, too, if all requests are greedy


def _temperatures_v2(sampler: Any, batch: Any) -> Tensor | None:
    states = sampler.sampling_states
    rows = batch.idx_mapping_np
    cuts_top_k = (states.top_k.np[rows] != states.vocab_size).any()
    cuts_top_p = (states.top_p.np[rows] != 1.0).any()
    cuts_min_p = (states.min_p.np[rows] != 0.0).any()
    if not (cuts_top_k or cuts_top_p or cuts_min_p):
        return None
    temperatures: Tensor = states.temperature.gpu[batch.expanded_idx_mapping]
    return temperatures
