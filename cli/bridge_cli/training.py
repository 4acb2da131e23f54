"""Load what a run trains on, and train: what `bridge run`, `bridge train` and `bridge demo` have in common.

Not covered: the training itself (`bridge/run/trainer.py`), where a server comes from (`rank_run.py`, `servers.py`).
"""

from functools import partial
from typing import TYPE_CHECKING

from bridge.checkpoints.run_directory import RunDirectory, labelled_json
from bridge.config import EvaluationConfig, RolloutConfig, TaskConfig, TrainConfig
from bridge.config.choices import flag
from bridge.errors import UsageError
from bridge.types import Environment, Task
from bridge_cli import console, live

if TYPE_CHECKING:
    from bridge.checkpoints.checkpoint import SavedCheckpoint
    from bridge.checkpoints.metrics import Summary
    from bridge.modes.mode import ServerProcess
    from bridge.ranks.world import Ranks


def check_files(task: TaskConfig, rollouts: RolloutConfig) -> None:
    """Check that the environment and the data that a run names are here, before anything that takes seconds."""
    if rollouts.samples_here:
        from bridge_environments import registry

        registry.check_files(task)


def load_environment(task: TaskConfig, rollouts: RolloutConfig, evaluation: EvaluationConfig) -> Task | None:
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
            hint="leave it out, or write a class with a method reset and tools, or run (docs/environments.md)",
        )
    if evaluation.samples:
        problems.held_out(environment)
    return environment


def train_in(
    run: RunDirectory,
    config: TrainConfig,
    environment: Environment | None,
    *,
    as_json: bool,
    process: "ServerProcess | None" = None,
    resume: "SavedCheckpoint | None",
    ranks: "Ranks",
) -> "Summary":
    """Train, print one line per step, and write everything to `run`."""
    from bridge.run import reporting
    from bridge.run.trainer import Run

    run_of = partial(Run, config, environment, run, process=process, resume=resume, ranks=ranks)
    if not ranks.is_rank_zero:
        with console.printing_only(*console.OF_STARTS):  # the first rank prints the rest
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
