"""`bridge train`: train on servers that are already running, and report each step.

Not covered: which servers (`servers.py`), what `--resume` finds (`resume.py`).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.config.choices import flag
from bridge.errors import UsageError
from bridge.processes.accelerator import check_host
from bridge.processes.server_command import StartCommand
from bridge.processes.server_process import StartedServer
from bridge.processes.start_checks import check_folder, check_reachable
from bridge.types import Environment
from bridge_cli import console, ending, layout, rank, rank_run, servers
from bridge_cli.options import Json, from_config
from bridge_cli.rank_run import Opened
from bridge_cli.resume import open_run
from bridge_cli.servers import Running
from bridge_cli.training import check_files, load_environment, train_in

if TYPE_CHECKING:
    from bridge.checkpoints.checkpoint import SavedCheckpoint
    from bridge.ranks.world import Ranks


@from_config(TrainConfig, hide=("gpus", "hosts", "rendezvous"))
def train(config: TrainConfig, *, as_json: Json = False) -> None:
    """Train a model on a server that is already running, or on several.

    Such as: bridge train --model MODEL --environment gsm8k --training-steps 100
    """
    for name in ("gpus", "hosts", "rendezvous"):
        if config.get(name) != config.default(name):
            raise UsageError(
                f"{flag(name)} {config.get(name)}: bridge train trains on running servers of this host",
                hint="name them: --servers; or bridge run, which starts a server on each GPU",
            )
    check_host(config)
    check_folder(config.model_name, needs_config=False)  # the tokenizer is enough
    check_files(config.task, config.rollouts)
    given = config.publishing.start_command
    command = StartCommand.parse(given, config.server.url(), config.model_name) if given else None
    replicas = servers.running(config.server, attaches=config.needs_patched_server)
    layout.check_cuts(config.model_name, config.context_parallel_size)
    planned = replace(servers.layout(replicas, config.tp_size, config.restarts), cp_size=config.context_parallel_size)
    if config.restarts and len(planned.gpus) == 1:
        raise UsageError(
            f"--restarts {config.restarts} has no effect: there is one process to train with",
            hint="leave it out; a run that ended resumes with --resume",
        )
    if len(replicas) > 1:
        config = config.changed(gpus=len(planned.gpus))
    config.dp_size(planned.tp_size)  # refuses a batch that cannot be divided
    if rank.OWN_RANK.get() is None and len(planned.gpus) > 1:  # before ranks start; a single process asks by itself
        servers.check_free(replicas, config.sampling.request_timeout_s, resumes=config.resume)
    with rank_run.joined(rank.OWN_RANK.get() or planned) as world:
        environment = world.run_on_all(lambda: load_environment(config.task, config.rollouts, config.evaluation))
        first = _FirstRank(config, environment, command)
        try:
            _train(world, first, replicas, as_json=as_json)
        finally:
            if first.directory is not None:
                first.directory.remove_if_unused()


@dataclass
class _FirstRank:
    """What only the first rank has: the run directory, and the command of --start-command."""

    chosen: TrainConfig
    environment: Environment | None
    command: StartCommand | None
    directory: RunDirectory | None = None

    def open(self, replicas: Sequence[Running]) -> "tuple[TrainConfig, Path, SavedCheckpoint | None]":
        """Check the model, open the run, and try its environment."""
        from bridge.agents import stream
        from bridge.modes.shared_vllm import manifest_of

        if replicas:
            manifest_of(self.chosen.server, self.chosen.model_name, replicas[0].manifest)
        config, self.directory, checkpoint = open_run(self.chosen, self.environment)
        check_reachable(config.model_name)
        if self.environment is not None:
            num_parts = max((running.manifest.tp_degree for running in replicas), default=1)
            lengths = [running.manifest.max_model_len for running in replicas if running.manifest.max_model_len]
            stream.rehearse(
                config.model_name, config.task, config.sampling, self.environment,
                max_model_len=min(lengths, default=None), pass_size=num_parts * config.context_parallel_size,
            )  # fmt: skip
        return config, self.directory.path, checkpoint


def _train(world: "Ranks", first: _FirstRank, replicas: Sequence[Running], *, as_json: bool) -> None:
    opened = Opened(*world.run_on_rank_zero(lambda: first.open(replicas)))
    config = opened.train
    if replicas:
        config = config.changed(vllm_config_path=replicas[world.dp_rank].path)
    if not world.is_rank_zero:
        run = rank_run.join_run_directory(world, opened)
        train_in(run, config, first.environment, as_json=as_json, resume=opened.resume, ranks=world)
        return
    directory, command = first.directory, first.command
    assert directory is not None, "it was opened"
    world.barrier()  # the others join the run directory
    server = (
        StartedServer(command, directory.server_log, waiting=console.waiting).running() if command else nullcontext()
    )
    with (
        server as process,
        ending.print_at_end(directory, config.checkpoints),
    ):
        train_in(
            directory, config, first.environment, as_json=as_json, process=process, resume=opened.resume, ranks=world
        )
