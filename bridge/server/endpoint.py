"""Whom a rollout asks, and for what.

Not covered: asking (`sampler.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What the rollouts ask, and for what."""

    url: str
    """Where the server answers."""
    model: str | None = None
    """The name in a request; None: the first that the server lists."""
    version: int | None = None
    """Version of the weights behind it, where the server itself does not tell; None: it does."""
