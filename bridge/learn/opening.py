"""Everything that trains a model, made ready: all memory is taken that does not depend on a batch.

Not covered: opening the model itself (`bridge/modes`).
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.learn import reference
from bridge.learn.learner import Learner
from bridge.optimizers import factory
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.passes import preparation
from bridge.passes.budget import Budget
from bridge.passes.preparation import Note
from bridge.weights.opened_model import OpenedModel

MakeOptimizer = Callable[[TrainConfig, Iterable[dict[str, Any]]], InPlaceOptimizer]


def learner_of(
    config: TrainConfig,
    opened: OpenedModel,
    note: Note,
    *,
    max_model_len: int | None = None,
    make_optimizer: MakeOptimizer = factory.make,
) -> Learner:
    """Prepare the model, and return what trains it; `note` hears what was chosen and why.

    `max_model_len` is the length of the server's longest sequence; None: not known.

    Raises:
        UsageError: it does not fit.
        UnsupportedModelError: the model cannot be trained as it is wanted to be.
    """
    model = opened.model
    shares_prompts = preparation.prepare(model, config.compute, note, max_model_len=max_model_len)
    lr = config.learning_rate
    groups = [
        factory.scaled_group(model.get_parameter(name), factor, lr=lr, weight_decay=config.optimizer.weight_decay)
        for name, factor in opened.lr_factors.items()
    ]
    _say_rates(config, groups, note)
    optimizer = make_optimizer(config, groups)
    try:
        optimizer.allocate()
        beside = reference.open_reference(config, model, opened.device, note, max_model_len=max_model_len)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the optimizer's state does not fit beside the server: {str(error).strip().splitlines()[0]}",
            remedy=f"bridge plan --model {shlex.quote(config.model_name)} tells what fits: a lower"
            " --gpu-memory-utilization, an --optimizer with less state, --offload-optimizer",
        ) from error
    if beside is not None:
        shares_prompts = shares_prompts and beside.shares_prompts
    budget = Budget(model, config, note, share_prompts=shares_prompts)
    return Learner(config, model, optimizer, budget=budget, reference=beside)


def _say_rates(config: TrainConfig, groups: Iterable[Mapping[str, Any]], note: Note) -> None:
    """Report a learning rate that nobody chose, and a weight decay that float32 rounds away."""
    lr, weight_decay = config.learning_rate, config.optimizer.weight_decay
    if config.optimizer.lr is None:
        trained = "an adapter" if config.mode == "lora_only" else "all weights"
        note(f"learning rate {lr:g}, the default for {trained}; --lr sets another one")
    if factory.decays(groups):
        return
    note(
        f"weight decay does nothing: 1 - {lr:g} x {weight_decay:g} is 1 in float32, in torch's AdamW as well; at this"
        f" learning rate it takes effect from --weight-decay {2 * factory.LEAST_DECAY / lr:.2g} on"
    )
