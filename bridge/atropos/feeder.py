"""Feed an Atropos API with groups of one of our environments, as many as its trainer can use.

Groups that wait and groups in flight are together never more than the trainer takes in `max_queued_batches` batches.
Batches that the API has formed and the trainer has not taken yet do not count, because the API does not report them.

A group whose answer was lost may be in the queue, and is not sent again: a missing group costs a sample, and a second
one would be trained on twice. A group that lacks a completion is left out: no batch could be made up with it, and the
API would keep it forever. A group whose rewards are all equal is sent: the trainer decides what to do with it.
"""

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from bridge.atropos.api import (
    MASKED,
    UNKNOWN_LOGPROB,
    WEIGHT_VERSIONS,
    AtroposApi,
    EnvironmentRegistration,
    EnvironmentStatus,
    ScoredGroup,
)
from bridge.config import FeedConfig
from bridge.errors import AtroposError, UsageError
from bridge.rollouts import problems
from bridge.rollouts.openai_api import Vocabulary
from bridge.rollouts.sampler import Sampler, fit_completions, seed_of
from bridge.scoring.score import FailedScore, FailedScores, Score, Scores
from bridge.scoring.scorer import Scorer
from bridge.server.client import VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import ADAPTER
from bridge.types import Completion, Environment, Message, Problem
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
MAX_TOO_LONG = 32
"""Groups that may be left out as too long before the first one is sent."""


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
    """What waits in the API, from all environments, in the trainer's batches."""
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


def feed(
    config: FeedConfig,
    environment: Environment,
    recipe: Callable[[], Scores],
    *,
    note: Callable[[str], None],
    report: Callable[[FeedProgress], None],
) -> FeedProgress:
    """Feed until the trainer has all batches that it wants, and return the last progress; `report` gets those before.

    Raises:
        BridgeError: joining, sampling or scoring failed.
        AtroposError: the API is gone, or was reset.
    """
    urls = [url.strip().rstrip("/") for url in config.server_url.split(",")]
    lengths = [length for url in urls if (length := max_model_len(url))]
    config = fit_completions(config, min(lengths, default=None), note)
    tokenizer = skeleton.tokenizer(config.model_name)
    task = config.task
    scorer = Scorer(recipe, processes=task.reward_processes, timeout_s=task.reward_timeout_s, variables=task.worker_env)
    sampler = Sampler(config.sampling, ids_of=Vocabulary(tokenizer))
    with closing(scorer), sampler, AtroposApi(config.atropos_url) as api:
        joined = join(api, config, note)
        try:
            feeder = _Feeder(config, api, joined, sampler, scorer, endpoints(urls), note)
            return sampler.run(feeder.run(environment, tokenizer, report))
        finally:
            with suppress(AtroposError):  # an API that is gone knows no environment
                api.disconnect_environment(joined.env_id)


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What an environment knows of the trainer that it feeds."""

    env_id: int
    groups_per_batch: int
    max_token_len: int
    """The trainer wants no sequence of so many tokens or more; 0 or less: any."""
    num_steps: int
    """Batches after which nothing more is wanted; 0: no end is known.

    Also 0 if the API has formed them all already: a trainer that was resumed wants more than it registered.
    """


def join(api: AtroposApi, config: FeedConfig, note: Callable[[str], None]) -> Membership:
    """Join the API once a trainer requests its first batch; `note` gets what is waited for.

    Raises:
        UsageError: our groups do not make up the trainer's batches.
        AtroposError: the API does not answer.
    """
    noted: set[str] = set()
    group_size = config.sampling.group_size

    def wait_for(what: str) -> None:
        if what not in noted:
            noted.add(what)
            note(f"{api.url}: waiting for {what}")
        time.sleep(JOIN_POLL_S)

    while (trainer := api.info()).batch_size < 1:
        wait_for("a trainer to register (bridge train --rollouts atropos ...)")
    if trainer.batch_size % group_size:  # the API would never form a batch, without a word
        fitting = [size for size in range(2, trainer.batch_size + 1) if trainer.batch_size % size == 0]
        nearest = min(fitting, key=lambda size: abs(size - group_size), default=None)
        hint = f"--group-size {nearest}" if nearest else "let the trainer register a larger batch"
        raise UsageError(
            f"groups of {group_size} do not make up the trainer's batches of {trainer.batch_size} sequences",
            remedy=f"{hint}, or another batch size there: a multiple of the group size",
        )
    registration = EnvironmentRegistration(
        max_token_length=trainer.max_token_len if trainer.max_token_len > 0 else config.sampling.longest,
        desired_name=config.task.environment.rpartition(":")[2],
        weight=1.0,  # the share among several environments, relative to theirs
        group_size=group_size,
    )
    while (answer := api.register_environment(registration)).status != "success":
        wait_for("the trainer to request its first batch")
    assert answer.env_id is not None, answer
    num_steps = answer.num_steps or 0
    return Membership(
        env_id=answer.env_id,
        groups_per_batch=trainer.batch_size // group_size,
        max_token_len=trainer.max_token_len,
        num_steps=num_steps if num_steps > (answer.starting_step or 0) else 0,
    )


class _Feeder:
    """An environment that has joined an API: samples its problems, scores and sends the groups."""

    def __init__(
        self,
        config: FeedConfig,
        api: AtroposApi,
        joined: Membership,
        sampler: Sampler,
        scorer: Scorer,
        servers: Sequence[Endpoint],
        note: Callable[[str], None],
    ) -> None:
        self._config, self._sampling, self._api, self._joined = config, config.sampling, api, joined
        self._sampler, self._scorer, self._servers = sampler, scorer, servers
        self._note, self._noted = note, set[str]()
        self._seed = seed_of(config.seed, joined.env_id * SEEDS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        """Groups that are being sampled, scored or sent."""
        self._step = self._num_scored = 0
        self._counts = {"groups": 0, "too_long": 0, "unscored": 0, "unanswered": 0}
        self._begun = self._last = time.monotonic()
        self._rewards, self._num_tokens = list[float](), 0
        """Of the groups sent since the last line."""
        self._all_rewards = 0.0, 0
        """Their sum and number."""

    async def run(
        self, environment: Environment, tokenizer: PreTrainedTokenizerBase, report: Callable[[FeedProgress], None]
    ) -> FeedProgress:
        """Feed until the trainer has what it wants."""
        order = problems.endless(environment, seed_of(self._config.seed, self._joined.env_id))
        template = self._config.task.chat_template_kwargs
        prompts = ((problem, problems.encode(tokenizer, problem, **template)) for problem in order)
        fitting = (pair for pair in prompts if not self._is_too_long(len(pair[1]) + 1))
        try:
            while True:
                in_flight = self._in_flight  # from before: what is sent meanwhile counts twice rather than never
                status = await self._status()
                if 0 < self._joined.num_steps <= status.current_step:
                    return self._line(status)
                if time.monotonic() - self._last >= REPORT_S:
                    report(self._line(status))
                if (num_groups := self._room(status) - in_flight) > 0:
                    pairs = [next(fitting) for _ in range(num_groups)]
                    self._in_flight += num_groups
                    self._seed += 1  # each round has a seed of its own
                    self._tasks.add(asyncio.create_task(self._sample(pairs, self._seed)))
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

    async def _pause(self) -> None:
        """Wait a moment, or until all that was begun is done; what fails is raised."""
        if not self._tasks:
            await asyncio.sleep(POLL_S)
            return
        done, _ = await asyncio.wait(self._tasks, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        self._tasks -= done
        for task in done:
            task.result()

    async def _sample(self, pairs: Sequence[tuple[Problem, tuple[int, ...]]], seed: int) -> None:
        async def sent(index: int, completions: Sequence[Completion]) -> None:
            try:
                await self._send(*pairs[index], completions)
            finally:
                self._in_flight -= 1

        prompts = [prompt for _, prompt in pairs]
        await self._sampler.each(self._servers, prompts, sent, num_samples=self._sampling.group_size, seed=seed)
        for line in self._sampler.lacks:
            if line not in self._noted:
                self._noted.add(line)
                self._note(line)

    async def _send(self, problem: Problem, prompt: tuple[int, ...], completions: Sequence[Completion]) -> None:
        """Score the completions of one problem, and send them once, or leave them out."""
        if self._is_too_long(len(prompt) + max(len(completion.token_ids) for completion in completions)):
            return
        results = await self._scorer.score(problem, [completion.text for completion in completions])
        self._count_failures(results)
        rewards = [result.reward for result in results if isinstance(result, Score)]
        if len(rewards) < len(results):
            self._counts["unscored"] += 1
            return
        params = {"temperature": self._sampling.temperature, "max_new_tokens": self._sampling.longest}
        env_id = self._joined.env_id
        group = scored_group(problem, prompt, completions, rewards, env_id=env_id, generation_params=params)
        try:
            await asyncio.to_thread(self._api.send, [group])
        except AtroposError as error:
            if not isinstance(error.__cause__, httpx.TransportError):
                raise
            self._counts["unanswered"] += 1  # the connection broke before the answer
        else:
            self._counts["groups"] += 1
            self._rewards += rewards
            self._all_rewards = self._all_rewards[0] + sum(rewards), self._all_rewards[1] + len(rewards)
            self._num_tokens += sum(len(completion.token_ids) for completion in completions)

    def _is_too_long(self, num_tokens: int) -> bool:
        """Return whether the trainer does not want so many tokens, and count it.

        Raises:
            UsageError: nothing was short enough so far.
        """
        limit = self._joined.max_token_len
        if not 0 < limit <= num_tokens:
            return False
        self._counts["too_long"] += 1
        if not self._counts["groups"] and self._counts["too_long"] >= MAX_TOO_LONG:
            raise UsageError(
                f"each of the first {self._counts['too_long']} groups has a sequence of {limit} tokens or more, prompt"
                " included, and the trainer wants none of them",
                remedy="lower --max-new-tokens, or let the trainer register a larger max_token_len",
            )
        return True

    def _count_failures(self, results: Sequence[Score | FailedScore]) -> None:
        """Count completions without a reward, as a share of as many completions as make up one batch."""
        batch_size = self._joined.groups_per_batch * self._sampling.group_size
        if self._num_scored % batch_size == 0:
            first = self._num_scored // self._sampling.group_size + 1
            last = first + self._joined.groups_per_batch - 1
            self._failures = FailedScores(
                f"groups {first} to {last}", num_completions=batch_size, max_share=self._config.task.max_unscored_share
            )
        self._num_scored += len(results)
        self._failures.add(results)
        self._failures.note(self._note, self._noted)

    def _line(self, status: EnvironmentStatus) -> FeedProgress:
        """Return the next line, and begin the one after it."""
        now, rewards, num_tokens = time.monotonic(), self._rewards, self._num_tokens
        seconds, self._last, self._rewards, self._num_tokens = now - self._last, now, [], 0
        total, num_rewards = self._all_rewards
        return FeedProgress(
            seconds=now - self._begun,
            step=status.current_step,
            num_steps=self._joined.num_steps,
            queued_batches=status.queue_size / self._joined.groups_per_batch,
            reward_mean=statistics.fmean(rewards) if rewards else None,
            reward_mean_so_far=total / num_rewards if num_rewards else None,
            tokens_per_s=num_tokens / seconds if seconds else 0.0,
            retries=self._sampler.num_retries + self._api.num_retries,
            **self._counts,
        )


def scored_group(
    problem: Problem,
    prompt: tuple[int, ...],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    *,
    env_id: int,
    generation_params: dict[str, Any],
) -> ScoredGroup:
    """Return a group as the API accepts it; a NaN, which JSON cannot encode, would cost a whole batch."""
    given = problem["prompt"]
    before: list[Message] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return ScoredGroup(
        tokens=tuple(prompt + completion.token_ids for completion in completions),
        masks=tuple((MASKED,) * len(prompt) + completion.token_ids for completion in completions),
        scores=tuple(rewards),
        inference_logprobs=tuple(
            (UNKNOWN_LOGPROB,) * len(prompt)
            + tuple(value if math.isfinite(value) else UNKNOWN_LOGPROB for value in completion.logprobs)
            for completion in completions
        ),
        overrides=tuple(map(_versions, completions)),
        messages=[[*before, {"role": "assistant", "content": completion.text}] for completion in completions],
        generation_params=generation_params,
        env_id=env_id,
    )


def _versions(completion: Completion) -> dict[str, Any]:
    """Return which weights sampled a completion, if that is known of every token."""
    runs = [[version, len(list(run))] for version, run in itertools.groupby(completion.versions)]
    return {} if any(version is None for version, _ in runs) or not runs else {WEIGHT_VERSIONS: runs}


def endpoints(urls: Sequence[str]) -> list[Endpoint]:
    """Return what to sample from: on each server the adapter that is trained, else the model itself.

    Raises:
        UsageError: a server requires another key, or has an adapter whose name changes every step.
        ServerUnreachableError: one does not answer as vLLM does.
    """
    found = []
    for url in urls:
        with VllmClient(url) as server:
            names = [model.id for model in server.models()]
        if renamed := [name for name in names if name.startswith(f"{ADAPTER}-")]:
            raise UsageError(
                f"the adapter that is trained at {url} gets a new name with every step, now {renamed[-1]}",
                remedy="train it with --lora-handover memory, which keeps its name",
            )
        found.append(Endpoint(url=url, model=ADAPTER if ADAPTER in names else None))
    return found
