"""The memory of a forward and backward pass, measured instead of modeled.

Two passes of different sizes give the memory per token. On a GPU the allocator reports its peak. On a CPU it does not:
there, the tensors that autograd keeps are counted, plus three layers' worth for the temporaries of a backward pass.
"""

import gc
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.core.host_memory import left_bytes
from bridge.passes import layers
from bridge.passes.logprobs import BLOCK_ELEMENTS
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.passes.prepared_model import PreparedModel
from bridge.weights.model_folder import state

PROBES = (1_024, 2_048)
"""Tokens of the two measured passes."""
PROBE_LENGTH = 512
"""Tokens of each sequence in these passes."""
CPU_PROBES = (64, 128)
"""Tokens of the two measured passes on a CPU, where passes are slow and counting is exact."""
CPU_PROBE_LENGTH = 32
"""Tokens of each sequence in the passes on a CPU."""
LIVE_LAYERS = 3
"""Layers whose recomputed activations and gradients a backward pass holds at once on a CPU."""
CPU_LOGITS_BYTES = 3 * 4 * BLOCK_ELEMENTS["cpu"]
"""Bytes of one vocabulary block's float32 logits, and of two temporaries of the same size."""


def free_memory(model: PreTrainedModel) -> float:
    """Return the free bytes, including those that a GPU's allocator has reserved but does not use."""
    if model.device.type == "cpu":
        return float(left_bytes())
    unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return float(torch.cuda.mem_get_info(model.device)[0] + unused)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The memory of a forward and backward pass."""

    fixed_bytes: float
    token_bytes: float

    @classmethod
    def of(cls, measured: Sequence[tuple[int, int]]) -> Self:
        """Fit a line through two measurements of (tokens, bytes)."""
        (few, low), (many, high) = sorted(measured)
        token_bytes = max((high - low) / (many - few), 1.0)
        return cls(fixed_bytes=max(low - few * token_bytes, 0.0), token_bytes=token_bytes)

    def tokens_in(self, free_bytes: float) -> int:
        return max(0, int((free_bytes - self.fixed_bytes) / self.token_bytes))


def measure_cost(prepared: PreparedModel, temperature: float) -> Cost:
    """Run passes of two sizes, leaving no gradient behind, and return their cost.

    The random state is restored afterwards, since a resumed run measures at a different time.
    """
    device = prepared.model.device
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            return _cost_on_cpu(prepared, temperature)
    with torch.random.fork_rng(devices=[device]):
        return cost_on_gpu(prepared, temperature)


def cost_on_gpu(prepared: PreparedModel, temperature: float) -> Cost:
    return Cost.of([(tokens, _peak_bytes(prepared, tokens, temperature)) for tokens in PROBES])


def _peak_bytes(prepared: PreparedModel, num_tokens: int, temperature: float) -> int:
    model = prepared.model
    part = example(model, num_tokens, PROBE_LENGTH)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    logprobs_N, _ = prepared.logprobs(part, temperature)
    torch.autograd.grad(logprobs_N.sum(), layers.first_trained(model))
    return int(torch.cuda.max_memory_allocated(model.device) - before)


def _cost_on_cpu(prepared: PreparedModel, temperature: float) -> Cost:
    """Count what autograd keeps, plus temporaries: what some layers would keep without recomputing."""
    all_layers = layers.decoder_layers(prepared.model)
    recomputed = [layer for layer in all_layers if getattr(layer, "gradient_checkpointing", False)]
    kept = [_kept_bytes(prepared, tokens, temperature) for tokens in CPU_PROBES]
    for layer in recomputed:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    plain = [_kept_bytes(prepared, tokens, temperature) for tokens in CPU_PROBES] if recomputed else kept
    for layer in recomputed:
        layer.gradient_checkpointing = True  # type: ignore[assignment]
    share = LIVE_LAYERS / max(len(all_layers), 1)
    totals = [some + int(share * all_) for some, all_ in zip(kept, plain, strict=True)]
    cost = Cost.of(list(zip(CPU_PROBES, totals, strict=True)))
    return Cost(fixed_bytes=cost.fixed_bytes + CPU_LOGITS_BYTES, token_bytes=cost.token_bytes)


def _kept_bytes(prepared: PreparedModel, num_tokens: int, temperature: float) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without weights; each storage counts once."""
    model = prepared.model
    weights = {tensor.untyped_storage().data_ptr() for tensor in state(model).values()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            kept[address] = tensor  # kept alive, so that no other tensor gets its address
        return tensor

    part = example(model, num_tokens, CPU_PROBE_LENGTH)
    with (
        torch.compiler.set_stance("force_eager"),  # hooks would make torch recompile compiled layers
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        prepared.logprobs(part, temperature)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def example(model: PreTrainedModel, num_tokens: int, length: int) -> MicroBatch:
    """Return a micro-batch of `num_tokens` tokens in sequences of this `length`, with advantages of 0."""
    zeros = (0.0,) * (length - 1)
    sample = Sample(
        prompt_token_ids=(1,), token_ids=(1,) * len(zeros), sampled_logprobs=zeros, advantages=zeros, weight=0.0
    )
    (part,) = packs([sample] * (num_tokens // length), max_tokens=num_tokens, device=model.device)
    return part


def let_go(error: BaseException, device: torch.device) -> None:
    """Free the memory of a failed pass, whose stack frames live as long as its error."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
