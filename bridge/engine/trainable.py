"""The trainable part of a policy: a prepared model, its optimizer and its memory budget, without a server.

    add_gradients    run the passes of an update forward and backward
    exchange         sum the gradients over all ranks, and return their norm
    step             write the update into the parameters

With gradient release, `step_in_backward` does all three: each parameter is updated during the single backward pass, as
soon as its gradient is complete. Its caller must be inside the fence (`policy.py`).

Not covered: the loss, and the choice of samples for an update.
Shape suffixes: N rows (positions that predict a sampled token).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bridge.checkpoints.optimizer_state import WholeState
from bridge.config import OptimizerConfig, SamplingConfig
from bridge.core.interrupt import acting_interrupt
from bridge.engine.reference import Reference
from bridge.engine.teacher import RemoteTeacher, Teacher
from bridge.errors import UsageError, first_line
from bridge.learn.policy_loss import LossSpec
from bridge.optimizers import factory
from bridge.optimizers.gradient_hooks import added_in_float32
from bridge.optimizers.in_place import InPlaceOptimizer, number
from bridge.passes import logprobs
from bridge.passes.budget import Budget
from bridge.passes.packing import MicroBatch, Sample
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import Ranks
from bridge.types import Result

Pass = TypeVar("Pass")


class LossInputs(NamedTuple):
    """What a built-in loss reads of a micro-batch, in nats; only what comes from the policy has a gradient."""

    logprobs_N: Tensor
    entropies_N: Tensor
    divergences_N: Tensor | None
    """From the teacher, over the whole vocabulary or the words that its server lists; None: not part of the loss."""
    teacher_logprobs_N: Tensor | None
    """Of the sampled tokens; None: not part of the loss."""


class Trainable:
    """A model that is trained in place with any loss. If there are several ranks, all of them call its methods."""

    def __init__(
        self,
        prepared: PreparedModel,
        optimizer: InPlaceOptimizer,
        choices: OptimizerConfig,
        budget: Budget,
        *,
        lr: float,
        weights: Mapping[str, nn.Parameter],
        state: InPlaceOptimizer | WholeState,
        sampling: SamplingConfig,
        ranks: Ranks,
        reference: Reference | None = None,
        teacher: Teacher | RemoteTeacher | None = None,
    ) -> None:
        """Store the model and its parts; log-probabilities are computed at the temperature of `sampling`."""
        self.prepared = prepared
        self.optimizer = optimizer
        self.choices = choices
        self.budget = budget
        self.lr = lr
        """Base learning rate, before the schedule."""
        self._max_norm = choices.max_grad_norm
        self.weights = weights
        """The trained parameters, by name."""
        self.state = state
        """The optimizer state as a checkpoint stores it, gathered into the layout of a single process."""
        self.sampling = sampling
        self.ranks = ranks
        self.reference = reference
        """The frozen model of a KL divergence or a preference loss; None: the loss needs none."""
        self.teacher = teacher
        """The teacher of a distillation; None: there is none."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self.prepared.model.parameters() if parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.prepared.model.device
        return device

    def logprobs(self, batch: MicroBatch, *, differentiates_entropies: bool = False) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the sampled tokens, and the entropies, as `PreparedModel.logprobs`.

        Shapes: -> [N] float32, [N] float32.
        """
        return self.prepared.logprobs(
            batch, self.sampling.temperature, differentiates_entropies=differentiates_entropies
        )

    def graded(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return samples with what a teacher's server knows of them; with another teacher, the samples themselves.

        All ranks must call this: those that share a pass get the answers of one of them, since a server may round
        differently the next time.

        Raises:
            UsageError: the server does not answer.
        """
        teacher = self.teacher
        if not isinstance(teacher, RemoteTeacher):
            return [*samples]
        targets = self.ranks.pass_group.run_on_rank_zero(
            lambda: [(sample.targets, sample.target_weights) for sample in teacher.graded(samples)]
        )
        pairs = zip(samples, targets, strict=True)
        return [replace(sample, targets=ids, target_weights=weights) for sample, (ids, weights) in pairs]

    def lacks_hints(self, has_hints: bool) -> bool:
        """Whether the teacher is the policy itself, which teaches nothing unless it `has_hints`."""
        return isinstance(self.teacher, Teacher) and self.teacher.is_policy and not has_hints

    def loss_inputs(self, batch: MicroBatch, spec: LossSpec, teacher_logprobs_N: Tensor | None = None) -> LossInputs:
        """Compute what a built-in loss reads; `teacher_logprobs_N` if they are known from an earlier pass."""
        temperature = self.sampling.temperature
        teacher = self.teacher if spec.teacher_weight > 0 else None
        compared = None
        if isinstance(teacher, Teacher):
            if spec.divergence is not None:
                compared = logprobs.Comparison(spec.divergence, teacher.prediction(batch, temperature))
            elif teacher_logprobs_N is None:
                teacher_logprobs_N = teacher.logprobs(batch, temperature)
        scores = self.prepared.scores(
            batch, temperature, differentiates_entropies=spec.entropy_coef > 0, teacher=compared
        )
        if batch.several is None:
            return LossInputs(*scores, teacher_logprobs_N)
        # A server graded the samples: the sampled token comes first, then the teacher's likeliest ones.
        known_NK = batch.several.weights_NK.log()
        divergences_N = None
        if spec.divergence is not None:
            divergences_N = spec.divergence.of_listed(scores.logprobs_NX[:, 1:], known_NK[:, 1:])
        return LossInputs(scores.logprobs_NX[:, 0], scores.entropies_N, divergences_N, known_NK[:, 0])

    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the reference's log-probabilities of the sampled tokens, without gradient: [N] float32."""
        assert self.reference is not None, "the loss needs no reference"
        return self.reference.logprobs(batch, self.sampling.temperature)

    def within_memory(self, compute: Callable[[], Result], forget: Callable[[], None]) -> Result:
        """Compute this rank's share of a batch; if memory runs out, call `forget` and retry with smaller passes.

        Ranks that share a pass communicate in every layer. If one of them fails there, it raises RankError, so that the
        others do not wait for it.

        Raises:
            UsageError: a single sequence does not fit.
        """
        if self.ranks.pass_size > 1:
            with self.ranks.in_pass():
                return compute()
        while True:
            try:
                with acting_interrupt():
                    return compute()
            except torch.OutOfMemoryError as error:
                forget()
                self.budget.shrink(error)

    def drop_gradients(self) -> None:
        self.prepared.model.zero_grad(set_to_none=True)

    def add_gradients(self, passes: Sequence[Pass], loss: Callable[[Pass], Tensor], *, widens: bool) -> None:
        """Add the gradients of some passes; with `widens`, in float32 if memory allows.

        If the optimizer is in host memory, gradients move there as soon as they are complete.
        """
        with ExitStack() as gradients:
            if self.choices.gradient_release:
                gradients.enter_context(self.optimizer.releasing())
            elif widens and self.budget.sums_in_float32:
                gradients.enter_context(added_in_float32(self.parameters))
            for one in passes:
                loss(one).backward()

    def widen_gradients(self) -> None:
        """Convert existing gradients to float32, if memory allows, so that more can be added exactly.

        The first gradients are bf16 because the passes compute bf16, so converting them later loses nothing.
        """
        if self.budget.sums_in_float32 is None:
            self.budget.decide_on_sums()
        if self.budget.sums_in_float32:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad_dtype = None
                    parameter.grad = parameter.grad.float()

    def set_step(
        self,
        lr: float | None,
        max_norm: float | None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        """Set the hyperparameters and the clipping norm of the following steps; None: the configured value.

        Raises:
            UsageError: a value is out of range.
        """
        base = self.lr if lr is None else number(lr)
        if not 0 <= base < math.inf:
            raise UsageError(f"lr is {lr!r}, expected a number from 0", hint="policy.optim_step(lr=1e-6)")
        norm = self.choices.max_grad_norm if max_norm is None else number(max_norm)
        if not norm > 0:
            raise UsageError(f"max_norm is {max_norm!r}, expected a number above 0", hint="leave max_norm out")
        given: Any = betas
        are_pair = isinstance(given, tuple) and len(given) == 2 and all(0 <= number(beta) < 1 for beta in given)
        if betas is not None and not are_pair:
            raise UsageError(
                f"betas is {betas!r}, expected two numbers from 0 to below 1",
                hint="policy.optim_step(betas=(0.9, 0.999))",
            )
        for name, value in (("eps", eps), ("weight_decay", weight_decay)):
            if value is not None and not 0 <= number(value) < math.inf:
                raise UsageError(f"{name} is {value!r}, expected a number from 0", hint=f"leave {name} out")
        self.optimizer.scale_rates(base / self.lr)
        self.optimizer.replace_hyperparameters(
            None if betas is None else (number(betas[0]), number(betas[1])),
            None if eps is None else number(eps),
            None if weight_decay is None else number(weight_decay),
        )
        self._max_norm = norm

    def rescale(self, lr_factors: Mapping[str, float]) -> None:
        """Train parameters that are stored multiplied by these factors, by name, as if they were not."""
        self.optimizer.regroup(
            factory.scaled_group(self.weights[name], factor, lr=self.lr, weight_decay=self.choices.weight_decay)
            for name, factor in lr_factors.items()
        )

    def exchange(self) -> float:
        """Sum the gradients over all ranks, and return their global norm (waits for the device)."""
        if self.prepared.parallel is not None:
            named = self.prepared.model.named_parameters()
            self.prepared.parallel.combine({name: p.grad for name, p in named if p.grad is not None})
        if self.ranks.world_size > 1:
            self.optimizer.exchange()
        return self.optimizer.global_norm()

    def step(self, norm: float) -> None:
        """Write the update into the parameters; `norm` is the global norm of its gradients."""
        self.optimizer.step(grad_norm=norm, max_norm=self._max_norm)

    def step_in_backward(self, losses: Callable[[], list[Tensor] | None]) -> float:
        """Update each parameter during the single backward pass of an update, and return the gradients' norm.

        `losses` runs the forward passes; it returns None to skip the update. The backward pass starts only if the
        losses of all ranks are finite; otherwise the norm is NaN.

        Raises:
            UsageError: memory ran out, or a gradient is not finite.
        """
        self.drop_gradients()
        try:
            computed = losses()
            is_usable = computed is not None and all(math.isfinite(loss.item()) for loss in computed)
            if not all(self.ranks.all_gather_object(is_usable)):
                return math.nan
            with self.optimizer.releasing(max_norm=self._max_norm):
                for loss in computed or ():
                    loss.backward()
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"out of memory in the middle of an update: {first_line(error)}",
                hint="resume from the last checkpoint with --gradient-checkpointing, a higher --updates-per-batch or"
                " --kv-sleep always",
            ) from error
        return self.optimizer.global_norm()
