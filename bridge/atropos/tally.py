"""What an environment of ours has sent so far, and how that goes.

Not covered: sending (`feeder.py`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bridge.types import Completion


@dataclass(frozen=True, kw_only=True)
class FeedProgress:
    """One line of output."""

    seconds: float
    """Since the trainer asked for its first batch."""
    step: int
    """Batches that the API has formed, from the trainer's first step on."""
    num_steps: int
    """Batches after which the trainer wants nothing more; 0 or less: no end is known."""
    queued_batches: float
    """What waits in the API, of all environments, in the trainer's batches."""
    groups: int
    """Groups that were sent."""
    reward_mean: float | None
    """Mean reward of the groups sent since the last line; None: there were none."""
    reward_mean_so_far: float | None
    """Mean reward of all groups that were sent; None: there were none."""
    tokens_per_s: float
    """Sampled tokens of the same, per second."""
    too_long: int
    """Groups left out because a sequence of theirs is longer than the trainer wants."""
    unscored: int
    """Groups left out because a completion of theirs has no reward."""
    unanswered: int
    """Groups that may be in the queue or not, since the API's answer was lost."""
    retries: int
    """Requests, to the servers and to the API, that were sent again."""


@dataclass
class Tally:
    """Counts what is sent."""

    clock: Callable[[], float] = time.monotonic
    """Tells seconds."""
    groups: int = 0
    """As in `FeedProgress`, and so are the next three."""
    too_long: int = 0
    unscored: int = 0
    unanswered: int = 0
    _rewards: list[float] = field(default_factory=list)
    _num_tokens: int = 0
    _all_rewards: tuple[float, int] = (0.0, 0)

    def __post_init__(self) -> None:
        self._start = self._last = self.clock()

    def add(self, rewards: Sequence[float], completions: Sequence[Completion]) -> None:
        """Count one group that was sent."""
        self.groups += 1
        self._rewards += rewards
        self._all_rewards = self._all_rewards[0] + sum(rewards), self._all_rewards[1] + len(rewards)
        self._num_tokens += sum(len(completion.token_ids) for completion in completions)

    def seconds_since_the_last(self) -> float:
        """Return how long ago the last line was written."""
        return self.clock() - self._last

    def line(self, *, step: int, num_steps: int, queued_batches: float, retries: int) -> FeedProgress:
        """Return the next line, and begin the one after it."""
        now, rewards, num_tokens = self.clock(), self._rewards, self._num_tokens
        seconds, self._last, self._rewards, self._num_tokens = now - self._last, now, [], 0
        return FeedProgress(
            seconds=now - self._start,
            step=step,
            num_steps=num_steps,
            queued_batches=queued_batches,
            groups=self.groups,
            reward_mean=statistics.fmean(rewards) if rewards else None,
            reward_mean_so_far=self._all_rewards[0] / self._all_rewards[1] if self.groups else None,
            tokens_per_s=num_tokens / seconds if seconds else 0.0,
            too_long=self.too_long,
            unscored=self.unscored,
            unanswered=self.unanswered,
            retries=retries,
        )
