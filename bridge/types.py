"""Plain records that cross package borders, free of torch.

Not covered: what a person configures (`config.py`) and what a server exports (`weights/manifest.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

Message = dict[str, str]
"""One chat message: `role` and `content`."""

FinishReason = Literal["stop", "length", "abort", "repetition"]
"""What vLLM 0.26 to 0.33 answer; its fifth reason, `error`, always becomes an HTTP status of 500."""


LOGPROB_DIFF_EDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Edges of the histogram of log-prob mismatch, in nats: the first bin lies below the first, the last above the last."""
HEALTHY_NATS = (0.013, 0.024)
"""Mean log-prob mismatch that rounding alone makes, between vLLM and transformers in bf16."""


class Problem(TypedDict):
    """One problem of an environment; every further key is the environment's own."""

    prompt: str | list[Message]
    """Text, or chat messages that the model's chat template renders."""
    plain_prompt: NotRequired[str]
    """The prompt as text, for a model without a chat template, where `prompt` is chat messages."""
    answer: NotRequired[Any]
    """What the environment's `score` compares with, if it needs anything."""


@runtime_checkable
class Environment(Protocol):
    """A task: problems to iterate over, and a score for a completion.

    Iterated once per pass over the data, no further than problems are needed; the trainer shuffles each pass by its own
    seed. An environment may add `held_out() -> list[Problem]`: problems kept from training, for evaluation.
    """

    def __iter__(self) -> Iterator[Problem]:
        """Yield training problems, each once or without an end, in the same order whenever it is called."""
        ...

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of one completion, a finite number."""
        ...


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion, as the server returned it."""

    token_ids: tuple[int, ...]
    """The sampled tokens, the end-of-sequence token included when it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the server's sampling distribution, in nats; NaN where unknown."""
    text: str
    """The decoded completion without special tokens."""
    finish_reason: FinishReason
    """Why the server stopped; `length` means that it was truncated."""
    weight_version: int | None
    """Version of the weights that made it; None if the server tells none or several made it."""
    sampled: tuple[bool, ...] | None = None
    """Which of the tokens the model sampled; the others, such as a tool's answer, are not trained on. Absent: all."""

    @property
    def num_sampled(self) -> int:
        """Return how many of the tokens the model sampled."""
        return len(self.token_ids) if self.sampled is None else sum(self.sampled)


@dataclass(frozen=True, kw_only=True)
class Unscored:
    """A completion without a reward."""

    completion: Completion
    """What was to be scored."""
    fault: str
    """What its score did instead, in one line."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one prompt."""

    problem: Problem
    """What was asked."""
    prompt_token_ids: tuple[int, ...]
    """The prompt as it was sent to the server; what a group has in common, where it came from elsewhere."""
    completions: tuple[Completion, ...]
    """The sampled completions that have a reward; there may be none."""
    rewards: tuple[float, ...]
    """One finite reward per completion, in the same order."""
    advantages: tuple[tuple[float, ...], ...] | None = None
    """Advantages from outside, taken as they are: per completion one for each of its tokens, or one for all of them.

    Absent: they come from the rewards.
    """
    reward_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Where the reward is a sum of several: name of each -> one per completion, before its weight."""
    unscored: tuple[Unscored, ...] = ()
    """Completions that were sampled and are not in the group, since their score failed."""
