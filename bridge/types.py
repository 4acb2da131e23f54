"""Data classes that several packages share; nothing here imports torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Literal, NotRequired, Protocol, TypedDict, TypeVar, runtime_checkable

Result = TypeVar("Result")
"""The return value of a call that is forwarded, for example to other ranks or to another thread."""
Message = dict[str, Any]
"""One chat message: `role` and `content`. The content is text; with images, it is a list of text and image parts."""

Quantization = Literal["fp8_per_block", "fp8_per_channel"]
"""How a server may quantize its weights, under vLLM's names: FP8 with one scale per 128 x 128 block, or per row."""

FinishReason = Literal["stop", "length", "abort", "repetition"]
"""The finish reasons of vLLM 0.26 to 0.33, except `error`, which becomes HTTP status 500."""

LOGPROB_DIFF_EDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Edges of the histogram of log-prob mismatch, in nats; the first and last bins are open."""
NOT_SENT = {"is_sent": False}
"""Metadata of a field that is not sent to other ranks with the rest of its record (`bridge/ranks/messages.py`)."""
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
    hint: NotRequired[str]
    """Text that only a teacher sees, after the prompt: a solution, or advice."""
    answer: NotRequired[Any]
    """The reference that the environment's `score` compares a completion with, if it needs one."""


@runtime_checkable
class Environment(Protocol):
    """A task: problems to iterate over, and a score for a completion.

    The trainer iterates over it once per pass over the data, reads only as many problems as it needs, and shuffles each
    pass with a seed derived from the run's. An environment may add `held_out() -> list[Problem]`: problems kept for
    evaluation.
    """

    def __iter__(self) -> Iterator[Problem]:
        """Yield training problems, finitely many or without end, in the same order each time."""
        ...

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of one completion, a finite number."""
        ...


Interaction = Literal["completion", "tools", "agent"]
"""How a model answers a problem: in one completion, with tool calls, or as the model behind an agent."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment together with what a run needs to know about it."""

    problems: Callable[[], Iterator[Problem]]
    """Returns a new iterator over the training problems."""
    kept: Sequence[Problem] = ()
    """Problems held out for evaluation."""
    recipe: Callable[[], Any]
    """Builds the object that scores completions; called in each process that scores."""
    in_workers: bool = True
    """Whether `recipe` can be called in another process."""
    interaction: Interaction = "completion"
    schemas: tuple[Mapping[str, Any], ...] = ()
    """The JSON schema of each tool."""

    @classmethod
    def of(cls, environment: Environment) -> "Task":
        """Wrap an environment as a task that scores in this process; a task is returned unchanged."""
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
    """A tensor in a form that can be sent between processes."""

    name: str
    dtype: str
    """The dtype's name in torch, without the prefix `torch.`."""
    shape: tuple[int, ...]
    content: bytes = field(default=b"", metadata=NOT_SENT)
    """The tensor's bytes; empty if only another rank has them."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """The images of one prompt as the model's processor encoded them, so that server and trainer use the same bytes."""

    arrays: tuple[Array, ...]
    """The inputs of the model's vision tower, concatenated over all images."""
    starts: tuple[int, ...]
    """Index in the prompt at which each run of image tokens begins. A run is a whole image, or one of its rows."""
    grids: tuple[tuple[int, int, int], ...]
    """The size of each run in tokens: frames, rows and columns."""
    digest: str
    """A hash that tells different images apart when their prompts have the same token ids."""

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
    """Token ids, including the end-of-sequence token if it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the server's sampling distribution, in nats; NaN if unknown."""
    text: str
    """The decoded text without special tokens; with tools, each turn and each tool result starts on a new line."""
    finish_reason: FinishReason
    """Why the server stopped; `length` means that it was truncated."""
    versions: tuple[int | None, ...] = ()
    """Version of the weights that sampled each token, None if unknown; empty: unknown for all."""
    sampled: tuple[bool, ...] | None = None
    """Which tokens the model sampled; the others, such as tool results, are not trained on. None: all of them."""
    kept: tuple[tuple[float, int], ...] = ()
    """For each token, which part of the vocabulary top-k, top-p and min-p kept: a threshold between the logits of the
    last kept and the first dropped token, divided by the temperature, and the number of kept tokens. Empty if the
    filters were off."""
    experts: bytes = b""
    """For a mixture of experts, the experts that the server routed each token of prompt and completion to, except the
    last one: layer by layer, as little-endian int16; empty if unknown."""

    prompt_logprobs: tuple[float, ...] = ()
    """Log-probability of each prompt token, in nats, at temperature 1 and over the whole vocabulary; NaN for the first
    token. Empty if not requested."""

    tool_errors: int = 0
    """Number of tool calls that failed."""
    transcript: tuple[Mapping[str, Any], ...] = ()
    """With tools or an agent, all messages, with the fields of `turns` in `rollouts.jsonl`; otherwise empty."""
    others: tuple["Completion", ...] = ()
    """Further token sequences of the same agent run. All of them share one reward, which counts once."""

    @property
    def sequences(self) -> tuple["Completion", ...]:
        return (self, *self.others)

    @property
    def num_sampled(self) -> int:
        own = len(self.token_ids) if self.sampled is None else sum(self.sampled)
        return own + sum(other.num_sampled for other in self.others)

    @property
    def turns(self) -> tuple[int | None, ...]:
        """Return the turn index of each token. A turn is a run of consecutive sampled tokens; other tokens get None."""
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
    """Why the completion has no reward, on one line."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one prompt: C completions of a prompt of P tokens, with their rewards.

        problem             the problem's dictionary, or {"prompt": the prompt}
        prompt_token_ids    P token ids, as sent to the server
        completions         C `Completion`s
        rewards             C finite numbers
        advantages          C tuples of one number, or of one per token; None: computed from the rewards by `samples`

    Frozen: `with_advantages` returns a copy with advantages of your own.
    """

    problem: Problem
    number: int | None = None
    """Index of the problem in the run's endless order; None if it is held out or comes from an external source."""
    prompt_token_ids: tuple[int, ...]
    """The prompt as sent to the server; for a group from an external source, the prefix that its sequences share."""
    images: Images | None = None
    """The prompt's images, as sent to the server."""
    teacher_prompt_token_ids: tuple[int, ...] = ()
    """The prompt as a teacher sees it, with the problem's hint; empty: there is no hint."""
    completions: tuple[Completion, ...]
    """The sampled completions that have a reward; there may be none."""
    rewards: tuple[float, ...]
    """One finite reward per completion."""
    advantages: tuple[tuple[float, ...], ...] | None = None
    """For each completion one advantage, or one per token; None: the trainer computes them from the rewards."""
    zero_advantage: tuple[bool, ...] = ()
    """Whether each completion gets an advantage of zero regardless of its reward; empty: none does.

    The reward of such a completion still counts toward the advantages of the other completions.
    """
    reward_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """If the reward is a weighted sum: name of each part -> its unweighted value for each completion, NaN where the
    part does not apply."""
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """For each completion one reward per turn; they sum to the completion's reward. Empty without per-turn rewards."""
    unscored: tuple[Unscored, ...] = ()
    """Sampled completions that are left out because scoring them failed."""

    def with_advantages(self, advantages: Iterable[Any]) -> "Group":
        """Return a copy with these advantages: one number for each completion, or one per token.

        Raises:
            ValueError: one of them is not a number.
        """
        return replace(self, advantages=tuple(map(_numbers, advantages)))


def _numbers(value: Any) -> tuple[float, ...]:
    """Return a number, or one per token, as floats. Text is refused: the bytes of `b"1"` would be the number 49."""
    several = value if _is_several(value) else (value,)
    try:
        if any(isinstance(number, str | bytes) for number in (value, *several)):
            raise TypeError
        return tuple(map(float, several))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an advantage is {str(value)[:60]!r}, expected a number, or one number per token") from error


def _is_several(value: object) -> bool:
    """Return whether `value` holds one number per token; a zero-dimensional array or tensor is a single number."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


@dataclass(frozen=True, kw_only=True)
class TrainedProblems:
    """The problems that a run has trained on, by their indices in its endless order."""

    below: int = 0
    """All problems with an index below this one are included."""
    beyond: frozenset[int] = frozenset()
    """Indices of further problems, which were trained on before an earlier one."""

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def including(self, numbers: Iterable[int]) -> "TrainedProblems":
        below = self.below
        beyond = self.beyond.union(numbers)
        while below in beyond:
            below += 1
        return TrainedProblems(below=below, beyond=frozenset(number for number in beyond if number >= below))
