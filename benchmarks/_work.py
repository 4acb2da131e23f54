"""The task of `grpo.py`, which both sides work on: prompts of one length, and a reward that tells completions apart.

`bridge run --environment benchmarks/_work.py:Hashed` reads it as well as TRL's process does. Where nobody samples
(`train_step.py`) a batch of it can be made up.

Not covered: the model and its tokenizer, to which a letter is a token (`_models.py`).
"""

import math
import random
import string
import zlib
from collections.abc import Iterator

from bridge.types import Completion, Group, Problem

PROMPT_TOKENS = 120
NUM_PROMPTS = 512


def prompts() -> list[str]:
    """Return the prompts, always the same."""
    choose = random.Random(0)  # noqa: S311  a task, not a secret
    return ["".join(choose.choices(string.ascii_lowercase, k=PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]


def reward(completion: str) -> float:
    """Return a number from 0 to 1 that tells nothing: no group is without advantages, so that no token is left out."""
    return zlib.crc32(completion.encode()) / 2**32


class Hashed:
    """The task as an environment of Bridge's."""

    def __iter__(self) -> Iterator[Problem]:
        """Yield every prompt."""
        for prompt in prompts():
            yield {"prompt": prompt}

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward."""
        del problem
        return reward(completion)


def batch(vocabulary: int, num_completions: int, *, group: int, num_tokens: int) -> list[Group]:
    """Return a step's groups as if they had been sampled: random tokens, each as likely as any, and random rewards."""
    chance = random.Random(0)  # noqa: S311  the same

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.choices(range(vocabulary), k=count))

    def completion() -> Completion:
        logprobs = (-math.log(vocabulary),) * num_tokens
        return Completion(
            token_ids=tokens(num_tokens), logprobs=logprobs, text="", finish_reason="length", versions=(0,) * num_tokens
        )

    return [
        Group(
            problem={"prompt": ""},
            prompt_token_ids=tokens(PROMPT_TOKENS),
            completions=tuple(completion() for _ in range(group)),
            rewards=tuple(chance.random() for _ in range(group)),
        )
        for _ in range(num_completions // group)
    ]
