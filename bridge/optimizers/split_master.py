"""One elementwise AdamW update, eager or compiled, for float32 weights, or masters split into bf16 and a remainder.

    float32 master   s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
                     the bf16 weight    | int16 remainder        master = (weight's bits << 16) + remainder

The weight is the master rounded to nearest (ties away from zero), so the remainder is signed and a carry reaches the
exponent. Without a remainder, the weight is the master rounded stochastically.

Everything that changes from step to step is in a tensor, so that nothing is recompiled.

Shape suffixes: R blocks, B elements of a block.
Source: TransformerEngine's `FusedAdam` (`store_param_remainders`) for the split; AdamW, arXiv 1711.05101, algorithm 2.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from bridge.config.optimizers import OPTIMIZERS, OptimizerName
from bridge.optimizers.moments import (
    EIGHT_BIT,
    FLOAT32,
    FOUR_BIT,
    Moments,
    StateTensor,
    random_bits,
    stochastic_round,
)

REMAINDER = "remainder"
TRIAL_BLOCKS = 3
"""Number of blocks in the call that compiles, since torch specializes on sizes 0 and 1."""
Update = Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor, Tensor, Tensor], Tensor]
"""`update` of one kind: (weight, gradient, state, coefficients, norm, counter) -> values changed in each block."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to store AdamW's state."""

    name: OptimizerName
    moments: Moments

    def parts(self, dtype: torch.dtype) -> dict[str, StateTensor]:
        """Return the state tensors for a weight of this dtype, by name."""
        is_split = OPTIMIZERS[self.name].has_master and dtype == torch.bfloat16
        return {**self.moments.parts, **({REMAINDER: StateTensor(torch.int16)} if is_split else {})}


KINDS: Mapping[str, Kind] = {
    "adamw": Kind(name="adamw", moments=FLOAT32),
    "adamw-8bit": Kind(name="adamw-8bit", moments=EIGHT_BIT),
    "adamw-4bit": Kind(name="adamw-4bit", moments=FOUR_BIT),
}
"""Kinds by the value of `--optimizer`."""


class Coefficients(NamedTuple):
    """The scalars of one update of a parameter, in the order in which `update` unpacks them."""

    decay: float  # factor of the weight: 1 - lr * weight_decay
    lerp1: float  # 1 - beta1
    beta2: float
    lerp2: float  # 1 - beta2
    step_size: float  # learning rate over the first moment's bias correction
    root_bias2: float  # square root of the second moment's bias correction
    eps: float
    largest: float  # upper bound of first moment / denominator for exact moments, whatever the gradients
    max_norm: float  # norm to which the gradient is clipped

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int, max_norm: float = math.inf) -> Self:
        """Derive the coefficients from a parameter group and the step's number, counted from 1."""
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


def join(upper: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master, given its bf16 bits `upper` and the `remainder`, both int16."""
    return ((upper.int() << 16) + remainder.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the bf16 nearest to float32 `master`, and the remainder, both int16; `join` inverts this."""
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
    counter: Tensor,
) -> Tensor:
    """Apply one AdamW update in place, without a device sync; return how many stored values changed in each block.

    If `norm` exceeds `max_norm`, the gradient is scaled down; if it is not finite, everything stays unchanged.

    Shapes: `weight_RB` float32, or the int16 bits of bf16; `state` R blocks of each of `Kind.parts`; `coefficients`
    float32, the fields of `Coefficients`; `norm` float32 []; `counter` as in `random_bits`.
        -> [R] int32.
    """
    decay, lerp1, beta2, lerp2, step_size, root_bias2, eps, largest, max_norm = coefficients.unbind()
    is_bf16 = weight_RB.dtype == torch.int16
    keep = norm.isfinite()
    gradient_RB = gradient_RB.float() * torch.where(norm > max_norm, max_norm / norm, 1.0)
    first_RB, second_RB = kind.moments.decode(state)
    first_RB = torch.lerp(first_RB, gradient_RB, lerp1)
    second_RB = torch.addcmul(second_RB * beta2, lerp2 * gradient_RB, gradient_RB)
    denominator_RB = second_RB.sqrt() / root_bias2 + eps
    if kind.moments.by_chance:
        change_RB = step_size * (first_RB / denominator_RB).clamp(-largest, largest)
    else:
        change_RB = step_size * first_RB / denominator_RB  # ordered as in torch.optim.AdamW, for equal bits
    bits_RB = random_bits(counter, weight_RB) if kind.moments.by_chance else None
    new = dict(kind.moments.encode(first_RB, second_RB, bits_RB))
    if is_bf16 and REMAINDER in state:
        new_RB, new[REMAINDER] = split(join(weight_RB, state[REMAINDER]) * decay - change_RB)
    elif is_bf16:
        assert bits_RB is not None, "without a remainder, rounding needs random bits"
        new_RB = stochastic_round((weight_RB.int() << 16).view(torch.float32) * decay - change_RB, bits_RB)
    else:
        new_RB = weight_RB * decay - change_RB
    new_RB = torch.where(keep, new_RB, weight_RB)
    differs_RB = (
        new_RB.view(torch.int32) != weight_RB.view(torch.int32) if new_RB.is_floating_point() else new_RB != weight_RB
    )
    num_changed_R = differs_RB.sum(1, dtype=torch.int32)
    weight_RB.copy_(new_RB)
    for name, tensor in state.items():
        tensor.copy_(torch.where(keep, new[name], tensor))
    return num_changed_R


@cache
@torch.no_grad()  # as in later calls, since torch recompiles if grad mode changes
def compiled(kind: Kind, weight: torch.dtype, gradient: torch.dtype, device: torch.device, *, single: bool) -> Update:
    """Compile `update` for these dtypes into one kernel for any number of blocks, by running it once on zeros.

    With `single`, also compile the separate kernel that torch needs for a single block; the border between two ranks
    may leave one.
    """

    def update_of_kind(*tensors: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        weight_RB, gradient_RB, *scalars = tensors
        return update(kind, weight_RB, gradient_RB, state, *scalars)

    update_of_kind.__code__ = update_of_kind.__code__.replace()  # torch limits the compilations of one code object
    compiled_update = torch.compile(update_of_kind, fullgraph=True)

    def call(weight_RB: Tensor, gradient_RB: Tensor, state: Mapping[str, Tensor], *scalars: Tensor) -> Tensor:
        return compiled_update(weight_RB, gradient_RB, *scalars, state=state)

    def zeros(num_blocks: int, dtype: torch.dtype, elements: int = 1) -> Tensor:
        made = torch.zeros(num_blocks, kind.moments.block // elements, dtype=dtype, device=device)
        if num_blocks > 1:
            torch._dynamo.mark_dynamic(made, 0)
        return made

    group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    for count in (TRIAL_BLOCKS, 1) if single else (TRIAL_BLOCKS,):
        call(
            zeros(count, torch.int16 if weight == torch.bfloat16 else weight),
            zeros(count, gradient),
            {name: zeros(count, part.dtype, part.elements) for name, part in kind.parts(weight).items()},
            torch.tensor(Coefficients.of(group, 1), device=device),
            torch.ones((), device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
    return call


def _largest(beta1: float, beta2: float, step: int) -> float:
    """Return the largest possible first moment over root of second moment after `step` gradients (Cauchy-Schwarz)."""
    ratio = beta1**2 / beta2 if beta2 else math.inf
    if ratio >= 1:
        return math.inf
    return (1 - beta1) * math.sqrt((1 - ratio**step) / (1 - ratio) / (1 - beta2))
