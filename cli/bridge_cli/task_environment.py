"""Load the environment that a run trains on, and check the files that it names."""

from bridge.config import EvaluationConfig, RolloutConfig, TaskConfig
from bridge.config.choices import flag
from bridge.errors import UsageError
from bridge.types import Task


def check_files(task: TaskConfig, rollouts: RolloutConfig) -> None:
    """Check that the environment and the data files of a run exist, before anything slow starts."""
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
            f"{' and '.join(map(flag, unused))}: only for an environment with tools or an agent, but"
            f" {task.environment} has neither",
            hint="leave it out, or write a class with a method reset and tools, or run (docs/environments.md)",
        )
    if evaluation.samples:
        problems.held_out(environment)
    return environment
