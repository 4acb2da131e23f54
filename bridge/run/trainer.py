"""The training loop, the same in every mode: rollouts -> gradients -> one write that is published.

A step reads from top to bottom in `Run._take_steps`. If the server dies and this run started it, it is restarted with
the newest weights, and the interrupted operation is retried. Several ranks run this loop in lockstep; rank 0 writes and
reports.
"""

import logging
import math
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from bridge.agents.open_stream import open_stream
from bridge.atropos.atropos_stream import AtroposStream
from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import SavedCheckpoint
from bridge.checkpoints.metrics import Evaluation, StepMetrics, Summary, goal_of
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.engine import measuring, provenance
from bridge.engine.measuring import Alarms
from bridge.engine.policy import Policy
from bridge.errors import RewardError, ServerUnreachableError
from bridge.learn.policy_loss import LossSpec
from bridge.modes.mode import PausePolicy, RunContext, ServerProcess
from bridge.optimizers import factory
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts.groups import Stream
from bridge.rollouts.row_stream import RowStream
from bridge.rollouts.training_rows import TrainingRow
from bridge.run import resuming
from bridge.run.learner import Learner, log_uncorrected
from bridge.run.reporting import Reporter
from bridge.run.saving import Checkpoints
from bridge.server.fence import Update
from bridge.types import Environment, Group, Result
from bridge.weights import model_files

logger = logging.getLogger(__name__)

RESTARTS = 3
"""How often the server is restarted in one operation before the run gives up."""


def restarting_the_server(operation: Callable[..., Result]) -> Callable[..., Result]:
    """Retry a method of `Run` on a new server with the newest weights if the run's own server dies in it."""

    @wraps(operation)
    def repeated(run: "Run", *arguments: Any) -> Result:
        for _ in range(RESTARTS if run._owns_server else 0):
            try:
                return operation(run, *arguments)
            except ServerUnreachableError as error:
                run._revive(error)
        return operation(run, *arguments)

    return repeated


class Run:
    """One training run, up to step `config.training_steps`.

    `environment` has the problems; None if rollouts come from elsewhere. `rows` are given completions, for the first or
    all steps. `chosen` is what the user chose, if `config` also has derived values. `process` is the server, if this
    run started it. `resume` is the checkpoint to resume from. `ranks` are the processes that train together.
    """

    def __init__(
        self,
        config: TrainConfig,
        environment: Environment | None,
        directory: RunDirectory,
        reporter: Reporter,
        *,
        rows: Sequence[TrainingRow] = (),
        chosen: TrainConfig | None = None,
        process: ServerProcess | None = None,
        resume: SavedCheckpoint | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._rows = rows
        self._chosen = chosen or config
        self._config = config.changed(save_path=config.checkpoints.save_path or directory.checkpoints)
        self._environment = environment
        self._directory = directory
        self._reporter = reporter
        self._process = process
        self._resume = resume
        self._ranks = ranks
        self._steps: list[StepMetrics] = []
        self._evaluated: Evaluation | None = None
        self._is_reached = False
        self._begun_at = 0
        """The step of the checkpoint that the run resumed from."""

    def train(self) -> Summary:
        """Train; if an interrupt or an error ends the run, the weights of the last published step are saved."""
        with ExitStack() as opened:
            self._open(opened)
            self._announce_version()
            before = self._ranks.run_on_rank_zero(self._directory.first_evaluation) if self._begun_at else None
            evaluated = self._evaluate() if before is None or self._is_evaluation_missing() else None
            before = evaluated if before is None else before
            try:
                with self._ranks.raise_on_all():
                    self._take_steps()
            except BaseException:  # save published steps after any error
                if self._checkpoints.step > self._begun_at:
                    self._reporter.phase("save")
                    self._checkpoints.rescue()
                raise
            if not self._is_last(self._config.training_steps):
                self._catch_up()
            after = self._evaluate()
            checkpoint = self._save()
            last = self._checkpoints.step
            self._directory.record(f"done after step {last}; checkpoint {checkpoint}")
            return measuring.summary(
                self._steps, self._opened, last=last, version=self._policy.version, checkpoint=checkpoint,
                before=before, after=after,
            )  # fmt: skip

    def _is_evaluation_missing(self) -> bool:
        """Return whether the run that is resumed ended after saving its checkpoint, but before evaluating that step."""
        interval = self._config.evaluation.interval
        if not interval or self._begun_at % interval:
            return False
        return self._ranks.run_on_rank_zero(self._directory.last_evaluated) != self._begun_at

    def _take_steps(self) -> None:
        last = self._config.training_steps
        interval = self._config.evaluation.interval
        for step in range(self._begun_at + 1, last + 1):
            self._reporter.phase("rollouts")
            start = time.perf_counter()
            groups = self._take_groups(step)
            sampled = time.perf_counter()

            self._reporter.phase("train")
            self._learner.take(groups, step=step)
            self._decide_on_sleep()
            if not self._pauses.computes_inside:
                self._learner.prepare()
            seconds = sampled - start, time.perf_counter() - sampled

            self._reporter.phase("fence")
            metrics = self._publish(step, groups, seconds)
            self._announce_version()
            self._reporter.step(metrics, groups)
            self._alarms.count_skipped(metrics)
            self._compare(metrics)

            if step == last or self._checkpoints.is_due(step):
                self._save()
            if step < last and interval and step % interval == 0:
                self._evaluate()
            if self._is_reached:
                break
        self._learner.check_usable(RewardError)  # after the last step, only a failed loss is an error

    @restarting_the_server
    def _take_groups(self, step: int) -> list[Group]:
        config = self._config
        is_warm_up = step <= config.rollouts.warm_up_steps
        return self._stream.take(config.rollouts.batch_size if is_warm_up else config.groups_per_batch, step=step)

    @deferred_interrupt()  # every published step gets its metrics; after Ctrl-C no server is restarted
    @restarting_the_server
    def _publish(self, step: int, groups: Sequence[Group], seconds: tuple[float, float]) -> StepMetrics:
        """Update the weights inside the fence, publish them, and return and append the metrics."""
        served = self._policy.version
        repair = self._checkpoints.last
        sleeps = bool(self._pauses.kv_sleeps)
        update = Update(sleep=sleeps, last_checkpoint=repair, is_last=self._is_last(step))
        with self._policy.fence(update) as window:
            if self._checkpoints.step != step:  # otherwise the server died after the write
                if self._pauses.computes_inside:
                    with window.preparing():
                        self._learner.prepare()
                with self._checkpoints.writing(step, (*groups, *self._stream.skipped)):
                    self._learner.write()
        learnt = self._learner.learnt()
        metrics = measuring.step_metrics(
            step,
            measuring.rollouts(groups, self._stream, served=served),
            measuring.times(window.times, rollout_s=seconds[0], train_s=seconds[1]),
            learnt,
            {"objective": "sft" if step <= self._config.rollouts.warm_up_steps else self._config.loss.name},
            {"changed_weight_share": self._learner.optimizer.changed_weight_share if learnt["updates"] else 0.0},
            measuring.devices(self._opened.device, self._ranks.world_size),
        )
        self._steps.append(metrics)
        if self._ranks.is_rank_zero:
            if self._config.tracking.save_rollouts and step > self._config.num_row_steps:
                self._directory.append_rollouts(step, [*groups, *self._stream.skipped], version=served)
            self._directory.append(metrics)
        self._alarms.check(metrics, is_published=window.times.version != served)
        return metrics

    @restarting_the_server
    def _catch_up(self) -> None:
        self._policy.mode.catch_up()
        self._announce_version()

    @restarting_the_server
    def _evaluate(self) -> float | None:
        """Return the held-out reward of the served weights, which is measured only once."""
        last = self._evaluated
        if last and (last.step, last.weight_version) == (self._checkpoints.step, self._policy.version):
            return float(last.reward_mean)
        self._reporter.phase("evaluation")
        start = time.perf_counter()
        groups = self._stream.evaluate(step=self._checkpoints.step)
        if groups is None:
            return None
        self._policy.mode.check_served()
        evaluation = measuring.evaluation(
            groups, step=self._checkpoints.step, version=self._policy.version, seconds=time.perf_counter() - start,
            pass_reward=self._config.evaluation.pass_reward,
        )  # fmt: skip
        self._evaluated = evaluation
        if self._ranks.is_rank_zero:
            self._directory.append_evaluation(evaluation)
        self._reporter.evaluation(evaluation)
        self._compare(evaluation)
        return float(evaluation.reward_mean)

    def _open(self, opened: ExitStack) -> None:
        """Connect to the server, open the stream and the model, and load the checkpoint; `opened` closes them."""
        ranks = self._ranks
        directory = self._directory
        scratch = directory.served if ranks.is_rank_zero else directory.ranks / str(ranks.rank) / directory.served.name
        context = RunContext(
            name=str(directory.path.absolute()), scratch=scratch,
            resumes=self._resume is not None, process=self._process, ranks=ranks,
        )  # fmt: skip
        self._owns_server = any(ranks.all_gather_object(self._process is not None))
        self._policy = Policy(self._config, context)
        opened.callback(self._policy.close)
        self._config = self._policy.config
        self._stream = opened.enter_context(closing(self._open_stream()))
        with ranks.raise_on_all():
            self._open_learner()
        with ranks.raise_on_all():
            self._load()
        if ranks.is_rank_zero:
            directory.write_config(self._chosen.document(self._settled()))  # last: a refused run leaves no files
            directory.append_start(provenance.of_this_process())
        steps = f"steps {self._begun_at + 1} to {self._config.training_steps}"
        directory.record(f"training {self._config.model_name} by --mode {self._config.mode}: {steps}")

    def _settled(self) -> TrainConfig:
        """Return the configuration with defaults resolved that depend on the loss."""
        config = self._config.settled()
        parts = () if config.loss.is_own else self._spec.parts
        chosen = {part: value for part in parts if (value := getattr(self._spec, part)) != math.inf}
        return config.changed(**chosen)

    def _open_stream(self) -> Stream:
        """Open the rows of a file, if the run trains on some, and the source of rollouts that --rollouts names."""
        config = self._config
        if not config.num_row_steps:
            return self._open_rollouts()
        assert self._rows, "no rows to train on"
        if config.rollouts.warm_up_steps and config.sampling.temperature != 1:
            logger.info(
                f"the warm-up trains log-probabilities at --temperature {config.sampling.temperature:g}, as the steps"
                " after it do"
            )
        return RowStream(
            self._rows,
            seed=config.seed, num_steps=config.num_row_steps,
            other=self._open_rollouts() if config.samples_problems else None,
        )  # fmt: skip

    def _open_rollouts(self) -> Stream:
        config = self._config
        if config.rollouts.source == "atropos":
            return self._open_atropos_stream()
        assert self._environment is not None, "nothing to sample for"
        return open_stream(
            config.model_name, self._environment,
            chosen=config.task, sampling=config.sampling, rollouts=config.rollouts, evaluation=config.evaluation,
            has_teacher=config.loss.teacher is not None, seed=config.seed, hosts=config.hosts,
            progress=self._reporter.progress, ranks=self._ranks,
        )  # fmt: skip

    def _open_atropos_stream(self) -> AtroposStream:
        config = self._config
        checkpoints = self._directory.checkpoints
        folder = (config.checkpoints.save_path or checkpoints).absolute()
        named_folder = folder.parent if folder.name == checkpoints.name else folder
        return AtroposStream(
            config.model_name,
            rollouts=config.rollouts, sampling=config.sampling, loss=config.loss, evaluation=config.evaluation,
            checkpoints=config.checkpoints, training_steps=config.training_steps,
            max_unscored_share=config.task.max_unscored_share,
            run_name=named_folder.name or "bridge", ranks=self._ranks,
        )  # fmt: skip

    def _open_learner(self) -> None:
        config = self._config
        if left_out := model_files.source_files(config.model_name, download=True).note():  # checkpoints need them
            logger.info(left_out)
        self._opened = self._policy.open().opened
        log_uncorrected(
            config.loss, max_staleness=config.rollouts.max_staleness,
            restart_interval=config.publishing.restart_interval,
        )  # fmt: skip
        schedule = factory.schedule(config.optimizer, config.training_steps)
        self._spec = LossSpec.of(config.loss)
        self._learner = Learner(
            self._policy.trainable, self._spec, schedule, warm_up_steps=config.rollouts.warm_up_steps
        )
        self._checkpoints = Checkpoints(config.checkpoints, self._directory, self._policy)
        if self._ranks.is_rank_zero:
            self._checkpoints.log_lack_of_room(config.optimizer.name)
        self._pauses = PausePolicy.of(
            config.publishing, max_staleness=config.rollouts.max_staleness, can_sleep=self._policy.mode.can_sleep,
            shares_gpu=config.mode != "none" and self._opened.device.type == "cuda",
        )  # fmt: skip
        if self._pauses.stops_sampling and config.publishing.pause_while_training is None:
            logger.info("sampling stops while a step is computed, since both would share the GPU")
        self._alarms = Alarms(mismatch_limit=config.loss.mismatch_alarm, needs_rewards=self._spec.uses_rewards)
        self._goal = goal_of(config.stop_at, self._spec.metrics)

    def _load(self) -> None:
        """Load the checkpoint to resume from: weights, optimizer, random state and position in the data."""
        trained_on = None if self._config.loss.takes_rows else self._environment
        if self._ranks.is_rank_zero:
            self._checkpoints.order = resuming.order_of(self._config, trained_on, self._rows)
        if self._resume is not None:
            self._resume.check_left(self._config.training_steps)
            changes: Sequence[str] = ()
            if self._ranks.is_rank_zero:
                changes = resuming.check(self._resume, self._chosen, trained_on, self._rows)
            for line in changes:
                logger.info(line)
            self._checkpoints.load(self._resume)
            self._stream.resume(self._checkpoints.trained)
            self._begun_at = self._checkpoints.step
        elif self._config.mode == "shared_vllm" and self._policy.version:  # the other modes load their own weights
            model = self._config.model_name
            version = self._policy.version
            logger.info(
                f"the server was trained before: step 1 starts from its weights, version {version}, not from those of"
                f" {model} (bridge restore {shlex.quote(model)} loads these)"
            )

    def _decide_on_sleep(self) -> None:
        """Decide whether training needs the KV cache's memory, with the first batch that has something to train on."""
        if self._pauses.kv_sleeps is not None:
            return
        self._pauses = replace(self._pauses, kv_sleeps=self._learner.wants_sleep())
        if self._pauses.kv_sleeps:
            then = "; requests in flight recompute theirs" if self._config.rollouts.max_staleness else ""
            logger.info(f"the server's KV cache sleeps while training, which needs its memory{then}")

    def _is_last(self, step: int) -> bool:
        """Return whether nothing is sampled after `step`: the run's own server ends with it, without an evaluation."""
        return step == self._config.training_steps and self._owns_server and not self._config.evaluation.samples

    def _compare(self, record: StepMetrics | Evaluation) -> None:
        """End the run if this record reaches --stop-at; an evaluation before the first step does not count."""
        if self._checkpoints.step == self._begun_at or self._is_reached:
            return
        if self._ranks.run_on_rank_zero(lambda: self._goal(record)):  # measured times differ between ranks
            self._is_reached = True
            logger.info(f"--stop-at {self._config.stop_at}: reached after step {record.step}")

    def _announce_version(self) -> None:
        self._stream.served(self._policy.endpoint, self._policy.version)

    def _save(self) -> Path:
        self._reporter.phase("save")
        return self._checkpoints.save()

    def _revive(self, error: ServerUnreachableError) -> None:
        """Restart the dead server with the newest weights."""
        if self._checkpoints.is_torn():
            raise error
        logger.warning(f"the server died: {error.message}")
        newest = self._save() if self._checkpoints.step else None
        if newest is not None:
            self._checkpoints.pin(newest)
            checkpoint.check_on_all_hosts(newest, self._ranks)
        if self._pauses.kv_sleeps:
            self._learner.forget()  # frees memory that the new server needs for its KV cache
        if self._opened.device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM refuses to start if too little memory is free
        self._policy.mode.revive(newest)
        self._announce_version()
        logger.info(f"the server was restarted with the weights of step {self._checkpoints.step}")
