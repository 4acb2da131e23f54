"""Float32 logits of a few words of the vocabulary: the head's product, and what a model does to it.

Not covered: log-probabilities (`logprobs.py`).
Shape suffixes: N rows, H hidden size, V vocabulary, W words of one block of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_LOGITS = {"cpu": 2**23, "cuda": 2**26}
"""Float32 logits that are held at once: 256 MiB on a GPU, whose products need large operands, and 32 MiB on the CPU,
where what fits its caches is faster; a few temporaries of the same size come on top."""
BLOCK_WORDS = 256
"""Blocks are a multiple of this, so that no product is of an odd shape; and no smaller, however many rows there are."""


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """What a model does to its logits before they are log-probabilities of a temperature."""

    temperature: float
    """Divides the logits, last."""
    final_logit_softcapping: float | None = None
    """c in c * tanh(logit / c), as in Gemma 2; None: no cap."""
    logits_scaling: float = 1.0
    """Divides the logits, first, as in Granite."""

    def apply(self, raw: Tensor) -> Tensor:
        """Return the transformed logits; `raw` itself where they are the same."""
        cap = self.final_logit_softcapping
        if cap is None:
            divisor = self.logits_scaling * self.temperature
            return raw if divisor == 1 else raw / divisor
        return (raw / (self.logits_scaling * cap)).tanh_().mul_(cap / self.temperature)

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the transformed `logits` into that of the raw ones, in place; a cap uses them up."""
        cap = self.final_logit_softcapping
        if cap is not None:
            gradient.mul_(logits.mul_(self.temperature / cap).square_().neg_().add_(1))
        divisor = self.temperature * self.logits_scaling
        return gradient if divisor == 1 else gradient.div_(divisor)


def transformed(raw_NW: Tensor, bias_W: Tensor | None, by: LogitTransform) -> Tensor:
    """Return the logits of the head's product; `raw_NW` itself where there is nothing to do.

    Shapes: [N, W], [W] -> [N, W].
    """
    return by.apply(raw_NW if bias_W is None else raw_NW + bias_W)


def operand(matrix: Tensor) -> Tensor:
    """Return what `multiply` takes: on a GPU the matrix itself, on the CPU, which lacks `out_dtype`, a float32 copy."""
    return matrix if matrix.is_cuda else matrix.float()


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the float32 product of two operands."""
    assert left.dtype == right.dtype, (left.dtype, right.dtype)
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def blocks(num_rows: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Cut the vocabulary so that `num_rows` have about `BLOCK_LOGITS` logits in each block."""
    words = BLOCK_LOGITS[device.type] // max(1, num_rows)
    size = max(1, words // BLOCK_WORDS) * BLOCK_WORDS
    return (slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size))
