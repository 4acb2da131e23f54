"""The update as one kernel: compiled once for all sizes on a GPU, as it is written on a CPU.

Not covered: what it computes (`split_master.py`).
"""

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor

from bridge.optimizers.split_master import Coefficients, Kind, update

Update = Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor, Tensor, Tensor], Tensor]
"""`update` of one kind: (weight, gradient, state, coefficients, norm, place) -> words changed in each block."""
TRIAL_BLOCKS = 3
"""Of the call that compiles; 0 and 1 would be compiled for themselves."""


def eager(kind: Kind) -> Update:
    """Return the update as it is written."""
    return partial(update, kind)


@cache
@torch.no_grad()  # as it is called later: another mode would be compiled for itself
def compiled(kind: Kind, weight: torch.dtype, gradient: torch.dtype, device: torch.device) -> Update:
    """Compile the update for weights and gradients of these types and run it once on nothing, before it is needed.

    The number of blocks is left open, and what changes from step to step is in tensors: it is compiled once.
    """

    def update_of_kind(*tensors: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        weight_RB, gradient_RB, *scalars = tensors
        return update(kind, weight_RB, gradient_RB, state, *scalars)

    update_of_kind.__code__ = update_of_kind.__code__.replace()  # torch bounds the compilations of one code object
    compiled_update = torch.compile(update_of_kind, fullgraph=True)

    def call(weight_RB: Tensor, gradient_RB: Tensor, state: Mapping[str, Tensor], *scalars: Tensor) -> Tensor:
        return compiled_update(weight_RB, gradient_RB, *scalars, state=state)

    call(*_trial(kind, weight, gradient, device))
    return call


def _trial(
    kind: Kind, weight: torch.dtype, gradient: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Mapping[str, Tensor], Tensor, Tensor, Tensor]:
    def blocks(dtype: torch.dtype, elements: int = 1) -> Tensor:
        made = torch.zeros(TRIAL_BLOCKS, kind.moments.block // elements, dtype=dtype, device=device)
        torch._dynamo.mark_dynamic(made, 0)
        return made

    state = {name: blocks(part.dtype, part.elements) for name, part in kind.parts(weight).items()}
    bits = torch.int16 if weight == torch.bfloat16 else weight
    group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    coefficients = torch.tensor(Coefficients.of(group, 1).values(), device=device)
    place = torch.zeros(2, dtype=torch.int32, device=device)
    return blocks(bits), blocks(gradient), state, coefficients, torch.ones((), device=device), place
