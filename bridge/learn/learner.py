"""One batch of rollouts turned into updates: all that can be computed before a weight changes, and the changes.

    take       the groups become samples, one share of them per update
    prepare    forward and backward passes up to where the first weight would change
    write      the update, and where a batch makes several, the passes and the updates that follow

With one update a batch nothing but the optimizer's step is left to write. Where gradients are released, each parameter
is stepped in the middle of the backward pass, which is part of writing then.

Not covered: the fence around writing (`loop.py`), forward and backward (`gradients.py`), the loss (`bridge/learn`), the
optimizer (`bridge/optimizers`), how many tokens a pass takes (`bridge/passes/budget.py`).
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.learn.advantages import samples, with_advantages
from bridge.learn.gradients import Gradients, Learnt, Part, Sums
from bridge.learn.policy_loss import LossSpec
from bridge.learn.reference import Reference
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.release import added_in_float32
from bridge.passes.budget import Budget
from bridge.passes.packing import Sample, packs
from bridge.types import Group


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
    ) -> None:
        self.optimizer = optimizer
        self._config, self._model, self._budget = config, model, budget
        self._spec = LossSpec.of(config)
        self._gradients = Gradients(
            model=model, spec=self._spec, temperature=config.sampling.temperature, reference=reference
        )
        self._refusal: UsageError | None = None
        """What is wrong since an update that can never fit: the weights are whole, and the next batch is refused."""
        self._take([])

    def take(self, groups: Sequence[Group]) -> None:
        """Make `groups` the batch at hand.

        Raises:
            UsageError: advantages from outside cannot be used.
        """
        whole = with_advantages(groups, self._spec.advantage_scale)
        cut = _cut(whole, self._config.optimizer.updates_per_batch)
        self._take([samples(each, self._spec, max_new_tokens=self._config.sampling.longest) for each in cut])

    def wants_sleep(self) -> bool | None:
        """Tell whether the batch lacks memory, which a sleeping KV cache would give; None: it is empty."""
        if not any(self._shares):
            return None
        return self._budget.is_short(max(self._shares, key=lambda each: sum(sample.num_tokens for sample in each)))

    def prepare(self) -> None:
        """Compute what comes before the first change of a weight, once; what is interrupted leaves nothing.

        Raises:
            UsageError: it does not fit in memory, or an update of the batch before did not.
        """
        if self._refusal is not None:
            raise self._refusal
        while not self._prepared:
            try:
                self._prepare()
            except torch.OutOfMemoryError as error:
                self.forget()
                self._budget.shrink(error)
            except BaseException:
                self.forget()
                raise

    def write(self) -> None:
        """Take every update of the batch.

        A gradient that is not finite is skipped and ends the batch, as does what does not fit in memory after the first
        update: the weights and the optimizer's state are those of the update before.

        Raises:
            UsageError: gradients are released, and memory ran out in the middle of an update.
        """
        for number in range(self._config.optimizer.passes_per_batch * len(self._parts)):
            parts = self._parts[number % len(self._parts)]
            if not self._update(parts, first=number == 0):
                break
        self._model.zero_grad(set_to_none=True)  # a KV cache that slept needs their memory
        self._is_written = True

    def forget(self) -> None:
        """Drop what was computed of the batch at hand; what was measured stays if it is written."""
        self._model.zero_grad(set_to_none=True)
        if not self._is_written:
            self._take(self._shares)

    def learnt(self) -> Learnt:
        """Wait for the device, and return what was found."""
        return self._sums.read(sum(sample.num_trained for each in self._shares for sample in each))

    def _take(self, shares: list[list[Sample]]) -> None:
        self._shares, self._parts = shares, list[list[Part]]()
        self._prepared = self._is_written = False
        self._sums = Sums(self._model.device)

    def _prepare(self) -> None:
        self._parts = [self._pack(each) for each in self._shares if each]
        if self._budget.sums_in_float32:
            self.optimizer.expect(torch.float32)  # compiled now, and not between two writes
        for part in (part for parts in self._parts[1:] for part in parts):
            self._gradients.look_back(part, self._sums)  # the first update needs none: its ratios are 1
        if self._parts and not self._steps_in_backward:
            self._differentiate(self._parts[0])
        self._prepared = True

    def _pack(self, share: Sequence[Sample]) -> list[Part]:
        max_tokens = self._budget.max_tokens(share)
        sharing = self._budget.share_prompts
        packed = packs(share, max_tokens=max_tokens, device=self._model.device, share_prompts=sharing)
        parts = [Part(batch=batch) for batch in packed]
        if len(parts) > 1 and self._steps_in_backward:
            raise UsageError(
                f"--gradient-release steps each parameter after one backward pass, and the {len(share)} completions of"
                f" an update need {len(parts)}, of at most {max_tokens:,} tokens",
                remedy=self._smaller_updates(len(parts)),
            )
        return parts

    def _smaller_updates(self, num_passes: int) -> str:
        """Say what makes one pass of an update that takes several."""
        num_groups = self._config.rollouts.batch_size // self._config.sampling.group_size
        wanted = num_passes * len(self._shares)
        cuts = [cut for cut in range(wanted, num_groups + 1) if num_groups % cut == 0]
        smaller = f"--updates-per-batch {cuts[0]}, " if cuts else ""
        return smaller + "a smaller --batch-size, or --offload-optimizer, which adds gradients up in host memory"

    @property
    def _steps_in_backward(self) -> bool:
        return self._config.optimizer.gradient_release and not self._config.optimizer.offload

    def _differentiate(self, parts: Sequence[Part]) -> None:
        """Compute the gradients of one update, and their norm."""
        self._model.zero_grad(set_to_none=True)
        max_norm, steps = self._config.optimizer.max_grad_norm, self._steps_in_backward
        with ExitStack() as gradients:
            if self._config.optimizer.gradient_release:
                gradients.enter_context(self.optimizer.releasing(max_norm=max_norm))
            elif len(parts) > 1 and self._budget.sums_in_float32:
                gradients.enter_context(added_in_float32(p for p in self._model.parameters() if p.requires_grad))
            is_whole = self._gradients.backward(parts, self._sums, checks_loss=steps)
        self._sums.norms.append(self.optimizer.global_norm() if is_whole else math.nan)

    def _update(self, parts: Sequence[Part], *, first: bool) -> bool:
        """Take one update, and tell whether it was taken."""
        if self._steps_in_backward:
            self._step_in_backward(parts)
        elif not first and not self._can_differentiate(parts):
            return False
        if not math.isfinite(self._sums.norms[-1]):
            return False
        self.optimizer.step(grad_norm=self._sums.norms[-1], max_norm=self._config.optimizer.max_grad_norm)
        self._sums.num_updates += 1
        return True

    def _can_differentiate(self, parts: Sequence[Part]) -> bool:
        try:
            self._differentiate(parts)
        except torch.OutOfMemoryError as error:
            try:
                self._budget.shrink(error)
            except UsageError as refusal:  # not raised here: no weight is half written
                self._refusal = refusal
            return False
        return True

    def _step_in_backward(self, parts: Sequence[Part]) -> None:
        try:
            self._differentiate(parts)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"out of memory in an update, which is half written: {str(error).strip().splitlines()[0]}",
                remedy="go on from the last checkpoint with --gradient-checkpointing, a higher --updates-per-batch or"
                " --kv-sleep always",
            ) from error


def _cut(groups: Sequence[Group], num_parts: int) -> list[Sequence[Group]]:
    """Cut a batch into parts that differ by at most one group; into fewer where there are fewer groups."""
    num_parts = max(1, min(num_parts, len(groups)))
    borders = [len(groups) * number // num_parts for number in range(num_parts + 1)]
    return [groups[start:end] for start, end in pairwise(borders)]
