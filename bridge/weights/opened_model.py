"""The model to train, as a mode opens it and the learner takes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from bridge.weights.cut import Cut


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """The model to train, and where its weights are."""

    model: PreTrainedModel
    """In evaluation mode; what is trained requires gradients, and nothing else does."""
    device: torch.device
    """Where its weights are."""
    lr_factors: Mapping[str, float]
    """Every trained parameter, by its name in the model -> factor of the learning rate."""
    cuts: Sequence[Mapping[str, Cut]] = ()
    """What each part of a replica holds of every parameter; empty: the model is whole."""
    open_s: float
    """Seconds to attach or load its weights."""
    weight_bytes: int
    """Bytes of weights that this process holds beside the server's; 0 with one copy."""
