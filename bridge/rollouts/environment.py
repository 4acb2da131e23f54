"""The stream of a run's own environment: samples its problems in order, and scores the completions.

Without staleness a step's groups are sampled together, and none is in flight between two steps. With it, groups begin
whenever there is room, a step takes those that are done, and the server goes on with the others under new weights. In
both cases each is scored as soon as it arrives, while others are still being sampled.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

from bridge.config import TrainConfig
from bridge.core.together import together
from bridge.errors import BridgeError
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts import in_flight, problems
from bridge.rollouts.agent_runs import AgentRuns
from bridge.rollouts.in_flight import InFlight
from bridge.rollouts.openai_api import Vocabulary
from bridge.rollouts.sampler import Sampler, seed_of
from bridge.rollouts.servers import WRITTEN, Server
from bridge.rollouts.trajectories import Trajectories, num_processes
from bridge.scoring.agent import Agent, WithAgent
from bridge.scoring.score import FailedScore, FailedScores, Score, Scores, failed
from bridge.scoring.scorer import Scorer
from bridge.scoring.tools import Tools, WithTools
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Environment, Group, Problem, TrainedProblems, Unscored
from bridge.weights import skeleton

EVALUATION = 2**31
"""Takes the place of the step in an evaluation's seed: larger than any step, so that no rollout is repeated."""
SEND_LIMIT_S = 1.0
"""Longest wait until the requests that are to run while a step is computed are on their way."""


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What one replica brings to a step."""

    groups: list[Group]
    skipped: list[Group]
    num_retries: int
    num_in_flight: int


class EnvironmentStream:
    """Samples and scores the problems of one environment."""

    def __init__(
        self,
        config: TrainConfig,
        environment: Environment,
        note: Callable[[str], None],
        *,
        recipe: Callable[[], Scores] | None = None,
        progress: Callable[[int, int], None] = lambda *_: None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Prepare everything that needs no server.

        Of several `ranks`, each that talks to a server samples a share of every step. `recipe` makes what scores, in
        worker processes; without it, `environment` scores in this process. `note` gets each warning once, and
        `progress` the number of groups scored so far and in all.

        Raises:
            RewardError: the environment has nothing to evaluate on, or the recipe cannot be pickled.
            UsageError: the model has no tokenizer.
        """
        self.num_retries = self.num_in_flight = 0
        self.skipped: list[Group] = []
        self._ranks = ranks
        self._config, self._note, self._noted, self._progress = config, note, set[str](), progress
        self._tokenizer = skeleton.tokenizer(config.model_name)
        self._held_out = problems.held_out(environment) if config.evaluation.samples else []
        self._order = enumerate(problems.endless(environment, config.seed))
        self._trained = TrainedProblems()
        self._step = 0
        self._in_flight: list[InFlight] = []
        self._endpoint: Endpoint
        self._own_skipped: list[Group] = []
        self._again: list[InFlight] = []
        """What was in flight when a server was lost or a step failed, to begin again."""
        self._earlier_retries = 0
        """Requests that were sent again before this step."""
        has_turns = isinstance(environment, WithTools | WithAgent)
        cores, processes = len(os.sched_getaffinity(0)), config.task.reward_processes
        processes = num_processes(config, cores, ranks.dp_size) if has_turns else processes
        recipe = recipe if ranks.is_tp_rank_zero else None  # else another part samples and scores
        self._scorer = Scorer(
            recipe or _recipe(environment),
            processes=processes if recipe else 0,
            timeout_s=config.task.reward_timeout_s,
            tool_timeout_s=config.rollouts.tool_timeout_s,
            variables=config.task.worker_env,
        )
        self._sampler = Sampler(config.sampling, ids_of=Vocabulary(self._tokenizer))
        parts = self._tokenizer, self._sampler, self._scorer
        self._trajectories: Trajectories | AgentRuns | None = None
        if isinstance(environment, WithTools):
            self._trajectories = Trajectories(config, environment, *parts)
        elif isinstance(environment, WithAgent):
            self._trajectories = AgentRuns(config, *parts, self._tell)

    def served(self, endpoint: Endpoint, version: int) -> None:  # noqa: ARG002  each token has its own
        if self._in_flight and endpoint.starts != self._endpoint.starts:
            self._sampler.run(self._stop(keep_sampled=True))
        self._endpoint = endpoint
        self._servers = self._sampler.servers_at([endpoint])
        self._endpoints = self._ranks.one_per_replica(self._ranks.all_gather_object(endpoint))

    def resume(self, trained: TrainedProblems) -> None:
        self._trained = trained

    def take(self, count: int, *, step: int) -> list[Group]:
        """Return `count` groups, as soon as so many are sampled and no other one would become too old.

        A step that failed may be taken again, and gets groups of the same problems with the same seeds.

        Raises:
            BridgeError: a server cannot be sampled from.
            RewardError: too many completions have no reward, or the problems cannot be read.
        """
        if step != self._step:
            self._step, self._own_skipped = step, []
            self._earlier_retries = self._sampler.num_retries
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
        groups = self._sampler.run(self._taken(count, step))
        return _Share(
            groups=groups, skipped=self._own_skipped, num_in_flight=len(self._in_flight),
            num_retries=self._sampler.num_retries - self._earlier_retries,
        )  # fmt: skip

    def evaluate(self, *, step: int) -> list[Group] | None:
        """Sample and score the held-out problems, with the same seeds each time."""
        if not self._held_out:
            return None
        num_samples, seed = self._config.evaluation.samples, seed_of(self._config.seed, EVALUATION)
        temperature = self._config.evaluation.temperature
        other = {} if temperature is None else {"temperature": temperature}
        prompts = [self._encoded(problem) for problem in self._held_out]
        failures = self._failures_of(f"evaluation after step {step}", len(prompts), num_samples)
        num_scored = count(1)

        async def one(servers: Sequence[Server], index: int, problem: Problem) -> Group:
            group = await self._group(
                lambda: servers, None, problem, prompts[index], failures,
                num_samples=num_samples, seed=seed, index=index, **other,
            )  # fmt: skip
            self._progress(next(num_scored), len(prompts))
            return group

        def all_groups() -> list[Group]:
            servers = self._sampler.servers_at(self._endpoints)
            each = (one(servers, index, problem) for index, problem in enumerate(self._held_out))
            found = self._sampler.run(together(each))
            self._report(failures)
            return found

        return self._ranks.run_on_rank_zero(all_groups)

    def close(self) -> None:
        try:
            self._sampler.close(self._trajectories.close if isinstance(self._trajectories, AgentRuns) else None)
        finally:
            self._scorer.close()

    async def _taken(self, count: int, step: int) -> list[Group]:
        max_staleness = self._config.rollouts.max_staleness
        self._failures = self._failures_of(f"step {step}", count, self._config.sampling.group_size)
        try:
            while True:
                self._begin(count, step, num_steps=max_staleness + 1)
                if taken := in_flight.next_of(self._in_flight, count, step=step, max_staleness=max_staleness):
                    break
                pending = [each.task for each in self._in_flight if not each.is_sampled]
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                self._skip(count)
        except BaseException as error:
            await self._stop(keep_sampled=bool(max_staleness) and isinstance(error, BridgeError))
            raise
        self._in_flight = [each for each in self._in_flight if each not in taken]
        self._begin(count, step, num_steps=max_staleness)
        self._report(self._failures)
        sent = [asyncio.ensure_future(each.sent.wait()) for each in self._in_flight]
        if sent:  # they are sampled while this process trains
            _, late = await asyncio.wait(sent, timeout=SEND_LIMIT_S)
            for one in late:
                one.cancel()
        return [each.task.result() for each in taken]

    def _begin(self, count: int, step: int, *, num_steps: int) -> None:
        """Send as many further groups as there is room for."""
        room = in_flight.room(self._in_flight, count, num_steps=num_steps, at_once=self._at_once(count))
        if room <= 0:
            return
        in_order = not self._in_flight or bool(self._again)
        begun, self._again = self._again[:room], self._again[room:]
        own, size = self._ranks.dp_rank, self._ranks.dp_size
        untrained = (pair for pair in self._order if pair[0] % size == own and pair[0] not in self._trained)
        for number, problem in islice(untrained, room - len(begun)):
            prompt = self._encoded(problem)
            begun.append(InFlight(number=number, problem=problem, prompt=prompt, begun=step))
        for each in begun:
            each.begun, each.in_order = step, in_order
            each.sent.clear()
            each.task = asyncio.create_task(self._sampled(each, count))
            self._in_flight.append(each)

    def _encoded(self, problem: Problem) -> tuple[int, ...]:
        if self._trajectories is not None:  # a reset may add to it, and an agent makes its own
            return ()
        return problems.encode(self._tokenizer, problem, **self._config.task.chat_template_kwargs)

    def _at_once(self, count: int) -> int:
        """Return how many groups to sample at once: as chosen, or as many as may wait and fit into the KV cache.

        They fit if completions are half as long as the longest on average.
        """
        rollouts, sampling, kv_tokens = self._config.rollouts, self._config.sampling, self._endpoint.kv_tokens
        if rollouts.groups_in_flight is not None:
            return max(1, rollouts.groups_in_flight // self._ranks.dp_size)
        most = count * (rollouts.max_staleness + 1)
        fitting = most if kv_tokens is None else 2 * kv_tokens // (sampling.group_size * sampling.longest)
        at_once = min(most, max(count, fitting))
        if rollouts.max_staleness:
            self._tell(f"up to {at_once} groups in flight (--groups-in-flight)")
        return at_once

    async def _sampled(self, asked: InFlight, count: int) -> Group:
        WRITTEN.set(asked.sent.set)
        step, index = divmod(asked.number, count * self._ranks.dp_size)  # the same whatever their number
        group = await self._group(
            lambda: self._servers, asked.number, asked.problem, asked.prompt, self._failures,
            num_samples=self._config.sampling.group_size, seed=seed_of(self._config.seed, step + 1), index=index,
        )  # fmt: skip
        group = penalized(group, self._config)
        self._progress(min(count, 1 + sum(each.is_sampled for each in self._in_flight)), count)
        return group

    async def _group(
        self,
        servers: Callable[[], Sequence[Server]],
        number: int | None,
        problem: Problem,
        prompt: tuple[int, ...],
        failures: FailedScores,
        *,
        num_samples: int,
        seed: int,
        index: int,
        **other: float,
    ) -> Group:
        """Return a group, sampled and scored; `index` is its place among those that share `seed`."""
        completions: Sequence[Completion]
        results: Sequence[Score | FailedScore]
        if self._trajectories is not None:
            prompt, completions, results = await self._trajectories.group(
                servers, problem, num_samples=num_samples, seed=seed, index=index, **other
            )
        else:
            completions = await self._sampler.one(
                servers(), prompt, num_samples=num_samples, seed=seed, index=index, **other
            )
            results = await self._scorer.score(problem, [completion.text for completion in completions])
        results = [_checked(problem, *each) for each in zip(completions, results, strict=True)]
        failures.add(results)
        return _group(number, problem, prompt, completions, results)

    def _skip(self, count: int) -> None:
        """Let other groups take the place of those whose rewards are all equal, within the bound."""
        rollouts = self._config.rollouts
        if not rollouts.skip_without_signal:
            return
        for each in [each for each in self._in_flight if each.is_sampled]:
            group = each.task.result()
            if (
                len(set(group.turn_rewards or group.rewards)) < 2
                and len(self._own_skipped) < (rollouts.max_oversampling - 1) * count
            ):
                self._in_flight.remove(each)
                self._own_skipped.append(group)

    async def _stop(self, *, keep_sampled: bool) -> None:
        """End what is in flight; it begins again with the next step, but for what is kept."""
        ended = [each for each in self._in_flight if not (keep_sampled and each.is_sampled)]
        for each in ended:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in ended), return_exceptions=True)
        self._in_flight = [each for each in self._in_flight if each not in ended]
        self._again = [*ended, *self._again]

    def _failures_of(self, batch: str, num_groups: int, num_samples: int) -> FailedScores:
        return FailedScores(
            batch, num_completions=num_groups * num_samples, max_share=self._config.task.max_unscored_share
        )

    def _report(self, failures: FailedScores) -> None:
        failures.note(self._note, self._noted)
        for line in self._sampler.lacks:
            self._tell(line)

    def _tell(self, line: str) -> None:
        """Note a line, once."""
        if line not in self._noted:
            self._noted.add(line)
            self._note(line)


def _recipe(environment: Environment) -> Callable[[], Scores | Tools | Agent]:
    """Return what makes what scores completions in this process."""
    if isinstance(environment, WithTools):
        return environment.tools
    return environment.agent if isinstance(environment, WithAgent) else lambda: environment


def penalized(group: Group, config: TrainConfig) -> Group:
    """Lower the rewards of completions that end in the buffer before the longest length, or reach that.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    buffer, penalty = config.rollouts.overlong_buffer, config.rollouts.overlong_penalty
    if not buffer:
        return group
    begin = config.sampling.longest - buffer
    parts = tuple(-min(max(_length(each) - begin, 0) / buffer, 1.0) for each in group.completions)
    added = [penalty * part for part in parts]
    return replace(
        group,
        rewards=tuple(reward + more for reward, more in zip(group.rewards, added, strict=True)),
        turn_rewards=tuple(
            (*turns, last + more) for (*turns, last), more in zip(group.turn_rewards, added, strict=True)
        )
        if group.turn_rewards
        else (),
        reward_parts={**group.reward_parts, "overlong": parts},
    )


def _length(completion: Completion) -> int:
    """Return the tokens from the first sampled one on, of the longest sequence."""
    return max(len(one.token_ids) - (one.sampled or (True,)).index(True) for one in completion.sequences)


def _checked(problem: Problem, completion: Completion, result: Score | FailedScore) -> Score | FailedScore:
    """Return `result`, or why its rewards cannot be those of the completion's turns."""
    if isinstance(result, FailedScore) or not result.turns:
        return result
    if completion.others:
        what = f"a reward per turn for a run of {len(completion.sequences)} token sequences, expected one sequence"
        return failed(problem, completion.text, "a reward per turn for a run of several token sequences", what)
    if len(result.turns) == completion.num_turns:
        return result
    what = f"{len(result.turns)} rewards for {completion.num_turns} turns, expected one for each turn of the model"
    return failed(problem, completion.text, "another number of rewards than of turns", what)


def _group(
    number: int | None,
    problem: Problem,
    prompt: tuple[int, ...],
    completions: Sequence[Completion],
    results: Sequence[Score | FailedScore],
) -> Group:
    both = list(zip(completions, results, strict=True))
    scored = [(completion, result) for completion, result in both if isinstance(result, Score)]
    failed = [(completion, result) for completion, result in both if isinstance(result, FailedScore)]
    names = dict.fromkeys(name for _, score in scored for name in score.parts)
    by_turn = any(score.turns for _, score in scored) and not any(completion.others for completion, _ in scored)
    return Group(
        problem=problem,
        number=number,
        prompt_token_ids=prompt,
        completions=tuple(completion for completion, _ in scored),
        rewards=tuple(score.reward for _, score in scored),
        turn_rewards=tuple(_of_turns(*each) for each in scored) if by_turn else (),
        reward_parts={name: tuple(score.parts.get(name, 0.0) for _, score in scored) for name in names},
        unscored=tuple(Unscored(completion=completion, fault=failure.line) for completion, failure in failed),
    )


def _of_turns(completion: Completion, score: Score) -> tuple[float, ...]:
    """Return one reward per turn; a reward for the whole completion is that of its last turn."""
    return tuple(score.turns) or (*(0.0,) * (completion.num_turns - 1), score.reward)
