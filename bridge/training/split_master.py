"""One AdamW update, elementwise: on a float32 weight, or on a master split into a bf16 weight and the rest of it.

    float32 master   s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
                     the bf16 weight    | int16 remainder        master = (weight's bits << 16) + remainder

The weight is the master rounded to nearest (a tie away from zero), so the remainder is signed and a carry reaches the
exponent as it should.

Not covered: which tensors, in which pieces (`optimizer.py`).
Source: TransformerEngine's `FusedAdam` (`store_param_remainders`) for the split; AdamW, arXiv 1711.05101, algorithm 2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The scalars of one AdamW update of one parameter."""

    decay: float
    """Factor of the weight: 1 - lr * weight_decay."""
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    step_size: float
    """Learning rate over the first moment's bias correction."""
    root_bias2: float
    """Square root of the second moment's bias correction."""
    eps: float
    """Added to the denominator."""

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int) -> Self:
        """Derive them from a parameter group's hyperparameters and the number of the step, from 1."""
        beta1, beta2 = group["betas"]
        return cls(
            decay=1 - group["lr"] * group["weight_decay"],
            beta1=beta1,
            beta2=beta2,
            step_size=group["lr"] / (1 - beta1**step),
            root_bias2=math.sqrt(1 - beta2**step),
            eps=group["eps"],
        )


def join(upper: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of the bf16 bits `upper` and `remainder`, both int16."""
    return ((upper.int() << 16) + remainder.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 bits nearest to float32 `master` and the remainder, both int16; `join` undoes it exactly."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.short(), (bits - (upper << 16)).short()


def adamw(master: Tensor, moments: tuple[Tensor, Tensor], gradient: Tensor, by: Coefficients) -> None:
    """Apply one AdamW update to a float32 master and its moments, in place, in the order of torch.optim.AdamW."""
    first, second = moments
    master.mul_(by.decay)
    first.lerp_(gradient, 1 - by.beta1)
    second.mul_(by.beta2).addcmul_(gradient, gradient, value=1 - by.beta2)
    master.addcdiv_(first, second.sqrt().div_(by.root_bias2).add_(by.eps), value=-by.step_size)


def step_split(
    upper: Tensor, remainder: Tensor, moments: tuple[Tensor, Tensor], gradient: Tensor, by: Coefficients
) -> Tensor:
    """Apply `adamw` to a split master in place; return how many words of `upper`, the bf16 weight, changed."""
    master = join(upper, remainder)
    adamw(master, moments, gradient, by)
    new_upper, new_remainder = split(master)
    num_changed = (new_upper != upper).sum()
    upper.copy_(new_upper)
    remainder.copy_(new_remainder)
    return num_changed


def step_float32(weight: Tensor, moments: tuple[Tensor, Tensor], gradient: Tensor, by: Coefficients) -> Tensor:
    """Apply `adamw` to a float32 weight in place; return how many of its words changed."""
    before = weight.clone()
    adamw(weight, moments, gradient, by)
    return (weight.view(torch.int32) != before.view(torch.int32)).sum()
