"""The training loop: rollouts -> micro-batches -> gradients -> one write that is published, whatever the mode.

A server that is ours and dies is started again with the newest weights, and what it interrupted is done over.

Not covered: rollouts (`experience.py`), forward and backward (`gradients.py`), the optimizer (`optimizer.py`),
checkpoints (`series.py`), how weights reach vLLM (`bridge/modes`).
"""

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from bridge.config import TrainConfig
from bridge.errors import ServerUnreachableError, UsageError
from bridge.modes import MODES
from bridge.modes.mode import Engine, Mode
from bridge.run_directory import RunDirectory
from bridge.training import batch
from bridge.training.checkpoint import Found
from bridge.training.experience import Experience, digest
from bridge.training.gradients import Gradients, accumulate, recompute_activations
from bridge.training.logprobs import check_head
from bridge.training.metrics import StepMetrics, Summary
from bridge.training.optimizer import SplitMasterAdamW, scaled_group
from bridge.training.series import Series
from bridge.types import Environment, Group
from bridge.weights.fence import FenceTimes, deferred_interrupt

Report = Callable[[StepMetrics], None]
Result = TypeVar("Result")
RESTARTS_PER_STEP = 3
"""A server that dies more often than this in one step is given up: starting it again does not help."""


def train(
    config: TrainConfig,
    environment: Environment,
    run: RunDirectory,
    report: Report,
    *,
    engine: Engine | None = None,
    resume: Found | None = None,
) -> Summary:
    """Train up to step `config.training_steps`, leave metrics and checkpoints behind, and tell `report` of each step.

    An interrupt or an error ends the run with the weights of the last published step saved. With an `engine`, a server
    that dies is not the end. `resume` is the checkpoint to go on from.

    Raises:
        BridgeError: whatever the mode, the environment, the server or the disk gave as a reason to stop.
    """
    mode = MODES[config.mode](config.model_copy(update={"resume": resume is not None}), run, engine)
    try:
        trainer = _Trainer(config, environment, run, mode, engine)
        if resume is not None:
            trainer.resume(resume)
        elif config.resume and mode.version:
            run.note(f"the server has been trained before: step 1 begins with its weights of version {mode.version}")
        run.write_config(config)  # from here on there is something to keep: a refused run leaves no trace
        return trainer.run(report)
    finally:
        mode.close()


class _Trainer:
    """One run's state."""

    def __init__(
        self, config: TrainConfig, environment: Environment, run: RunDirectory, mode: Mode, engine: Engine | None
    ) -> None:
        self._config, self._run, self._mode, self._engine = config, run, mode, engine
        self._experience = Experience(config, environment, run.note)
        self._opened = mode.open()
        self._model, self._device = self._opened.model, self._opened.device
        check_head(self._model)
        if config.gradient_checkpointing:
            recompute_activations(self._model)
        trained = {name: self._model.get_parameter(name) for name in self._opened.lr_factors}
        self._optimizer = SplitMasterAdamW(
            scaled_group(trained[name], factor, lr=config.lr, weight_decay=config.weight_decay)
            for name, factor in self._opened.lr_factors.items()
        )
        self._checkpoints = Series(config, run, mode, trained, self._optimizer)
        self._steps: list[StepMetrics] = []
        self._begun_at = 0
        """The step that a checkpoint was of, where the run goes on from one."""
        self._written = 0
        """The step whose weights are in memory."""
        self._used = 0
        """Problems that those weights were trained on."""
        self._half_written = False
        """Whether an error stopped a write: what is in memory is no model then."""

    def resume(self, found: Found) -> None:
        """Go on from a checkpoint: weights, optimizer, random state and the place in the data.

        Raises:
            UsageError: it is of another model, or no step is left to take.
        """
        step, wanted = found.progress.step, self._config.training_steps
        if step >= wanted:
            raise UsageError(
                f"{found.folder} is of step {step}, and --training-steps is {wanted}: no step is left to take",
                remedy=f"--training-steps {step + wanted}, or begin another run with --save-path",
            )
        self._checkpoints.load(found)
        self._experience.draw(found.progress.problems_drawn)
        self._begun_at, self._written, self._used = step, step, found.progress.problems_drawn

    def run(self, report: Report) -> Summary:
        """Take every step, evaluating before and after if asked to."""
        before = self._evaluate()
        try:
            for step in range(self._begun_at + 1, self._config.training_steps + 1):
                report(self._step(step))
                if self._checkpoints.is_due(step):
                    self._save()
        except BaseException:  # whatever it was, steps that were paid for are not lost
            if self._written > self._begun_at and not self._half_written:
                self._save()
            raise
        self._surviving(self._mode.catch_up)
        after = self._evaluate()
        return self._summary(before, after)

    def _step(self, step: int) -> StepMetrics:
        start = time.perf_counter()
        problems = self._experience.draw(self._config.batch_size // self._config.group_size)
        groups = self._surviving(lambda: self._experience.groups(self._mode.endpoint, problems, step=step))
        sampled = time.perf_counter()
        gradients = accumulate(self._model, groups, self._config)
        _check_finite(step, gradients)
        trained = time.perf_counter()
        seconds = sampled - start, trained - sampled
        return self._surviving(lambda: self._publish(step, groups, gradients, seconds))

    def _surviving(self, operation: Callable[[], Result]) -> Result:
        """Run `operation`; where the server dies and is ours, start it again with the newest weights and repeat."""
        for _ in range(RESTARTS_PER_STEP if self._engine else 0):
            try:
                return operation()
            except ServerUnreachableError as error:
                self._revive(error)
        return operation()

    def _revive(self, error: ServerUnreachableError) -> None:
        assert self._engine is not None
        if self._half_written:
            raise error
        self._run.note(f"the server died: {error.message}")
        newest = self._save() if self._written else None
        if newest is not None:
            self._checkpoints.pin(newest)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM refuses to start where less is free than it is to take
        self._mode.revive(self._engine, newest)
        self._run.note(f"the server was started again with the weights of step {self._written}")

    def _publish(
        self, step: int, groups: Sequence[Group], gradients: Gradients, seconds: tuple[float, float]
    ) -> StepMetrics:
        with deferred_interrupt():  # a step that was published is in the metrics too
            times = self._mode.publish(
                lambda: self._write(step, gradients.norm), last_checkpoint=self._checkpoints.last
            )
            metrics = self._measure(step, groups, gradients, times, seconds)
            self._steps.append(metrics)
            self._run.append(metrics)
        return metrics

    def _write(self, step: int, norm: float) -> None:
        """Write the update of `step`, once: a publication that is repeated finds it written."""
        if self._written == step:
            return
        self._half_written = True
        self._optimizer.step(grad_norm=norm)
        self._written, self._half_written, self._used = step, False, self._experience.num_drawn

    def _evaluate(self) -> float | None:
        return self._surviving(lambda: self._experience.evaluate(self._mode.endpoint))

    def _save(self) -> Path:
        return self._checkpoints.save(self._written, problems_drawn=self._used)

    def _measure(
        self, step: int, groups: Sequence[Group], gradients: Gradients, times: FenceTimes, seconds: tuple[float, float]
    ) -> StepMetrics:
        rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)
        return StepMetrics(
            step=step,
            weight_version=times.version,
            reward_mean=rewards.mean().item(),
            reward_std=rewards.std(correction=0).item(),
            loss=gradients.loss,
            grad_norm=gradients.norm,
            logprob_diff_mean=gradients.diffs.mean().item(),
            logprob_diff_max=gradients.diffs.max().item() if len(gradients.diffs) else float("nan"),
            changed_weight_share=self._optimizer.changed_weight_share,
            rollout_s=seconds[0],
            train_s=seconds[1],
            fence_pause_s=times.pause_s,
            fence_write_s=times.write_s,
            fence_publish_s=times.publish_s,
            rollouts=digest(groups),
            tokens_generated=batch.count_tokens(groups),
            peak_memory_gib=_peak_memory_gib(self._device),
        )

    def _summary(self, before: float | None, after: float | None) -> Summary:
        fences = [metrics.fence_pause_s + metrics.fence_publish_s for metrics in self._steps]
        diffs = [metrics.logprob_diff_max for metrics in self._steps if metrics.logprob_diff_max >= 0]
        return Summary(
            steps=self._written,
            weight_version=self._mode.version,
            checkpoint=self._save(),
            reward_before=before,
            reward_after=after,
            rewards=tuple(metrics.reward_mean for metrics in self._steps),
            logprob_diff_max=max(diffs, default=float("nan")),
            fence_p50_ms=statistics.median(fences) * 1e3,
            attach_ms=self._opened.open_s * 1e3,
            weight_bytes=self._opened.weight_bytes,
        )


def _check_finite(step: int, gradients: Gradients) -> None:
    if not math.isfinite(gradients.norm):
        raise UsageError(
            f"the gradient's norm is {gradients.norm} at step {step}; the weights were not touched",
            remedy="lower --lr",
        )


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
