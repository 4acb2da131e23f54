"""How completions are sampled and scored, whoever learns from them.

Not covered: how they are merged (`choices.py`), training (`train.py`), feeding others (`feed.py`).
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from bridge.config.borrowed import ROLLOUT_ALIASES
from bridge.config.choices import Config


class RolloutConfig(Config):
    """An environment, and how its rollouts are made."""

    aliases: ClassVar[Mapping[str, str]] = ROLLOUT_ALIASES

    model_name: str
    """The model that samples: the folder or hub name that the server was started with."""
    environment: str = "arithmetic"
    """`arithmetic`, `gsm8k`, `jsonl`, or `file.py:ClassName` of your own."""
    data: str | None = None
    """The problems of `gsm8k` and `jsonl`: a JSONL file, a folder, or a name on the hub; absent: the bundled ones."""
    eval_data: str | None = None
    """Problems to evaluate on, given as --data is; absent: those that the environment itself holds out."""
    prompt_column: str | None = None
    """Column of the prompts, text or chat messages; absent: `question` for `gsm8k`, `prompt` for `jsonl`."""
    answer_column: str = "answer"
    """Column of the answers, if there is one."""
    system_prompt: str | None = None
    """A system message in front of every prompt, which is then a chat message; absent: the environment's own."""
    reward: str | None = None
    """Rewards in place of the environment's own: names, or `file.py:function`, each with `=WEIGHT` behind it if that is
    not 1, separated by commas."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds until the score of one completion is given up."""
    reward_processes: int | None = Field(default=None, ge=0)
    """Processes that score; absent: as many as there are cores, at most 4; 0: this one, without a time limit."""
    max_unscored_share: float = Field(default=0.2, ge=0, le=1)
    """Share of a batch's completions without a reward, since their score failed, past which the run ends."""
    group_size: int = Field(default=8, ge=2)
    """Completions per prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest completion in tokens; unless it is given, at most half of the server's longest sequence."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the rollouts; the loss uses the same."""
    seed: int = Field(default=0, ge=0)
    """Seed of the data's order and of the sampling."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds until one request to the server is given up; another server, if there is one, is asked then."""
    max_retries: int = Field(default=4, ge=0)
    """How often a request is sent again that failed by the server's fault, each time after a longer wait."""
    max_concurrency: int = Field(default=256, ge=1)
    """Requests that are under way at once."""
