"""`bridge train`: train on a server that is already running, and report each step.

Not covered: the training itself (`bridge/run/trainer.py`), and what `--resume` finds (`resume.py`).
"""

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from bridge.config import RolloutConfig, TaskConfig, TrainConfig
from bridge.config.choices import flag
from bridge.errors import UsageError
from bridge.processes.accelerator import check_host
from bridge.run.run_directory import RunDirectory, labelled_json
from bridge.types import Environment, Task
from bridge_cli import console, ending, live
from bridge_cli.options import Json, from_config
from bridge_cli.resume import open_run
from bridge_cli.steps import summary_line

if TYPE_CHECKING:
    from bridge.modes.mode import ServerProcess
    from bridge.ranks.world import Ranks
    from bridge.run.checkpoint import SavedCheckpoint
    from bridge.run.metrics import Summary


@from_config(TrainConfig, hide=("gpus", "hosts", "rendezvous", "restarts"))
def train(config: TrainConfig, *, as_json: Json = False) -> None:
    """Train a model on a server that is already running."""
    for name in ("gpus", "hosts", "rendezvous", "restarts"):
        if config.get(name) != config.default(name):
            raise UsageError(
                f"{flag(name)} {config.get(name)}: bridge train takes one running server",
                remedy="bridge run, which starts a server on each GPU",
            )
    from bridge.agents import stream
    from bridge.modes import WAYS
    from bridge.processes.server_command import StartCommand
    from bridge.processes.server_process import StartedServer

    check_host(config)
    environment = load_environment(config.task, config.rollouts, evaluates=bool(config.evaluation.samples))
    given = config.publishing.start_command
    command = StartCommand.parse(given, config.server.url(), config.model_name) if given else None
    settled, run, checkpoint = open_run(config)
    try:
        if environment is not None:
            stream.rehearse(settled.model_name, settled.task, settled.sampling, environment, console.note)
        server = (
            StartedServer(command, run.server_log, output=console).running() if command else contextlib.nullcontext()
        )
        prefix, steps = WAYS[settled.way].checkpoint_prefix, settled.training_steps
        with (
            server as process,
            ending.printed(run, settled.checkpoints, prefix=prefix, training_steps=steps),
        ):
            train_in(run, settled, environment, as_json=as_json, process=process, resume=checkpoint)
    finally:
        run.remove_if_unused()


def load_environment(task: TaskConfig, rollouts: RolloutConfig, *, evaluates: bool) -> Task | None:
    """Return the environment that `task` names; None if rollouts come from elsewhere."""
    from bridge.rollouts import problems
    from bridge_environments import registry

    if not rollouts.samples_here:
        return None
    environment = registry.load(task)
    fields = RolloutConfig.model_fields
    unused = [name for name in ("max_turns", "tool_timeout_s") if getattr(rollouts, name) != fields[name].default]
    if unused and environment.interaction == "completion":
        raise UsageError(
            f"{' and '.join(map(flag, unused))}: only for an environment with tools or an agent, and"
            f" {task.environment} has none",
            remedy="leave it out, or write a class with a method reset and tools, or run (docs/environments.md)",
        )
    if evaluates:
        problems.held_out(environment)
    return environment


def train_in(
    run: RunDirectory,
    config: TrainConfig,
    environment: Environment | None,
    *,
    as_json: bool,
    process: "ServerProcess | None" = None,
    resume: "SavedCheckpoint | None" = None,
    ranks: "Ranks | None" = None,
) -> "Summary":
    """Train, print one line per step, and write everything to `run`."""
    from bridge.ranks.world import ALONE
    from bridge.run import reporting
    from bridge.run.trainer import Run

    ranks = ranks or ALONE
    run_of = partial(Run, config, environment, run, process=process, resume=resume, ranks=ranks)
    if not ranks.is_rank_zero:
        return run_of(reporting.Reporter()).train()
    data = console.data if as_json else None
    first_step = resume.progress.step + 1 if resume else 1
    with (
        live.reporting_to_people(config.training_steps, f"run directory: {run.path}", data=data) as lines,
        reporting.trackers_of(config.tracking, config.flat(), run, first_step=first_step) as curves,
    ):
        summary = run_of(reporting.Several(curves, lines)).train()
    run.write_summary(summary)
    console.note(summary_line(summary))
    if as_json:
        console.data(labelled_json("summary", summary, run_dir=run.path))
    return summary
