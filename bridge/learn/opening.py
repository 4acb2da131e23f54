"""Open a learner: prepare the model, make its optimizer, and allocate all memory that does not depend on a batch."""

import shlex
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.learn.learner import Learner
from bridge.learn.reference import open_reference
from bridge.optimizers import factory
from bridge.optimizers.gradients import Alike
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.passes import preparation
from bridge.passes.budget import Budget
from bridge.passes.parallel import Parallel, divide
from bridge.passes.parallel_proof import check_layers
from bridge.passes.preparation import Note
from bridge.ranks.world import ALONE, Ranks
from bridge.weights.attach import OpenedModel

MakeOptimizer = Callable[..., InPlaceOptimizer]
"""As `factory.make`."""


def learner_of(
    config: TrainConfig,
    opened: OpenedModel,
    note: Note,
    *,
    max_model_len: int | None = None,
    make_optimizer: MakeOptimizer = factory.make,
    ranks: Ranks = ALONE,
) -> Learner:
    """Prepare the model and return its learner; all memory is allocated that does not depend on a batch.

    `max_model_len` is the length of the server's longest sequence; None: unknown.

    Raises:
        UsageError: it does not fit.
        UnsupportedModelError: the model cannot be trained as configured.
    """
    model, lr, weight_decay = opened.model, config.learning_rate, config.optimizer.weight_decay
    parallel = divide(model, opened.cuts, ranks.within.group) if opened.cuts else None
    if parallel is not None:
        check_layers(model, parallel)
    shares_prompts = preparation.prepare(model, config.compute, note, max_model_len=max_model_len)
    groups = [
        factory.scaled_group(model.get_parameter(name), factor, lr=lr, weight_decay=weight_decay)
        for name, factor in opened.lr_factors.items()
    ]
    if config.optimizer.lr is None:
        trained = "an adapter" if config.mode == "lora_only" else "all weights"
        note(f"learning rate {lr:g}, the default for {trained}; set it with --lr")
    if not factory.decays(groups):
        note(
            f"weight decay has no effect: 1 - {lr:g} x {weight_decay:g} is 1 in float32, as in torch's AdamW; at this"
            f" learning rate it takes at least --weight-decay {2 * factory.LEAST_DECAY / lr:.2g}"
        )
    several: dict[str, Any] = {} if ranks.size == 1 else {"ranks": ranks}
    if parallel is not None:
        several["alike"] = _alike(model, parallel)
    optimizer = make_optimizer(config.optimizer, groups, seed=config.seed, **several)
    try:
        optimizer.allocate()
        reference = open_reference(config, model, opened.device, note, max_model_len=max_model_len)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the optimizer's state does not fit beside the server: {str(error).strip().splitlines()[0]}",
            remedy=f"bridge plan --model {shlex.quote(config.model_name)} shows what fits: a lower"
            " --gpu-memory-utilization, an --optimizer with less state, --offload-optimizer",
        ) from error
    if reference is not None:
        shares_prompts = shares_prompts and reference.shares_prompts
    budget = Budget(model, config, note, share_prompts=shares_prompts, parts=ranks.within)
    return Learner(config, model, optimizer, budget=budget, reference=reference, ranks=ranks, parallel=parallel)


def _alike(model: PreTrainedModel, parallel: Parallel) -> Alike:
    """Return what parts hold alike of every parameter, and which elements of it another part counts."""
    found: dict[Tensor, list[range]] = {}
    for each in parallel.shared:
        parameter = model.get_parameter(each.name)
        others = found.setdefault(parameter, [])
        if parallel.part in each.parts[1:]:
            own = each.of(parameter.detach(), parallel.cuts[parallel.part][each.name])
            start = int(own.storage_offset() - parameter.storage_offset())
            others.append(range(start, start + own.numel()))  # rows, which the layout checks
    return found
