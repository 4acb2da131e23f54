"""What is learnt from: problems in their order, completions of them by the server, and their rewards.

Not covered: the order itself and prompts as token ids (`data.py`), the endpoint (`bridge/rollouts`), what a reward
is (`environments`).
"""

import hashlib
import statistics
from collections.abc import Callable, Sequence
from itertools import islice

from bridge.config import TrainConfig
from bridge.rewards.scoring import score_all
from bridge.rollouts.endpoint import Endpoint
from bridge.rollouts.sampler import Sampler
from bridge.rollouts.vocabulary import Vocabulary
from bridge.training import data
from bridge.types import Environment, Group, Problem
from bridge.weights import skeleton

EVALUATION_SEED = 2**31
"""Far from the seeds of the steps, so that no evaluation repeats a rollout."""


class Experience:
    """One run's problems, and how they are sampled and scored."""

    def __init__(self, config: TrainConfig, environment: Environment, tell: Callable[[str], None]) -> None:
        """Prepare everything that needs no server; `tell` hears once of each thing that an endpoint lacks.

        Raises:
            RewardError: the environment cannot be evaluated on, as it should be.
            UsageError: the model has no tokenizer.
        """
        self.num_drawn = 0
        """Problems taken so far."""
        self.num_retries = 0
        """Requests of the last step that were sent again."""
        self._config, self._environment, self._tell = config, environment, tell
        self._tokenizer = skeleton.tokenizer(config.model_name)
        self._vocabulary = Vocabulary(self._tokenizer)
        self._held_out = data.held_out(environment) if config.eval_samples else []
        self._problems = data.endless(list(environment), config.seed)
        self._told: set[str] = set()

    def draw(self, count: int) -> list[Problem]:
        """Take the next problems."""
        self.num_drawn += count
        return list(islice(self._problems, count))

    def groups(self, endpoint: Endpoint, problems: Sequence[Problem], *, step: int) -> list[Group]:
        """Sample and score the completions of one step, always with the same seeds.

        Raises:
            BridgeError: as sampling and scoring do.
        """
        return self._roll_out(endpoint, problems, self._config.group_size, seed=self._config.seed + step)

    def evaluate(self, endpoint: Endpoint) -> float | None:
        """Return the mean reward of the held-out problems, sampled as in training; None where none are wanted."""
        if not self._held_out:
            return None
        seed = self._config.seed + EVALUATION_SEED
        groups = self._roll_out(endpoint, self._held_out, self._config.eval_samples, seed=seed)
        return statistics.fmean(reward for group in groups for reward in group.rewards)

    def _roll_out(self, endpoint: Endpoint, problems: Sequence[Problem], num_samples: int, *, seed: int) -> list[Group]:
        prompts = [data.encode(self._tokenizer, problem) for problem in problems]
        sampler = Sampler(
            endpoint,
            max_new_tokens=self._config.max_new_tokens,
            temperature=self._config.temperature,
            timeout_s=self._config.request_timeout_s,
            ids_of=self._vocabulary,
        )
        completions = sampler.sample(prompts, num_samples=num_samples, seed=seed)
        for line in sampler.lacks:
            if line not in self._told:
                self._told.add(line)
                self._tell(line)
        return [
            Group(
                problem=problem,
                prompt_token_ids=prompt,
                completions=group,
                rewards=score_all(self._environment, problem, [completion.text for completion in group]),
            )
            for problem, prompt, group in zip(problems, prompts, completions, strict=True)
        ]


def digest(groups: Sequence[Group]) -> str:
    """Return 16 hexadecimal digits for every sampled token id, in their order."""
    sampled = [completion.token_ids for group in groups for completion in group.completions]
    return hashlib.sha256(repr(sampled).encode()).hexdigest()[:16]
