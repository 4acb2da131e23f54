"""The task of both sides of `grpo.py`: prompts of equal length, and a reward that distinguishes completions.

`bridge run --environment benchmarks/_work.py:Hashed` and TRL's process use it. `turns.py` adds a tool, and
`train_step.py` makes up a batch of it. The model, whose tokenizer has one token per letter, is in `_models.py`.
"""

import math
import random
import string
import time
import zlib
from collections.abc import Iterator
from typing import Any

from bridge.types import Completion, Group, Problem

PROMPT_TOKENS = 120
ANSWER_TOKENS = 100
NUM_PROMPTS = 512


def prompts() -> list[str]:
    """Return the prompts, which are always the same."""
    choose = random.Random(0)  # noqa: S311  a task, not a secret
    return ["".join(choose.choices(string.ascii_lowercase, k=PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]


def reward(completion: str) -> float:
    """Return a hash between 0 and 1, so that every group has nonzero advantages."""
    return zlib.crc32(completion.encode()) / 2**32


class Hashed:
    """The task as an environment."""

    def __iter__(self) -> Iterator[Problem]:
        for prompt in prompts():
            yield {"prompt": prompt}

    def score(self, problem: Problem, completion: str) -> float:
        del problem
        return reward(completion)


class Waiting(Hashed):
    """The same task with a tool."""

    def reset(self, **_: Any) -> None:
        """Do nothing, since calls do not depend on earlier ones."""

    def wait(self, seconds: float) -> str:
        """Wait, and return an answer of `ANSWER_TOKENS` letters.

        Args:
            seconds: Time to wait.
        """
        time.sleep(seconds)
        return "a" * ANSWER_TOKENS


def batch(vocabulary: int, num_completions: int, *, group: int, num_tokens: int) -> list[Group]:
    """Return made-up groups for a step, with uniformly random tokens and rewards."""
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
