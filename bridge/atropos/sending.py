"""What becomes of one group of an environment of ours: scored and sent once, or left out, and counted either way.

A group whose answer was lost may be in the queue, and is not sent again: a missing group costs a sample, and a second
one would be trained on twice. A group that lacks a completion is left out: no batch could be made up with it, and the
API would keep it forever. A group whose rewards are all equal is sent: what becomes of it is up to the trainer.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bridge.atropos.api import MASKED, UNKNOWN_LOGPROB, AtroposApi, ScoredGroup
from bridge.config import FeedConfig
from bridge.errors import AtroposError, UsageError
from bridge.scoring.score import FailedScore, FailedScores, Score
from bridge.scoring.scorer import Scorer
from bridge.types import Completion, Message, Problem

MAX_TOO_LONG = 32
"""Groups that may be left out as too long before the first one is sent."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What an environment knows of the trainer that it feeds."""

    env_id: int
    """The environment's number."""
    groups_per_batch: int
    """Groups of ours that make up one batch."""
    max_token_len: int
    """The trainer wants no sequence of so many tokens or more; 0 or less: any."""
    num_steps: int
    """Batches after which nothing more is wanted; 0: no end is known.

    It is unknown too if the API has formed them all already: a trainer that was resumed wants more than it said.
    """


@dataclass(frozen=True, kw_only=True)
class FeedProgress:
    """One line of output."""

    seconds: float
    """Since the trainer requested its first batch."""
    step: int
    """Batches that the API has formed, counted from the trainer's first step."""
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
    """Sampled tokens of the groups sent since the last line, per second."""
    too_long: int
    """Groups left out because one of their sequences is longer than the trainer wants."""
    unscored: int
    """Groups left out because one of their completions has no reward."""
    unanswered: int
    """Groups that may be in the queue or not, because the API's answer was lost."""
    retries: int
    """Requests, to the servers and to the API, that were sent again."""


@dataclass
class Tally:
    """Counts what is sent."""

    clock: Callable[[], float] = time.monotonic
    """The time in seconds."""
    groups: int = 0
    """As in `FeedProgress`, and so are the next three."""
    too_long: int = 0
    unscored: int = 0
    unanswered: int = 0
    _rewards: list[float] = field(default_factory=list)
    _num_tokens: int = 0
    _all_rewards: tuple[float, int] = (0.0, 0)
    """Their sum and number."""

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


class Sending:
    """Scores and sends the groups of one environment that has joined an API."""

    def __init__(
        self, config: FeedConfig, api: AtroposApi, joined: Membership, scorer: Scorer, tell: Callable[[str], None]
    ) -> None:
        self.tally = Tally()
        self._sampling, self._max_unscored_share = config.sampling, config.task.max_unscored_share
        self._api, self._joined, self._scorer = api, joined, scorer
        self._tell, self._told = tell, set[str]()
        self._batch_size = joined.groups_per_batch * config.sampling.group_size
        self._num_scored = 0

    def leaves_room(self, prompt: tuple[int, ...]) -> bool:
        """Return whether a completion of one token fits behind `prompt`; if not, count the group as too long.

        Raises:
            UsageError: nothing was short enough so far.
        """
        return not self._is_too_long(len(prompt) + 1)

    def tell_once(self, line: str) -> None:
        """Show a person a line, unless it was shown before."""
        if line not in self._told:
            self._told.add(line)
            self._tell(line)

    async def send(self, problem: Problem, prompt: tuple[int, ...], completions: Sequence[Completion]) -> None:
        """Score the completions of one problem, and send them.

        Raises:
            UsageError: nothing was short enough so far.
            RewardError: too many completions have no reward.
            AtroposError: the API accepts no groups.
        """
        if self._is_too_long(len(prompt) + max(len(completion.token_ids) for completion in completions)):
            return
        results = await self._scorer.score(problem, [completion.text for completion in completions])
        self._count_failures(results)
        rewards = [result.reward for result in results if isinstance(result, Score)]
        if len(rewards) < len(results):
            self.tally.unscored += 1
            return
        params = {"temperature": self._sampling.temperature, "max_new_tokens": self._sampling.longest}
        env_id = self._joined.env_id
        group = scored_group(problem, prompt, completions, rewards, env_id=env_id, generation_params=params)
        if await asyncio.to_thread(self._is_received, group):
            self.tally.add(rewards, completions)
        else:
            self.tally.unanswered += 1

    def _is_received(self, group: ScoredGroup) -> bool:
        """Send the group; False: the connection broke before the answer, so that it may have arrived or not."""
        try:
            self._api.send([group])
        except AtroposError as error:
            if isinstance(error.__cause__, httpx.TransportError):
                return False
            raise
        return True

    def _is_too_long(self, num_tokens: int) -> bool:
        limit = self._joined.max_token_len
        if not 0 < limit <= num_tokens:
            return False
        self.tally.too_long += 1
        if not self.tally.groups and self.tally.too_long >= MAX_TOO_LONG:
            raise UsageError(
                f"each of the first {self.tally.too_long} groups has a sequence of {limit} tokens or more, prompt"
                " included, and the trainer wants none of them",
                remedy="lower --max-new-tokens, or let the trainer register a larger max_token_len",
            )
        return True

    def _count_failures(self, results: Sequence[Score | FailedScore]) -> None:
        """Count completions without a reward, as a share of as many completions as make up one batch."""
        if self._num_scored % self._batch_size == 0:
            first = self._num_scored // self._sampling.group_size + 1
            last = first + self._joined.groups_per_batch - 1
            self._failures = FailedScores(
                f"groups {first} to {last}", num_completions=self._batch_size, max_share=self._max_unscored_share
            )
        self._num_scored += len(results)
        self._failures.add(results)
        self._failures.tell(self._tell, self._told)


def scored_group(
    problem: Problem,
    prompt: tuple[int, ...],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    *,
    env_id: int,
    generation_params: dict[str, Any],
) -> ScoredGroup:
    """Return a group as the API accepts it; `prompt` is the problem's as it was sent to the server."""
    return ScoredGroup(
        tokens=tuple(prompt + completion.token_ids for completion in completions),
        masks=tuple((MASKED,) * len(prompt) + completion.token_ids for completion in completions),
        scores=tuple(rewards),
        inference_logprobs=tuple(
            (UNKNOWN_LOGPROB,) * len(prompt) + _known(completion.logprobs) for completion in completions
        ),
        messages=[_conversation(problem, completion) for completion in completions],
        generation_params=generation_params,
        env_id=env_id,
    )


def _known(logprobs: tuple[float, ...]) -> tuple[float, ...]:
    """Replace what JSON cannot encode: one NaN would cost a whole batch."""
    return tuple(value if math.isfinite(value) else UNKNOWN_LOGPROB for value in logprobs)


def _conversation(problem: Problem, completion: Completion) -> list[Message]:
    prompt = problem["prompt"]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*before, {"role": "assistant", "content": completion.text}]
