"""Choices of `bridge env`: an environment of ours that feeds an Atropos API."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from bridge.config.borrowed import ROLLOUT_ALIASES
from bridge.config.choices import Config
from bridge.config.rollouts import SamplingConfig, TaskConfig
from bridge.core.address import Urls


class FeedConfig(Config):
    """Rollouts for an Atropos API."""

    synonyms: ClassVar[Mapping[str, str]] = {"model": "model_name"}
    aliases: ClassVar[Mapping[str, str]] = ROLLOUT_ALIASES

    model_name: str
    """The served model: the folder or hub name that the server was started with."""
    task: TaskConfig = TaskConfig()
    """The environment."""
    sampling: SamplingConfig = SamplingConfig()
    """How its completions are sampled."""
    seed: int = Field(default=0, ge=0)
    """Seed for the order of the problems and for sampling."""
    atropos_url: Urls = "http://127.0.0.1:8000"
    """URL of the Atropos API."""
    server_url: Urls = "http://127.0.0.1:9001"
    """URLs of the servers to sample from, separated by commas; the least loaded one is used."""
    max_queued_batches: float = Field(default=2.0, ge=1)
    """Pause sampling while this many batches wait in the Atropos API."""
