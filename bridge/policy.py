"""The model of a live server, for a loop of your own: `bridge.attach` and `bridge.serve` make a `Policy`.

Its parameters are the server's memory. Sample from it, compute log-probabilities with gradients, and step any optimizer
inside the fence; the server generates with the new weights from the next token on. Nothing is copied.

Not covered: the run directory and the checkpoints that it writes (`bridge/run/loop.py`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.checks import Check, verify
from bridge.config import ComputeConfig, SamplingConfig
from bridge.config.optimizers import OptimizerName
from bridge.core import atomic_folder, paths
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import UsageError, first_few
from bridge.optimizers import factory
from bridge.optimizers.in_place import EPS, InPlaceOptimizer, clip_gradients
from bridge.passes import preparation
from bridge.passes.logprobs import model_logprobs
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.rollouts.distribution import filters
from bridge.run.loop import load_state
from bridge.served import ServedModel, note, warning
from bridge.server import fence
from bridge.server.fence import FenceTimes, Update, Window
from bridge.server.manifest import Manifest
from bridge.server.protocol import InFlight
from bridge.types import Group
from bridge.weights import model_folder
from bridge.weights.attach import attach as attach_parameters


class Policy(ServedModel):
    """The model of a live server, attached to this process: one copy of the weights. Made by `attach` and `serve`.

    A context manager; leaving it returns the server to others, with the weights that were published last.
    """

    model: PreTrainedModel
    """The transformers model, in evaluation mode. Its parameters are the server's: change them inside `update` only.

    `pack` and `logprobs` give it attention for packed sequences; from then on it takes no padding."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        sampling: SamplingConfig,
        compute: ComputeConfig,
        reads_only: bool,
        run_dir: Path | None = None,
    ) -> None:
        super().__init__(manifest, sampling=sampling, reads_only=reads_only, run_dir=run_dir)
        self._compute = compute
        try:
            self._attached = attach_parameters(manifest)
            self.model = self._attached.model
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> torch.device:
        return self._attached.device

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the trained parameters, for an optimizer: a tied parameter once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def pack(self, samples: Sequence[Sample], *, max_tokens: int = 16_384) -> list[MicroBatch]:
        """Pack samples into micro-batches of at most `max_tokens`, without padding, with shared prompts if possible.

        A longer sample gets its own micro-batch. The first call checks that packing does not change what the model
        computes.

        Raises:
            UnsupportedModelError: packing does change it.
        """
        _, shares_prompts = self._prepared
        return packs(samples, max_tokens=max_tokens, device=self.device, share_prompts=shares_prompts)

    @cached_property
    def _prepared(self) -> tuple[PreTrainedModel, bool]:
        """The model, prepared for packed sequences once, and whether completions of one prompt may share it."""
        shares_prompts = preparation.prepare(
            self.model, self._compute, note, max_model_len=self._manifest.max_model_len
        )
        self.model.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
        return self.model, shares_prompts

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return this process's log-probabilities of the sampled tokens at the sampling temperature, and the entropies.

        Only the first have a gradient; both are in nats, and aligned with `batch.sampled_logprobs_N`. If this policy's
        `sampling` has a `top_k`, `top_p` or `min_p`, both are of the distribution over the tokens that these kept.

        Shapes: -> [N] float32, [N] float32.
        """
        model, _ = self._prepared
        if not filters(self.sampling):  # a teacher, say, of a student that is filtered
            batch = replace(batch, kept=None)
        return model_logprobs(model, replace(batch, experts_TX=None), self.sampling.temperature)

    def optimizer(
        self,
        name: OptimizerName = "adamw",
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] | None = None,
        eps: float = EPS,
        seed: int = 0,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    ) -> InPlaceOptimizer:
        """Return Bridge's AdamW: it updates bf16 weights in place, and loses no update to rounding.

        `adamw` keeps the bits that a float32 master would have. torch's optimizers lose updates smaller than half a
        bf16 step, which are most of them at learning rates of reinforcement learning. The state is allocated
        in the first `update`, before the fence. `params` are those to train, as torch's optimizers take them, such as
        groups with a `weight_decay` of their own; by default all.

        Raises:
            UsageError: there is no such optimizer, or a number is out of range.
        """
        given = [*(self.parameters() if params is None else params)]
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        defaults = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        return factory.make(factory.choices(name, lr, betas), [{**defaults, **group} for group in groups], seed=seed)

    def update(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float = math.inf, in_flight: InFlight = "keep"
    ) -> FenceTimes:
        """Step `optimizer` with the gradients inside the fence, publish the result, and drop the gradients.

        Gradients are clipped to a global norm of `max_norm` before it. Requests in flight are kept, drained or
        aborted. Ctrl-C is deferred to the end of the update. If the step raises, the weights may be half-written: the
        server stops serving them, and this policy samples, updates and saves no more until `resume` or `publish` has
        written all of them. `bridge restore` loads a checkpoint once this process has ended.

        Raises:
            UsageError: the norm is not finite, `max_norm` is no positive number, the optimizer needs a closure or
                changes nothing of the server's, the policy only reads, or the call is inside another one that changes
                the weights; nothing was changed.
            AttachError: the server refuses the fence, or the weights are half-written.
            ServerUnreachableError: the server is gone.
        """
        self._refuse_to_write()
        with self._alone("update"):
            self._refuse_half_written("update")
            norm = clip_gradients(optimizer, max_norm, self._attached.parameters.values())
            if isinstance(optimizer, InPlaceOptimizer):
                optimizer.allocate()  # running out of memory inside the fence would leave the weights half-written
            with deferred_interrupt():  # else a loop that goes on after Ctrl-C would add to gradients that were applied
                with self._fence("update", Update(), in_flight) as window:
                    if isinstance(optimizer, InPlaceOptimizer):
                        optimizer.step(grad_norm=norm, max_norm=max_norm)
                    else:
                        optimizer.step()
                optimizer.zero_grad()
            return window.times

    def publish(self, write: Callable[[], object], *, in_flight: InFlight = "keep") -> FenceTimes:
        """Call `write` inside the fence and publish what it wrote into the parameters, whatever that is.

        Raises:
            UsageError: the policy only reads, or the call is inside another one that changes the weights.
            AttachError: the server refuses the fence.
            ServerUnreachableError: the server is gone.
        """
        self._refuse_to_write()
        with self._alone("publish"), self._fence("publish", Update(), in_flight) as window:
            write()
        return window.times

    def _refuse_to_write(self) -> None:
        if self._reads_only:
            raise UsageError("this policy only reads", remedy="attach without reads_only=True to update it")

    @contextmanager
    def _fence(self, call: str, update: Update, in_flight: InFlight = "keep") -> Iterator[Window]:
        with deferred_interrupt():  # the new version is known before an interrupt acts
            is_open = False
            try:
                with fence.publish(self._client, update, in_flight=in_flight, served=self.version) as window:
                    is_open = True
                    yield window
            except BaseException:
                if is_open:
                    self._failed = f"policy.{call}"
                    self._sampler.loop.cancel()  # of another thread: no server would answer it
                raise
            self._failed = ""
            self.version = window.times.version
            self._loop.add_fence(window.times)

    def log(self, step: int, groups: Sequence[Group] = (), **metrics: float | Tensor | Mapping[str, float]) -> None:
        """Write a line of metrics into the run directory; `bridge report` makes a page of it.

        `groups` are those of the step: their rewards, lengths and texts are written, too. `metrics` are numbers, or
        numbers by name. A name of `metrics.jsonl`, such as `loss` or `grad_norm`, appears in its chart, any other in a
        chart of its own. The times of rollouts, fences and the rest of the step are measured.

        Raises:
            UsageError: a value is no number, the step is not after the last one, or the run directory cannot be used.
        """
        self._loop.log(step, groups, metrics, version=self.version, device=self.device.type)

    def save(
        self,
        folder: str | Path | None = None,
        *,
        step: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Path:
        """Write the weights and the tokenizer to a folder atomically, as transformers loads them; return the folder.

        With a `step` it is a checkpoint: with the optimizer's state, torch's random state and a checksum of every file,
        in `checkpoints/step_N` of the run directory by default. `resume` loads it.

        Raises:
            UsageError: there is something at `folder`, neither a folder nor a step was given, or the disk refuses.
        """
        target = None if folder is None else paths.expanded(folder)

        def write(scratch: Path) -> None:
            if missing := model_folder.save(self.model, self._manifest.model, scratch):
                warning("the weights were saved, and beside them is missing: %s", first_few(missing))

        if step is not None:
            with self._alone("save"):
                self._refuse_half_written("save")
                return self._loop.save(
                    target, step, write, model=self.model, optimizer=optimizer, version=self.version,
                    calls=self._num_calls,
                )  # fmt: skip
        if target is None or optimizer is not None:
            raise UsageError(
                "policy.save has neither a folder nor a step"
                if optimizer is None
                else "policy.save has an optimizer, but no step",
                remedy="policy.save(FOLDER), or policy.save(step=STEP, optimizer=...)",
            )
        with self._alone("save"):
            self._refuse_half_written("save")
            with atomic_folder.write(target, replaceable=lambda _: False, flag="policy.save(FOLDER)") as scratch:
                write(scratch)
        return target

    def resume(self, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest checkpoint of the run directory, and return its step; 0 if there is none.

        The weights are loaded into the server's memory inside the fence, and the optimizer and torch continue as they
        were; so do the seeds of `sample`. Lines of later steps are moved aside. Call it before the first step.

        Raises:
            UsageError: no `run_dir` was given, it is in use, or the checkpoint is of another model.
            CheckpointError: it has no state of such an optimizer.
        """
        self._refuse_to_write()
        with self._alone("resume"):
            newest = self._loop.newest()
            if newest is None:
                return 0
            model_folder.check(self.model, newest.folder)
            load_state(newest, self.model, optimizer)
            version = newest.progress.weight_version
            update = Update(version=version, takeover=True, last_checkpoint=newest.folder)
            with self._fence("resume", update):
                model_folder.load_into(self.model, newest.folder)
            self._num_calls = newest.progress.samples_drawn
            return newest.progress.step

    def verify(self) -> list[Check]:
        """Prove that there is one copy of the weights, from both processes; a failed check has the status FAIL."""
        with self._alone("verify"):
            self._refuse_half_written("verify")  # it would let the server serve them
            return [*verify.proofs([self._attached], self._client, timeout_s=self.sampling.request_timeout_s)]


def _refuse_padding(_: nn.Module, positional: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuse a padded batch: attention for packed sequences has no mask, and would attend to the padding."""
    mask = given.get("attention_mask", positional[1] if len(positional) > 1 else None)  # the second one in transformers
    if mask is not None and not bool(mask.all()):
        raise UsageError(
            "the batch has padding, and this model's attention is the one for packed sequences",
            remedy="use policy.pack and policy.logprobs, or attach another policy for passes with padding",
        )
