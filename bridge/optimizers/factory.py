"""Create the optimizer that a run's configuration names, and its learning rate schedule."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import get_scheduler

from bridge.config import OptimizerConfig
from bridge.config.optimizers import OptimizerName
from bridge.errors import UsageError
from bridge.optimizers.gradient_hooks import NOTHING, Replicated
from bridge.optimizers.in_place import EPS, InPlaceOptimizer
from bridge.optimizers.offloaded_adamw import OffloadedAdamW
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS
from bridge.ranks.world import ALONE, Ranks

LEAST_DECAY = 2.0**-25
"""Half the distance from 1 to the next smaller float32: if lr * weight_decay is not larger, 1 minus it rounds to 1."""


def make(
    choices: OptimizerConfig,
    groups: Iterable[dict[str, Any]],
    *,
    seed: int = 0,
    ranks: Ranks = ALONE,
    replicated: Replicated = NOTHING,
) -> InPlaceOptimizer:
    """Return the optimizer for groups from `scaled_group`; `ranks` share its work."""
    shared: dict[str, Any] = {"betas": (choices.beta1, choices.beta2), "ranks": ranks, "replicated": replicated}
    if choices.offload:
        return OffloadedAdamW(groups, streams=choices.gradient_release, **shared)
    return SplitMasterAdamW(groups, kind=KINDS[choices.name], seed=seed, **shared)


def choices(name: OptimizerName, lr: float, betas: tuple[float, float] | None) -> OptimizerConfig:
    """Return the optimizer configuration of a user's own loop.

    Raises:
        UsageError: there is no optimizer of this name, or a number is out of range.
    """
    if betas is not None and len(betas) != 2:
        raise UsageError(f"betas is {betas!r}, expected two numbers", hint="betas=(0.9, 0.999)")
    chosen = {} if betas is None else {"beta1": betas[0], "beta2": betas[1]}
    try:
        return OptimizerConfig.model_validate({"name": name, "lr": lr, **chosen})
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"{first['loc'][-1]} is {first['input']!r}: {first['msg'].lower()}",
            hint="policy.optimizer('adamw', lr=1e-6)",
        ) from error


def schedule(choices: OptimizerConfig, training_steps: int) -> Callable[[int], float]:
    """Return a function from the number of planned updates before an update to its learning rate factor.

    The factor depends only on that number, so that a resumed run continues the schedule, and a skipped update does not
    delay its end.
    """
    scheduler = get_scheduler(
        choices.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),  # a dummy, because the scheduler wraps `step`
        num_warmup_steps=choices.warmup_steps * choices.updates_per_step,
        num_training_steps=training_steps * choices.updates_per_step,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


def scaled_group(parameter: Tensor, factor: float, *, lr: float, weight_decay: float) -> dict[str, Any]:
    """Return a parameter group in which a parameter that is stored scaled by `factor` trains as if it were unscaled.

    If B is stored as B' = factor * B, the gradient of B' is 1 / factor of B's. With this group's hyperparameters AdamW
    takes the same steps of B, including decay, eps and clipping.
    """
    return {
        "params": [parameter],
        "lr": lr * factor,
        "weight_decay": weight_decay / factor,
        "eps": EPS / factor,
        "factor": factor,
    }


def with_factors(groups: Iterable[dict[str, Any]], factors: Mapping[Tensor, float]) -> list[dict[str, Any]]:
    """Return a user's groups; parameters that are stored scaled by a factor get separate groups (`scaled_group`)."""
    made: list[dict[str, Any]] = []
    for group in groups:
        scaled = [parameter for parameter in group["params"] if factors.get(parameter, 1.0) != 1.0]
        plain = [parameter for parameter in group["params"] if factors.get(parameter, 1.0) == 1.0]
        if plain or not scaled:
            made.append({**group, "params": plain})
        for parameter in scaled:
            factor = factors[parameter]
            rates = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            eps = group.get("eps", EPS) / factor
            made.append({**group, **scaled_group(parameter, factor, **rates), "eps": eps})
    return made
