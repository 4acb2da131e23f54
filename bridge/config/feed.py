"""An environment of ours that feeds an Atropos API.

Not covered: how choices are given and merged (`bridge/config/choices.py`), how rollouts are made (`rollouts.py`).
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from bridge.config.rollouts import RolloutConfig
from bridge.core.address import Urls


class FeedConfig(RolloutConfig):
    """Rollouts for an Atropos API."""

    synonyms: ClassVar[Mapping[str, str]] = {"model": "model_name"}

    atropos_url: Urls = "http://127.0.0.1:8000"
    """Where the Atropos API answers."""
    server_url: Urls = "http://127.0.0.1:9001"
    """Where the servers answer that sample, separated by commas; the least loaded is asked."""
    max_queued_batches: float = Field(default=2.0, ge=1)
    """Batches that may wait in the Atropos API before no more is sampled."""
