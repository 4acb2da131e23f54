"""Train on batches of rollouts: compute all that can be computed before a weight changes, then take the updates.

    take       turn the groups into samples, and cut them into mini-batches
    prepare    run forward and backward passes up to the first change of a weight
    write      take the update, and if a batch has several, run the remaining passes and take their updates

With one update per batch, `write` only takes the optimizer step. With gradient release each parameter is updated in the
middle of the backward pass, which is then part of `write`.

Several replicas split each mini-batch. Its weights are those of the whole, so that the sum over all replicas is its
loss, and gradients and figures add up. The parts of a replica compute the same samples, each with its own weights.

Not covered: the fence around `write` (`bridge/server/fence.py`), the loss (`policy_loss.py`).
Shape suffixes: N rows (positions that predict a sampled token).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.core.interrupt import acting_interrupt, deferred_interrupt
from bridge.errors import UsageError
from bridge.learn import balance
from bridge.learn.mismatch import Mismatch, Tally, measure, share
from bridge.learn.policy_loss import NUM_SUMS, LossShares, LossSpec, least_entropy, policy_loss
from bridge.learn.reference import Reference
from bridge.learn.samples import mini_batches
from bridge.optimizers import factory
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.release import added_in_float32
from bridge.passes.budget import Budget
from bridge.passes.logprobs import model_logprobs
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.passes.parallel import Parallel
from bridge.ranks.world import ALONE, Ranks
from bridge.types import Group

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """The figures of one step."""

    loss: float
    """Mean over the updates."""
    grad_norm: float
    """Global norm of the gradient before it is clipped, mean over the updates."""
    lr: float
    """Learning rate of the first update."""
    entropy: float
    """Mean entropy of the policy at the sampled tokens, before the first update, in nats."""
    mismatch: Mismatch
    """Between the server and the trainer, before the first update."""
    shares: LossShares
    num_tokens: int
    """Sampled tokens that were trained on."""
    balance: float
    """Tokens of the busiest replica over the mean; NaN for one."""
    num_updates: int
    num_skipped: int
    """Updates that were skipped because their gradient was not finite: the first of them ends its step."""


@dataclass(kw_only=True)
class _Part:
    """One micro-batch, and its log-probabilities from before the first update of the batch, once they are computed."""

    batch: MicroBatch
    old_logprobs_N: Tensor | None = None
    """The trainer's."""
    reference_logprobs_N: Tensor | None = None
    """The frozen reference's."""
    entropies_N: Tensor | None = None
    """The trainer's, if its most uncertain tokens are chosen."""


class Learner:
    """A model that is trained in place, batch by batch."""

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel,
        optimizer: InPlaceOptimizer,
        *,
        budget: Budget,
        reference: Reference | None,
        ranks: Ranks = ALONE,
        parallel: Parallel | None = None,
    ) -> None:
        self.optimizer, self._ranks, self._parallel = optimizer, ranks, parallel
        self._config, self._model, self._budget, self._reference = config, model, budget, reference
        self._spec, self._temperature = LossSpec.of(config.loss), config.sampling.temperature
        self._schedule, self._num_before = factory.schedule(config), 0
        """Factor of the learning rate by the number of planned updates before, and that number for this batch."""
        self._updates_in_backward = config.optimizer.gradient_release and not config.optimizer.offload
        self._refusal: UsageError | None = None
        """Why no batch can follow: an update can never fit. The weights are whole."""
        self._prepared = False
        self._least = list[Tensor]()
        """For each update the least entropy of the tokens that are trained on; empty: all are."""
        self._only_ranked = list[list[Sample]]()
        """For each update, the samples without a gradient whose tokens are ranked by entropy with the others."""
        self._num_tokens = 0
        """Sampled tokens of the batch, of all ranks."""
        self._busiest = math.nan
        self._take([])

    def take(self, groups: Sequence[Group], *, step: int = 1) -> None:
        """Start the step of this number with this batch.

        Raises:
            UsageError: given advantages are invalid.
        """
        self._num_before = (step - 1) * self._config.optimizer.updates_per_step
        num_updates, longest = self._config.optimizer.updates_per_batch, self._config.sampling.longest
        updates = mini_batches(groups, self._spec, num_updates=num_updates, max_new_tokens=longest)
        trained = [samples for samples, _ in updates]
        self._num_tokens = sum(sample.num_trained for each in trained for sample in each)
        self._busiest = balance.busiest(trained, self._ranks.dp_size)
        self._only_ranked = [self._dealt(only_ranked) for _, only_ranked in updates]
        self._take([self._dealt(each) for each in trained])

    def wants_sleep(self) -> bool | None:
        """Whether the batch needs the memory of a sleeping KV cache; None: the batch is empty."""
        if not self._mini_batches:
            return None
        most = max(self._mini_batches, key=lambda each: sum(one.num_tokens for one in each))
        return any(self._ranks.run_and_gather(lambda: bool(most) and self._budget.is_short(most)))

    def prepare(self) -> None:
        """Compute, once, what comes before the first change of a weight; an interrupt leaves nothing behind.

        Raises:
            UsageError: it does not fit in memory, or an update of the batch before did not.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._prepared:
            return
        try:
            with deferred_interrupt():  # in the midst of an exchange the other ranks would wait for this one
                self._least = self._least_entropies() if self._spec.top_entropy < 1 else []
                self._ranks.run_on_all(lambda: self._within_memory(self._prepare))
                if self._parts and not self._updates_in_backward:
                    self._exchange()
        except BaseException:
            self.forget()
            raise
        self._prepared = True

    def write(self) -> None:
        """Take every update of the batch.

        An update is skipped if its gradient is not finite, and ends the batch. So does one that does not fit in memory
        after the first: the weights and the optimizer's state are then those of the update before.

        Raises:
            UsageError: memory ran out in the middle of an update with gradient release.
        """
        for number in range(self._config.optimizer.passes_per_batch * len(self._parts)):
            self.optimizer.scale_rates(self._schedule(self._num_before + number))
            if not self._update(self._parts[number % len(self._parts)], first=number == 0):
                break
        self._drop_gradients()  # a KV cache that slept needs their memory
        self._is_written = True

    def forget(self) -> None:
        """Drop what was computed for the batch; its figures are kept if it is written."""
        self._drop_gradients()
        if not self._is_written:
            self._take(self._mini_batches)

    def learnt(self) -> Learnt:
        """Wait for the device, and return the figures."""
        num_taken = self._num_updates or len(self._norms)  # if the first was skipped: the figures that show why
        losses = self._ranks.all_reduce_dp(torch.stack(self._losses[:num_taken] or [torch.zeros(())]))
        tallies = self._ranks.one_per_replica(self._ranks.all_gather_object(self._tally.cpu()))
        return Learnt(
            loss=sum(losses.tolist()) / max(num_taken, 1),
            grad_norm=sum(self._norms[:num_taken]) / max(num_taken, 1),
            lr=self._config.learning_rate * self._schedule(self._num_before),
            entropy=share(self._ranks.all_reduce_dp(self._entropy).item(), self._num_tokens),
            mismatch=sum(tallies, Tally.zero(torch.device("cpu"))).read(),
            shares=LossShares.of(self._ranks.all_reduce_dp(self._loss_sums)),
            num_tokens=self._num_tokens,
            balance=self._busiest,
            num_updates=self._num_updates,
            num_skipped=sum(not math.isfinite(norm) for norm in self._norms),
        )

    def _dealt(self, mini_batch: list[Sample]) -> list[Sample]:
        return [mini_batch[index] for index in balance.dealt(mini_batch, self._ranks)]

    def _take(self, mini_batches: list[list[Sample]]) -> None:
        self._mini_batches, self._parts = mini_batches, list[list[_Part]]()
        self._prepared = self._is_written = False
        self._num_updates = 0
        self._norms, self._losses = list[float](), list[Tensor]()  # of every update, and of one that was skipped
        device = self._model.device
        self._entropy = torch.zeros((), dtype=torch.float64, device=device)
        self._tally = Tally.zero(device)
        self._loss_sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)

    def _least_entropies(self) -> list[Tensor]:
        """Return, for each update, the entropy from which on its tokens are trained on, of all ranks' tokens."""

        def own() -> list[Tensor]:
            others = self._within_memory(self._other_entropies)
            self._within_memory(self._look_ahead)
            trained = ([_entropies(part).cpu() for part in parts] for parts in self._parts)
            both = zip(trained, others, strict=True)
            return [torch.cat([torch.zeros(0), *of_trained, *of_others]) for of_trained, of_others in both]

        # The ranks of one replica compute the same tokens.
        of_replicas = self._ranks.one_per_replica(self._ranks.run_and_gather(own))
        whole = (torch.cat(each) for each in zip(*of_replicas, strict=True))
        return [least_entropy(each_N, self._spec.top_entropy).to(self._model.device) for each_N in whole]

    def _other_entropies(self) -> list[list[Tensor]]:
        """Return, for each update, the entropies of the samples that are only ranked."""
        entropies = [list[Tensor]() for _ in self._only_ranked]
        for of_update, samples, trained in zip(entropies, self._only_ranked, self._mini_batches, strict=True):
            max_tokens = self._budget.max_tokens([*trained, *samples]) if samples else 0
            sharing = self._budget.share_prompts
            for batch in packs(samples, max_tokens=max_tokens, device=self._model.device, share_prompts=sharing):
                with torch.enable_grad():  # as in `_look_ahead`
                    of_update.append(model_logprobs(self._model, batch, self._temperature)[1].cpu())
        return entropies

    def _within_memory(self, act: Callable[[], Result]) -> Result:
        """Compute this rank's share of the batch, in smaller passes if memory runs out.

        The parts of a replica meet in every layer: where one stops, by an error or an interrupt, the others wait.

        Raises:
            RankError: a part of several is out of memory, or met something else; its process has to end.
        """
        if self._ranks.tp_size > 1:
            with self._ranks.tp_pass():
                return act()
        while True:
            try:
                with acting_interrupt():
                    return act()
            except torch.OutOfMemoryError as error:
                self.forget()
                self._budget.shrink(error)

    def _prepare(self) -> None:
        if not self._parts:
            self._look_ahead()
        if self._budget.sums_in_float32:
            self.optimizer.expect(torch.float32)  # compiled now, and not between two writes
        for least, parts in zip(self._least, self._parts, strict=False):  # none, if all tokens are trained on
            for part in parts:
                advantages_N = part.batch.advantages_N * (_entropies(part) >= least)
                part.batch = replace(part.batch, advantages_N=advantages_N)
        if self._parts and not self._updates_in_backward:
            self._differentiate(self._parts[0])

    def _look_ahead(self) -> None:
        """Cut the batch into passes, and compute what updates need from before the first one."""
        self._parts = [self._pack(each) for each in self._mini_batches]
        chooses = self._spec.top_entropy < 1
        for part in chain.from_iterable(self._parts[0 if chooses else 1 :]):  # the first update's ratios are 1
            # With gradients enabled, as in training: without, compiled layers are another graph, which rounds
            # differently. In bf16 the two differ by 0.01 nats a token, and GSPO clips at 0.0003.
            with torch.enable_grad():
                logprobs_N, entropies_N = model_logprobs(self._model, part.batch, self._temperature)
            self._remember(part, logprobs_N.detach(), entropies_N)
            part.entropies_N = entropies_N if chooses else None

    def _pack(self, mini_batch: Sequence[Sample]) -> list[_Part]:
        if not mini_batch:  # all of it is other ranks'
            return []
        max_tokens = self._budget.max_tokens(mini_batch)
        sharing = self._budget.share_prompts
        packed = packs(mini_batch, max_tokens=max_tokens, device=self._model.device, share_prompts=sharing)
        if len(packed) > 1 and self._updates_in_backward:
            raise self._budget.too_few_for_one_pass(mini_batch, len(packed), num_updates=len(self._mini_batches))
        return [_Part(batch=batch) for batch in packed]

    def _update(self, parts: Sequence[_Part], *, first: bool) -> bool:
        """Take one update; return whether it was taken."""
        if self._updates_in_backward:
            self._update_in_backward(parts)
        elif not first and not self._fits(parts):
            return False
        if not math.isfinite(self._norms[-1]):
            return False
        self.optimizer.step(grad_norm=self._norms[-1], max_norm=self._config.optimizer.max_grad_norm)
        self._num_updates += 1
        return True

    def _fits(self, parts: Sequence[_Part]) -> bool:
        """Compute the gradients of an update after the first; return whether they fit in every rank's memory."""
        try:
            with self._ranks.tp_pass():
                self._differentiate(parts)
        except torch.OutOfMemoryError as error:
            try:
                self._budget.shrink(error)
            except UsageError as refusal:  # not raised here: no weight is half written
                self._refusal = refusal
            fits = False
        else:
            fits = True
        if not all(self._ranks.all_gather_object(fits)):
            return False
        self._exchange()
        return True

    def _differentiate(self, parts: Sequence[_Part]) -> None:
        """Compute the gradients of one update, and their norm."""
        self._model.zero_grad(set_to_none=True)
        self._losses.append(self._no_loss())
        with ExitStack() as gradients:
            if self._config.optimizer.gradient_release:
                gradients.enter_context(self.optimizer.releasing())
            elif len(parts) > 1 and self._budget.sums_in_float32:
                gradients.enter_context(added_in_float32(p for p in self._model.parameters() if p.requires_grad))
            for part in parts:
                self._loss(part).backward()
        if self._ranks.world_size == 1:
            self._norms.append(self.optimizer.global_norm())

    def _update_in_backward(self, parts: Sequence[_Part]) -> None:
        """Update each parameter in the one backward pass of an update, and compute the norm of the gradients.

        No rank begins that pass unless every loss is finite.

        Raises:
            UsageError: memory ran out, or a gradient is not finite.
        """
        self._model.zero_grad(set_to_none=True)
        self._losses.append(self._no_loss())
        try:
            losses = [self._loss(part) for part in parts]  # none, if all of the update is other ranks'
            is_finite = all(self._ranks.all_gather_object(all(math.isfinite(loss.item()) for loss in losses)))
            if is_finite:
                with self.optimizer.releasing(max_norm=self._config.optimizer.max_grad_norm):
                    for loss in losses:
                        loss.backward()
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"out of memory in the middle of an update: {str(error).strip().splitlines()[0]}",
                remedy="resume from the last checkpoint with --gradient-checkpointing, a higher --updates-per-batch or"
                " --kv-sleep always",
            ) from error
        self._norms.append(self.optimizer.global_norm() if is_finite else math.nan)

    def _exchange(self) -> None:
        """Add up the gradients of several ranks, and compute their norm."""
        if self._parallel is not None:
            gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
            self._parallel.combine(gradients)
        if self._ranks.world_size > 1:
            self.optimizer.exchange()
            self._norms.append(self.optimizer.global_norm())

    def _drop_gradients(self) -> None:
        self._model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad()

    def _no_loss(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._model.device)

    def _loss(self, part: _Part) -> Tensor:
        """Return the loss of one pass, and add it to that of its update."""
        logprobs_N, entropies_N = model_logprobs(self._model, part.batch, self._temperature)
        if part.old_logprobs_N is None:
            self._remember(part, logprobs_N.detach(), entropies_N)
        if self._reference is not None and part.reference_logprobs_N is None:
            part.reference_logprobs_N = self._reference.logprobs(part.batch, self._temperature)
        assert part.old_logprobs_N is not None
        loss, sums_K = policy_loss(logprobs_N, part.old_logprobs_N, part.batch, self._spec, part.reference_logprobs_N)
        self._losses[-1] += loss.detach()
        self._loss_sums += sums_K
        return loss

    def _remember(self, part: _Part, logprobs_N: Tensor, entropies_N: Tensor) -> None:
        part.old_logprobs_N = logprobs_N
        self._entropy += entropies_N.sum(dtype=torch.float64)
        batch, spec = part.batch, self._spec
        self._tally += measure(logprobs_N, batch.sampled_logprobs_N, spec.correction, spec.weighted_sequences(batch))


def _entropies(part: _Part) -> Tensor:
    assert part.entropies_N is not None, "it looked ahead"
    return part.entropies_N
