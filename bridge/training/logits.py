"""Float32 logits of a few rows: the head's product, and what a model does to its logits.

Not covered: log-probabilities (`logprobs.py`).
Shape suffixes: C rows of one chunk, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_LOGITS = 2**25
"""Float32 logits that are held at once (128 MiB, and as much again for a temporary)."""


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
        """Transform `raw` in place and return it."""
        cap = self.final_logit_softcapping
        if cap is None:
            return raw.div_(self.logits_scaling * self.temperature)
        return raw.div_(self.logits_scaling * cap).tanh_().mul_(cap / self.temperature)

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the transformed `logits` into that of the raw ones, in place; `logits` are used up."""
        cap = self.final_logit_softcapping
        if cap is not None:
            gradient.mul_(logits.mul_(self.temperature / cap).square_().neg_().add_(1))
        return gradient.div_(self.temperature * self.logits_scaling)


def project(hidden_CH: Tensor, head_HV: Tensor, bias_V: Tensor | None, by: LogitTransform) -> Tensor:
    """Return the transformed float32 logits of operands (see `operand`).

    Shapes: [C, H], [H, V], [V] -> [C, V].
    """
    raw_CV = multiply(hidden_CH, head_HV)
    return by.apply(raw_CV if bias_V is None else raw_CV.add_(bias_V))


def operand(matrix: Tensor) -> Tensor:
    """Return what `multiply` takes: on a GPU the matrix itself, on the CPU, which lacks `out_dtype`, a float32 copy."""
    return matrix if matrix.is_cuda else matrix.float()


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the float32 product of two operands."""
    assert left.dtype == right.dtype, (left.dtype, right.dtype)
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def row_chunks(num_rows: int, vocabulary: int) -> Iterator[slice]:
    """Cut the rows so that no piece has more than `CHUNK_LOGITS` logits (one row at least)."""
    size = max(1, CHUNK_LOGITS // vocabulary)
    return (slice(start, start + size) for start in range(0, num_rows, size))
