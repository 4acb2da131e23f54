"""`bridge env`: feed an Atropos API with groups from one of Bridge's environments, and report the progress.

Not covered: the feeding itself (`bridge/atropos/feeder.py`).
"""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.config import FeedConfig
from bridge.errors import UsageError
from bridge_cli import console
from bridge_cli.options import Json, from_config

if TYPE_CHECKING:
    from bridge.atropos.feeder import FeedProgress

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The environment; overrides --environment.", show_default=False),
]


@from_config(
    FeedConfig, hide=("eval_data", "eval_env_args", "top_k", "top_p", "min_p")
)  # `bridge env` does not evaluate, and refuses filters
def env(config: FeedConfig, *, name: Name = None, as_json: Json = False) -> None:
    """Feed an Atropos API with rollouts of an environment.

    Any trainer can fetch its batches there. The command ends when the trainer has all that it needs, or on Ctrl-C.
    """
    from bridge.agents import rehearsal
    from bridge.atropos import feeder
    from bridge_environments import registry

    if name is not None:
        config = config.changed(environment=name)
    environment = registry.load(config.task)
    if environment.interaction != "completion":
        raise UsageError(
            f"environment {config.task.environment} takes several turns, but bridge env feeds an Atropos API with"
            " single turns only",
            hint=f"bridge run --environment {config.task.environment}, which needs no API",
        )
    rehearsal.rehearse(config.model_name, config.task, config.sampling, environment)

    def show(progress: "FeedProgress", line: str) -> None:
        console.note(line)
        if as_json:
            console.data(json.dumps(dataclasses.asdict(progress)))

    last = feeder.feed(config, environment, environment.recipe, report=lambda now: show(now, progress_line(now)))
    show(last, summary_line(last))


def progress_line(progress: "FeedProgress") -> str:
    """Return a line about the progress so far."""
    step = f"{progress.step}/{progress.num_steps}" if progress.num_steps > 0 else str(progress.step)
    speed = f"{progress.tokens_per_s:,.0f} tok/s  queue {progress.queued_batches:.1f} batches"
    return _line(f"step {step}", progress, speed)


def summary_line(progress: "FeedProgress") -> str:
    """Return the last line, which sums up what was sent."""
    return _line(f"done: the trainer has its {progress.num_steps} batches", progress, f"{progress.seconds:.0f} s")


def _line(start: str, progress: "FeedProgress", end: str) -> str:
    troubles = {
        "too long": progress.too_long,
        "without a reward": progress.unscored,
        "unanswered": progress.unanswered,
        "retries": progress.retries,
    }
    reward = "-" if progress.reward_mean is None else f"{progress.reward_mean:.3f}"
    figures = [start, f"{progress.groups} groups sent", f"reward {reward}", end]
    return "  ".join(figures + [f"{count} {name}" for name, count in troubles.items() if count])
