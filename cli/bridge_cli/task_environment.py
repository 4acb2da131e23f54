"""Load the environment and the rows that a run trains on, and check the files that it names."""

from typing import TYPE_CHECKING

from bridge.config import RolloutConfig, TaskConfig, TrainConfig
from bridge.config.choices import flag
from bridge.errors import UsageError
from bridge.types import Task

if TYPE_CHECKING:
    from bridge.rollouts.training_rows import TrainingRow


def check_files(config: TrainConfig) -> None:
    """Check that the environment and the data files of a run exist, before anything slow starts."""
    from bridge_environments import dataset, registry

    loss = config.loss.name
    if config.loss.takes_rows and config.task.data is None:
        raise UsageError(
            f"--loss {loss} trains on the rows of a file, but --data is missing",
            hint=f"--loss {loss} --data path/to/rows.jsonl",
        )
    if config.rows_key:
        dataset.check_source(config.get(config.rows_key), flag(config.rows_key))
    if config.samples_problems:
        registry.check_files(_of_problems(config))


def load_rows(config: TrainConfig, max_model_len: int | None) -> "list[TrainingRow]":
    """Return the rows that a run trains on, each of at most `max_model_len` tokens; empty if it trains on none."""
    from bridge_environments import training_rows

    return training_rows.load(config, max_model_len)


def _of_problems(config: TrainConfig) -> TaskConfig:
    """Return the task whose problems are sampled.

    If `--data` has the rows to train on, only held-out problems are sampled: those of `--eval-data`, if it is given.
    """
    task = config.task
    if not config.loss.takes_rows:
        return task
    if task.environment == "jsonl" and task.eval_data is None:
        raise UsageError(
            f"--environment jsonl has no held-out problems, since --data has the rows of --loss {config.loss.name}",
            hint="--eval-data path/to/problems.jsonl",
        )
    return task.model_copy(update={"data": task.eval_data})


def load_environment(config: TrainConfig) -> Task | None:
    """Return the environment that a run samples; None if rollouts come from elsewhere, or the run samples nothing."""
    from bridge.rollouts import problems
    from bridge_environments import registry

    if not config.samples_problems:
        return None
    task = _of_problems(config)
    rollouts = config.rollouts
    environment = registry.load(task)
    fields = RolloutConfig.model_fields
    unused = [name for name in ("max_turns", "tool_timeout_s") if getattr(rollouts, name) != fields[name].default]
    if unused and environment.interaction == "completion":
        raise UsageError(
            f"{' and '.join(map(flag, unused))}: only for an environment with tools or an agent, but"
            f" {task.environment} has neither",
            hint="leave it out, or write a class with a method reset and tools, or run (docs/environments.md)",
        )
    if config.evaluation.samples:
        problems.held_out(environment)
    return environment
