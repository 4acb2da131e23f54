"""The training loop, the same in every mode: rollouts -> gradients -> one write that is published.

If this run started the server and the server dies, it is restarted with the newest weights, and what it interrupted is
done again.

Several ranks run this loop in lockstep, each beside its own server; the first one writes and reports.

Not covered: rollouts (`bridge/rollouts`), learning from them (`bridge/learn`), how weights reach vLLM (`bridge/modes`).
"""

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import torch

from bridge.atropos.stream import AtroposStream
from bridge.config import TrainConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import RankError, ServerUnreachableError, UsageError
from bridge.learn import mismatch, reference
from bridge.learn.opening import MakeOptimizer, learner_of
from bridge.modes import way_of
from bridge.modes.mode import Mode, RunContext, ServerProcess
from bridge.optimizers import factory
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts.environment import EnvironmentStream
from bridge.rollouts.sampler import fit_completions
from bridge.rollouts.stream import Stream
from bridge.run import delivery, measuring
from bridge.run.checkpoint import Checkpoints, Found
from bridge.run.metrics import Evaluation, StepMetrics, Summary, goal_of
from bridge.run.reporting import Reporter
from bridge.run.run_directory import RunDirectory
from bridge.scoring.score import Scores
from bridge.server.fence import Update
from bridge.types import Environment, Group, TrainedProblems

Result = TypeVar("Result")
RESTARTS_PER_STEP = 3
"""A server that dies more often than this in one step is given up: another restart would not help."""
SKIPS_IN_A_ROW = 3
"""Steps in a row whose first gradient is not finite, after which the run ends: the next would be no better."""


def train(
    config: TrainConfig,
    environment: Environment | None,
    run: RunDirectory,
    reporter: Reporter,
    *,
    recipe: Callable[[], Scores] | None = None,
    process: ServerProcess | None = None,
    resume: Found | None = None,
    chosen: TrainConfig | None = None,
    make_optimizer: MakeOptimizer = factory.make,
    ranks: Ranks = ALONE,
) -> Summary:
    """Train up to step `config.training_steps`, write metrics and checkpoints, and report each step to `reporter`.

    `environment` has the problems; None if rollouts come from elsewhere. `recipe` builds the scorer in other processes;
    without it, `environment` scores in this one. An interrupt or an error ends the run with the weights of the
    last published step saved. `process` is the server if this run started it: it is restarted if it dies. `resume` is
    the checkpoint to resume from. `make_optimizer` is for comparisons. `ranks` train together. `config` may have
    derived values where nothing was `chosen`; both are written to the run directory.

    Raises:
        BridgeError: the mode, the environment, the server or the disk ended the run.
    """
    chosen = chosen or config
    reference.check(config)
    config = config.changed(save_path=config.checkpoints.save_path or run.checkpoints)
    name = str(run.path.absolute())
    scratch = run.served if ranks.is_rank_zero else run.ranks / str(ranks.rank) / run.served.name
    context = RunContext(
        name=name, scratch=scratch, note=run.note, resumes=resume is not None, process=process, ranks=ranks
    )
    owns_server = any(ranks.all_gather_object(process is not None))
    mode = ranks.run_on_all(lambda: way_of(config)(config, context))
    try:
        lengths = [length for length in ranks.all_gather_object(mode.max_model_len) if length is not None]
        config = fit_completions(config, min(lengths, default=None), run.note)
        with closing(_stream(config, environment, run, reporter, recipe, ranks)) as stream:
            trainer = ranks.run_on_all(
                lambda: Trainer(
                    config, stream, run, mode, reporter, make_optimizer, owns_server=owns_server, ranks=ranks
                )
            )
            if resume is not None:
                ranks.run_on_all(lambda: trainer.resume(resume))
            elif config.mode == "shared_vllm" and mode.version:  # the other modes bring weights of their own
                run.note(
                    f"the server was trained before: step 1 starts from its weights, version {mode.version}, not from"
                    f" those of {config.model_name} (bridge restore {shlex.quote(config.model_name)} loads these)"
                )
            if ranks.is_rank_zero:
                run.write_config(chosen, config.settled())  # a refused run leaves no trace
            first = 1 if resume is None else resume.progress.step + 1
            steps = f"steps {first} to {config.training_steps}"
            run.record(f"training {config.model_name} by --mode {config.mode}: {steps}")
            summary = trainer.run()
            run.record(f"done after step {summary.steps}; checkpoint {summary.checkpoint}")
            return summary
    finally:
        mode.close()


def _stream(
    config: TrainConfig,
    environment: Environment | None,
    run: RunDirectory,
    reporter: Reporter,
    recipe: Callable[[], Scores] | None,
    ranks: Ranks,
) -> Stream:
    if config.rollouts.source == "atropos":
        assert config.checkpoints.save_path is not None, "derived from the run directory"
        folder = config.checkpoints.save_path.absolute()
        name = (folder.parent if folder.name == run.checkpoints.name else folder).name or "bridge"
        return AtroposStream(config, run.note, run_name=name, ranks=ranks)
    assert environment is not None, "nothing to sample for"
    return EnvironmentStream(config, environment, run.note, recipe=recipe, progress=reporter.progress, ranks=ranks)


class Trainer:
    """The state of one run, and what each step does."""

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
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._config, self._stream, self._run, self._mode = config, stream, run, mode
        self._reporter, self._owns_server = reporter, owns_server
        self._opened = mode.open()
        self._learner = learner_of(
            config, self._opened, run.note, max_model_len=mode.max_model_len, make_optimizer=make_optimizer,
            ranks=ranks,
        )  # fmt: skip
        trained = {name: self._opened.model.get_parameter(name) for name in self._opened.lr_factors}
        self._checkpoints = Checkpoints(config, run, mode, trained, self._learner.optimizer, ranks, self._opened.cuts)
        kv_sleep = config.publishing.kv_sleep
        if kv_sleep == "always" and not mode.can_sleep:
            raise UsageError(
                "--kv-sleep always, but the server's KV cache cannot sleep",
                remedy="bridge serve-vllm on a GPU switches vLLM's --enable-sleep-mode on; or leave --kv-sleep out",
            )
        self._sleeps = None if kv_sleep == "auto" and mode.can_sleep else kv_sleep == "always"
        """Whether the server's KV cache sleeps while training; None: the first batch decides."""
        chosen = config.publishing.pause_while_training
        shares_gpu = config.mode != "none" and self._opened.device.type == "cuda"
        self._pauses = config.rollouts.max_staleness > 0 and shares_gpu if chosen is None else chosen
        """Whether the server stops sampling while training."""
        if self._pauses and chosen is None:
            run.note("sampling stops while a step is computed, since both would share the GPU")
        self._is_ahead = False
        """Whether the server has older weights than the next batch is trained on, as in mode `none` between reloads."""
        self._skipped = 0
        """Steps in a row without an update because the first gradient was not finite."""
        self._alarmed: dict[str, str | None] = {}
        """Alarms of the last step, by their kind."""
        self._steps: list[StepMetrics] = []
        self._evaluated: Evaluation | None = None
        """The last evaluation."""
        self._goal, self._is_reached = goal_of(config.stop_at), False
        self._begun_at = 0
        """Step of the checkpoint that the run resumed from."""
        self._written = 0
        """Step whose weights are in memory."""
        self._trained = TrainedProblems()
        """Problems that those weights were trained on."""
        self._half_written = False
        """Whether an error interrupted a write: what is in memory is no model then."""

    def resume(self, found: Found) -> None:
        """Resume from a checkpoint: its weights, optimizer, random state and place in the data.

        Raises:
            UsageError: it is of another model, or no step is left.
        """
        found.check_left(self._config.training_steps)
        step = found.progress.step
        self._checkpoints.load(found)
        self._stream.resume(found.progress.trained)
        self._begun_at, self._written, self._trained = step, step, found.progress.trained

    def run(self) -> Summary:
        """Take every step, and evaluate before, in between and afterwards if configured."""
        self._tell_stream()
        # Only the first rank's host has the file.
        before = self._ranks.run_on_rank_zero(self._run.first_evaluation) if self._begun_at else None
        if before is None:
            before = self._evaluate()
        last = self._config.training_steps
        try:
            self._ranks.run_on_all(self._take_steps)
        except BaseException:  # whatever it was, published steps are not lost
            if self._written > self._begun_at:
                self._rescue()
            raise
        if not self._is_last(last):
            self._surviving(self._mode.catch_up)
            self._tell_stream()
        after = self._last_evaluation()
        return measuring.summary(
            self._steps, self._opened, last=self._written, version=self._mode.version, checkpoint=self._save(),
            before=before, after=after,
        )  # fmt: skip

    def _take_steps(self) -> None:
        last, interval = self._config.training_steps, self._config.evaluation.interval
        for step in takewhile(lambda _: not self._is_reached, range(self._begun_at + 1, last + 1)):
            self._step(step)
            if self._checkpoints.is_due(step):
                self._save()
            if step < last and interval and step % interval == 0:
                self._evaluate()

    def _step(self, step: int) -> None:
        start = time.perf_counter()
        self._reporter.phase("rollouts")
        count = self._config.rollouts.batch_size // self._config.sampling.group_size
        groups = self._surviving(lambda: self._stream.take(count, step=step))
        sampled = time.perf_counter()
        self._reporter.phase("train")
        self._learner.take(groups, step=step)
        if not self._prepares_inside():
            self._learner.prepare()
        seconds = sampled - start, time.perf_counter() - sampled
        self._reporter.phase("fence")
        metrics = self._surviving(lambda: self._publish(step, groups, seconds))
        self._tell_stream()
        self._reporter.step(metrics, groups)
        self._count_skipped(metrics)
        self._compare(metrics)

    def _publish(self, step: int, groups: Sequence[Group], seconds: tuple[float, float]) -> StepMetrics:
        served = self._mode.version
        with deferred_interrupt():  # a published step has its metrics
            times = self._mode.publish(
                Update(
                    lambda: self._write(step, groups),
                    prepare=self._learner.prepare if self._prepares_inside() and self._written != step else None,
                    sleep=bool(self._sleeps),
                    last_checkpoint=self._checkpoints.last,
                    is_last=self._is_last(step),
                )
            )
            learnt = self._learner.learnt()
            metrics = measuring.step(
                step, groups, learnt, times,
                served=served, stream=self._stream, rollout_s=seconds[0], train_s=seconds[1],
                changed_weight_share=self._learner.optimizer.changed_weight_share, device=self._opened.device,
            )  # fmt: skip
            self._steps.append(metrics)
            if self._ranks.is_rank_zero:
                if self._config.tracking.save_rollouts:
                    self._run.append_rollouts(step, [*groups, *self._stream.skipped], version=served)
                self._run.append(metrics)
        alarm = mismatch.alarm(learnt.mismatch, self._config.loss.mismatch_alarm)
        self._watch("mismatch", None if self._is_ahead else alarm)  # ahead of the server, a mismatch is expected
        self._is_ahead = times.version == served
        self._watch("signal", measuring.nothing_learnt(metrics))
        return metrics

    def _write(self, step: int, groups: Sequence[Group]) -> None:
        """Write the updates of `step`, once: a publication that is retried finds them written."""
        if self._written == step:
            return
        self._half_written = True
        self._learner.write()
        self._written, self._half_written = step, False
        used = [group.number for group in (*groups, *self._stream.skipped) if group.number is not None]
        self._trained = self._trained.including(used)

    def _rescue(self) -> None:
        """Save what was published; if a rank is gone, without its part of the optimizer's state."""
        try:
            if not self._ranks.is_broken and not self._is_torn():
                self._save()
        except RankError:  # one has gone meanwhile
            if not self._ranks.is_broken:
                raise
        if not self._ranks.is_broken:
            return
        if self._ranks.tp_size > 1:
            self._run.note(
                "the other parts of the weights are gone with their ranks: continue from the last checkpoint"
            )
        elif self._ranks.is_rank_zero and not self._half_written:
            folder = self._checkpoints.save_weights(self._written)
            self._run.note(f"the weights of step {self._written}, without the optimizer's state, are in {folder}")

    def _is_torn(self) -> bool:
        """Return whether what is in memory is no model, on any rank."""
        return any(self._ranks.all_gather_object(self._half_written))

    def _is_last(self, step: int) -> bool:
        """Return whether nothing is sampled after `step`, because a server of our own ends with the run."""
        return step == self._config.training_steps and self._owns_server and not self._config.evaluation.samples

    def _compare(self, record: StepMetrics | Evaluation) -> None:
        """Let the run end if this reaches --stop-at; an evaluation before the first step does not count."""
        if self._written == self._begun_at or self._is_reached:
            return
        if self._ranks.run_on_rank_zero(lambda: self._goal(record)):  # each rank has other times
            self._is_reached = True
            self._run.note(f"--stop-at {self._config.stop_at}: reached after step {record.step}")

    def _watch(self, kind: str, alarm: str | None) -> None:
        """Log an alarm in the first of consecutive steps that have one."""
        if alarm and not self._alarmed.get(kind):
            self._run.note(alarm)
        self._alarmed[kind] = alarm

    def _count_skipped(self, metrics: StepMetrics) -> None:
        """Log a skipped update; the step was published with the weights of the update before.

        Raises:
            UsageError: too many in a row.
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

    def _prepares_inside(self) -> bool:
        """Return whether the server pauses while this process computes."""
        return self._lets_sleep() or self._pauses

    def _lets_sleep(self) -> bool:
        if self._sleeps is None:
            self._sleeps = self._learner.wants_sleep()
            if self._sleeps:
                then = "; requests in flight recompute theirs" if self._config.rollouts.max_staleness else ""
                self._run.note(f"the server's KV cache sleeps while training, which needs its memory{then}")
        return bool(self._sleeps)

    def _surviving(self, operation: Callable[[], Result]) -> Result:
        """Run `operation`; if the server is ours and dies, restart it with the newest weights and repeat."""
        for _ in range(RESTARTS_PER_STEP if self._owns_server else 0):
            try:
                return operation()
            except ServerUnreachableError as error:
                self._revive(error)
        return operation()

    def _revive(self, error: ServerUnreachableError) -> None:
        if self._is_torn():
            raise error
        self._run.note(f"the server died: {error.message}")
        newest = None
        if self._written:
            newest = self._save()
            self._checkpoints.pin(newest)
            delivery.deliver(newest, self._ranks)
        if self._sleeps:
            self._learner.forget()  # the new server needs its memory for the KV cache
        if self._opened.device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM refuses to start if less memory is free than it is to take
        self._mode.revive(newest)
        self._tell_stream()
        self._run.note(f"the server was started again with the weights of step {self._written}")

    def _evaluate(self) -> float | None:
        def evaluation() -> Evaluation | None:
            start = time.perf_counter()
            groups = self._stream.evaluate(step=self._written)
            if groups is None:
                return None
            seconds = time.perf_counter() - start
            return measuring.evaluation(
                groups, step=self._written, version=self._mode.version, seconds=seconds,
                pass_reward=self._config.evaluation.pass_reward,
            )  # fmt: skip

        self._reporter.phase("evaluation")
        found = self._surviving(evaluation)
        if found is None:
            return None
        self._evaluated = found
        if self._ranks.is_rank_zero:
            self._run.append_evaluation(found)
        self._reporter.evaluation(found)
        self._compare(found)
        return found.reward_mean

    def _last_evaluation(self) -> float | None:
        """Evaluate what is served now, unless that is done: the run may have ended with an evaluation."""
        done = self._evaluated
        if done and (done.step, done.weight_version) == (self._written, self._mode.version):
            return done.reward_mean
        return self._evaluate()

    def _tell_stream(self) -> None:
        self._stream.served(self._mode.endpoint, self._mode.version)

    def _save(self) -> Path:
        self._reporter.phase("save")
        return self._checkpoints.save(self._written, self._trained)
