"""Why an Atropos API has no batch, which it does not tell: what is connected, and what waits.

Not covered: when it is asked (`waiting.py`).
"""

from dataclasses import dataclass

from bridge.atropos.client import AtroposApi


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What keeps an API from making a batch."""

    found: str
    """What is connected, and what waits."""
    remedy: str
    """What mends it."""


def diagnose(api: AtroposApi, batch_size: int) -> Diagnosis:
    """Find out why no batch of `batch_size` sequences comes.

    Raises:
        AtroposError: the API is gone.
    """
    num_groups, environment = api.status().queue_size, api.environment_status(0)
    waiting = f"{num_groups} groups wait" if num_groups else "nothing waits"
    if environment is None:
        return Diagnosis(
            found=f"no environment is there, and {waiting}",
            remedy=f"start one: python my_environment.py serve --env.rollout_server_url {api.url}, or bridge env;"
            " one that was there before the API was started has to be started again",
        )
    if num_groups:
        return _too_few_or_misfit(num_groups, environment.max_group_size, batch_size)
    return Diagnosis(
        found=f"environments have registered, and {waiting}",
        remedy="see whether they still run, and look into their logs: they end at a total_steps of their own, and"
        " leave out groups whose scores are all equal or with too long a sequence; or raise --atropos-timeout-s",
    )


def _too_few_or_misfit(num_groups: int, largest: int, batch_size: int) -> Diagnosis:
    waiting = f"{num_groups} groups wait, of up to {largest} sequences each, and"
    if batch_size % largest:
        fitting = -(-batch_size // largest) * largest
        return Diagnosis(
            found=f"{waiting} no batch of {batch_size} can be made of them: {batch_size} is no multiple of {largest}",
            remedy=f"--batch-size {fitting} --group-size {largest}, or another group size of the environment; start"
            " run-api again for it, and then the environments",
        )
    return Diagnosis(
        found=f"{waiting} they do not make a batch of {batch_size}",
        remedy="look into the environments' logs; where they have a min_batch_allocation, each has to send its share",
    )
