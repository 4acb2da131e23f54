"""The steps of one run: rollouts -> gradients -> one write that is published, whatever the mode.

A server that is ours and dies is started again with the newest weights, and what it interrupted is done over.

Not covered: opening and closing what it works with (`loop.py`), rollouts (`stream.py`), what is learnt from them
(`learner.py`), checkpoints (`series.py`), how weights reach vLLM (`bridge/modes`).
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from bridge.config import TrainConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import ServerUnreachableError, UsageError
from bridge.learn import mismatch
from bridge.learn.learner import MakeOptimizer, learner_of
from bridge.modes.mode import Mode
from bridge.rollouts.stream import Stream
from bridge.run import measuring
from bridge.run.checkpoint import Found
from bridge.run.metrics import Evaluation, StepMetrics, Summary
from bridge.run.reporting import Reporter
from bridge.run.run_directory import RunDirectory
from bridge.run.series import Series
from bridge.server.fence import Update
from bridge.types import Group, TrainedProblems

Result = TypeVar("Result")
RESTARTS_PER_STEP = 3
"""A server that dies more often than this in one step is given up: starting it again does not help."""
SKIPS_IN_A_ROW = 3
"""Steps in a row whose first gradient is not finite, after which the run ends: the next would be no better."""


class Trainer:
    """One run: its state, and what is done in each step."""

    def __init__(
        self,
        config: TrainConfig,
        stream: Stream,
        run: RunDirectory,
        mode: Mode,
        reporter: Reporter,
        make_optimizer: MakeOptimizer,
        *,
        owns_server: bool,
    ) -> None:
        self._config, self._run, self._mode, self._owns_server = config, run, mode, owns_server
        self._stream, self._reporter = stream, reporter
        self._opened = mode.open()
        self._device = self._opened.device
        self._learner = learner_of(
            config, self._opened, run.note, max_model_len=mode.max_model_len, make_optimizer=make_optimizer
        )
        trained = {name: self._opened.model.get_parameter(name) for name in self._opened.lr_factors}
        self._checkpoints = Series(config, run, mode, trained, self._learner.optimizer)
        self._sleeps = self._sleeps_always()
        """Whether the server's KV cache sleeps while training; None: to be seen with the first batch."""
        self._skipped = 0
        """Steps in a row without an update because the first gradient was not finite."""
        self._alarmed: dict[str, str | None] = {}
        """What was alarming in the last step, by its kind."""
        self._steps: list[StepMetrics] = []
        self._begun_at = 0
        """The step that a checkpoint was of, where the run goes on from one."""
        self._written = 0
        """The step whose weights are in memory."""
        self._trained = TrainedProblems()
        """The problems that those weights were trained on."""
        self._taken = frozenset[int]()
        """Numbers of the problems of the step at hand."""
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
                remedy=f"--training-steps {step + wanted}, or begin another run without --resume",
            )
        self._checkpoints.load(found)
        self._stream.resume(found.progress.trained)
        self._begun_at, self._written, self._trained = step, step, found.progress.trained

    def run(self) -> Summary:
        """Take every step, evaluating before, in between and after if asked to."""
        self._tell_stream()
        before, last = self._before(), self._config.training_steps
        try:
            for step in range(self._begun_at + 1, last + 1):
                self._step(step)
                if self._checkpoints.is_due(step):
                    self._save()
                if step < last and self._config.evaluation.interval and step % self._config.evaluation.interval == 0:
                    self._evaluate()
        except BaseException:  # whatever it was, steps that were paid for are not lost
            if self._written > self._begun_at and not self._half_written:
                self._save()
            raise
        if not self._is_last(last):
            self._surviving(self._mode.catch_up)
            self._tell_stream()
        after = self._evaluate()
        return measuring.summary(
            self._steps, self._opened, last=self._written, version=self._mode.version, checkpoint=self._save(),
            before=before, after=after,
        )  # fmt: skip

    def _step(self, step: int) -> None:
        start = time.perf_counter()
        self._reporter.phase("rollouts")
        count = self._config.rollouts.batch_size // self._config.sampling.group_size
        groups = self._surviving(lambda: self._stream.take(count, step=step))
        self._taken = frozenset(group.number for group in groups if group.number is not None)
        sampled = time.perf_counter()
        self._reporter.phase("train")
        self._learner.take(groups)
        if not self._lets_sleep():
            self._learner.prepare()
        seconds = sampled - start, time.perf_counter() - sampled
        self._reporter.phase("fence")
        metrics = self._surviving(lambda: self._publish(step, groups, seconds))
        self._tell_stream()
        self._reporter.step(metrics, groups)
        self._count_skipped(metrics)

    def _count_skipped(self, metrics: StepMetrics) -> None:
        """Log an update that was skipped; the step was published, with the weights of the update before.

        Raises:
            UsageError: there were too many in a row.
        """
        if metrics.updates:
            self._skipped = 0
        if not metrics.skipped_updates:
            return
        if metrics.updates:
            left = f"{metrics.updates} updates of the batch were taken before it, and none after it"
        else:
            self._skipped += 1
            left = f"no weight was changed ({self._skipped} in a row; the run ends after {SKIPS_IN_A_ROW})"
        self._run.note(f"step {metrics.step}: a gradient was not finite, and its update was skipped: {left}")
        if self._skipped == SKIPS_IN_A_ROW:
            raise UsageError(
                f"the gradients of {SKIPS_IN_A_ROW} steps in a row were not finite; no weight was changed in them",
                remedy="lower --lr or --max-grad-norm and continue with --resume; if no step before them had an update,"
                " check the model with bridge verify",
            )

    def _sleeps_always(self) -> bool | None:
        wanted = self._config.publishing.kv_sleep
        if wanted == "always" and not self._mode.can_sleep:
            raise UsageError(
                "--kv-sleep always, and the server's KV cache cannot sleep",
                remedy="bridge serve-vllm on a GPU switches vLLM's --enable-sleep-mode on; or leave --kv-sleep out",
            )
        return wanted == "always" or (None if wanted == "auto" and self._mode.can_sleep else False)

    def _lets_sleep(self) -> bool:
        if self._sleeps is None:
            self._sleeps = self._learner.wants_sleep()
            if self._sleeps:
                self._run.note("the server's KV cache sleeps while training, which needs its memory")
        return bool(self._sleeps)

    def _surviving(self, operation: Callable[[], Result]) -> Result:
        """Run `operation`; where the server dies and is ours, start it again with the newest weights and repeat."""
        for _ in range(RESTARTS_PER_STEP if self._owns_server else 0):
            try:
                return operation()
            except ServerUnreachableError as error:
                self._revive(error)
        return operation()

    def _revive(self, error: ServerUnreachableError) -> None:
        if self._half_written:
            raise error
        self._run.note(f"the server died: {error.message}")
        newest = self._save() if self._written else None
        if newest is not None:
            self._checkpoints.pin(newest)
        if self._sleeps:
            self._learner.forget()  # its memory is the new server's KV cache's
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM refuses to start where less is free than it is to take
        self._mode.revive(newest)
        self._tell_stream()
        self._run.note(f"the server was started again with the weights of step {self._written}")

    def _publish(self, step: int, groups: Sequence[Group], seconds: tuple[float, float]) -> StepMetrics:
        served = self._mode.version
        with deferred_interrupt():  # a step that was published is in the metrics too
            times = self._mode.publish(
                Update(
                    lambda: self._write(step),
                    prepare=self._learner.prepare if self._sleeps and self._written != step else None,
                    sleep=bool(self._sleeps),
                    last_checkpoint=self._checkpoints.last,
                    is_last=self._is_last(step),
                )
            )
            learnt = self._learner.learnt()
            metrics = measuring.step(
                step, groups, learnt, times,
                served=served, retries=self._stream.num_retries, rollout_s=seconds[0], train_s=seconds[1],
                changed_weight_share=self._learner.optimizer.changed_weight_share, device=self._device,
            )  # fmt: skip
            self._steps.append(metrics)
            if self._config.tracking.save_rollouts:
                self._run.append_rollouts(step, groups)
            self._run.append(metrics)
        self._watch("mismatch", mismatch.alarm(learnt.mismatch, self._config.loss.mismatch_alarm))
        self._watch("signal", measuring.nothing_learnt(metrics))
        return metrics

    def _is_last(self, step: int) -> bool:
        """Tell whether nothing is sampled after `step`: a server of our own ends with the run."""
        return step == self._config.training_steps and self._owns_server and not self._config.evaluation.samples

    def _watch(self, kind: str, alarm: str | None) -> None:
        """Note an alarm in the first of the steps in a row that have one."""
        if alarm and not self._alarmed.get(kind):
            self._run.note(alarm)
        self._alarmed[kind] = alarm

    def _write(self, step: int) -> None:
        """Write the updates of `step`, once: a publication that is repeated finds them written."""
        if self._written == step:
            return
        self._half_written = True
        self._learner.write()
        self._written, self._half_written, self._trained = step, False, self._trained.including(self._taken)

    def _before(self) -> float | None:
        """Return the held-out reward before the first step; a resumed run has measured it already."""
        known = self._run.first_evaluation() if self._begun_at else None
        return self._evaluate() if known is None else known

    def _evaluate(self) -> float | None:
        self._reporter.phase("evaluation")
        found = self._surviving(self._evaluation)
        if found is None:
            return None
        self._run.append_evaluation(found)
        self._reporter.evaluation(found)
        return found.reward_mean

    def _evaluation(self) -> Evaluation | None:
        start = time.perf_counter()
        groups = self._stream.evaluate(step=self._written)
        if groups is None:
            return None
        seconds = time.perf_counter() - start
        return measuring.evaluation(groups, step=self._written, version=self._mode.version, seconds=seconds)

    def _tell_stream(self) -> None:
        self._stream.served(self._mode.endpoint, self._mode.version)

    def _save(self) -> Path:
        self._reporter.phase("save")
        return self._checkpoints.save(self._written, self._trained)
