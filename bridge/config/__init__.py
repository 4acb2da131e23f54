"""What a person may choose, each field declared once; flags, environment and TOML all come from here.

Words: a *choice* is one field; what is derived from choices is not here, the code that derives says so.
May import: `bridge.config.choices`, `bridge.core.address`, `bridge.config.borrowed`.
"""

from bridge.config.feed import FeedConfig
from bridge.config.rollouts import RolloutConfig
from bridge.config.serve import DEFAULT_PORT, ServeConfig
from bridge.config.train import FIELDS_OF_MODES, TrainConfig

__all__ = ["DEFAULT_PORT", "FIELDS_OF_MODES", "FeedConfig", "RolloutConfig", "ServeConfig", "TrainConfig"]
