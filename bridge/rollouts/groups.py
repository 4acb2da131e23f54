"""The interface of rollout streams, and how the completions of a problem become a group.

Streams are in `stream.py` and `bridge/atropos/atropos_stream.py`; a run opens the one that `--rollouts` names. A
`GroupSampler` turns a problem into a group. The simplest one is `Completions`, which samples single-turn completions;
the others are in `bridge/agents`.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from bridge.config import RolloutConfig
from bridge.errors import BridgeError, RejectedRequestError, RewardError
from bridge.rollouts.encoded_prompts import Prompts
from bridge.rollouts.sampler import Sampler
from bridge.rollouts.servers import Server
from bridge.scoring.score import FailedScore, Score, UnusablePrompt, failed
from bridge.scoring.scorer import Scorer
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Group, Images, Problem, TrainedProblems, Unscored


class Stream(Protocol):
    """Groups to train on, in the order in which they are trained on."""

    num_retries: int
    """Requests that were retried for the last step."""

    @property
    def skipped(self) -> Sequence[Group]:
        """Groups without a learning signal that were replaced in the last step."""

    @property
    def num_in_flight(self) -> int:
        """Number of groups that have been started, but not yet taken by a step."""

    def served(self, endpoint: Endpoint, version: int) -> None:
        """Announce that `endpoint` serves `version` of the weights from now on.

        Called before the first `take`, after each publication, and after each restart of the server.
        """

    def resume(self, trained: TrainedProblems) -> None:
        """Skip the problems in `trained`; called before the first `take`."""

    def take(self, count: int, *, step: int) -> list[Group]:
        """Wait for the `count` groups of a step, and return them; a retry after a failure uses the same problems."""

    def evaluate(self, *, step: int) -> list[Group] | None:
        """Sample the held-out problems after `step`, and return their groups; None if the run does not evaluate."""

    def close(self) -> None: ...


Servers = Callable[[], Sequence[Server]]
"""Returns the servers for the next request."""


class Sampled(NamedTuple):
    """The completions of one problem, and the score of each."""

    prompt: tuple[int, ...]
    """The prompt that all sequences share."""
    completions: Sequence[Completion]
    results: Sequence[Score | FailedScore]
    images: Images | None = None
    """The prompt's images."""
    taught: tuple[int, ...] = ()
    """The prompt as a teacher sees it; empty: it sees the same."""


MOST_UNUSABLE = 16
"""Number of consecutive unusable prompts after which the cause is assumed not to be a single problem."""


class Unusable:
    """Counts consecutive problems with unusable prompts. One such problem costs its group; too many end the run."""

    def __init__(self) -> None:
        self._num_in_row = 0

    def count(self, results: Sequence[Score | FailedScore]) -> None:
        """Count a group; raise RewardError at the limit."""
        faults = [result for result in results if isinstance(result, UnusablePrompt)]
        if faults and len(faults) == len(results):
            self._num_in_row += 1
        else:
            self._num_in_row = 0
        if self._num_in_row >= MOST_UNUSABLE:
            raise RewardError(
                f"the prompts of {self._num_in_row} consecutive problems cannot be used, the last: {faults[-1].line}",
                hint="fix the problems, or serve with a larger --max-model-len if they are too long",
            )


class GroupSampler(ABC):
    """Samples and scores the completions of a problem."""

    is_chat: bool
    """Whether text prompts are converted to chat messages."""

    def check_prompt(self, problem: Problem) -> tuple[int, ...]:  # noqa: ARG002  an agent makes its own prompts
        """Return a prompt's token ids, or nothing if the prompt is made later; RewardError if it cannot be encoded."""
        return ()

    @abstractmethod
    async def group(
        self, servers: Servers, problem: Problem, *, num_samples: int, seed: int, index: int, **params: float
    ) -> Sampled:
        """Sample and score `num_samples` completions; `index` numbers the problems that share `seed`.

        `params` are sampling parameters that override the run's.
        """

    @abstractmethod
    async def rehearse(self, problem: Problem, text: str) -> Score | FailedScore:
        """Score the made-up completion `text` without a server."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release the groups' resources. The stream itself closes the sampler and the scorer."""


class Completions(GroupSampler):
    """Samples single-turn completions."""

    is_chat = False

    def __init__(self, prompts: Prompts, sampler: Sampler, scorer: Scorer) -> None:
        self._prompts = prompts
        self._sampler = sampler
        self._scorer = scorer
        self._turns = asyncio.Semaphore(sampler.config.max_concurrency)
        """Limits concurrent prompts with images: pixels are large, and an evaluation starts all problems at once."""

    def check_prompt(self, problem: Problem) -> tuple[int, ...]:
        return self._prompts.encode(problem).prompt

    async def group(
        self, servers: Servers, problem: Problem, *, num_samples: int, seed: int, index: int, **params: float
    ) -> Sampled:
        async with self._turns if problem.get("images") else nullcontext():
            try:
                prompt, images = await self._prompts.encode_beside(problem)
            except RewardError as error:
                return without_completions(problem, num_samples, error)
            other: dict[str, Any] = {**params, **({} if images is None else {"images": images})}
            try:
                completions = await self._sampler.one(
                    servers(), prompt, num_samples=num_samples, seed=seed, index=index,
                    is_chat=not isinstance(problem["prompt"], str), **other,
                )  # fmt: skip
            except RejectedRequestError as error:
                return without_completions(problem, num_samples, error)
        results = await self._scorer.score(problem, [completion.text for completion in completions])
        return Sampled(prompt, completions, results, images)

    async def rehearse(self, problem: Problem, text: str) -> Score | FailedScore:
        (result,) = await self._scorer.score(problem, [text])
        return result


NOTHING = Completion(token_ids=(), logprobs=(), text="", finish_reason="abort")
"""Placeholder for a completion of an unusable prompt."""


def without_completions(problem: Problem, num_samples: int, error: BridgeError) -> Sampled:
    """Return a group without completions for a problem with an unusable prompt; the reason counts as a failed score."""
    return Sampled((), [NOTHING] * num_samples, [UnusablePrompt.of(problem, error)] * num_samples)


def penalized(group: Group, rollouts: RolloutConfig, longest: int) -> Group:
    """Lower the rewards of completions whose length falls into the buffer just below `longest`, or reaches `longest`.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    buffer = rollouts.overlong_buffer
    penalty = rollouts.overlong_penalty
    if not buffer:
        return group
    begin = longest - buffer
    parts = []
    for completion in group.completions:
        beyond = max(_length(completion) - begin, 0)
        parts.append(-min(beyond / buffer, 1.0))
    added = [penalty * part for part in parts]
    turn_rewards: list[tuple[float, ...]] = []
    if group.turn_rewards:
        of_turns = zip(group.turn_rewards, added, strict=True)
        turn_rewards = [(*turns, last + more) for (*turns, last), more in of_turns]
    return replace(
        group,
        rewards=tuple(reward + more for reward, more in zip(group.rewards, added, strict=True)),
        turn_rewards=tuple(turn_rewards),
        reward_parts={**group.reward_parts, "overlong": tuple(parts)},
    )


def _length(completion: Completion) -> int:
    """Return the length of the longest sequence in tokens, from its first sampled token on."""
    return max(len(part.token_ids) - (part.sampled or (True,)).index(True) for part in completion.sequences)


def checked(problem: Problem, completion: Completion, result: Score | FailedScore) -> Score | FailedScore:
    """Return `result`, or a FailedScore if its rewards do not match the completion's turns."""
    if isinstance(result, FailedScore) or not result.turns:
        return result
    if completion.others:
        what = f"rewards per turn for a run of {len(completion.sequences)} token sequences, expected one sequence"
        return failed(problem, completion.text, "rewards per turn for a run of several token sequences", what)
    if len(result.turns) == completion.num_turns:
        return result
    what = f"{len(result.turns)} rewards for {completion.num_turns} turns, expected one for each turn of the model"
    return failed(problem, completion.text, "the number of rewards differs from the number of turns", what)


def scored_group(number: int | None, problem: Problem, sampled: Sampled) -> Group:
    """Return a group of the completions that have a reward; the others become its `unscored`."""
    completions: list[Completion] = []
    scores: list[Score] = []
    unscored: list[Unscored] = []
    for completion, result in zip(sampled.completions, sampled.results, strict=True):
        if isinstance(result, Score):
            completions.append(completion)
            scores.append(result)
        else:
            unscored.append(Unscored(completion=completion, fault=result.line))
    names = dict.fromkeys(name for score in scores for name in score.parts)
    turn_rewards: list[tuple[float, ...]] = []
    if any(score.turns for score in scores) and not any(completion.others for completion in completions):
        turn_rewards = [_of_turns(*scored) for scored in zip(completions, scores, strict=True)]
    return Group(
        problem=problem,
        number=number,
        prompt_token_ids=sampled.prompt,
        images=sampled.images,
        teacher_prompt_token_ids=sampled.taught,
        completions=tuple(completions),
        rewards=tuple(score.reward for score in scores),
        turn_rewards=tuple(turn_rewards),
        reward_parts={name: tuple(score.parts.get(name, math.nan) for score in scores) for name in names},
        unscored=tuple(unscored),
    )


def _of_turns(completion: Completion, score: Score) -> tuple[float, ...]:
    """Return one reward per turn; a reward for the whole completion counts for its last turn."""
    if score.turns:
        return tuple(score.turns)
    return (*[0.0] * (completion.num_turns - 1), score.reward)
