"""Feed an Atropos API with groups from one of Bridge's environments, no more than its trainer can use.

Queued groups and groups in flight together never exceed `max_queued_batches` of the trainer's batches. Batches that the
API has formed but the trainer has not taken yet do not count, because the API does not report them.

If the response to a group is lost, the group may be in the queue, and is not sent again: a missing group only costs
samples, while a duplicate would be trained on twice. A group that lacks a completion is left out: it would not fit into
any batch, and the API would keep it forever. A group whose rewards are all equal is sent: what to do with it is the
trainer's decision.
"""

import asyncio
import itertools
import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import httpx

from bridge.atropos.api import AtroposApi, EnvironmentStatus
from bridge.atropos.scored_groups import scored_group
from bridge.config import FeedConfig
from bridge.core.logs import info_once
from bridge.errors import AtroposError, BridgeError, RejectedRequestError, RewardError, UsageError
from bridge.rollouts import problems
from bridge.rollouts.groups import Unusable
from bridge.rollouts.sampler import Sampler, fit_completions, seed_of
from bridge.rollouts.servers import Server
from bridge.rollouts.vocabulary import Vocabulary
from bridge.scoring.score import FailedScore, FailedScores, Score, Scores, UnusablePrompt
from bridge.scoring.scorer import Scorer
from bridge.server.client import VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import ADAPTER
from bridge.types import Environment, Problem
from bridge.weights import skeleton

logger = logging.getLogger(__name__)

JOIN_POLL_S = 0.5
"""Seconds between two attempts to join."""
POLL_S = 0.25
"""Seconds between two queries of the queue."""
REPORT_S = 10.0
"""Seconds between two progress reports."""
SEEDS = 1_000_000
"""Distance between the first seeds of two environments; each group uses one seed."""
MAX_TOO_LONG = 32
"""Number of groups left out as too long, before any group is sent, at which feeding fails."""


@dataclass(frozen=True, kw_only=True)
class FeedProgress:
    """The progress shown in one line of output."""

    seconds: float  # since the trainer requested its first batch
    step: int  # batches that the API has formed since the trainer's first step
    num_steps: int  # batches after which the trainer stops; 0 if unknown
    queued_batches: float  # groups in the API's queue, from all environments, in units of the trainer's batches
    groups: int  # groups sent
    reward_mean: float | None  # mean reward of the last batch sent; None if nothing was sent
    tokens_per_s: float  # sampled tokens of all groups sent, per second
    too_long: int  # groups left out because a sequence is longer than the trainer accepts
    unscored: int  # groups left out because a completion has no reward
    unanswered: int  # groups that may or may not be queued, because the API's response was lost
    retries: int  # retried requests to the servers and to the API


class Membership(NamedTuple):
    """Settings of the trainer that an environment feeds."""

    env_id: int
    groups_per_batch: int
    max_token_len: int
    """The trainer only accepts sequences with fewer tokens than this; 0 or less: no limit."""
    num_steps: int
    """Number of batches after which the trainer stops; 0 if unknown.

    Also 0 if the API has already formed them all, because a resumed trainer needs more batches than it registered.
    """


def feed(
    config: FeedConfig,
    environment: Environment,
    recipe: Callable[[], Scores],
    *,
    report: Callable[[FeedProgress], None],
) -> FeedProgress:
    """Feed the API until the trainer has all of its batches; call `report` with the progress, and return the last one.

    Raises:
        BridgeError: joining, sampling or scoring failed, or the API has stopped or was reset.
    """
    urls = [url.strip().rstrip("/") for url in config.server_url.split(",")]
    lengths = [length for url in urls if (length := max_model_len(url))]
    sampling = fit_completions(config.sampling, min(lengths, default=None))
    config = config.model_copy(update={"sampling": sampling})
    tokenizer = skeleton.tokenizer(config.model_name)
    task = config.task
    sampler = Sampler(config.sampling, vocabulary=Vocabulary.of(tokenizer, config.model_name))
    scorer = Scorer(
        recipe, processes=task.reward_processes, timeout_s=task.reward_timeout_s, variables=task.worker_env,
        call_here=sampler.loop.call_here,
    )  # fmt: skip
    with closing(scorer), sampler, closing(AtroposApi(config.atropos_url)) as api:
        joined = join(api, config)
        order = problems.endless(environment, seed_of(config.seed, joined.env_id))
        encode = partial(problems.encode, tokenizer, **task.chat_template_kwargs)
        try:
            feeder = _Feeder(config, api, joined, sampler, scorer)
            pairs = feeder.encoded(order, encode)
            return sampler.loop.run(feeder.run(pairs, sampler.servers_at(endpoints(urls)), report))
        finally:
            with suppress(AtroposError):  # the API may have stopped
                api.disconnect_environment(joined.env_id)


def join(api: AtroposApi, config: FeedConfig) -> Membership:
    """Wait until a trainer requests its first batch, logging each wait, and join the API.

    Raises:
        UsageError: the trainer's batch size is not a multiple of the group size.
    """
    group_size = config.sampling.group_size
    while (trainer := api.info()).batch_size < 1:
        info_once(logger, f"{api.url}: waiting for a trainer to register (bridge train --rollouts atropos ...)")
        time.sleep(JOIN_POLL_S)
    if trainer.batch_size % group_size:  # the API would never form a batch, and would not report why
        sizes = [size for size in range(2, trainer.batch_size + 1) if trainer.batch_size % size == 0]
        nearest = min(sizes, key=lambda size: abs(size - group_size), default=None)
        hint = f"--group-size {nearest}" if nearest else "let the trainer register a larger batch"
        raise UsageError(
            f"groups of {group_size} do not fill the trainer's batches of {trainer.batch_size} sequences",
            hint=f"{hint}, or give the trainer a batch size that is a multiple of the group size",
        )
    name = config.task.environment.rpartition(":")[2]
    longest = trainer.max_token_len if trainer.max_token_len > 0 else config.sampling.longest
    while (
        answer := api.register_environment(name, group_size=group_size, max_token_length=longest)
    ).status != "success":
        info_once(logger, f"{api.url}: waiting for the trainer to request its first batch")
        time.sleep(JOIN_POLL_S)
    assert answer.env_id is not None, answer
    num_steps = answer.num_steps or 0
    return Membership(
        env_id=answer.env_id,
        groups_per_batch=trainer.batch_size // group_size,
        max_token_len=trainer.max_token_len,
        num_steps=num_steps if num_steps > (answer.starting_step or 0) else 0,
    )


class _Feeder:
    """Samples and scores the problems of an environment that has joined an API, and sends the groups."""

    def __init__(
        self,
        config: FeedConfig,
        api: AtroposApi,
        joined: Membership,
        sampler: Sampler,
        scorer: Scorer,
    ) -> None:
        self._config = config
        self._api = api
        self._joined = joined
        self._sampler = sampler
        self._scorer = scorer
        self._reported = set[str]()
        """Kinds of failures that have been logged."""
        self._counts = Counter[str]()
        self._rewards = deque[float](maxlen=joined.groups_per_batch * config.sampling.group_size)
        """Rewards of the last groups sent, up to a batch."""
        self._begun = time.monotonic()
        self._unusable = Unusable()

    async def run(
        self,
        pairs: Iterator[tuple[Problem, tuple[int, ...]]],
        servers: Sequence[Server],
        report: Callable[[FeedProgress], None],
    ) -> FeedProgress:
        """Feed the API until the trainer has all of its batches."""
        seeds = itertools.count(seed_of(self._config.seed, self._joined.env_id * SEEDS))
        fitting = (pair for pair in pairs if not self._is_too_long(len(pair[1]) + 1))
        room = int(self._config.max_queued_batches * self._joined.groups_per_batch)
        tasks = set[asyncio.Task[None]]()
        reported = self._begun
        status = EnvironmentStatus(queue_size=0, current_step=0)
        try:
            while not 0 < self._joined.num_steps <= (status := await self._status(status.current_step)).current_step:
                if time.monotonic() - reported >= REPORT_S:
                    reported = time.monotonic()
                    report(self._progress(status))
                # Groups sent since the status was read count twice rather than never, because `tasks` still has them.
                for problem, prompt in itertools.islice(fitting, max(room - status.queue_size - len(tasks), 0)):
                    tasks.add(asyncio.create_task(self._feed(servers, problem, prompt, next(seeds))))
                await asyncio.sleep(POLL_S)
                ended = {task for task in tasks if task.done()}
                await asyncio.gather(*ended)  # raises the exception of a failed task
                tasks -= ended
            return self._progress(status)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _status(self, step: int) -> EnvironmentStatus:
        """Return the queue's status; raise AtroposError if the API was reset since it had formed `step` batches."""
        status = await asyncio.to_thread(self._api.environment_status, self._joined.env_id)
        if status is None or status.current_step < step:
            raise AtroposError(
                f"the Atropos API at {self._api.url} no longer knows this environment: it was reset or restarted",
                hint="restart the trainer, then this command",
            )
        return status

    def encoded(
        self, order: Iterator[Problem], encode: Callable[[Problem], tuple[int, ...]]
    ) -> Iterator[tuple[Problem, tuple[int, ...]]]:
        """Yield the problems with their prompts as token ids, leaving out those that cannot be encoded."""
        for problem in order:
            try:
                prompt = encode(problem)
            except RewardError as error:
                self._leave_out(problem, error)
                continue
            yield problem, prompt

    def _leave_out(self, problem: Problem, error: BridgeError) -> None:
        """Count and log a problem with an unusable prompt."""
        fault = UnusablePrompt.of(problem, error)
        self._counts["unscored"] += 1
        if fault.kind not in self._reported:
            self._reported.add(fault.kind)
            logger.warning(f"a problem is left out: {fault.line} (reported once; all are counted)")
        self._unusable.count([fault])

    async def _feed(self, servers: Sequence[Server], problem: Problem, prompt: tuple[int, ...], seed: int) -> None:
        """Sample and score one group, and send it at most once."""
        sampling = self._config.sampling
        try:
            completions = await self._sampler.one(
                servers, prompt, num_samples=sampling.group_size, seed=seed,
                is_chat=not isinstance(problem["prompt"], str),
            )  # fmt: skip
        except RejectedRequestError as error:
            self._leave_out(problem, error)
            return
        for line in self._sampler.lacks:
            info_once(logger, line)
        if self._is_too_long(len(prompt) + max(len(completion.token_ids) for completion in completions)):
            return
        results = await self._scorer.score(problem, [completion.text for completion in completions])
        self._unusable.count(results)
        self._check(results)
        rewards = [result.reward for result in results if isinstance(result, Score)]
        if len(rewards) < len(completions):
            self._counts["unscored"] += 1
            return
        params = {"temperature": sampling.temperature, "max_new_tokens": sampling.longest}
        group = scored_group(problem, prompt, completions, rewards, self._joined.env_id, params)
        try:
            await asyncio.to_thread(self._api.send, [group])
        except AtroposError as error:
            if not isinstance(error.__cause__, httpx.TransportError):
                raise
            self._counts["unanswered"] += 1  # the connection was lost before the response arrived
            return
        self._counts["groups"] += 1
        self._counts["tokens"] += sum(len(completion.token_ids) for completion in completions)
        self._rewards += rewards

    def _check(self, results: Sequence[Score | FailedScore]) -> None:
        """Count failed scores; raise RewardError if one batch has too many of them."""
        groups = self._joined.groups_per_batch
        size = self._config.sampling.group_size
        if self._counts["scored"] % groups == 0:
            batch = f"groups {self._counts['scored'] + 1} to {self._counts['scored'] + groups}"
            share = self._config.task.max_unscored_share
            self._failures = FailedScores(batch, num_completions=groups * size, max_share=share)
        self._counts["scored"] += 1
        self._failures.add(results)
        self._failures.log(self._reported)

    def _is_too_long(self, num_tokens: int) -> bool:
        """Return whether a sequence is too long for the trainer, and count it.

        Raises:
            UsageError: many groups were too long, and none was short enough.
        """
        limit = self._joined.max_token_len
        if not 0 < limit <= num_tokens:
            return False
        self._counts["too_long"] += 1
        if not self._counts["groups"] and self._counts["too_long"] >= MAX_TOO_LONG:
            raise UsageError(
                f"each of the first {self._counts['too_long']} groups has a sequence of {limit} tokens or more, prompt"
                " included, and the trainer does not accept them",
                hint="lower --max-new-tokens, or let the trainer register a larger max_token_len",
            )
        return True

    def _progress(self, status: EnvironmentStatus) -> FeedProgress:
        seconds = time.monotonic() - self._begun
        return FeedProgress(
            seconds=seconds,
            step=status.current_step,
            num_steps=self._joined.num_steps,
            queued_batches=status.queue_size / self._joined.groups_per_batch,
            groups=self._counts["groups"],
            reward_mean=statistics.fmean(self._rewards) if self._rewards else None,
            tokens_per_s=self._counts["tokens"] / seconds,
            too_long=self._counts["too_long"],
            unscored=self._counts["unscored"],
            unanswered=self._counts["unanswered"],
            retries=self._sampler.num_retries + self._api.num_retries,
        )


def endpoints(urls: Sequence[str]) -> list[Endpoint]:
    """Return the endpoints to sample from: on each server the adapter in training, or otherwise the model itself.

    Raises:
        UsageError: the adapter's name changes with every step.
    """
    sampled = []
    for url in urls:
        with VllmClient(url) as server:
            names = [model.id for model in server.models()]
        if renamed := [name for name in names if name.startswith(f"{ADAPTER}-")]:
            raise UsageError(
                f"the adapter in training at {url} gets a new name with every step, currently {renamed[-1]}",
                hint="train it with --lora-handover memory, which keeps its name",
            )
        sampled.append(Endpoint(url=url, model=ADAPTER if ADAPTER in names else None))
    return sampled
