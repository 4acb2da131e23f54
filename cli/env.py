"""`bridge env`: feed an Atropos API with groups of one of our environments, and report how that goes.

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
    from bridge.atropos.feeder import FeedProgress

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The environment; overrides --environment.", show_default=False),
]


@from_config(FeedConfig, hide=("eval_data",))  # nothing is evaluated
def env(config: FeedConfig, *, name: Name = None, as_json: Json = False) -> None:
    """Feed an Atropos API with rollouts of an environment.

    Any trainer can fetch its batches there. It ends when the trainer has all that it needs, or on Ctrl-C.
    """
    from bridge.atropos import feeder
    from environments import registry

    if name is not None:
        config = config.changed(environment=name)
    environment = registry.load(config.task)
    rehearse(config, environment)
    recipe = functools.partial(registry.scorer, config.task)

    def show(line: str, progress: "FeedProgress") -> None:
        console.note(line)
        if as_json:
            console.data(json.dumps(dataclasses.asdict(progress)))

    last = feeder.feed(config, environment, recipe, tell=console.note, report=lambda now: show(progress_line(now), now))
    show(summary_line(last), last)


def progress_line(progress: "FeedProgress") -> str:
    """Return the progress in one line."""
    step = f"{progress.step}/{progress.num_steps}" if progress.num_steps > 0 else str(progress.step)
    reward = "-" if progress.reward_mean is None else f"{progress.reward_mean:.3f}"
    line = (
        f"step {step}  {progress.groups} groups sent  reward {reward}"
        f"  {progress.tokens_per_s:,.0f} tok/s  queue {progress.queued_batches:.1f} batches"
    )
    return "  ".join([line, *_troubles(progress)])


def summary_line(progress: "FeedProgress") -> str:
    """Return the result in one line."""
    reward = "-" if progress.reward_mean_so_far is None else f"{progress.reward_mean_so_far:.3f}"
    line = (
        f"done: the trainer has its {progress.num_steps} batches  {progress.groups} groups sent"
        f"  reward {reward}  {progress.seconds:.0f} s"
    )
    return "  ".join([line, *_troubles(progress)])


def _troubles(progress: "FeedProgress") -> list[str]:
    """Return what was left out or went wrong, each with its count."""
    counts = {
        "too long": progress.too_long,
        "without a reward": progress.unscored,
        "unanswered": progress.unanswered,
        "retries": progress.retries,
    }
    return [f"{count} {what}" for what, count in counts.items() if count]
