"""Feed an Atropos API with groups of an environment of ours, as many as its trainer can use.

Groups that wait and groups in flight are together never more than the trainer takes in `max_queued_batches` batches.
Batches that the API has formed and the trainer has not taken yet do not count, because the API does not report them.

Not covered: scoring and sending a group (`sending.py`).
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from bridge.atropos.api import AtroposApi, EnvironmentRegistration, EnvironmentStatus
from bridge.atropos.sending import FeedProgress, Membership, Sending
from bridge.config import FeedConfig
from bridge.errors import AtroposError, UsageError
from bridge.rollouts import problems
from bridge.rollouts.openai_api import Vocabulary
from bridge.rollouts.sampler import Sampler, fit_completions, seed_of
from bridge.scoring.score import Scores
from bridge.scoring.scorer import Scorer
from bridge.server.client import VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import ADAPTER
from bridge.types import Completion, Environment, Problem
from bridge.weights import skeleton

JOIN_POLL_S = 0.5
"""Between two attempts to join."""
POLL_S = 0.25
"""Between two looks into the queue."""
REPORT_S = 10.0
"""Between two reports."""
SPARE_BATCHES = 1
"""Sent beyond the trainer's last step: groups of several environments may not add up to whole batches at the end."""
SEEDS = 1_000_000
"""Between the first seeds of two environments: each round of sampling takes one."""
WEIGHT = 1.0
"""Our share among several environments, relative to theirs."""

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
    """Feed until the trainer has all batches that it wants, and return the last progress; `report` gets those before.

    Raises:
        BridgeError: joining, sampling or scoring failed.
        AtroposError: the API is gone, or was reset.
    """
    lengths = [length for url in urls(config.server_url) if (length := max_model_len(url))]
    config = fit_completions(config, min(lengths, default=None), tell)
    tokenizer = skeleton.tokenizer(config.model_name)
    scorer = Scorer(recipe, processes=config.task.reward_processes, timeout_s=config.task.reward_timeout_s)
    sampler = Sampler.of(config.sampling, ids_of=Vocabulary(tokenizer))
    with closing(scorer), sampler, AtroposApi(config.atropos_url) as api:
        joined = join(api, config, tell)
        try:
            order = problems.endless(environment, seed_of(config.seed, joined.env_id))
            prompts = ((problem, problems.encode(tokenizer, problem)) for problem in order)
            sending = Sending(config, api, joined, scorer, tell)
            return sampler.run(_Feeder(config, api, joined, sampler, sending, prompts, report).run())
        finally:
            with suppress(AtroposError):  # an API that is gone knows no environment
                api.disconnect_environment(joined.env_id)


def join(
    api: AtroposApi, config: FeedConfig, tell: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Membership:
    """Join the API once a trainer requests its first batch; `tell` gets what is waited for.

    Raises:
        UsageError: our groups do not make up the trainer's batches.
        AtroposError: the API does not answer.
    """
    told: set[str] = set()

    def wait_for(what: str) -> None:
        if what not in told:
            told.add(what)
            tell(f"{api.url}: waiting for {what}")
        sleep(JOIN_POLL_S)

    while (trainer := api.info()).batch_size < 1:
        wait_for("a trainer to register (bridge train --rollouts atropos ...)")
    _refuse_misfit(trainer.batch_size, config.sampling.group_size)
    registration = EnvironmentRegistration(
        max_token_length=trainer.max_token_len if trainer.max_token_len > 0 else config.sampling.longest,
        desired_name=config.task.environment.rpartition(":")[2],
        weight=WEIGHT,
        group_size=config.sampling.group_size,
    )
    while (answer := api.register_environment(registration)).status != "success":
        wait_for("the trainer to request its first batch")
    assert answer.env_id is not None, answer
    num_steps = answer.num_steps or 0
    return Membership(
        env_id=answer.env_id,
        groups_per_batch=trainer.batch_size // config.sampling.group_size,
        max_token_len=trainer.max_token_len,
        num_steps=num_steps if num_steps > (answer.starting_step or 0) else 0,
    )


def _refuse_misfit(batch_size: int, group_size: int) -> None:
    """Refuse a group size that does not divide the batch: the API would never form one, without a word."""
    if batch_size % group_size:
        fitting = [size for size in range(2, batch_size + 1) if batch_size % size == 0]
        nearest = min(fitting, key=lambda size: abs(size - group_size), default=None)
        hint = f"--group-size {nearest}" if nearest else "let the trainer register a larger batch"
        raise UsageError(
            f"groups of {group_size} do not make up the trainer's batches of {batch_size} sequences",
            remedy=f"{hint}, or another batch size there: a multiple of the group size",
        )


class _Feeder:
    """An environment that has joined an API."""

    def __init__(
        self,
        config: FeedConfig,
        api: AtroposApi,
        joined: Membership,
        sampler: Sampler,
        sending: Sending,
        prompts: Iterator[Prompted],
        report: Callable[[FeedProgress], None],
    ) -> None:
        self._config, self._api, self._joined, self._report = config, api, joined, report
        self._sampler, self._sending, self._prompts = sampler, sending, prompts
        self._servers = endpoints(config.server_url)
        self._seed = seed_of(config.seed, joined.env_id * SEEDS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        """Groups that are being sampled, scored or sent."""
        self._step = 0

    async def run(self) -> FeedProgress:
        """Feed until the trainer has what it wants."""
        try:
            while True:
                in_flight = self._in_flight  # from before: what is sent meanwhile counts twice rather than never
                status = await self._status()
                if 0 < self._joined.num_steps <= status.current_step:
                    return self._line(status)
                if self._sending.tally.seconds_since_the_last() >= REPORT_S:
                    self._report(self._line(status))
                self._begin(self._room(status) - in_flight)
                await self._pause()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _status(self) -> EnvironmentStatus:
        status = await asyncio.to_thread(self._api.environment_status, self._joined.env_id)
        if status is None or status.current_step < self._step:
            raise AtroposError(
                f"the Atropos API at {self._api.url} no longer knows this environment: it was reset or restarted",
                remedy="restart the trainer, then this command",
            )
        self._step = status.current_step
        return status

    def _room(self, status: EnvironmentStatus) -> int:
        """Return how many groups more than those that wait the trainer can use."""
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
            self._in_flight += num_groups
            self._seed += 1
            self._start(self._sample(pairs, self._seed))

    def _next(self) -> Prompted:
        return next(pair for pair in self._prompts if self._sending.leaves_room(pair[1]))

    async def _sample(self, pairs: Sequence[Prompted], seed: int) -> None:
        await self._sampler.each(
            self._servers,
            [prompt for _, prompt in pairs],
            lambda index, completions: self._send(pairs[index], completions),
            num_samples=self._config.sampling.group_size,
            seed=seed,
        )
        for line in self._sampler.lacks:
            self._sending.tell_once(line)

    async def _send(self, pair: Prompted, completions: Sequence[Completion]) -> None:
        try:
            await self._sending.send(*pair, completions)
        finally:
            self._in_flight -= 1

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

    def _line(self, status: EnvironmentStatus) -> FeedProgress:
        return self._sending.tally.line(
            step=status.current_step,
            num_steps=self._joined.num_steps,
            queued_batches=status.queue_size / self._joined.groups_per_batch,
            retries=self._sampler.num_retries + self._api.num_retries,
        )


def urls(server_url: str) -> list[str]:
    """Return the addresses in `--server-url`.

    Raises:
        UsageError: there are none.
    """
    found = [url.strip().rstrip("/") for url in server_url.split(",") if url.strip()]
    if not found:
        raise UsageError("no server is named to sample from", remedy="--server-url http://127.0.0.1:9001")
    return found


def endpoints(server_url: str) -> list[Endpoint]:
    """Return what to sample from: on each server the adapter that is trained, else the model itself.

    Raises:
        UsageError: no server is named, or one requires another key, or has an adapter whose name changes every step.
        ServerUnreachableError: one does not answer as vLLM does.
    """
    return [_endpoint(url) for url in urls(server_url)]


def _endpoint(url: str) -> Endpoint:
    with VllmClient(url) as server:
        names = [model.id for model in server.models()]
    if renamed := [name for name in names if name.startswith(f"{ADAPTER}-")]:
        raise UsageError(
            f"the adapter that is trained at {url} gets a new name with every step, now {renamed[-1]}",
            remedy="train it with --lora-handover memory, which keeps its name",
        )
    return Endpoint(url=url, model=ADAPTER if ADAPTER in names else None)
