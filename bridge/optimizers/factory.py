"""The optimizer of a run: AdamW that writes bf16 weights in place, as the configuration wants it.

Not covered: the two of them (`split_adamw.py`, `offload.py`), keeping their state
(`bridge/training/trainer_state.py`), float16, DTensors.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from bridge.config import TrainConfig
from bridge.optimizers.in_place import EPS, InPlaceOptimizer
from bridge.optimizers.offload import OffloadedAdamW
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS

__all__ = ["SplitMasterAdamW", "make", "scaled_group"]


def make(config: TrainConfig, groups: Iterable[dict[str, Any]]) -> InPlaceOptimizer:
    """Return the optimizer that `config` asks for, of what `scaled_group` made.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """
    kind = KINDS[config.optimizer]
    betas = config.beta1, kind.beta2 if config.beta2 is None else config.beta2
    if not config.offload_optimizer:
        return SplitMasterAdamW(groups, kind=kind, betas=betas, seed=config.seed)
    assert kind.name == "adamw", "the configuration refuses the others"
    return OffloadedAdamW(groups, betas=betas, streams=config.gradient_release)


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
