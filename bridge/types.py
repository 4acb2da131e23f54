"""Plain records that cross package borders, free of torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Literal, NotRequired, Protocol, TypedDict, TypeVar, runtime_checkable

Result = TypeVar("Result")
"""What a call returns that is passed on, such as to other ranks or another thread."""
Message = dict[str, Any]
"""One chat message: `role`, and `content`, which is text, or with images a list of parts of text and of images."""

Quantization = Literal["fp8_per_block", "fp8_per_channel"]
"""What a server may make of its weights, in vLLM's words: FP8 with a scale for each 128 x 128 elements, or each row."""

FinishReason = Literal["stop", "length", "abort", "repetition"]
"""The reasons of vLLM 0.26 to 0.33 except `error`, which becomes an HTTP status of 500."""

LOGPROB_DIFF_EDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Edges of the histogram of log-prob mismatch, in nats; the first and last bins are open."""
NOT_SENT = {"is_sent": False}
"""Metadata of a field that other ranks do not get with the rest of a record (`bridge/ranks/messages.py`)."""
HEALTHY_NATS = (0.013, 0.024)
"""Mean log-prob mismatch between vLLM and transformers in bf16 that comes from rounding alone."""


class Problem(TypedDict):
    """One problem of an environment, which may add its own keys."""

    prompt: str | list[Message]
    """Text, or chat messages that the model's chat template renders."""
    prompt_token_ids: NotRequired[Sequence[int]]
    """The prompt's token ids, for `Policy.sample`: they are sent instead of `prompt`."""
    plain_prompt: NotRequired[str]
    """Chat messages as text, for a model without a chat template."""
    images: NotRequired[list[str]]
    """Paths of images, in the order in which the prompt has them."""
    answer: NotRequired[Any]
    """What the environment's `score` compares with, if anything."""


@runtime_checkable
class Environment(Protocol):
    """A task: problems to iterate over, and a score for a completion.

    It is iterated once per pass over the data, only as far as problems are needed; the trainer shuffles each pass with
    its own seed. An environment may add `held_out() -> list[Problem]`: problems kept for evaluation.
    """

    def __iter__(self) -> Iterator[Problem]:
        """Yield training problems, finitely many or without end, in the same order each time."""
        ...

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of one completion, a finite number."""
        ...


Interaction = Literal["completion", "tools", "agent"]
"""How a model answers a problem: in one completion, with calls of tools, or as the model of an agent."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment as a run uses it."""

    problems: Callable[[], Iterator[Problem]]
    """Starts a pass over the training problems."""
    kept: Sequence[Problem] = ()
    """Problems held out for evaluation."""
    recipe: Callable[[], Any]
    """Makes what scores completions, in each process that scores."""
    in_workers: bool = True
    """Whether other processes can run the recipe."""
    interaction: Interaction = "completion"
    schemas: tuple[Mapping[str, Any], ...] = ()
    """The JSON schema of each tool."""

    @classmethod
    def of(cls, environment: Environment) -> "Task":
        """Return an environment as a task, which scores in this process unless it is one already."""
        if isinstance(environment, Task):
            return environment
        kept = list(getattr(environment, "held_out", list)())
        return cls(problems=environment.__iter__, kept=kept, recipe=lambda: environment, in_workers=False)

    def __iter__(self) -> Iterator[Problem]:
        return self.problems()

    def held_out(self) -> list[Problem]:
        return list(self.kept)

    def score(self, problem: Problem, completion: str) -> float:
        return self._scores.score(problem, completion)  # type: ignore[no-any-return]

    @cached_property
    def _scores(self) -> Any:
        return self.recipe()


@dataclass(frozen=True, kw_only=True)
class Array:
    """A tensor that can be sent."""

    name: str
    dtype: str
    """As torch writes it, without `torch.`."""
    shape: tuple[int, ...]
    content: bytes = field(default=b"", metadata=NOT_SENT)
    """Its bytes; empty: another rank has them."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """The images of one prompt as the model's processor made them: server and trainer compute with the same bytes."""

    arrays: tuple[Array, ...]
    """What the model's vision tower takes, for all images one after the other."""
    starts: tuple[int, ...]
    """Where each run of image tokens begins in the prompt: an image is one, or each of its rows."""
    grids: tuple[tuple[int, int, int], ...]
    """How many tokens each run has: in time, in rows and in columns."""
    digest: str
    """Distinguishes images whose prompts have the same token ids."""

    @classmethod
    def of(
        cls, arrays: tuple[Array, ...], *, starts: tuple[int, ...], grids: tuple[tuple[int, int, int], ...]
    ) -> "Images":
        digest = blake2b(digest_size=16)
        for array in arrays:
            digest.update(f"{array.name} {array.dtype} {array.shape} ".encode())
            digest.update(array.content)
        return cls(arrays=arrays, starts=starts, grids=grids, digest=digest.hexdigest())

    @property
    def is_here(self) -> bool:
        """Whether this rank has the bytes."""
        return all(array.content for array in self.arrays)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion of T tokens.

    token_ids        T token ids, the end-of-sequence token included if it was sampled
    logprobs         T log-probabilities under the server's sampling distribution, in nats; NaN if unknown
    versions         T versions of the weights that sampled each token, None if unknown
    text             the decoded text, without special tokens
    finish_reason    "stop", or "length" if it was truncated
    """

    token_ids: tuple[int, ...]
    """Its tokens, including the end-of-sequence token if it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the server's sampling distribution, in nats; NaN if unknown."""
    text: str
    """The decoded completion without special tokens; with tools, every turn and every answer on lines of its own."""
    finish_reason: FinishReason
    """Why the server stopped; `length` means that it was truncated."""
    versions: tuple[int | None, ...] = ()
    """Version of the weights that sampled each token, None if unknown; empty: unknown for all."""
    sampled: tuple[bool, ...] | None = None
    """Which tokens the model sampled; others, such as a tool's answer, are not trained on. Absent: all."""
    kept: tuple[tuple[float, int], ...] = ()
    """What top-k, top-p and min-p kept of the vocabulary for each token: a threshold between the logit of the last kept
    word and that of the next, over the temperature, and the number of kept words; empty: they were off."""
    experts: bytes = b""
    """Of a mixture of experts, which ones the server sent each token of prompt and completion to, but for the last:
    layer by layer, little-endian int16; empty: unknown."""

    prompt_logprobs: tuple[float, ...] = ()
    """Log-probability of each token of the prompt, in nats, at temperature 1 and over the whole vocabulary; the first
    one is NaN. Empty: not requested."""

    tool_errors: int = 0
    """Calls of tools that failed."""
    transcript: tuple[Mapping[str, Any], ...] = ()
    """With tools or an agent, every message of its text, with the fields of `turns` in `rollouts.jsonl`; else empty."""
    others: tuple["Completion", ...] = ()
    """Further token sequences of the same run of an agent; they share its reward, and it counts once."""

    @property
    def sequences(self) -> tuple["Completion", ...]:
        return (self, *self.others)

    @property
    def num_sampled(self) -> int:
        own = len(self.token_ids) if self.sampled is None else sum(self.sampled)
        return own + sum(other.num_sampled for other in self.others)

    @property
    def turns(self) -> tuple[int | None, ...]:
        """Return the index of each token's turn; a turn is a run of sampled tokens, other tokens have None."""
        flags = (True,) * len(self.token_ids) if self.sampled is None else self.sampled
        begun = accumulate(own and not before for before, own in pairwise((False, *flags)))
        return tuple(number - 1 if own else None for number, own in zip(begun, flags, strict=True))

    @property
    def num_turns(self) -> int:
        return len({*self.turns} - {None}) + sum(other.num_turns for other in self.others)


@dataclass(frozen=True, kw_only=True)
class Unscored:
    """A completion without a reward."""

    completion: Completion
    fault: str
    """Why it has no reward, on one line."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one prompt: C completions of a prompt of P tokens, with their rewards.

        problem             the dictionary that was sampled for, or {"prompt": the prompt}
        prompt_token_ids    P token ids, as sent to the server
        completions         C `Completion`s
        rewards             C finite numbers
        advantages          C tuples of one number, or of one per token; None: computed from the rewards by `samples`

    Frozen: `with_advantages` returns a copy with advantages of your own.
    """

    problem: Problem
    number: int | None = None
    """Index of the problem in the run's endless order; None if it is held out or comes from elsewhere."""
    prompt_token_ids: tuple[int, ...]
    """The prompt as sent to the server; for a group from elsewhere, the prefix that its sequences share."""
    images: Images | None = None
    """The prompt's images, as sent to the server."""
    completions: tuple[Completion, ...]
    """The sampled completions that have a reward; there may be none."""
    rewards: tuple[float, ...]
    """One finite reward per completion."""
    advantages: tuple[tuple[float, ...], ...] | None = None
    """For each completion one advantage, or one per token; absent: the trainer computes them from the rewards."""
    zero_advantage: tuple[bool, ...] = ()
    """Whether each completion gets an advantage of zero whatever its reward; empty: none does.

    Its reward still counts for the advantages of the others.
    """
    reward_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """If the reward is a weighted sum: name of each part -> one unweighted value per completion, NaN where it
    does not apply."""
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """For each completion one reward per turn, of which its reward is the sum; empty: none has them."""
    unscored: tuple[Unscored, ...] = ()
    """Sampled completions that are left out because their score failed."""

    def with_advantages(self, advantages: Iterable[Any]) -> "Group":
        """Return a copy with these advantages: for each completion a number, or one number per token."""
        own = tuple(tuple(map(float, value)) if _is_several(value) else (float(value),) for value in advantages)
        return replace(self, advantages=own)


def _is_several(value: object) -> bool:
    """Return whether `value` holds numbers per token; an array or tensor without dimensions is one number."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


@dataclass(frozen=True, kw_only=True)
class TrainedProblems:
    """The problems that a run has trained on, by their numbers in its endless order."""

    below: int = 0
    """All problems with a smaller number are included."""
    beyond: frozenset[int] = frozenset()
    """The others, trained on ahead of an earlier one."""

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def including(self, numbers: Iterable[int]) -> "TrainedProblems":
        below = self.below
        beyond = self.beyond.union(numbers)
        while below in beyond:
            below += 1
        return TrainedProblems(below=below, beyond=frozenset(number for number in beyond if number >= below))
