"""Several adapters on one base: one is in the model, and the others are kept beside it until it is their turn.

An adapter is copied in and out, so the parameters, the optimizer's state and compiled code stay the same objects. That
takes one pass over its weights and moments: at rank 32 of a 7B model, 1.4 GB each way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bridge.engine.trainable import Trainable
from bridge.optimizers.in_place import KeptState
from bridge.weights.adapter import AdapterShape


@dataclass
class Kept:
    """What a pass and a step of an adapter depend on, while another one is in the model."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    state: KeptState
    num_passes: int
    """Calls of `forward_backward` since the last step."""
    served: int | None
    """Version under which the server has loaded it."""
    is_changed: bool
    """Whether it has changed since then."""
    starts: int
    """Number of times that the server was restarted before that; a restarted one has loaded nothing."""


@dataclass(eq=False)
class HeldAdapter:
    """One of the adapters that a policy trains in turn: `Policy.new_adapter` creates one, `Policy.use` takes it."""

    shape: AdapterShape
    kept: Kept | None = None
    """None: it is in the model."""


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradients, and remove them from the parameters."""
    taken = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def put_in(kept: Kept, trainable: Trainable) -> None:
    """Copy what was kept into the model and its optimizer."""
    parameters = [*trainable.weights.values()]
    with torch.no_grad():
        torch._foreach_copy_([parameter.detach() for parameter in parameters], kept.values)
    for parameter, gradient in zip(parameters, kept.gradients, strict=True):
        if gradient is not None and gradient.dtype != parameter.dtype:
            parameter.grad_dtype = None  # lets a parameter have a gradient of another dtype
        parameter.grad = gradient
    trainable.optimizer.put_back(kept.state)
