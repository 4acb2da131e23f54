"""Trajectories of a model that calls tools: turns are sampled one after the other, for many problems concurrently.

A trajectory is one completion that holds every token after the prompt; `sampled` marks the tokens that the model
sampled. Each turn sends the server all tokens so far, exactly as they were sampled.
"""

import logging
import math
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from bridge.agents.conversation import UNREADABLE, Conversation, encodable
from bridge.agents.tool_calls import Call
from bridge.core.concurrency import gather_or_cancel
from bridge.core.logs import info_once
from bridge.errors import RejectedRequestError, RewardError, UsageError
from bridge.rollouts.chat_template import text_of
from bridge.rollouts.groups import GroupSampler, Sampled, Servers
from bridge.rollouts.problems import encode, refuse_images
from bridge.rollouts.sampler import Sampler
from bridge.rollouts.servers import Server
from bridge.scoring.score import FailedScore, Score, UnusablePrompt, failed
from bridge.scoring.scorer import Scorer, Trajectory
from bridge.types import Completion, FinishReason, Problem

logger = logging.getLogger(__name__)

NOT_SAMPLED = 0.0, 0
"""Placeholder in `kept` for a context token, which is never read."""
SEQUENCE_BREAK = "\n---\n"
"""Separator between the texts of the sequences of one trajectory."""
DEEPEST = 32
"""Maximum nesting depth of a call's arguments in a transcript."""


@dataclass(kw_only=True)
class SequenceBuilder:
    """Builds one token sequence of a trajectory, turn by turn."""

    prompt: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    kept: list[tuple[float, int]] = field(default_factory=list)
    """Empty without filters."""
    experts: bytes = b""
    """Experts of all tokens except the last, including the prompt's."""
    transcript: list[dict[str, Any]] = field(default_factory=list)
    """All turns and tool results, as in `Completion`."""
    last: str = ""
    """The text of the last turn."""
    tool_errors: int = 0
    finish_reason: FinishReason = "abort"

    def add_turn(self, completion: Completion, calls: Sequence[Call] = ()) -> None:
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.versions += completion.versions or [None] * len(completion.token_ids)
        self.sampled += [True] * len(completion.token_ids)
        self.kept += completion.kept
        self.add_experts(completion.experts)
        self.transcript.append({**as_turn(completion.text, calls), "tokens": len(completion.token_ids)})
        self.last = completion.text
        self.finish_reason = completion.finish_reason

    def add_experts(self, experts: bytes) -> None:
        """Append the experts that the server reported for a turn; if it reported none, drop those of earlier turns."""
        self.experts = self.experts + experts if experts else b""

    def add_answers(self, token_ids: Sequence[int]) -> None:
        count = len(token_ids)
        self.token_ids += token_ids
        self.logprobs += [math.nan] * count
        self.versions += [None] * count
        self.sampled += [False] * count
        if self.kept:
            self.kept += [NOT_SAMPLED] * count

    def completion(self, start: int) -> Completion:
        """Return the sequence as a completion of the group's shared prompt: the sequence's first `start` tokens."""
        rest = self.prompt[start:]
        count = len(rest)
        lines = [f"{entry.get('name', entry['role'])}: {entry['text']}" for entry in self.transcript]
        kept = [NOT_SAMPLED] * count + self.kept if self.kept else []
        return Completion(
            token_ids=(*rest, *self.token_ids),
            logprobs=(*[math.nan] * count, *self.logprobs),
            text=encodable("\n".join(lines)),
            transcript=tuple(self.transcript),
            finish_reason=self.finish_reason,
            versions=(*[None] * count, *self.versions),
            sampled=(*[False] * count, *self.sampled),
            kept=tuple(kept),
            tool_errors=self.tool_errors,
            experts=self.experts,
        )


class TrajectorySampler(GroupSampler):
    """Samples multi-turn completions; a subclass adds the tokens between turns."""

    is_chat = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampler: Sampler, scorer: Scorer, max_turns: int) -> None:
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._scorer = scorer
        self._max_turns = max_turns

    async def group(
        self, servers: Servers, problem: Problem, *, num_samples: int, seed: int, index: int, **params: float
    ) -> Sampled:
        """Sample trajectories. Each turn's seed is derived from the trajectory's number and the turn's.

        The group's prompt is the common prefix of all trajectories, because each may add different text to it.
        """
        first = index * num_samples
        return joined(
            await gather_or_cancel(
                self._usable_trajectory(servers, problem, seed=seed, number=first + sample, **params)
                for sample in range(num_samples)
            )
        )

    async def _usable_trajectory(
        self, servers: Servers, problem: Problem, *, seed: int, number: int, **params: float
    ) -> tuple[Sequence[SequenceBuilder], Score | FailedScore]:
        """Return a trajectory; if a server rejects it as too long, it has no tokens and no reward."""
        try:
            return await self._trajectory(servers, problem, seed=seed, number=number, **params)
        except RejectedRequestError as error:
            return [SequenceBuilder()], UnusablePrompt.of(problem, error)

    @abstractmethod
    async def _trajectory(
        self, servers: Servers, problem: Problem, *, seed: int, number: int, **params: float
    ) -> tuple[Sequence[SequenceBuilder], Score | FailedScore]:
        """Return the sequences of one trajectory, and its reward."""

    async def _turn(
        self,
        servers: Servers,
        token_ids: Sequence[int],
        *,
        seed: int,
        number: int,
        turn: int,
        num_routed: int,
        **params: Any,
    ) -> Completion:
        """Sample a turn of trajectory `number`; request the experts of all tokens after the first `num_routed`."""
        (completion,) = await self._sampler.one(
            [pinned(servers, number)],
            tuple(token_ids),
            num_samples=1,
            seed=seed,
            index=number * self._max_turns + turn,
            is_chat=True,
            **{**params, **({"experts": num_routed} if num_routed else {})},
        )
        return completion


def pinned(servers: Servers, number: int) -> Server:
    """Return the server for a trajectory: the same one in every turn, because it has the prefix in its cache."""
    listed = servers()
    return listed[number % len(listed)]


class Trajectories(TrajectorySampler):
    """Runs the trajectories of an environment with tools."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        scorer: Scorer,
        max_turns: int,
        conversation: Conversation,
    ) -> None:
        super().__init__(tokenizer, sampler, scorer, max_turns)
        self._conversation = conversation

    def check_prompt(self, problem: Problem) -> tuple[int, ...]:
        return self._prompt(problem, "")

    async def rehearse(self, problem: Problem, text: str) -> Score | FailedScore:
        """Score a trajectory that does not call any tool."""
        async with self._scorer.trajectory(problem) as tools:
            begun = await tools.begin()
            return begun if isinstance(begun, FailedScore) else await tools.score(text)

    async def _trajectory(
        self, servers: Servers, problem: Problem, *, seed: int, number: int, **params: float
    ) -> tuple[Sequence[SequenceBuilder], Score | FailedScore]:
        written = SequenceBuilder()
        async with self._scorer.trajectory(problem) as tools:
            begun = await tools.begin()
            if isinstance(begun, FailedScore):
                return [written], begun
            try:
                written.prompt = self._prompt(problem, begun.text)
            except RewardError as error:
                return [written], UnusablePrompt.of(problem, error)
            longest = self._sampler.config.longest
            num_routed = 0
            for turn in range(self._max_turns):
                completion = await self._turn(
                    servers, (*written.prompt, *written.token_ids), seed=seed, number=number, turn=turn,
                    max_tokens=longest - len(written.token_ids), num_routed=num_routed, **params,
                )  # fmt: skip
                is_whole = completion.finish_reason == "stop"
                calls = self._conversation.read(completion.token_ids)[1] if is_whole else ()
                written.add_turn(completion, calls)
                if is_whole and not calls and self._conversation.has_unreadable_call(completion.token_ids):
                    written.tool_errors += 1
                    info_once(logger, UNREADABLE)
                num_routed = len(written.prompt) + len(written.token_ids) - 1 if written.experts else 0
                added = await self._answered(problem, written, completion, calls, tools)
                if isinstance(added, FailedScore):
                    return [written], added
                if not added:
                    break
                if turn + 1 == self._max_turns or len(written.token_ids) + len(added) >= longest:
                    written.finish_reason = "length"
                    break
                written.add_answers(added)
            return [written], await tools.score(written.last)

    async def _answered(
        self,
        problem: Problem,
        written: SequenceBuilder,
        completion: Completion,
        calls: Sequence[Call],
        tools: Trajectory,
    ) -> Sequence[int] | FailedScore:
        """Run the turn's calls, and return the tokens between this turn and the next; none if it has no calls."""
        answers = []
        for call in calls:
            reply = await tools.call(call.name, call.arguments)
            if isinstance(reply, FailedScore):
                return reply
            written.tool_errors += reply.is_error
            message = {"role": "tool", "name": call.name, "id": call.id, "text": reply.text}
            written.transcript.append({**message, "is_error": True} if reply.is_error else message)
            answers.append(call.answered(reply.text))
        try:
            return self._conversation.tokens_between(calls, answers, completion.token_ids[-1]) if calls else ()
        except UsageError as error:  # the template cannot render the tool's result
            return failed(problem, completion.text, "the chat template rejects a tool's result", error.message)

    def _prompt(self, problem: Problem, added: str) -> tuple[int, ...]:
        return encode(self._tokenizer, as_chat(problem, encodable(added)), **self._conversation.template)


def as_turn(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Return a turn of the model for a transcript."""
    written = [{"id": call.id, "name": call.name, "arguments": shallow(call.arguments)} for call in calls]
    return {"role": "assistant", "text": text, **({"tool_calls": written} if written else {})}


def shallow(value: Any, levels: int = DEEPEST) -> Any:
    """Return a JSON value with everything below `levels` replaced by an ellipsis: pickle and JSON limit the depth."""
    if isinstance(value, Mapping):
        return {name: shallow(inner, levels - 1) for name, inner in value.items()} if levels else "…"
    if isinstance(value, list):
        return [shallow(inner, levels - 1) for inner in value] if levels else "…"
    return value


def as_chat(problem: Problem, added: str = "") -> Problem:
    """Return `problem` with chat messages as its prompt, and `added` at the end of the last one."""
    refuse_images(problem)
    prompt: Any = problem["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    last = {**messages[-1], "content": (text_of(messages[-1].get("content")) or "") + added}
    return cast("Problem", {**problem, "prompt": [*messages[:-1], last]})


def joined(trajectories: Sequence[tuple[Sequence[SequenceBuilder], Score | FailedScore]]) -> Sampled:
    """Return the common prefix of all sequences as the prompt, one completion per trajectory, and the rewards."""
    prompts = [written.prompt for sequences, _ in trajectories for written in sequences if written.prompt]
    prompt = tuple(os.path.commonprefix(prompts))  # noqa: RUF071  it works for any sequences
    completions = []
    for sequences, _ in trajectories:
        first, *others = (written.completion(len(prompt)) for written in sequences)
        text = SEQUENCE_BREAK.join(completion.text for completion in (first, *others))
        completions.append(replace(first, text=text, others=tuple(others)) if others else first)
    return Sampled(prompt, completions, [result for _, result in trajectories])
