"""Plain records that cross package borders, free of torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

Message = dict[str, str]
"""One chat message: `role` and `content`."""

FinishReason = Literal["stop", "length", "abort", "repetition"]
"""The reasons of vLLM 0.26 to 0.33 but `error`, which always becomes an HTTP status of 500."""


LOGPROB_DIFF_EDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Edges of the histogram of log-prob mismatch, in nats: the first bin lies below the first, the last above the last."""
HEALTHY_NATS = (0.013, 0.024)
"""Mean log-prob mismatch that rounding alone makes, between vLLM and transformers in bf16."""


class Problem(TypedDict):
    """One problem of an environment, which may add keys of its own."""

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
        """Yield training problems, finitely many or without end, in the same order each time."""
        ...

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of one completion, a finite number."""
        ...


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion."""

    token_ids: tuple[int, ...]
    """The tokens, the end-of-sequence token included when it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the server's sampling distribution, in nats; NaN where unknown."""
    text: str
    """The decoded completion without special tokens."""
    finish_reason: FinishReason
    """Why the server stopped; `length` means that it was truncated."""
    versions: tuple[int | None, ...] = ()
    """Version of the weights that sampled each token, None where it is unknown; empty: unknown for all."""
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
    """Why it has no reward, in one line."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one prompt."""

    problem: Problem
    """The problem, as its environment wrote it."""
    number: int | None = None
    """Place of the problem in the run's endless order, from 0; None if it is held out or comes from elsewhere."""
    prompt_token_ids: tuple[int, ...]
    """The prompt as it was sent to the server; for a group from elsewhere, the tokens that its sequences share."""
    completions: tuple[Completion, ...]
    """The sampled completions that have a reward; there may be none."""
    rewards: tuple[float, ...]
    """One finite reward per completion, in the same order."""
    advantages: tuple[tuple[float, ...], ...] | None = None
    """Advantages, one per token or a single one for each completion; absent: the trainer computes them from rewards."""
    zero_advantage: tuple[bool, ...] = ()
    """Which completions get an advantage of zero whatever their reward, one flag for each; empty: none.

    Their rewards still count for the advantages of the others.
    """
    reward_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Where the reward is a weighted sum: name of each part -> one value per completion, unweighted."""
    unscored: tuple[Unscored, ...] = ()
    """Completions that were sampled and are not in the group, because their score failed."""


@dataclass(frozen=True, kw_only=True)
class TrainedProblems:
    """The problems that a run has trained on, by their numbers in its endless order."""

    below: int = 0
    """All problems with a smaller number are among them."""
    beyond: frozenset[int] = frozenset()
    """The others, which were trained on ahead of an earlier one."""

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def including(self, numbers: Iterable[int]) -> "TrainedProblems":
        """Return the set with more problems in it."""
        below, beyond = self.below, self.beyond.union(numbers)
        while below in beyond:
            below += 1
        return TrainedProblems(below=below, beyond=frozenset(number for number in beyond if number >= below))
