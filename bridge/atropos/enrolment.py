"""How an environment of ours joins an Atropos API: a trainer is there, its batches fit, and it asked for the first.

Not covered: what is sent afterwards (`feeder.py`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from bridge.atropos.client import AtroposApi
from bridge.atropos.protocol import EnvironmentRegistration, Info, RegisteredEnvironment
from bridge.config.feed import FeedConfig
from bridge.errors import AtroposError, UsageError

POLL_S = 0.5
"""Between two looks at whether a trainer is there."""
WEIGHT = 1.0
"""Our share among several environments, relative to theirs."""


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """What an environment has to know of the trainer that it feeds."""

    env_id: int
    """Our number."""
    groups_per_batch: int
    """Groups of ours that make up one batch."""
    max_token_len: int
    """A sequence of so many tokens or more is not wanted; 0 or less: any is."""
    num_steps: int
    """Batches after which nothing more is wanted; 0: no end is known.

    None is known either where the API has formed them all already: a trainer that went on from a checkpoint then wants
    more than it said at first.
    """


def enrol(
    api: AtroposApi, config: FeedConfig, tell: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Enrolment:
    """Join as soon as a trainer asks for its first batch; `tell` hears what is waited for.

    Raises:
        UsageError: our groups do not make up the trainer's batches.
        AtroposError: the API does not answer.
    """
    told: set[str] = set()

    def wait_for(what: str) -> None:
        if what not in told:
            told.add(what)
            tell(f"{api.url}: waiting for {what}")
        sleep(POLL_S)

    while (trainer := api.info()).batch_size < 1:
        wait_for("a trainer to register (bridge train --rollouts atropos ...)")
    _refuse_misfit(trainer, config)
    while (answer := api.register_environment(_registration(trainer, config))).status != "success":
        wait_for("the trainer to ask for its first batch")
    return _enrolment(api, trainer, answer, config)


def _registration(trainer: Info, config: FeedConfig) -> EnvironmentRegistration:
    longest = trainer.max_token_len if trainer.max_token_len > 0 else config.sampling.longest
    name = config.environment.rpartition(":")[2]
    return EnvironmentRegistration(
        max_token_length=longest, desired_name=name, weight=WEIGHT, group_size=config.group_size
    )


def _enrolment(api: AtroposApi, trainer: Info, answer: RegisteredEnvironment, config: FeedConfig) -> Enrolment:
    if answer.env_id is None:
        raise AtroposError(
            f"the Atropos API at {api.url} registered this environment and told no number",
            remedy="take atroposlib 0.4.0: pip install atroposlib==0.4.0",
        )
    num_steps = answer.num_steps or 0
    return Enrolment(
        env_id=answer.env_id,
        groups_per_batch=trainer.batch_size // config.group_size,
        max_token_len=trainer.max_token_len,
        num_steps=num_steps if num_steps > (answer.starting_step or 0) else 0,
    )


def _refuse_misfit(trainer: Info, config: FeedConfig) -> None:
    """Refuse a group size of which no batch can be made: the API would never form one, and would not say so."""
    if trainer.batch_size % config.group_size:
        fitting = [size for size in range(2, trainer.batch_size + 1) if trainer.batch_size % size == 0]
        nearest = min(fitting, key=lambda size: abs(size - config.group_size), default=None)
        mending = f"--group-size {nearest}" if nearest else "let the trainer register a larger batch"
        raise UsageError(
            f"groups of {config.group_size} do not make up the trainer's batches of {trainer.batch_size} sequences",
            remedy=f"{mending}, or another batch size there: a multiple of the group size",
        )
