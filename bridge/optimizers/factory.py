"""The optimizer of a run: AdamW that writes bf16 weights in place, as the configuration wants it.

Not covered: the two of them (`split_adamw.py`, `offload.py`), keeping their state
(`bridge/run/trainer_state.py`), float16, DTensors.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from bridge.config import TrainConfig
from bridge.optimizers.in_place import EPS, InPlaceOptimizer
from bridge.optimizers.offload import OffloadedAdamW
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS

LEAST_DECAY = 2.0**-25
"""Half the distance from 1 to the next smaller float32: up to it 1 - lr * weight_decay is 1."""

__all__ = ["LEAST_DECAY", "SplitMasterAdamW", "decays", "make", "scaled_group"]


def make(config: TrainConfig, groups: Iterable[dict[str, Any]]) -> InPlaceOptimizer:
    """Return the optimizer that `config` asks for, of what `scaled_group` made.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """
    kind = KINDS[config.optimizer.name]
    betas = config.optimizer.beta1, kind.beta2 if config.optimizer.beta2 is None else config.optimizer.beta2
    if not config.optimizer.offload:
        return SplitMasterAdamW(groups, kind=kind, betas=betas, seed=config.seed)
    assert kind.name == "adamw", "the configuration refuses the others"
    return OffloadedAdamW(groups, betas=betas, streams=config.optimizer.gradient_release)


def decays(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether a weight decay that is not 0 changes weights: none does whose factor float32 rounds to 1."""
    rates = [group["lr"] * group["weight_decay"] for group in groups]
    return all(rate == 0 or rate > LEAST_DECAY for rate in rates)


def scaled_group(parameter: Tensor, factor: float, *, lr: float, weight_decay: float) -> dict[str, Any]:
    """Return the group of a parameter that is held multiplied by `factor`, so that it is trained as if it were not.

    A master B kept as B' = factor * B has 1 / factor of its gradient: AdamW then takes the same steps of B, decay,
    eps and clipping included, with these hyperparameters.
    """
    return {
        "params": [parameter],
        "lr": lr * factor,
        "weight_decay": weight_decay / factor,
        "eps": EPS / factor,
        "factor": factor,
    }
