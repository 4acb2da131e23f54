"""The stream of a run's own environment: samples its problems in order, and scores the completions.

A step's groups are sampled together, and none is in flight between two steps. Each is scored as soon as it arrives,
while others are still being sampled.
"""

from collections.abc import Callable, Sequence
from itertools import count, islice

from bridge.config import TrainConfig
from bridge.rollouts import problems
from bridge.rollouts.openai_api import Vocabulary
from bridge.rollouts.sampler import Sampler, seed_of
from bridge.scoring.score import FailedScore, FailedScores, Score, Scores
from bridge.scoring.scorer import Scorer
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Environment, Group, Problem, TrainedProblems, Unscored
from bridge.weights import skeleton

EVALUATION = 2**31
"""Takes the place of the step in an evaluation's seed: larger than any step, so that no rollout is repeated."""

Numbered = tuple[int | None, Problem]
"""A problem with its number in the endless order; None if it is held out."""


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
    ) -> None:
        """Prepare everything that needs no server.

        `recipe` makes what scores, in worker processes; without it, `environment` scores in this process. `note` gets
        each warning once, and `progress` the number of groups scored so far and in all.

        Raises:
            RewardError: the environment has nothing to evaluate on, or the recipe cannot be pickled.
            UsageError: the model has no tokenizer.
        """
        self.num_retries = 0
        self._config, self._note, self._noted, self._progress = config, note, set[str](), progress
        self._tokenizer = skeleton.tokenizer(config.model_name)
        self._held_out = problems.held_out(environment) if config.evaluation.samples else []
        self._order = enumerate(problems.endless(environment, config.seed))
        self._trained = TrainedProblems()
        self._step, self._drawn = 0, list[Numbered]()
        self._earlier_retries = 0
        """Requests that were sent again before this step."""
        self._scorer = Scorer(
            recipe or (lambda: environment),
            processes=config.task.reward_processes if recipe else 0,
            timeout_s=config.task.reward_timeout_s,
        )
        self._sampler = Sampler(config.sampling, ids_of=Vocabulary(self._tokenizer))

    def served(self, endpoint: Endpoint, version: int) -> None:  # noqa: ARG002  nothing in flight can become stale
        self._endpoint = endpoint

    def resume(self, trained: TrainedProblems) -> None:
        self._trained = trained

    def take(self, count: int, *, step: int) -> list[Group]:
        """Sample and score the next `count` problems; a repeated step gets the same problems and seeds.

        Raises:
            BridgeError: a server cannot be sampled from.
            RewardError: too many completions have no reward, or the problems cannot be read.
        """
        if step != self._step:
            untrained = (pair for pair in self._order if pair[0] not in self._trained)
            self._drawn, self._step = list(islice(untrained, count)), step
            self._earlier_retries = self._sampler.num_retries
        seed = seed_of(self._config.seed, step)
        try:
            return self._roll_out(self._drawn, self._config.sampling.group_size, seed=seed, batch=f"step {step}")
        finally:
            self.num_retries = self._sampler.num_retries - self._earlier_retries

    def evaluate(self, *, step: int) -> list[Group] | None:
        """Sample and score the held-out problems, with the same seeds each time."""
        if not self._held_out:
            return None
        pairs, seed = [(None, problem) for problem in self._held_out], seed_of(self._config.seed, EVALUATION)
        return self._roll_out(pairs, self._config.evaluation.samples, seed=seed, batch=f"evaluation after step {step}")

    def close(self) -> None:
        try:
            self._sampler.close()
        finally:
            self._scorer.close()

    def _roll_out(self, pairs: Sequence[Numbered], num_samples: int, *, seed: int, batch: str) -> list[Group]:
        prompts = [problems.encode(self._tokenizer, problem) for _, problem in pairs]
        failures = FailedScores(
            batch, num_completions=len(pairs) * num_samples, max_share=self._config.task.max_unscored_share
        )
        num_scored = count(1)

        async def scored(index: int, completions: Sequence[Completion]) -> Group:
            number, problem = pairs[index]
            results = await self._scorer.score(problem, [completion.text for completion in completions])
            failures.add(results)
            self._progress(next(num_scored), len(pairs))
            return _group(number, problem, prompts[index], completions, results)

        groups = self._sampler.run(
            self._sampler.each([self._endpoint], prompts, scored, num_samples=num_samples, seed=seed)
        )
        failures.note(self._note, self._noted)
        for line in self._sampler.lacks:
            if line not in self._noted:
                self._noted.add(line)
                self._note(line)
        return groups


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
    return Group(
        problem=problem,
        number=number,
        prompt_token_ids=prompt,
        completions=tuple(completion for completion, _ in scored),
        rewards=tuple(score.reward for _, score in scored),
        reward_parts={name: tuple(score.parts.get(name, 0.0) for _, score in scored) for name in names},
        unscored=tuple(Unscored(completion=completion, fault=failure.line) for completion, failure in failed),
    )
