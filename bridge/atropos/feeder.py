"""Feed an Atropos API with groups of an environment of ours, as many as it can use.

The groups that wait and those under way are never more than the trainer takes in `max_queued_batches` batches. Batches
that the API has formed and the trainer has not taken yet are not told of by the API, and not counted.

Not covered: joining the API (`enrolment.py`), what becomes of a group (`sending.py`), sampling (`bridge/rollouts`). A
group whose rewards are all the same is sent as any other: what becomes of it is the trainer's to say.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from bridge.atropos import asked
from bridge.atropos.client import AtroposApi
from bridge.atropos.enrolment import Enrolment, enrol
from bridge.atropos.protocol import EnvironmentStatus
from bridge.atropos.sending import Sending
from bridge.atropos.tally import FeedProgress
from bridge.config.feed import FeedConfig
from bridge.errors import AtroposError
from bridge.rollouts import data, limits
from bridge.rollouts.sampler import Sampler, seed_of
from bridge.rollouts.vocabulary import Vocabulary
from bridge.scoring.scorer import Scorer
from bridge.scoring.scoring import Scores
from bridge.server.client import max_model_len
from bridge.types import Completion, Environment, Problem
from bridge.weights import skeleton

POLL_S = 0.25
"""Between two looks into the queue."""
REPORT_S = 10.0
"""Between two reports."""
SPARE_BATCHES = 1
"""Sent beyond the trainer's last step: groups of several environments may not add up to whole batches at the end."""
SEEDS = 1_000_000
"""Between the first seeds of two environments: each round of sampling takes one."""

Prompted = tuple[Problem, tuple[int, ...]]
"""A problem, and its prompt as token ids."""


def feed(
    config: FeedConfig,
    environment: Environment,
    recipe: Callable[[], Scores],
    *,
    tell: Callable[[str], None],
    report: Callable[[FeedProgress], None],
) -> FeedProgress:
    """Feed until the trainer has all batches that it wants, and return how it ended; `report` hears in between.

    Raises:
        BridgeError: as joining, sampling and scoring do.
        AtroposError: the API is gone, or was reset.
    """
    lengths = [length for url in asked.urls(config.server_url) if (length := max_model_len(url))]
    config = limits.fit_completions(config, min(lengths, default=None), tell)
    tokenizer = skeleton.tokenizer(config.model_name)
    scorer = Scorer(recipe, processes=config.reward_processes, timeout_s=config.reward_timeout_s)
    sampler = Sampler(
        max_new_tokens=config.sampling.longest,
        temperature=config.temperature,
        timeout_s=config.request_timeout_s,
        max_retries=config.max_retries,
        max_concurrency=config.max_concurrency,
        ids_of=Vocabulary(tokenizer),
    )
    with closing(scorer), sampler, AtroposApi(config.atropos_url) as api:
        joined = enrol(api, config, tell)
        try:
            problems = data.endless(environment, seed_of(config.seed, joined.env_id))
            prompts = ((problem, data.encode(tokenizer, problem)) for problem in problems)
            sending = Sending(config, api, joined, scorer, tell)
            return sampler.run(Feeder(config, api, joined, sampler, sending, prompts, report).run())
        finally:
            with suppress(AtroposError):  # an API that is gone knows of no environment
                api.disconnect_environment(joined.env_id)


class Feeder:
    """An environment that has joined an API."""

    def __init__(
        self,
        config: FeedConfig,
        api: AtroposApi,
        joined: Enrolment,
        sampler: Sampler,
        sending: Sending,
        prompts: Iterator[Prompted],
        report: Callable[[FeedProgress], None],
    ) -> None:
        """Sample by `sampler` from the servers that `config` names; `prompts` never end.

        Raises:
            BridgeError: a server cannot be asked.
        """
        self._config, self._api, self._joined, self._report = config, api, joined, report
        self._sampler, self._sending, self._prompts = sampler, sending, prompts
        self._servers = asked.endpoints(config.server_url)
        self._seed = seed_of(config.seed, joined.env_id * SEEDS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = 0
        self._step = 0

    async def run(self) -> FeedProgress:
        """Feed until the trainer has what it wants."""
        try:
            while True:
                under_way = self._under_way  # as it was before: what is sent meanwhile counts twice rather than never
                status = await self._status()
                if 0 < self._joined.num_steps <= status.current_step:
                    return self._line(status)
                if self._sending.tally.seconds_since_the_last() >= REPORT_S:
                    self._report(self._line(status))
                self._begin(self._room(status) - under_way)
                await self._pause()
        finally:
            await self._end()

    async def _status(self) -> EnvironmentStatus:
        status = await asyncio.to_thread(self._api.environment_status, self._joined.env_id)
        if status is None or status.current_step < self._step:
            raise AtroposError(
                f"the Atropos API at {self._api.url} no longer knows this environment: it was reset or restarted",
                remedy="start the trainer again, then this command",
            )
        self._step = status.current_step
        return status

    def _room(self, status: EnvironmentStatus) -> int:
        """Return how many more groups the trainer can use, those under way among them."""
        per_batch = self._joined.groups_per_batch
        room = int(self._config.max_queued_batches * per_batch)
        if self._joined.num_steps > 0:
            left = self._joined.num_steps - status.current_step + SPARE_BATCHES
            room = min(room, left * per_batch)
        return room - status.queue_size

    def _begin(self, num_groups: int) -> None:
        """Sample the next groups, if any; each round has a seed of its own."""
        if num_groups > 0:
            pairs = [self._next() for _ in range(num_groups)]
            self._under_way += num_groups
            self._seed += 1
            self._start(self._sample(pairs, self._seed))

    def _next(self) -> Prompted:
        return next(pair for pair in self._prompts if self._sending.leaves_room(pair[1]))

    async def _sample(self, pairs: Sequence[Prompted], seed: int) -> None:
        prompts = [prompt for _, prompt in pairs]
        arriving = self._sampler.stream(self._servers, prompts, num_samples=self._config.group_size, seed=seed)
        async for index, completions in arriving:
            self._start(self._send(pairs[index], completions))
        for line in self._sampler.lacks:
            self._sending.tell_once(line)

    async def _send(self, pair: Prompted, completions: Sequence[Completion]) -> None:
        try:
            await self._sending.send(*pair, completions)
        finally:
            self._under_way -= 1

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _pause(self) -> None:
        """Wait a moment, or until all that was begun is done; what fails is raised."""
        if not self._tasks:
            await asyncio.sleep(POLL_S)
            return
        done, _ = await asyncio.wait(self._tasks, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        self._tasks -= done
        for task in done:
            task.result()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _line(self, status: EnvironmentStatus) -> FeedProgress:
        return self._sending.tally.line(
            step=status.current_step,
            num_steps=self._joined.num_steps,
            queued_batches=status.queue_size / self._joined.groups_per_batch,
            retries=self._sampler.num_retries + self._api.num_retries,
        )
