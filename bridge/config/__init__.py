"""Everything a user can configure. Each choice is declared once, for flags, environment variables and TOML.

Terms: a *choice* is one field, a *section* the choices of one concern, a *key* the flat name of a choice. Values that
are derived from choices are not here: the code that derives a value reports it.
May import: `bridge.core`.
"""

from bridge.config.rollouts import FeedConfig, RolloutConfig, SamplingConfig, TaskConfig
from bridge.config.sections import (
    DEFAULT_PORT,
    OWN_WEIGHTS,
    AdvantageScale,
    CheckpointConfig,
    ComputeConfig,
    DeviceChoice,
    EvaluationConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PublishingConfig,
    ServeConfig,
    ServerConfig,
    TrackingConfig,
)
from bridge.config.train_config import TrainConfig

__all__ = [
    "DEFAULT_PORT",
    "OWN_WEIGHTS",
    "AdvantageScale",
    "CheckpointConfig",
    "ComputeConfig",
    "DeviceChoice",
    "EvaluationConfig",
    "FeedConfig",
    "LoraConfig",
    "LossConfig",
    "OptimizerConfig",
    "PublishingConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServeConfig",
    "ServerConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainConfig",
]
