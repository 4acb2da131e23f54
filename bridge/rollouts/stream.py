"""The stream of an environment: samples its problems in order, and scores the completions.

Without staleness, the groups of a step are sampled together, and none is in flight between two steps. With staleness,
groups start whenever there is room, a step takes those that are done, and the others continue under new weights. In
both cases each group is scored as soon as it arrives, while others are still being sampled.

The sampler's event loop runs in its own thread, which keeps running while a step is computed. Only `take`, `evaluate`
and `served` start, take or drop groups.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from bridge.config import EvaluationConfig, RolloutConfig, SamplingConfig
from bridge.core.concurrency import gather_or_cancel
from bridge.core.logs import info_once
from bridge.errors import BridgeError, RewardError
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts import problems, staleness
from bridge.rollouts.groups import (
    GroupSampler,
    Servers,
    Unusable,
    checked,
    penalized,
    scored_group,
    without_completions,
)
from bridge.rollouts.sampler import Sampler, seed_of
from bridge.rollouts.staleness import InFlight
from bridge.scoring.score import FailedScores
from bridge.scoring.scorer import Scorer
from bridge.server.endpoint import Endpoint
from bridge.types import Group, Problem, Result, Task, TrainedProblems

logger = logging.getLogger(__name__)

EVALUATION = 2**31
"""Used instead of the step in an evaluation's seed; larger than any step, so that no rollout's seed is reused."""


@dataclass(frozen=True, kw_only=True)
class _Share:
    """One replica's share of the groups of a step."""

    groups: list[Group]
    skipped: list[Group]
    num_retries: int
    num_in_flight: int


class EnvironmentStream:
    """Samples and scores the problems of one environment."""

    def __init__(
        self,
        task: Task,
        group_sampler: GroupSampler,
        sampler: Sampler,
        scorer: Scorer,
        *,
        rollouts: RolloutConfig,
        sampling: SamplingConfig,
        evaluation: EvaluationConfig,
        seed: int,
        max_unscored_share: float,
        has_teacher: bool = False,
        progress: Callable[[int, int], None] = lambda *_: None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Prepare everything that does not need a server. Closing the stream closes `sampler` and `scorer`.

        With `has_teacher`, groups have the prompts that a teacher sees. With several `ranks`, each rank with a server
        samples a share of every step. `progress` is called with the number of groups scored so far, and their total
        number.
        """
        self._has_teacher = has_teacher
        self.num_retries = 0
        self.num_in_flight = 0
        self.skipped: list[Group] = []
        self._ranks = ranks
        self._rollouts = rollouts
        self._sampling = sampling
        self._evaluation = evaluation
        self._seed = seed
        self._max_unscored_share = max_unscored_share
        self._group_sampler = group_sampler
        self._sampler = sampler
        self._scorer = scorer
        self._reported = set[str]()
        """Kinds of failures that have been logged."""
        self._progress = progress
        self._held_out = problems.held_out(task) if evaluation.samples else []
        self._order = enumerate(problems.endless(task, seed))
        self._trained = TrainedProblems()
        self._step = 0
        self._in_flight: list[InFlight] = []
        self._endpoint: Endpoint
        self._own_skipped: list[Group] = []
        self._requeued: list[InFlight] = []
        """Groups that were in flight when a server was lost or a step failed, to be sampled again."""
        self._counted_retries = 0
        """Requests retried up to the last step taken, and in evaluations since then."""
        self._earlier_retries = 0
        """Requests retried before this step."""
        self._failures: FailedScores
        self._counted_step = 0
        """The step whose failures are being counted; 0 if there is none."""
        self._unusable = Unusable()

    def served(self, endpoint: Endpoint, version: int) -> None:  # noqa: ARG002  each token has its own
        if self._in_flight and endpoint.starts != self._endpoint.starts:
            self._run(self._requeue(keep_sampled=True))
        self._endpoint = endpoint
        self._servers = self._sampler.servers_at([endpoint, *endpoint.others])
        replicas = self._ranks.one_per_replica(self._ranks.all_gather_object(endpoint))
        self._endpoints = [server for replica in replicas for server in (replica, *replica.others)]

    def resume(self, trained: TrainedProblems) -> None:
        self._trained = trained

    def take(self, count: int, *, step: int) -> list[Group]:
        """Return `count` groups, as soon as that many are sampled and no other group would become too stale.

        Taking a step again after a failure returns groups of the same problems with the same seeds.
        """
        if step != self._step:
            self._step = step
            self._own_skipped = []
            self._earlier_retries = self._counted_retries
        own = count // self._ranks.dp_size
        shares = self._ranks.one_per_replica(self._ranks.run_and_gather(lambda: self._share(own, step)))
        self.skipped = [group for share in shares for group in share.skipped]
        self.num_retries = sum(share.num_retries for share in shares)
        self.num_in_flight = sum(share.num_in_flight for share in shares)
        if len(shares) == 1:
            return shares[0].groups
        return sorted((group for share in shares for group in share.groups), key=lambda group: group.number or 0)

    def _share(self, count: int, step: int) -> "_Share":
        if not self._ranks.is_tp_rank_zero:
            return _Share(groups=[], skipped=[], num_retries=0, num_in_flight=0)
        groups = self._run(self._taken(count, step))
        self._counted_retries = self._sampler.num_retries
        return _Share(
            groups=groups, skipped=self._own_skipped, num_in_flight=len(self._in_flight),
            num_retries=self._counted_retries - self._earlier_retries,
        )  # fmt: skip

    def evaluate(self, *, step: int) -> list[Group] | None:
        """Sample and score the held-out problems, with the same seeds each time."""
        if not self._held_out:
            return None
        total = len(self._held_out)
        num_samples = self._evaluation.samples
        temperature = self._evaluation.temperature
        params = {} if temperature is None else {"temperature": temperature}
        failures = self._failures_of(f"evaluation after step {step}", total, num_samples)
        num_scored = count(1)

        async def evaluated(servers: Servers, index: int, problem: Problem) -> Group:
            group = await self._scored(
                servers, None, problem, failures,
                num_samples=num_samples, seed=seed_of(self._seed, EVALUATION), index=index, **params,
            )  # fmt: skip
            self._progress(next(num_scored), total)
            return replace(group, images=None)  # not needed, because the group is not trained on

        def all_groups() -> list[Group]:
            servers = self._sampler.servers_at(self._endpoints)
            groups = (evaluated(lambda: servers, index, problem) for index, problem in enumerate(self._held_out))
            before = self._sampler.num_retries
            evaluation = self._run(gather_or_cancel(groups))
            self._counted_retries += self._sampler.num_retries - before
            self._report(failures)
            return evaluation

        return self._ranks.run_on_rank_zero(all_groups)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._sampler.loop.run(coroutine)

    def close(self) -> None:
        try:
            self._sampler.close(self._group_sampler.close)
        finally:
            self._scorer.close()

    async def _taken(self, count: int, step: int) -> list[Group]:
        max_staleness = self._rollouts.max_staleness
        if self._counted_step != step:
            self._begin_failures(count, step)
        try:
            while True:
                self._start_groups(count, step, num_steps=max_staleness + 1)
                if taken := staleness.ready(self._in_flight, count, step=step, max_staleness=max_staleness):
                    break
                pending = [group.task for group in self._in_flight if not group.is_sampled]
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                self._progress(min(count, sum(group.is_sampled for group in self._in_flight)), count)
                self._skip(count)
        except BaseException as error:
            self._counted_step = 0
            await self._requeue(keep_sampled=bool(max_staleness) and isinstance(error, BridgeError))
            raise
        self._in_flight = [group for group in self._in_flight if group not in taken]
        self._report(self._failures)
        self._begin_failures(count, step + 1)  # groups are sampled and scored while this step is computed
        self._start_groups(count, step, num_steps=max_staleness)
        return [group.task.result() for group in taken]

    def _start_groups(self, count: int, step: int, *, num_steps: int) -> None:
        """Start as many more groups as there is room for."""
        most = self._most_in_flight(count)
        room = staleness.room(self._in_flight, count, num_steps=num_steps, most_in_flight=most)
        if room <= 0:
            return
        in_order = not self._in_flight or bool(self._requeued)
        started = self._requeued[:room]
        self._requeued = self._requeued[room:]
        replica = self._ranks.dp_rank
        num_replicas = self._ranks.dp_size
        untrained = (pair for pair in self._order if pair[0] % num_replicas == replica and pair[0] not in self._trained)
        fresh = islice(untrained, room - len(started))
        started += [InFlight(number=number, problem=problem, begun=step) for number, problem in fresh]
        for group in started:
            group.begun = step
            group.in_order = in_order
            group.task = asyncio.create_task(self._sampled(group, count))
            self._in_flight.append(group)

    def _most_in_flight(self, count: int) -> int:
        """Return how many groups to sample concurrently: `groups_in_flight`, or as many as the staleness bound allows.

        The latter are limited to the number that fits in the KV cache if completions are half as long as the longest on
        average.
        """
        rollouts = self._rollouts
        sampling = self._sampling
        kv_tokens = self._endpoint.kv_tokens
        if rollouts.groups_in_flight is not None:
            return max(1, rollouts.groups_in_flight // self._ranks.dp_size)
        most = count * (rollouts.max_staleness + 1)
        fitting = most if kv_tokens is None else 2 * kv_tokens // (sampling.group_size * sampling.longest)
        most_in_flight = min(most, max(count, fitting))
        if rollouts.max_staleness:
            info_once(logger, f"up to {most_in_flight} groups in flight (--groups-in-flight)")
        return most_in_flight

    async def _sampled(self, started: InFlight, count: int) -> Group:
        step, index = divmod(started.number, count * self._ranks.dp_size)  # independent of the number of ranks
        group = await self._scored(
            lambda: self._servers, started.number, started.problem, None,
            num_samples=self._sampling.group_size, seed=seed_of(self._seed, step + 1), index=index,
        )  # fmt: skip
        return penalized(group, self._rollouts, self._sampling.longest)

    async def _scored(
        self,
        servers: Servers,
        number: int | None,
        problem: Problem,
        failures: FailedScores | None,
        *,
        num_samples: int,
        seed: int,
        index: int,
        **params: float,
    ) -> Group:
        """Sample and score a group. `failures` counts completions without a reward; None: the next step's failures."""
        plain: tuple[int, ...] = ()
        hinted: tuple[int, ...] = ()
        try:
            if self._has_teacher and number is not None and problems.has_hint(problem):
                plain = self._group_sampler.check_prompt(problem)
                hinted = self._group_sampler.check_prompt(problems.hinted(problem))
        except RewardError as error:
            sampled = without_completions(problem, num_samples, error)
        else:
            sampled = await self._group_sampler.group(
                servers, problem, num_samples=num_samples, seed=seed, index=index, **params
            )
        pairs = zip(sampled.completions, sampled.results, strict=True)
        results = [checked(problem, completion, result) for completion, result in pairs]
        self._unusable.count(results)
        (failures or self._failures).add(results)
        taught = problems.with_hint(sampled.prompt, plain, hinted) if hinted else ()
        return scored_group(number, problem, sampled._replace(results=results, taught=taught))

    def _skip(self, count: int) -> None:
        """Replace groups whose rewards are all equal by further groups, up to the oversampling bound."""
        rollouts = self._rollouts
        if not rollouts.skip_without_signal:
            return
        for sampled in [started for started in self._in_flight if started.is_sampled]:
            group = sampled.task.result()
            if (
                len(set(group.turn_rewards or group.rewards)) < 2
                and len(self._own_skipped) < (rollouts.max_oversampling - 1) * count
            ):
                self._in_flight.remove(sampled)
                self._own_skipped.append(replace(group, images=None))

    async def _requeue(self, *, keep_sampled: bool) -> None:
        """Cancel and requeue the groups in flight; with `keep_sampled`, except those that are already sampled."""
        ended = [group for group in self._in_flight if not (keep_sampled and group.is_sampled)]
        for group in ended:
            group.task.cancel()
        await asyncio.gather(*(group.task for group in ended), return_exceptions=True)
        self._in_flight = [group for group in self._in_flight if group not in ended]
        self._requeued = [*ended, *self._requeued]

    def _begin_failures(self, count: int, step: int) -> None:
        self._counted_step = step
        self._failures = self._failures_of(f"step {step}", count, self._sampling.group_size)

    def _failures_of(self, batch: str, num_groups: int, num_samples: int) -> FailedScores:
        return FailedScores(batch, num_completions=num_groups * num_samples, max_share=self._max_unscored_share)

    def _report(self, failures: FailedScores) -> None:
        failures.log(self._reported)
        for line in self._sampler.lacks:
            info_once(logger, line)
