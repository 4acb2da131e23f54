"""What one forward and backward pass takes of a GPU's memory: two of different sizes are run and measured.

Not covered: what follows from it (`budget.py`).
"""

import gc
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from bridge.passes.logprobs import model_logprobs
from bridge.passes.packing import packs
from bridge.passes.preparation import first_trained
from bridge.passes.samples import Sample

PROBES = (1_024, 2_048)
"""Tokens of the two passes that are measured."""
PROBE_LENGTH = 512
"""Tokens of each of their sequences."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a forward and backward pass takes."""

    fixed_bytes: float
    """Whatever its size."""
    token_bytes: float
    """Per token."""

    @classmethod
    def of(cls, measured: Sequence[tuple[int, int]]) -> Self:
        """Return the line through two measurements of (tokens, bytes)."""
        (few, low), (many, high) = sorted(measured)
        token_bytes = max((high - low) / (many - few), 1.0)
        return cls(fixed_bytes=max(low - few * token_bytes, 0.0), token_bytes=token_bytes)

    def tokens_in(self, free_bytes: float) -> int:
        """Return how many tokens fit."""
        return max(0, int((free_bytes - self.fixed_bytes) / self.token_bytes))


def measure_cost(model: PreTrainedModel, temperature: float) -> Cost | None:
    """Run forward and backward over two sizes on the GPU, without leaving a gradient, and return what they took."""
    try:
        return Cost.of([(tokens, _peak_bytes(model, tokens, temperature)) for tokens in PROBES])
    except torch.OutOfMemoryError as error:
        let_go(error, model.device)
        return None


def free_memory(model: PreTrainedModel) -> float:
    """Return the bytes of the model's GPU that a pass may take: what is free, and what the allocator holds unused."""
    unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return float(torch.cuda.mem_get_info(model.device)[0] + unused)


def _peak_bytes(model: PreTrainedModel, num_tokens: int, temperature: float) -> int:
    zeros = (0.0,) * (PROBE_LENGTH - 1)
    sample = Sample(
        prompt_token_ids=(1,), token_ids=(1,) * len(zeros), sampled_logprobs=zeros, advantages=zeros, weight=0.0
    )
    (part,) = packs([sample] * (num_tokens // PROBE_LENGTH), max_tokens=num_tokens, device=model.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    logprobs_N, _ = model_logprobs(model, part, temperature)
    torch.autograd.grad(logprobs_N.sum(), first_trained(model))
    return int(torch.cuda.max_memory_allocated(model.device) - before)


def let_go(error: BaseException, device: torch.device) -> None:
    """Free what a pass that failed still holds: its frames live as long as its error."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
