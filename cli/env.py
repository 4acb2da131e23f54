"""`bridge env`: feed an Atropos API with groups of an environment of ours, and say now and then how that goes.

Not covered: the feeding itself (`bridge/atropos/feeder.py`).
"""

import dataclasses
import functools
import json
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.config import FeedConfig
from cli import console
from cli.options import Json, from_config
from cli.train import rehearse

if TYPE_CHECKING:
    from bridge.atropos.tally import FeedProgress

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="The environment, as --environment; the stronger of the two.", show_default=False
    ),
]


@from_config(FeedConfig, hide=("eval_data",))  # nothing is evaluated
def env(config: FeedConfig, *, name: Name = None, as_json: Json = False) -> None:
    """Feed an Atropos API with rollouts of an environment: any trainer that asks it for batches learns from them.

    It ends when the trainer has all batches that it asked for, or on Ctrl-C.
    """
    from bridge.atropos import feeder
    from environments import registry

    if name is not None:
        config = config.changed(environment=name)
    environment = registry.load(config.task)
    rehearse(config, environment)
    recipe = functools.partial(registry.scorer, config.task)

    def report(progress: "FeedProgress") -> None:
        console.note(progress_line(progress))
        if as_json:
            console.data(json.dumps(dataclasses.asdict(progress)))

    last = feeder.feed(config, environment, recipe, tell=console.note, report=report)
    console.note(summary_line(last))
    if as_json:
        console.data(json.dumps(dataclasses.asdict(last)))


def progress_line(progress: "FeedProgress") -> str:
    """Return what a person wants to know of one moment, in a line."""
    step = f"{progress.step}/{progress.num_steps}" if progress.num_steps > 0 else str(progress.step)
    line = (
        f"step {step}  {progress.groups} groups sent  reward {_reward(progress.reward_mean)}"
        f"  {progress.tokens_per_s:,.0f} tok/s  queue {progress.queued_batches:.1f} batches"
    )
    return "  ".join([line, *_troubles(progress)])


def summary_line(progress: "FeedProgress") -> str:
    """Return what came of all of it, in one line."""
    line = (
        f"done: the trainer has its {progress.num_steps} batches  {progress.groups} groups sent"
        f"  reward {_reward(progress.reward_mean_so_far)}  {progress.seconds:.0f} s"
    )
    return "  ".join([line, *_troubles(progress)])


def _reward(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.3f}"


def _troubles(progress: "FeedProgress") -> list[str]:
    """Return what was left out or went wrong, each with its count; nothing of what did not."""
    counts = {
        "too long": progress.too_long,
        "without a reward": progress.unscored,
        "unanswered": progress.unanswered,
        "retries": progress.retries,
    }
    return [f"{count} {what}" for what, count in counts.items() if count]
