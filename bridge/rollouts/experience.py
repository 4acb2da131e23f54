"""What is learnt from: problems in their order, completions of them by the server, and their rewards.

Each group is scored as soon as it arrives, while the others are still sampled.

Not covered: the order itself and prompts as token ids (`data.py`), sampling (`bridge/rollouts`), scoring
(`bridge/scoring`), what a reward is (`environments`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count, islice

from bridge.config import TrainConfig
from bridge.rollouts import data
from bridge.rollouts.sampler import Sampler, seed_of
from bridge.rollouts.vocabulary import Vocabulary
from bridge.run import measuring
from bridge.run.metrics import Evaluation
from bridge.scoring.faults import Faults
from bridge.scoring.scorer import Scorer
from bridge.scoring.scoring import Fault, Score, Scores
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Environment, Group, Problem, Unscored
from bridge.weights import skeleton

EVALUATION = 2**31
"""Takes the place of the step in an evaluation's seed: far from any step, so that no evaluation repeats a rollout."""


class Experience:
    """One run's problems, and how they are sampled and scored."""

    def __init__(
        self,
        config: TrainConfig,
        environment: Environment,
        tell: Callable[[str], None],
        *,
        recipe: Callable[[], Scores] | None = None,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Prepare everything that needs no server; `tell` hears once of each thing that an endpoint lacks.

        What scores is made by `recipe` in processes of its own; without one, `environment` scores, in this process.
        `progress` hears how many groups of a batch are scored, of how many.

        Raises:
            RewardError: the environment cannot be evaluated on, as it should be, or the recipe cannot be pickled.
            UsageError: the model has no tokenizer.
        """
        self.num_drawn = 0
        """Problems taken so far."""
        self.num_retries = 0
        """Requests of the last step that were sent again."""
        self._config, self._tell, self._told, self._progress = config, tell, set[str](), progress
        self._step = 0
        """The step that was sampled last."""
        self._tokenizer = skeleton.tokenizer(config.model_name)
        self._held_out = data.held_out(environment) if config.eval_samples else []
        self._problems = data.endless(environment, config.seed)
        self._sampler = Sampler(
            max_new_tokens=config.sampling.longest,
            temperature=config.temperature,
            timeout_s=config.request_timeout_s,
            max_retries=config.max_retries,
            max_concurrency=config.max_concurrency,
            ids_of=Vocabulary(self._tokenizer),
        )
        self._scorer = Scorer(
            recipe or (lambda: environment),
            processes=config.reward_processes if recipe else 0,
            timeout_s=config.reward_timeout_s,
        )

    def draw(self, count: int) -> list[Problem]:
        """Take the next problems."""
        self.num_drawn += count
        return list(islice(self._problems, count))

    def groups(self, endpoint: Endpoint, problems: Sequence[Problem], *, step: int) -> list[Group]:
        """Sample and score the completions of one step, always with the same seeds.

        Nothing is kept of a call that failed: the next one samples all of the step.

        Raises:
            BridgeError: as sampling does.
            RewardError: too many completions have no reward.
        """
        before = self._sampler.num_retries - (self.num_retries if step == self._step else 0)
        self._step = step
        try:
            seed = seed_of(self._config.seed, step)
            return self._roll_out(endpoint, problems, self._config.group_size, seed=seed, batch=f"step {step}")
        finally:
            self.num_retries = self._sampler.num_retries - before

    def evaluate(self, endpoint: Endpoint, *, step: int, version: int) -> Evaluation | None:
        """Sample and score the held-out problems, with the same seeds each time; None where none are wanted.

        Raises:
            BridgeError: as `groups` does.
        """
        if not self._held_out:
            return None
        start, seed = time.perf_counter(), seed_of(self._config.seed, EVALUATION)
        batch = f"evaluation after step {step}"
        groups = self._roll_out(endpoint, self._held_out, self._config.eval_samples, seed=seed, batch=batch)
        return measuring.evaluation(groups, step=step, version=version, seconds=time.perf_counter() - start)

    def close(self) -> None:
        """End the connections, and the processes that score."""
        try:
            self._sampler.close()
        finally:
            self._scorer.close()

    def _roll_out(
        self, endpoint: Endpoint, problems: Sequence[Problem], num_samples: int, *, seed: int, batch: str
    ) -> list[Group]:
        prompts = [data.encode(self._tokenizer, problem) for problem in problems]
        num_completions = len(problems) * num_samples
        faults = Faults(batch, num_completions=num_completions, max_share=self._config.max_unscored_share)

        number = count(1)

        async def scored(index: int, completions: Sequence[Completion]) -> Group:
            group = await self._scored(problems[index], prompts[index], completions, faults)
            self._progress(next(number), len(problems))
            return group

        async def roll_out() -> list[Group]:
            found: dict[int, asyncio.Task[Group]] = {}
            async with _tasks() as tasks:
                arriving = self._sampler.stream([endpoint], prompts, num_samples=num_samples, seed=seed)
                async for index, completions in arriving:
                    found[index] = tasks.create_task(scored(index, completions))
            return [found[index].result() for index in range(len(problems))]

        groups = self._sampler.run(roll_out())
        faults.tell(self._tell, self._told)
        for line in self._sampler.lacks:
            if line not in self._told:
                self._told.add(line)
                self._tell(line)
        return groups

    async def _scored(
        self, problem: Problem, prompt: tuple[int, ...], completions: Sequence[Completion], faults: Faults
    ) -> Group:
        results = await self._scorer.score(problem, [completion.text for completion in completions])
        faults.add(results)
        pairs = list(zip(completions, results, strict=True))
        scored = [(completion, result) for completion, result in pairs if isinstance(result, Score)]
        failed = [(completion, result) for completion, result in pairs if isinstance(result, Fault)]
        names = dict.fromkeys(name for _, score in scored for name in score.parts)
        return Group(
            problem=problem,
            prompt_token_ids=prompt,
            completions=tuple(completion for completion, _ in scored),
            rewards=tuple(score.reward for _, score in scored),
            reward_parts={name: tuple(score.parts.get(name, 0.0) for _, score in scored) for name in names},
            unscored=tuple(Unscored(completion=completion, fault=fault.line) for completion, fault in failed),
        )


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Give a group of tasks in which whatever fails ends the rest, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        failed = group.exceptions[0]
    else:
        return
    raise failed
