"""Open a learner: prepare the model, make its optimizer, and allocate all memory that does not depend on a batch."""

import gc
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.config import ComputeConfig, OptimizerConfig, TrainConfig
from bridge.core.concurrency import end_thread
from bridge.core.interrupt import COMPILER, deferred_interrupt, wait_until
from bridge.errors import AttachError, UnsupportedModelError, UsageError, first_line, with_class
from bridge.learn.learner import Learner
from bridge.learn.policy_loss import LossSpec
from bridge.learn.reference import open_reference
from bridge.optimizers import factory
from bridge.optimizers.gradient_hooks import NOTHING, Replicated
from bridge.passes import layers, pass_cost, preparation, routing, slices
from bridge.passes.budget import Budget
from bridge.passes.logprobs import model_logprobs
from bridge.passes.packing_proof import Note
from bridge.passes.parallel import Parallel, divide
from bridge.passes.parallel_proof import check_layers, check_slices
from bridge.ranks.world import ALONE, Ranks
from bridge.weights.adapter import Adapter
from bridge.weights.attach import OpenedModel
from bridge.weights.parts import Parts


def learner_of(
    config: TrainConfig,
    opened: OpenedModel,
    note: Note,
    max_model_len: int | None = None,
    experts: tuple[int, int] | None = None,
    *,
    ranks: Ranks = ALONE,
) -> Learner:
    """Prepare the model and return its learner; all memory is allocated that does not depend on a batch.

    `max_model_len` is the length of the server's longest sequence; None: unknown. `experts` are the numbers of layers
    with experts and of experts of a token that the server reports; None: the trainer's routers choose.
    UsageError: it does not fit. UnsupportedModelError: the model cannot be trained as configured.
    """
    model, lr, has_adapter = opened.model, config.learning_rate, config.mode == "lora_only"
    parallel = _divided(opened, ranks)
    shares_prompts = _prepared(model, config.compute, note, max_model_len, experts, ranks)
    _note_rates(config.optimizer, lr, "an adapter" if has_adapter else "all weights", note)
    _note_uncorrected(config, note)
    groups = [
        factory.scaled_group(model.get_parameter(name), factor, lr=lr, weight_decay=config.optimizer.weight_decay)
        for name, factor in opened.lr_factors.items()
    ]
    replicated = NOTHING if parallel is None else _replicated(model, parallel)
    optimizer = factory.make(config.optimizer, groups, seed=config.seed, ranks=ranks, replicated=replicated)
    try:
        optimizer.allocate()
        reference = open_reference(
            config.loss, config.compute, model, opened.device, note,
            has_adapter=has_adapter, max_model_len=max_model_len, cp_group=ranks.cp_group,
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the optimizer's state does not fit beside the server: {first_line(error)}",
            remedy=f"bridge plan --model {shlex.quote(config.model_name)} shows what fits: a lower"
            " --gpu-memory-utilization, an --optimizer with less state, --offload-optimizer",
        ) from error
    budget = Budget(
        model, config.compute, config.optimizer, note,
        temperature=config.sampling.temperature,
        num_groups=config.rollouts.batch_size // config.sampling.group_size,
        replicas=config.replicas,
        share_prompts=shares_prompts and (reference is None or reference.shares_prompts),
        parts=ranks.pass_group,
        neighbors=ranks.world_size // config.hosts,
    )  # fmt: skip
    return Learner(
        model, optimizer, config.optimizer,
        lr=lr, schedule=factory.schedule(config.optimizer, config.training_steps), spec=LossSpec.of(config.loss),
        sampling=config.sampling, budget=budget, reference=reference, ranks=ranks, parallel=parallel,
    )  # fmt: skip


@contextmanager
def compiling_ahead(
    stand_in: Callable[[], PreTrainedModel | None], config: TrainConfig, note: Note, ranks: Ranks = ALONE
) -> Iterator[None]:
    """Compile the training step on a stand-in while the block waits for vLLM; the learner finds the code in memory.

    vLLM compares what is free when it starts and when it has loaded: a stand-in takes its memory before the block, and
    torch's allocator keeps it until the end. An error costs only time.
    """
    has_memory, is_over = threading.Event(), threading.Event()

    def compile_all() -> None:
        try:
            model = stand_in()
            has_memory.set()
            if model is None:
                return
            with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
                if config.mode == "lora_only":
                    Adapter(model, config.lora, seed=0, base_name="")
                _prepared(model, config.compute, lambda _: None, None, None, ALONE)
                _compile_step(model, config.optimizer, config.sampling.temperature, ranks)
        except Exception as error:  # noqa: BLE001  the real model raises it again, if it is not the stand-in's
            note(f"the trainer's code is compiled when training begins: {with_class(error)}")
        finally:
            has_memory.set()
            is_over.set()

    thread = threading.Thread(target=compile_all, name=COMPILER, daemon=True)
    try:
        with deferred_interrupt():  # a thread that started half cannot be ended
            thread.start()
        wait_until(has_memory.wait)
        yield
        if thread.is_alive():
            note("waiting for the trainer's code, which is still being compiled")
        wait_until(is_over.wait)
        thread.join()
    except BaseException:
        with deferred_interrupt():  # a process that ends while torch compiles in a thread crashes
            end_thread(thread)
        raise
    gc.collect()
    torch.cuda.empty_cache()


def _compile_step(model: PreTrainedModel, choices: OptimizerConfig, temperature: float, ranks: Ranks) -> None:
    """Compile what a step runs besides the layers: the log-probabilities, and the update of any parameter."""
    micro_batch, trained = pass_cost.example(model, 64, 32), layers.first_trained(model)
    logprobs_N, _ = model_logprobs(model, micro_batch, temperature)
    torch.autograd.grad(logprobs_N.sum(), trained)
    smallest = factory.scaled_group(min(trained, key=torch.numel), 1.0, lr=0.0, weight_decay=0.0)
    factory.make(choices, [smallest], ranks=ranks).allocate()


def _prepared(
    model: PreTrainedModel,
    compute: ComputeConfig,
    note: Note,
    longest: int | None,
    experts: tuple[int, int] | None,
    ranks: Ranks,
) -> bool:
    """Prepare the model, of whose passes each rank may have a slice; return whether completions may share a prompt."""
    with ranks.in_pass():
        if experts is not None:
            _replay(model, experts, compute, note)
        if ranks.cp_size > 1:
            slices.cut(model, ranks.cp_group)
        shares_prompts = preparation.prepare(
            model, compute, note, max_model_len=longest, is_replayed=experts is not None
        )
        check_slices(model)
        return shares_prompts


def _replay(model: PreTrainedModel, experts: tuple[int, int], compute: ComputeConfig, note: Note) -> None:
    """Let the model compute with the server's experts; without a choice of the user's, only if it can."""
    try:
        routing.use(model, experts)
    except UnsupportedModelError as error:
        if compute.router_replay:
            raise
        note(f"the trainer's routers choose the experts: {error.message}")


def _divided(opened: OpenedModel, ranks: Ranks) -> Parallel | None:
    """Let the model compute with this rank's part of the weights, and check the result; None: it has all of them."""
    if not opened.cuts:
        return None
    differing = [*Parts(cuts=opened.cuts, tp_group=ranks.tp_group).differing(dict(opened.model.named_parameters()))]
    if differing:
        more = f", and of {len(differing) - 1} more" if len(differing) > 1 else ""
        raise AttachError(
            f"the server's ranks hold different values of {differing[0]}{more}, which they share",
            remedy="restart the server, or restore a checkpoint: bridge restore",
        )
    parallel = divide(opened.model, opened.cuts, ranks.tp_group.process_group)
    check_layers(opened.model, parallel)
    return parallel


def _note_rates(choices: OptimizerConfig, lr: float, trained: str, note: Note) -> None:
    """Log a learning rate that was not chosen, and a weight decay without effect."""
    if choices.lr is None:
        note(f"learning rate {lr:g}, the default for {trained}; set it with --lr")
    if choices.weight_decay and lr * choices.weight_decay <= factory.LEAST_DECAY:
        note(
            f"weight decay has no effect: 1 - {lr:g} x {choices.weight_decay:g} is 1 in float32, as in torch's AdamW;"
            f" at this learning rate it takes at least --weight-decay {2 * factory.LEAST_DECAY / lr:.2g}"
        )


def _note_uncorrected(config: TrainConfig, note: Note) -> None:
    """Log that completions of older weights are trained on as if the newest had sampled them, if that was chosen."""
    interval = config.publishing.restart_interval
    causes = [f"--max-staleness {config.rollouts.max_staleness}"] if config.rollouts.max_staleness else []
    causes += [f"--vllm-restart-interval {interval}"] if interval > 1 else []
    if causes and config.loss.mismatch == "none":
        note(
            f"--mismatch none: with {' and '.join(causes)} completions of older weights are trained on, and nothing"
            " corrects for the difference"
        )


def _replicated(model: PreTrainedModel, parallel: Parallel) -> Replicated:
    """Return each parameter of which several ranks hold the same elements, and those that another rank counts."""
    counted_elsewhere: dict[Tensor, list[range]] = {}
    for shared in parallel.shared:
        parameter = model.get_parameter(shared.name)
        others = counted_elsewhere.setdefault(parameter, [])
        if parallel.part in shared.parts[1:]:
            own = shared.of(parameter.detach(), parallel.cuts[parallel.part][shared.name])
            start = int(own.storage_offset() - parameter.storage_offset())
            others.append(range(start, start + own.numel()))  # rows, which the layout checks
    return counted_elsewhere
