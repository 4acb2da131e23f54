"""Train on batches of rollouts: compute everything possible before a weight changes, then take the updates.

    take       turn the groups into samples, and cut them into mini-batches
    prepare    run forward and backward passes up to the first change of a weight
    write      take the update; if a batch has several, also run the remaining passes and take their updates
    learnt     return the metrics of the step

With one update per batch, `write` only takes the optimizer step. With gradient release each parameter is updated during
the backward pass, which is then part of `write`.

Several replicas split each mini-batch. Sample weights refer to the full mini-batch, so that losses, gradients and
metrics add up over the replicas. Ranks that share a pass compute the same samples, each with its part of the weights or
its slice of the tokens.

Shape suffixes: N rows (positions that predict a sampled token).
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bridge.config import OWN_WEIGHTS, LossConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.core.logs import warn_once
from bridge.engine.trainable import Trainable
from bridge.errors import RewardError, UsageError
from bridge.learn.mismatch import measure
from bridge.learn.policy_loss import ROW_LOSSES, LossSpec, least_entropy, policy_loss
from bridge.run.step_batch import Batch, Computed, Pass
from bridge.types import Group, Result

logger = logging.getLogger(__name__)


class Learner:
    """The algorithm of a run: how a batch becomes updates, and the metrics of these updates."""

    def __init__(
        self,
        trainable: Trainable,
        spec: LossSpec,
        schedule: Callable[[int], float],
        *,
        warm_up_steps: int = 0,
    ) -> None:
        """Store the parts; `schedule` maps the number of planned updates so far to a factor of the learning rate.

        The first `warm_up_steps` steps are supervised; the loss `spec` is that of the later ones.
        """
        self.trainable = trainable
        self.optimizer = trainable.optimizer
        self._choices = trainable.choices
        self._budget = trainable.budget
        self._ranks = trainable.ranks
        self._schedule = schedule
        self._warm_up_steps = warm_up_steps
        self._later_spec = spec
        self.spec = ROW_LOSSES["sft"] if warm_up_steps else spec
        """The loss of the current step."""
        self._thresholds = list[Tensor]()
        """For each update, the lowest entropy of tokens that are trained on; empty: all tokens are."""
        self._refusal: UsageError | None = None
        """Why training cannot continue: an update can never fit, or the user's loss failed. Weights are consistent."""
        self._start(Batch())

    def take(self, groups: Sequence[Group], *, step: int = 1) -> None:
        """Start step number `step` with this batch.

        UsageError: a group's given advantages are invalid, or a teacher's server does not grade the completions.
        """
        self.spec = ROW_LOSSES["sft"] if step <= self._warm_up_steps else self._later_spec
        has_hints = any(group.teacher_prompt_token_ids for group in groups)
        if groups and self.spec.teacher_weight > 0 and self.trainable.lacks_hints(has_hints):
            warn_once(
                logger,
                f"--teacher {OWN_WEIGHTS} teaches nothing in steps whose problems all lack a hint, since it predicts"
                " what the policy predicts; give every problem a key 'hint'",
            )
        longest = self.trainable.sampling.longest
        batch = Batch.of(groups, self.spec, self._ranks, self._choices, longest=longest, step=step)
        if self.spec.teacher_weight > 0:
            batch = replace(batch, mini_batches=[*map(self.trainable.graded, batch.mini_batches)])
        self._start(batch)

    def wants_sleep(self) -> bool | None:
        """Return whether the batch needs the memory of a sleeping KV cache; None: the batch is empty."""
        if not self._batch.mini_batches:
            return None
        largest = max(self._batch.mini_batches, key=lambda samples: sum(sample.num_tokens for sample in samples))
        return any(self._ranks.run_and_gather(lambda: bool(largest) and self._budget.is_short(largest)))

    def check_usable(self, cause: type[UsageError] = UsageError) -> None:
        """Raise the error that ends training, if it is a `cause`: an update cannot fit, or the user's loss failed."""
        if isinstance(self._refusal, cause):
            raise self._refusal

    def prepare(self) -> None:
        """Do all the work that comes before a weight changes, exactly once; an interrupt leaves no partial state.

        UsageError: the batch does not fit in memory, or the update of the previous batch did not.
        """
        self.check_usable()
        if self._computed.is_prepared:
            return
        try:
            with deferred_interrupt():  # an interrupted exchange would leave the other ranks waiting
                self._thresholds = self._least_entropies() if self.spec.top_entropy < 1 else []
                self._ranks.run_on_all(lambda: self._within_memory(self._prepare))
                if self._computed.passes and not self._choices.steps_in_backward:
                    self._exchange()
        except BaseException:
            self.forget()
            raise
        self._computed.is_prepared = True

    def write(self) -> None:
        """Run all updates of the batch.

        An update whose gradient is not finite is skipped, and ends the batch. So does a later update that
        runs out of memory, or in which the user's loss fails; it leaves weights and state as they were before it.
        UsageError: memory ran out in the middle of an update with gradient release.
        """
        updates = self._computed.passes
        for number in range(self._choices.passes_per_batch * len(updates)):
            self.optimizer.scale_rates(self._schedule(self._batch.num_before + number))
            if not self._update(updates[number % len(updates)], first=number == 0):
                break
        self.optimizer.zero_grad()  # the KV cache needs this memory when it wakes
        self._computed.is_written = True

    def forget(self) -> None:
        """Free everything computed for the batch, except the metrics of a batch that was written."""
        self.optimizer.zero_grad()
        if not self._computed.is_written:
            self._start(self._batch)

    def learnt(self) -> dict[str, Any]:
        """Wait for the device, and return the step's metrics, by their names in `metrics.jsonl`."""
        lr = self.trainable.lr * self._schedule(self._batch.num_before)
        return self._computed.figures(self._batch, self._ranks, lr, self.spec.metrics, self.trainable.prepared)

    def _start(self, batch: Batch) -> None:
        self._batch = batch
        self._computed = Computed.nothing(self.trainable.device, len(self.spec.metrics))

    def _least_entropies(self) -> list[Tensor]:
        """Return, for each update, the lowest entropy at which tokens are trained on, over all ranks' tokens."""

        def own() -> list[Tensor]:
            others = self._within_memory(self._other_entropies)
            self._within_memory(self._look_ahead)
            trained = ([model_pass.entropies.cpu() for model_pass in passes] for passes in self._computed.passes)
            both = zip(trained, others, strict=True)
            return [torch.cat([torch.zeros(0), *of_trained, *of_others]) for of_trained, of_others in both]

        # Ranks that share a pass all have the same tokens: count them once.
        of_shares = self._ranks.one_per_share(self._ranks.run_and_gather(own))
        whole = (torch.cat(of_update) for of_update in zip(*of_shares, strict=True))
        return [least_entropy(whole_N, self.spec.top_entropy).to(self.trainable.device) for whole_N in whole]

    def _other_entropies(self) -> list[list[Tensor]]:
        """Return, for each update, the entropies of the samples that are only ranked."""
        entropies = [list[Tensor]() for _ in self._batch.only_ranked]
        updates = zip(entropies, self._batch.only_ranked, self._batch.mini_batches, strict=True)
        for of_update, samples, trained in updates:
            for micro_batch in self._budget.packs(samples, [*trained, *samples]):
                with torch.enable_grad():  # same graph as in `_look_ahead`
                    of_update.append(self.trainable.logprobs(micro_batch)[1].cpu())
        return entropies

    def _within_memory(self, act: Callable[[], Result]) -> Result:
        """Compute this rank's share of the batch, in smaller passes if memory runs out."""
        return self.trainable.within_memory(act, self.forget)

    def _prepare(self) -> None:
        if not self._computed.passes:
            self._look_ahead()
        if self._budget.sums_in_float32:
            self.optimizer.expect(torch.float32)  # compile it now, not between two writes
        updates = self._computed.passes
        for least, passes in zip(self._thresholds, updates, strict=False):  # without thresholds, all tokens count
            for model_pass in passes:
                advantages_N = model_pass.batch.advantages_N * (model_pass.entropies >= least)
                model_pass.batch = replace(model_pass.batch, advantages_N=advantages_N)
        if updates and not self._choices.steps_in_backward:
            self._differentiate(updates[0])

    def _look_ahead(self) -> None:
        """Cut the batch into passes, and compute the log-probs from before the first update that updates need."""
        for samples in self._batch.mini_batches:
            packed = self._budget.packs(samples, samples)
            if len(packed) > 1 and self._choices.steps_in_backward:
                num_updates = len(self._batch.mini_batches)
                raise self._budget.too_few_for_one_pass(samples, len(packed), num_updates=num_updates)
            self._computed.passes.append([Pass(batch=micro_batch) for micro_batch in packed])
        chooses = self.spec.top_entropy < 1
        first = 0 if chooses else 1  # the ratios of the first update are 1
        if self.spec.objective in ("supervised", "preference"):  # there are no ratios
            return
        for model_pass in chain.from_iterable(self._computed.passes[first:]):
            # Enable gradients, as in training: without them, compiled layers use a different graph, which rounds
            # differently. In bf16 the two differ by 0.01 nats per token, while GSPO clips at 0.0003.
            with torch.enable_grad():
                logprobs_N, entropies_N = self.trainable.logprobs(replace(model_pass.batch, several=None))
            self._remember(model_pass, logprobs_N.detach(), entropies_N)
            model_pass.entropies_N = entropies_N if chooses else None

    def _update(self, passes: Sequence[Pass], *, first: bool) -> bool:
        """Take one update, and return whether it was taken."""
        if self._choices.steps_in_backward:
            self._update_in_backward(passes)
        elif not first and not self._fits(passes):
            return False
        if not math.isfinite(self._computed.norms[-1]):
            return False
        self.trainable.step(self._computed.norms[-1])
        self._computed.num_updates += 1
        return True

    def _fits(self, passes: Sequence[Pass]) -> bool:
        """Compute the gradients of a later update, and return whether this succeeded on all ranks."""
        fits = False
        try:
            with self._ranks.in_pass():
                self._differentiate(passes)
            fits = True
        except RewardError as error:  # raised later, since no weight is half-written
            self._refusal = error
        except torch.OutOfMemoryError as error:
            try:
                self._budget.shrink(error)
            except UsageError as refusal:  # raised later, since no weight is half-written
                self._refusal = refusal
        if fits := all(self._ranks.all_gather_object(fits)):
            self._exchange()
        return fits

    def _differentiate(self, passes: Sequence[Pass]) -> None:
        """Compute the gradients of one update."""
        self._begin_update()
        self.trainable.add_gradients(passes, self._loss, widens=len(passes) > 1)

    def _update_in_backward(self, passes: Sequence[Pass]) -> None:
        """Apply an update during its backward pass; if the user's loss fails, skip the update and end training."""

        def losses() -> list[Tensor] | None:
            try:
                return [self._loss(model_pass) for model_pass in passes]  # empty if only other ranks have samples
            except RewardError as error:
                self._refusal = error
                return None

        self._begin_update()
        self._computed.norms.append(self.trainable.step_in_backward(losses))

    def _begin_update(self) -> None:
        self.trainable.drop_gradients()
        self._computed.losses.append(torch.zeros((), dtype=torch.float64, device=self.trainable.device))

    def _exchange(self) -> None:
        """Sum the gradients over all ranks, and compute their norm."""
        self._computed.norms.append(self.trainable.exchange())

    def _loss(self, model_pass: Pass) -> Tensor:
        """Return the loss of one pass, and add it to the loss of its update."""
        inputs = self.trainable.loss_inputs(model_pass.batch, self.spec, model_pass.teacher_logprobs_N)
        logprobs_N = inputs.logprobs_N
        model_pass.teacher_logprobs_N = inputs.teacher_logprobs_N
        if model_pass.old_logprobs_N is None:
            self._remember(model_pass, logprobs_N.detach(), inputs.entropies_N.detach())
        if self.spec.needs_reference and model_pass.reference_logprobs_N is None:
            model_pass.reference_logprobs_N = self.trainable.reference_logprobs(model_pass.batch)
        assert model_pass.old_logprobs_N is not None
        loss, sums = policy_loss(
            logprobs_N, model_pass.old_logprobs_N, model_pass.batch, self.spec, model_pass.reference_logprobs_N,
            inputs.entropies_N, inputs.divergences_N, inputs.teacher_logprobs_N,
        )  # fmt: skip
        self._computed.losses[-1] += loss.detach()
        self._computed.loss_sums += torch.stack([sums[name] for name in self.spec.metrics])
        return loss

    def _remember(self, model_pass: Pass, logprobs_N: Tensor, entropies_N: Tensor) -> None:
        model_pass.old_logprobs_N = logprobs_N
        self._computed.entropy += entropies_N.sum(dtype=torch.float64)
        batch = model_pass.batch
        spec = self.spec
        self._computed.tally += measure(
            logprobs_N, batch.sampled_logprobs_N, spec.correction, spec.weighted_sequences(batch)
        )


def log_uncorrected(loss: LossConfig, *, max_staleness: int, restart_interval: int) -> None:
    """Log a note if the configuration trains on stale completions without importance-sampling correction."""
    causes = []
    if max_staleness:
        causes.append(f"--max-staleness {max_staleness}")
    if restart_interval > 1:
        causes.append(f"--vllm-restart-interval {restart_interval}")
    if causes and loss.mismatch == "none":
        logger.info(
            f"--mismatch none: with {' and '.join(causes)} completions of older weights are trained on, and nothing"
            " corrects for the difference"
        )
