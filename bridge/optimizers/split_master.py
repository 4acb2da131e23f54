"""One AdamW update, elementwise: on a float32 weight, or on a master split into a bf16 weight and the rest of it.

    float32 master   s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
                     the bf16 weight    | int16 remainder        master = (weight's bits << 16) + remainder

The weight is the master rounded to nearest (a tie away from zero), so the remainder is signed and a carry reaches the
exponent as it should. Where no remainder is kept the weight is the master rounded by chance.

What changes from step to step is a tensor, so that a compiled update stays compiled.

Not covered: which tensors, in which pieces (`slabs.py`), compiling (`compiled.py`), low-bit moments (`moments.py`).
Shape suffixes: R blocks, B elements of a block.
Source: TransformerEngine's `FusedAdam` (`store_param_remainders`) for the split; AdamW, arXiv 1711.05101, algorithm 2.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from bridge.optimizers.moments import BFLOAT16, EIGHT_BIT, FLOAT32, FOUR_BIT, Moments, Part
from bridge.optimizers.rounding import random_bits, round_by_chance

REMAINDER = "remainder"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to keep AdamW's state beside the weights."""

    name: str
    """Value of `--optimizer`."""
    moments: Moments
    """How it holds the moments."""
    has_master: bool = True
    """Whether a bf16 weight has a remainder; else it is rounded by chance."""
    beta2: float = 0.999
    """Decay of the second moment when none is given."""

    def parts(self, dtype: torch.dtype) -> dict[str, Part]:
        """Return the tensors of state of a weight of `dtype`, by name."""
        is_split = self.has_master and dtype == torch.bfloat16
        return {**self.moments.parts, **({REMAINDER: Part(torch.int16)} if is_split else {})}

    def described_parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of one parameter, without memory."""
        described = {}
        for name, part in self.parts(parameter.dtype).items():
            shape = parameter.shape if part.elements == 1 else (-(-parameter.numel() // part.elements),)
            described[name] = torch.empty(shape, dtype=part.dtype, device="meta")
        return described


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="adamw", moments=FLOAT32),
        Kind(name="adamw-bf16", moments=BFLOAT16, beta2=0.99),
        Kind(name="adamw-8bit", moments=EIGHT_BIT),
        Kind(name="adamw-4bit", moments=FOUR_BIT, has_master=False),
    )
}
"""By the value of `--optimizer`."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The scalars of one AdamW update of one parameter, in the order in which `update` takes them."""

    decay: float
    """Factor of the weight: 1 - lr * weight_decay."""
    lerp1: float
    """1 - decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    lerp2: float
    """1 - beta2."""
    step_size: float
    """Learning rate over the first moment's bias correction."""
    root_bias2: float
    """Square root of the second moment's bias correction."""
    eps: float
    """Added to the denominator."""
    largest: float
    """Largest ratio of first moment to denominator that any gradients can make of exact moments."""
    max_norm: float
    """Norm to which the gradient is scaled down."""

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int, max_norm: float = math.inf) -> Self:
        """Derive them from a parameter group's hyperparameters and the number of the step, from 1."""
        beta1, beta2 = group["betas"]
        return cls(
            decay=1 - group["lr"] * group["weight_decay"],
            lerp1=1 - beta1,
            beta2=beta2,
            lerp2=1 - beta2,
            step_size=group["lr"] / (1 - beta1**step),
            root_bias2=math.sqrt(1 - beta2**step),
            eps=group["eps"],
            largest=_largest(beta1, beta2, step) * math.sqrt(1 - beta2**step),
            max_norm=max_norm,
        )

    def values(self) -> tuple[float, ...]:
        """Return them in order."""
        return astuple(self)


def join(upper: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of the bf16 bits `upper` and `remainder`, both int16."""
    return ((upper.int() << 16) + remainder.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 bits nearest to float32 `master` and the remainder, both int16; `join` undoes it exactly."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.short(), (bits - (upper << 16)).short()


def update(
    kind: Kind,
    weight_RB: Tensor,
    gradient_RB: Tensor,
    state: Mapping[str, Tensor],
    coefficients: Tensor,
    norm: Tensor,
    place: Tensor,
) -> Tensor:
    """Apply one AdamW update in place and return how many words of each block changed; nothing waits for the device.

    A gradient whose norm is above `max_norm` is scaled down to it; one whose norm is not finite changes nothing.

    Shapes: `weight_RB` float32, or the int16 bits of bf16; `state` what `Kind.parts` says, R blocks of each;
    `coefficients` float32 as `Coefficients` has them; `norm` float32 []; `place` as `random_bits` wants it.
        -> [R] int32.
    """
    decay, lerp1, beta2, lerp2, step_size, root_bias2, eps, largest, max_norm = coefficients.unbind()
    is_bf16, keep = weight_RB.dtype == torch.int16, norm.isfinite()
    gradient_RB = gradient_RB.float() * torch.where(norm > max_norm, max_norm / norm, 1.0)
    first_RB, second_RB = kind.moments.decode(state)
    first_RB = torch.lerp(first_RB, gradient_RB, lerp1)
    second_RB = torch.addcmul(second_RB * beta2, lerp2 * gradient_RB, gradient_RB)
    denominator_RB = second_RB.sqrt() / root_bias2 + eps
    if kind.moments.by_chance:
        change_RB = step_size * (first_RB / denominator_RB).clamp(-largest, largest)
    else:
        change_RB = step_size * first_RB / denominator_RB  # in the order of torch.optim.AdamW, to the bit
    bits_RB = random_bits(place, weight_RB) if kind.moments.by_chance else None
    new = dict(kind.moments.encode(first_RB, second_RB, bits_RB))
    if is_bf16 and REMAINDER in state:
        new_RB, new[REMAINDER] = split(join(weight_RB, state[REMAINDER]) * decay - change_RB)
    elif is_bf16:
        assert bits_RB is not None, "without a master there is chance"
        new_RB = round_by_chance((weight_RB.int() << 16).view(torch.float32) * decay - change_RB, bits_RB)
    else:
        new_RB = weight_RB * decay - change_RB
    return _written(weight_RB, new_RB, keep, state, new)


def _written(
    weight_RB: Tensor, new_RB: Tensor, keep: Tensor, state: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> Tensor:
    """Put what is new into its place, if `keep`, and count the words that differ in each block: one pass on a GPU."""
    new_RB = torch.where(keep, new_RB, weight_RB)
    differs_RB = (
        new_RB.view(torch.int32) != weight_RB.view(torch.int32) if new_RB.is_floating_point() else new_RB != weight_RB
    )
    num_changed_R = differs_RB.sum(1, dtype=torch.int32)
    weight_RB.copy_(new_RB)
    for name, tensor in state.items():
        tensor.copy_(torch.where(keep, new[name], tensor))
    return num_changed_R


def _largest(beta1: float, beta2: float, step: int) -> float:
    """Return the largest first moment over root of the second after `step` gradients (Cauchy-Schwarz)."""
    ratio = beta1**2 / beta2 if beta2 else math.inf
    if ratio >= 1:
        return math.inf
    return (1 - beta1) * math.sqrt((1 - ratio**step) / (1 - ratio) / (1 - beta2))
