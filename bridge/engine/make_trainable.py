"""Make a model trainable: prepare it, create its optimizer, and allocate all memory that does not depend on a batch."""

import logging
import shlex
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.checkpoints.optimizer_state import WholeState
from bridge.config import ComputeConfig, LossConfig, OptimizerConfig, SamplingConfig
from bridge.engine.reference import open_reference
from bridge.engine.teacher import RemoteTeacher, open_teacher
from bridge.engine.trainable import Trainable
from bridge.errors import AttachError, UsageError, first_line
from bridge.optimizers import factory
from bridge.optimizers.gradient_hooks import NOTHING, Replicated
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.sharded import ShardedOptimizer
from bridge.passes import preparation
from bridge.passes.budget import Budget
from bridge.passes.parallel import Parallel, divide
from bridge.passes.parallel_proof import check_layers
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import ALONE, Ranks
from bridge.weights.attach import OpenedModel
from bridge.weights.model_folder import state
from bridge.weights.rank_parts import Parts

logger = logging.getLogger(__name__)


def prepared_of(
    compute: ComputeConfig,
    opened: OpenedModel,
    *,
    max_model_len: int | None = None,
    experts: tuple[int, int] | None = None,
    ranks: Ranks = ALONE,
) -> PreparedModel:
    """Prepare a model for training passes; with tensor parallelism, this rank's part of it.

    `max_model_len` is the length of the server's longest sequence; None: unknown. `experts` is the server's number of
    layers with experts, and of experts per token; None: the trainer's routers choose.

    Raises:
        AttachError: weights that the server's ranks share differ between them.
        UnsupportedModelError: the model cannot be trained as configured.
    """
    parallel = _divided(opened, ranks)
    return preparation.prepare(
        opened.model, compute,
        max_model_len=max_model_len, experts=experts, parallel=parallel, ranks=ranks,
    )  # fmt: skip


def trainable_of(
    opened: OpenedModel,
    prepared: PreparedModel,
    *,
    compute: ComputeConfig,
    optimizer: OptimizerConfig,
    lr: float,
    loss: LossConfig,
    sampling: SamplingConfig,
    num_groups: int,
    replicas: int,
    hosts: int,
    seed: int,
    has_adapter: bool,
    model_name: str,
    max_model_len: int | None = None,
    ranks: Ranks = ALONE,
) -> Trainable:
    """Return a prepared model with its optimizer, its budget, and the reference and the teacher that the loss needs.

    A step trains on `num_groups` groups, shared among `replicas` on `hosts`. With `has_adapter` an adapter is trained,
    otherwise all weights. `seed` is for stochastic rounding, and errors name `model_name`.

    Raises:
        UsageError: the model does not fit into memory.
        UnsupportedModelError: the reference or the teacher cannot be prepared like the model.
    """
    model = opened.model
    weights = {name: model.get_parameter(name) for name in opened.lr_factors}
    _log_rates(optimizer, lr, "an adapter" if has_adapter else "all weights")
    groups = [
        factory.scaled_group(weights[name], factor, lr=lr, weight_decay=optimizer.weight_decay)
        for name, factor in opened.lr_factors.items()
    ]
    replicated = NOTHING if prepared.parallel is None else _replicated(model, prepared.parallel)
    made = factory.make(optimizer, groups, seed=seed, ranks=ranks, replicated=replicated)
    try:
        made.allocate()
        reference = open_reference(
            loss, compute, prepared, opened.device,
            has_adapter=has_adapter, max_model_len=max_model_len, ranks=ranks,
        )  # fmt: skip
        teacher = open_teacher(
            loss, compute, prepared, opened.device,
            model_name=model_name, has_adapter=has_adapter, max_model_len=max_model_len, ranks=ranks,
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the optimizer's state does not fit beside the server: {first_line(error)}",
            hint=f"bridge plan --model {shlex.quote(model_name)} shows what fits: a lower"
            " --gpu-memory-utilization, an --optimizer with less state, --offload-optimizer",
        ) from error
    remote = None
    if loss.has_remote_teacher:
        remote = RemoteTeacher(loss, sampling, num_words=model.get_input_embeddings().num_embeddings)
    frozen = [reference, None if teacher is None else teacher.frozen]
    budget = Budget(
        prepared, compute, optimizer,
        temperature=sampling.temperature,
        num_groups=num_groups,
        replicas=replicas,
        share_prompts=prepared.shares_prompts and all(model is None or model.shares_prompts for model in frozen),
        parts=ranks.pass_group,
        neighbors=ranks.world_size // hosts,
    )  # fmt: skip
    return Trainable(
        prepared,
        made,
        optimizer,
        budget,
        lr=lr,
        weights=weights,
        state=_state(opened, made, weights, ranks),
        sampling=sampling,
        ranks=ranks,
        reference=reference,
        teacher=remote or teacher,
    )


def _state(
    opened: OpenedModel,
    optimizer: InPlaceOptimizer,
    weights: Mapping[str, nn.Parameter],
    ranks: Ranks,
) -> InPlaceOptimizer | WholeState:
    """Return the optimizer state as a checkpoint stores it: the parts of several ranks are joined."""
    if not opened.cuts:
        return optimizer
    assert isinstance(optimizer, ShardedOptimizer), "the state of a user's optimizer cannot be joined"
    whole = WholeState(optimizer, weights, Parts(cuts=opened.cuts, tp_group=ranks.tp_group))
    if whole.codes is not None:
        logger.info(
            "checkpoints store quantized optimizer state as a single process does: that of tensor-parallel ranks is"
            " decoded and quantized again, with rounding where blocks differ"
        )
    return whole


def _divided(opened: OpenedModel, ranks: Ranks) -> Parallel | None:
    """Make the model compute with this rank's part of the weights, and check the result; None: it has all weights."""
    if not opened.cuts:
        return None
    differing = [*Parts(cuts=opened.cuts, tp_group=ranks.tp_group).differing(state(opened.model))]
    if differing:
        more = f" and {len(differing) - 1} more parameters" if len(differing) > 1 else ""
        raise AttachError(
            f"the server's ranks hold different values of {differing[0]}{more}, which should be equal on all of them",
            hint="restart the server, or restore a checkpoint: bridge restore",
        )
    parallel = divide(opened.model, opened.cuts, ranks.tp_group.process_group)
    check_layers(opened.model, parallel)
    return parallel


def _log_rates(choices: OptimizerConfig, lr: float, trained: str) -> None:
    """Log a default learning rate, and a weight decay that has no effect."""
    if choices.lr is None:
        logger.info(f"learning rate {lr:g}, the default for {trained}; set it with --lr")
    if choices.weight_decay and lr * choices.weight_decay <= factory.LEAST_DECAY:
        logger.info(
            f"weight decay has no effect: 1 - {lr:g} x {choices.weight_decay:g} is 1 in float32, as in torch's AdamW;"
            f" at this learning rate it takes at least --weight-decay {2 * factory.LEAST_DECAY / lr:.2g}"
        )


def _replicated(model: PreTrainedModel, parallel: Parallel) -> Replicated:
    """Return each parameter that several ranks hold, with the indices of elements that another rank counts."""
    counted_by_others: dict[Tensor, list[range]] = {}
    parameters = dict(model.named_parameters())
    for shared in parallel.shared:
        if shared.name not in parameters:  # a buffer
            continue
        parameter = parameters[shared.name]
        others = counted_by_others.setdefault(parameter, [])
        if parallel.part in shared.parts[1:]:
            own = shared.of(parameter.detach(), parallel.cuts[parallel.part][shared.name])
            start = int(own.storage_offset() - parameter.storage_offset())
            others.append(range(start, start + own.numel()))  # contiguous: the layout check requires full rows
    return counted_by_others
