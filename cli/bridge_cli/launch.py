"""A training job of `bridge run` or `bridge train`: its ranks, its servers, its run directory and how it ends.

Not covered: which GPUs a rank gets (`rank_gpus.py`), the training itself (`bridge/run/trainer.py`).
"""

import abc
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.checkpoints.run_directory import RunDirectory, labelled_json
from bridge.config import SamplingConfig, ServeConfig, TrainConfig
from bridge.types import Environment
from bridge_cli import consistency, console, live, rank_process
from bridge_cli.open_or_resume import open_run
from bridge_cli.rank_gpus import RankLayout
from bridge_cli.run_ending import print_ending
from bridge_cli.task_environment import load_environment, load_rows

if TYPE_CHECKING:
    from bridge.checkpoints.checkpoint import SavedCheckpoint
    from bridge.checkpoints.metrics import Summary
    from bridge.modes.mode import ServerProcess
    from bridge.ranks.world import Ranks
    from bridge.rollouts.training_rows import TrainingRow


class ReplicaServer(NamedTuple):
    """The server that a replica trains on."""

    choices: Mapping[str, Any]
    """`TrainConfig` choices with which the trainer finds the server."""
    process: "ServerProcess | None"
    """None: Bridge did not start the server."""


class Servers(abc.ABC):
    """The servers of a job: it starts them (`started_servers.py`), or they already run (`running_servers.py`)."""

    serve: ServeConfig | None = None
    """The user's choices for the servers that the job starts; None: it starts none."""
    vllm_flags: Sequence[str] = ()

    @property
    @abc.abstractmethod
    def tp_degree(self) -> int:
        """Number of GPUs that the weights of one server are sharded across."""

    @property
    @abc.abstractmethod
    def max_model_len(self) -> int | None:
        """Longest sequence in tokens that every server accepts; None: unknown."""

    def preloading(self) -> contextlib.AbstractContextManager[object]:
        """Import vLLM in the background, in a process that the block may turn into a server."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def check(self) -> None:
        """Refuse a model or an adapter that these servers cannot serve; called on every rank."""

    @abc.abstractmethod
    def prepare(self, sampling: SamplingConfig) -> SamplingConfig:
        """Check everything that can be checked before vLLM starts, and return completions that fit the servers.

        Called on the first rank, after the run was opened.
        """

    def record(self, run: RunDirectory, checkpoints: Path) -> None:  # noqa: B027  running servers record nothing
        """Record how the servers will be started, and where `checkpoints` are; called on the first rank."""

    @abc.abstractmethod
    def serving(
        self, world: "Ranks", sampling: SamplingConfig, run: RunDirectory
    ) -> contextlib.AbstractContextManager[ReplicaServer]:
        """Yield the server of this rank's replica, which runs during the block."""


@dataclass(kw_only=True)
class Launch:
    """A training job, from starting its processes to printing how it ended."""

    config: TrainConfig
    """What the user chose."""
    servers: Servers
    layout: RankLayout | None
    """The ranks to start on this host; None: this process is already one of them."""
    as_json: bool
    directory: RunDirectory | None = field(default=None, init=False)
    """The run directory, once the first rank has opened it."""

    def start(self) -> None:
        """Train, and print how the run can be resumed, however it ends.

        With several ranks, the process that the user started launches the ranks, and exits when they have ended.

        Raises:
            BridgeError: the ranks cannot be started, a rank was lost, or the training failed.
        """
        start_ranks(self.layout)
        with self.servers.preloading(), rank_process.joined() as world:
            try:
                self._train(world)
            finally:
                if self.directory is not None:
                    self.directory.remove_if_unused()

    def _train(self, world: "Ranks") -> None:
        from bridge.checkpoints import checkpoint

        chosen = self.config
        if chosen.hosts > 1:
            choices = [chosen] if self.servers.serve is None else [chosen, self.servers.serve]
            consistency.check(world, choices, self.servers.vllm_flags)
        environment = world.run_on_all(lambda: load_environment(chosen))
        self.servers.check()
        rows = world.run_on_all(lambda: load_rows(chosen, self.servers.max_model_len))
        consistency.check_rows(world, rows)
        config, run_dir, resume = world.run_on_rank_zero(lambda: self._open(environment, rows))
        if chosen.hosts > 1 and chosen.restarts:
            assert config.checkpoints.save_path is not None, "derived from the run directory"
            consistency.check_shared(world, config.checkpoints.save_path)
        if resume is not None:
            checkpoint.check_on_all_hosts(resume.folder, world)
        run = self.directory or rank_process.join_run_directory(world, run_dir)
        if world.is_rank_zero:
            world.barrier()  # lets the other ranks join the run directory
        try:
            with self.servers.serving(world, config.sampling, run) as server:
                train_on(
                    server, config, environment, run,
                    rows=rows, chosen=chosen, resume=resume, ranks=world, as_json=self.as_json,
                )  # fmt: skip
        finally:
            if world.is_rank_zero:
                print_ending(run, config.checkpoints, config.way, config.training_steps)

    def _open(
        self, environment: Environment | None, rows: "Sequence[TrainingRow]"
    ) -> "tuple[TrainConfig, Path, SavedCheckpoint | None]":
        """Open the run, and check everything that can be checked before vLLM starts; called on the first rank.

        Returns the configuration with derived values, the run directory, and the checkpoint to resume from. Ranks
        exchange plain tuples, and no classes of this package.
        """
        from bridge.agents import rehearsal

        config, self.directory, resume = open_run(self.config, environment, rows)
        sampling = self.servers.prepare(config.sampling)
        config = config.model_copy(update={"sampling": sampling})
        if environment is not None:
            rehearsal.rehearse(
                config.model_name, config.task, config.sampling, environment,
                teacher=config.loss.teacher,
                max_model_len=self.servers.max_model_len,
                pass_size=self.servers.tp_degree * config.context_parallel_size,
            )  # fmt: skip
        assert config.checkpoints.save_path is not None, "derived from the run directory"
        self.servers.record(self.directory, config.checkpoints.save_path)
        return config, self.directory.path, resume


def start_ranks(layout: RankLayout | None) -> None:
    """Run the ranks of this host as child processes and exit with their exit code; return if there is only one rank.

    Raises:
        BridgeError: the ranks cannot be started, or one was lost.
    """
    if layout is not None and layout.world_size > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
        from bridge_cli import rank_launcher

        sys.exit(rank_launcher.launch(layout))


def train_on(
    server: ReplicaServer,
    config: TrainConfig,
    environment: Environment | None,
    run: RunDirectory,
    *,
    rows: "Sequence[TrainingRow]" = (),
    chosen: TrainConfig | None = None,
    resume: "SavedCheckpoint | None",
    ranks: "Ranks",
    as_json: bool,
) -> "Summary":
    """Train on a server, print one line per step, and write everything to `run`.

    `rows` are given completions to train on. `chosen` is what the user chose, if `config` also has derived values.
    """
    from bridge.run import reporting
    from bridge.run.trainer import Run

    config = config.changed(**server.choices)
    run_of = partial(
        Run, config, environment, run,
        rows=rows, chosen=chosen, process=server.process, resume=resume, ranks=ranks,
    )  # fmt: skip
    if not ranks.is_rank_zero:
        with console.printing_only(*console.OF_STARTS):  # the first rank prints all other lines
            return run_of(reporting.Reporter()).train()
    data = console.data if as_json else None
    first_step = resume.progress.step + 1 if resume else 1
    with (
        run.recording(),
        live.reporting_to_people(config.training_steps, f"run directory: {run.path}", data=data) as lines,
        reporting.trackers_of(config.tracking, config.flat(), run, first_step=first_step) as curves,
    ):
        summary = run_of(reporting.Reporters(curves, lines)).train()
    run.write_summary(summary)
    console.note(live.summary_line(summary))
    if as_json:
        console.data(labelled_json("summary", summary, run_dir=run.path))
    return summary
