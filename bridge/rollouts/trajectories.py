"""Trajectories of a model that calls tools: turns sampled one after the other, for many problems at once.

A trajectory is one completion: every token behind the prompt, of which `sampled` marks those of the model. Each turn
sends the server all tokens so far, exactly as they were sampled.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from bridge.config import TrainConfig
from bridge.core.together import together
from bridge.errors import RewardError, UsageError
from bridge.rollouts.conversation import Call, Conversation, encodable
from bridge.rollouts.problems import encode
from bridge.rollouts.sampler import Sampler
from bridge.rollouts.servers import Server
from bridge.scoring.score import FailedScore, Score, failed
from bridge.scoring.scorer import Scorer, Trajectory
from bridge.scoring.tools import WithTools
from bridge.types import Completion, FinishReason, Problem

NOT_SAMPLED = 0.0, 0
"""What filters kept for a token that is only read: nothing looks at it."""
SEQUENCE_BREAK = "\n---\n"
"""Between the texts of the sequences of one trajectory."""
DEEPEST = 32
"""Levels of a call's arguments in a transcript."""
PER_CORE = 8
"""Trajectories that run at once for each core of the machine."""


@dataclass(kw_only=True)
class Written:
    """What a trajectory holds so far."""

    prompt: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    kept: list[tuple[float, int]] = field(default_factory=list)
    """Empty without filters."""
    transcript: list[dict[str, Any]] = field(default_factory=list)
    """Each turn and each answer, as in `Completion`."""
    last: str = ""
    """The text of the last turn."""
    tool_errors: int = 0
    finish_reason: FinishReason = "abort"

    def add_turn(self, said: Completion, calls: Sequence[Call] = ()) -> None:
        self.token_ids += said.token_ids
        self.logprobs += said.logprobs
        self.versions += said.versions or [None] * len(said.token_ids)
        self.sampled += [True] * len(said.token_ids)
        self.kept += said.kept
        self.transcript.append({**as_turn(said.text, calls), "tokens": len(said.token_ids)})
        self.last, self.finish_reason = said.text, said.finish_reason

    def add_answers(self, token_ids: Sequence[int]) -> None:
        count = len(token_ids)
        self.token_ids += token_ids
        self.logprobs += [math.nan] * count
        self.versions += [None] * count
        self.sampled += [False] * count
        self.kept += [NOT_SAMPLED] * count if self.kept else []

    def completion(self, start: int) -> Completion:
        """Return it as a completion of a prompt that ends before place `start` of its own."""
        rest = self.prompt[start:]
        return Completion(
            token_ids=(*rest, *self.token_ids),
            logprobs=(*(math.nan for _ in rest), *self.logprobs),
            text=encodable("\n".join(f"{each.get('name', each['role'])}: {each['text']}" for each in self.transcript)),
            transcript=tuple(self.transcript),
            finish_reason=self.finish_reason,
            versions=(*(None for _ in rest), *self.versions),
            sampled=(*(False for _ in rest), *self.sampled),
            kept=(*(NOT_SAMPLED for _ in rest), *self.kept) if self.kept else (),
            tool_errors=self.tool_errors,
        )


class Trajectories:
    """Runs the trajectories of one environment."""

    def __init__(
        self,
        config: TrainConfig,
        environment: WithTools,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        scorer: Scorer,
    ) -> None:
        """Prove the model's chat template.

        Raises:
            UsageError: it does not keep earlier turns, or has no tools.
        """
        self._config, self._tokenizer, self._sampler, self._scorer = config, tokenizer, sampler, scorer
        template = config.task.chat_template_kwargs
        self._conversation = Conversation(tokenizer, config.model_name, tools=environment.schemas, **template)

    async def group(
        self,
        servers: Callable[[], Sequence[Server]],
        problem: Problem,
        *,
        num_samples: int,
        seed: int,
        index: int,
        **other: float,
    ) -> tuple[tuple[int, ...], list[Completion], list[Score | FailedScore]]:
        """Return the prompt, `num_samples` trajectories and their rewards.

        `servers` returns those for the next turn. Every turn has a seed of its own, by the `index` of the problem among
        those that share `seed`, its trajectory and its number. The prompt is what all of them begin with: each reset
        may add something else to it.

        Raises:
            BridgeError: a server cannot be sampled from, or the environment cannot be made.
        """
        first = index * num_samples
        both = await together(
            self._one(servers, problem, seed=seed, number=first + sample, **other) for sample in range(num_samples)
        )
        return joined([([written], result) for written, result in both])

    async def _one(
        self, servers: Callable[[], Sequence[Server]], problem: Problem, *, seed: int, number: int, **other: float
    ) -> tuple[Written, Score | FailedScore]:
        written = Written()
        async with self._scorer.trajectory(problem) as tools:
            begun = await tools.begin()
            if isinstance(begun, FailedScore):
                return written, begun
            try:
                written.prompt = self._prompt(problem, begun.text)
            except RewardError as error:
                return written, failed(problem, "", "what reset returned does not fit into the prompt", error.message)
            max_turns = self._config.rollouts.max_turns
            for turn in range(max_turns):
                listed = servers()
                (said,) = await self._sampler.one(
                    [listed[number % len(listed)]],  # the same in every turn: it has the prefix in its cache
                    (*written.prompt, *written.token_ids),
                    num_samples=1,
                    seed=seed,
                    index=number * max_turns + turn,
                    max_tokens=self._config.sampling.longest - len(written.token_ids),
                    **other,
                )
                calls = self._conversation.calls(said.token_ids) if said.finish_reason == "stop" else ()
                written.add_turn(said, calls)
                added = await self._answered(problem, written, said, calls, tools)
                if isinstance(added, FailedScore):
                    return written, added
                if not added:
                    break
                has_room = len(written.token_ids) + len(added) < self._config.sampling.longest
                if turn + 1 == max_turns or not has_room:
                    written.finish_reason = "length"
                    break
                written.add_answers(added)
            return written, await tools.score(written.last)

    async def _answered(
        self, problem: Problem, written: Written, said: Completion, calls: Sequence[Call], tools: Trajectory
    ) -> Sequence[int] | FailedScore:
        """Return the tokens between this turn and the next; none if the turn is the last, because it calls no tool."""
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
            return self._conversation.between(calls, answers, said.token_ids[-1]) if calls else ()
        except UsageError as error:  # the template does not take what a tool answered
            return failed(problem, said.text, "the chat template rejects a tool's answer", error.message)

    def _prompt(self, problem: Problem, added: str) -> tuple[int, ...]:
        return encode(self._tokenizer, as_chat(problem, encodable(added)), **self._conversation.template)


def as_turn(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Return a turn of the model for a transcript."""
    written = [{"id": call.id, "name": call.name, "arguments": shallow(call.arguments)} for call in calls]
    return {"role": "assistant", "text": text, **({"tool_calls": written} if written else {})}


def shallow(value: Any, levels: int = DEEPEST) -> Any:
    """Return a JSON value with an ellipsis for what lies deeper: neither pickle nor JSON takes any depth."""
    if isinstance(value, Mapping):
        return {name: shallow(each, levels - 1) for name, each in value.items()} if levels else "…"
    if isinstance(value, list):
        return [shallow(each, levels - 1) for each in value] if levels else "…"
    return value


def as_chat(problem: Problem, added: str = "") -> Problem:
    """Return `problem` with chat messages as its prompt, and `added` at the end of the last one."""
    prompt: Any = problem["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    last = {**messages[-1], "content": messages[-1]["content"] + added}
    made: Any = {**problem, "prompt": [*messages[:-1], last]}
    changed: Problem = made
    return changed


def joined(
    found: Sequence[tuple[Sequence[Written], Score | FailedScore]],
) -> tuple[tuple[int, ...], list[Completion], list[Score | FailedScore]]:
    """Return what all sequences begin with, a completion for each trajectory's sequences, and the rewards."""
    prompt = _shared([each.prompt for sequences, _ in found for each in sequences if each.prompt])
    completions = []
    for sequences, _ in found:
        one, *others = (each.completion(len(prompt)) for each in sequences)
        text = SEQUENCE_BREAK.join(each.text for each in (one, *others))
        completions.append(replace(one, text=text, others=tuple(others)) if others else one)
    return prompt, completions, [result for _, result in found]


def _shared(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return what all prompts begin with; nothing if there are none."""
    first, last = min(prompts, default=()), max(prompts, default=())  # all begin with what these two begin with
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((place for place, (one, other) in pairs if one != other), len(first))]


def num_processes(config: TrainConfig, cores: int, num_replicas: int) -> int:
    """Return how many trajectories run at once by default: each has a process, which mostly waits for the model."""
    chosen = config.task.reward_processes
    at_most = min(config.rollouts.batch_size // num_replicas, PER_CORE * cores * config.hosts // num_replicas)
    return max(1, at_most) if chosen is None else chosen
