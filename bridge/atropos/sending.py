"""What becomes of one group of an environment of ours: scored and sent once, or left out.

A group whose answer was lost may be in the queue, and is not sent again: a group too few costs a sample, and one too
many would be learnt from twice. A group that lacks a completion is left out: the API would keep it for ever, as no
batch can be made up with it.

Not covered: what is sampled, and when (`feeder.py`), the form of what is sent (`scored.py`).
"""

import asyncio
from collections.abc import Callable, Sequence

import httpx

from bridge.atropos.client import AtroposApi
from bridge.atropos.enrolment import Enrolment
from bridge.atropos.protocol import ScoredGroup
from bridge.atropos.scored import scored
from bridge.atropos.tally import Tally
from bridge.config.feed import FeedConfig
from bridge.errors import AtroposError, UsageError
from bridge.scoring.faults import Faults
from bridge.scoring.scorer import Scorer
from bridge.scoring.scoring import Fault, Score
from bridge.types import Completion, Problem

MOST_TOO_LONG = 32
"""Groups that may be left out as too long before the first that is sent."""


class Sending:
    """Scores and sends the groups of one environment that has joined an API."""

    def __init__(
        self, config: FeedConfig, api: AtroposApi, joined: Enrolment, scorer: Scorer, tell: Callable[[str], None]
    ) -> None:
        self.tally = Tally()
        """What was sent and left out."""
        self._config, self._api, self._joined, self._scorer = config, api, joined, scorer
        self._tell, self._told = tell, set[str]()
        self._batch_size = joined.groups_per_batch * config.group_size
        self._num_scored = 0
        self._params = {"temperature": config.temperature, "max_new_tokens": config.sampling.longest}

    def leaves_room(self, prompt: tuple[int, ...]) -> bool:
        """Tell whether a completion of one token fits behind `prompt`, and count the group as too long if not.

        Raises:
            UsageError: nothing was short enough so far.
        """
        return not self._is_too_long(len(prompt) + 1)

    def tell_once(self, line: str) -> None:
        """Tell a person something, unless he knows it."""
        if line not in self._told:
            self._told.add(line)
            self._tell(line)

    async def send(self, problem: Problem, prompt: tuple[int, ...], completions: Sequence[Completion]) -> None:
        """Score the completions of one problem, and send them.

        Raises:
            UsageError: nothing was short enough so far.
            RewardError: too many completions have no reward.
            AtroposError: the API takes no groups.
        """
        if self._is_too_long(len(prompt) + max(len(completion.token_ids) for completion in completions)):
            return
        results = await self._scorer.score(problem, [completion.text for completion in completions])
        self._count_faults(results)
        rewards = [result.reward for result in results if isinstance(result, Score)]
        if len(rewards) < len(results):
            self.tally.unscored += 1
            return
        env_id, params = self._joined.env_id, self._params
        group = scored(problem, prompt, completions, rewards, env_id=env_id, generation_params=params)
        if await asyncio.to_thread(self._is_received, group):
            self.tally.add(rewards, completions)
        else:
            self.tally.unanswered += 1

    def _is_received(self, group: ScoredGroup) -> bool:
        """Send the group; False: nobody knows whether it arrived, since the connection broke before the answer."""
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
        if not self.tally.groups and self.tally.too_long >= MOST_TOO_LONG:
            raise UsageError(
                f"each of the first {self.tally.too_long} groups has a sequence of {limit} tokens or more, prompt"
                " included, and the trainer wants none of them",
                remedy="lower --max-new-tokens, or let the trainer register a larger max_token_len",
            )
        return True

    def _count_faults(self, results: Sequence[Score | Fault]) -> None:
        """Count completions without a reward, as a share of as many completions as make up one batch."""
        if self._num_scored % self._batch_size == 0:
            first = self._num_scored // self._config.group_size + 1
            last = first + self._joined.groups_per_batch - 1
            share = self._config.max_unscored_share
            self._faults = Faults(f"groups {first} to {last}", num_completions=self._batch_size, max_share=share)
        self._num_scored += len(results)
        self._faults.add(results)
        self._faults.tell(self._tell, self._told)
