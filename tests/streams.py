"""Open rollout streams from a `TrainConfig`, as a run does."""

from collections.abc import Callable
from typing import Any

from bridge.agents import open_stream
from bridge.atropos.atropos_stream import AtroposStream
from bridge.config import TrainConfig
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts.stream import EnvironmentStream
from bridge.types import Environment


def environment_stream(
    config: TrainConfig,
    environment: Environment,
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
    ranks: Ranks = ALONE,
) -> EnvironmentStream:
    return open_stream.open_stream(
        config.model_name, environment,
        chosen=config.task, sampling=config.sampling, rollouts=config.rollouts, evaluation=config.evaluation,
        seed=config.seed, hosts=config.hosts, progress=progress, ranks=ranks,
    )  # fmt: skip


def atropos_stream(config: TrainConfig, **options: Any) -> AtroposStream:
    return AtroposStream(
        config.model_name,
        rollouts=config.rollouts, sampling=config.sampling, loss=config.loss, evaluation=config.evaluation,
        checkpoints=config.checkpoints, training_steps=config.training_steps,
        max_unscored_share=config.task.max_unscored_share, **options,
    )  # fmt: skip
