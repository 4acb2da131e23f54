"""`bridge train`: train on a server that is already running, and say what each step did.

Not covered: the training itself (`bridge/training/loop.py`).
"""

import math
from typing import TYPE_CHECKING

from bridge.config import TrainConfig
from bridge.run_directory import RunDirectory, to_json
from bridge.training.metrics import StepMetrics
from bridge.types import Environment
from cli import console
from cli.options import Json, from_config

if TYPE_CHECKING:
    from bridge.training.metrics import Summary


@from_config(TrainConfig)
def train(config: TrainConfig, *, as_json: Json = False) -> None:
    """Train a served model in place, on the server's own weights."""
    environment = load_environment(config)
    run = RunDirectory.create(config.run_dir, environment=config.environment)
    try:
        train_in(run, config, environment, as_json=as_json)
    finally:
        run.remove_if_unused()


def load_environment(config: TrainConfig) -> Environment:
    """Return the environment that `config` names, checked.

    Raises:
        UsageError: there is none, or it cannot be used.
    """
    from environments import registry

    return registry.load(config.environment)


def train_in(run: RunDirectory, config: TrainConfig, environment: Environment, *, as_json: bool) -> "Summary":
    """Train, print one line a step, and leave everything in `run`.

    Raises:
        BridgeError: the server, the manifest, the model or the environment is at fault.
    """
    from bridge.training import loop

    def report(metrics: StepMetrics) -> None:
        if metrics.step == 1:  # a run that never began has no directory to look into
            console.note(f"run directory: {run.path}", style="dim")
        console.note(step_line(metrics, config.training_steps))
        if as_json:
            console.data(to_json(metrics))

    summary = loop.train(config, environment, run, report)
    console.note(summary_line(summary))
    return summary


def step_line(metrics: StepMetrics, num_steps: int) -> str:
    """Return what a person wants to know of one step, in a line of a steady width."""
    speed = metrics.tokens_generated / metrics.rollout_s if metrics.rollout_s else 0.0
    return (
        f"step {metrics.step:{len(str(num_steps))}}/{num_steps}"
        f"  reward {metrics.reward_mean:6.3f} +- {metrics.reward_std:.3f}"
        f"  |dlogprob| {_or_dash(metrics.logprob_diff_mean, 4)} max {_or_dash(metrics.logprob_diff_max, 3)}"
        f"  fence {1e3 * metrics.fence_s:5.1f} ms"
        f"  rollout {metrics.rollout_s:5.2f} s  train {metrics.train_s:5.2f} s  {speed:7,.0f} tok/s"
    )


def _or_dash(value: float, digits: int) -> str:
    """Return `value`, or a dash of the same width where no token was trained on: all rewards of each group equal."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-".center(digits + 2)


def summary_line(summary: "Summary") -> str:
    """Return what came out of a run, in one line."""
    rewards = ""
    if summary.reward_before is not None and summary.reward_after is not None:
        rewards = f"  held-out reward {summary.reward_before:.3f} -> {summary.reward_after:.3f}"
    return (
        f"done: {summary.steps} steps{rewards}  |dlogprob| max {summary.logprob_diff_max:.3f}"
        f"  fence p50 {summary.fence_p50_ms:.1f} ms  checkpoint {summary.checkpoint}"
    )
