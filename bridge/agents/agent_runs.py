"""Concurrent runs of an agent that requests its turns from an OpenAI-compatible base URL.

A run's recording (`recording.py`) tokenizes each of its requests, and the tokens are sampled like any other prompt.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from bridge.agents import chat_request
from bridge.agents.conversation import Conversation
from bridge.agents.recorder import Document, Recorder
from bridge.agents.recording import Recording, Tools, TurnRequest, as_message
from bridge.agents.trajectories import SequenceBuilder, TrajectorySampler, pinned
from bridge.config.choices import flag
from bridge.core.foreign_code import reason_of
from bridge.core.http_limits import Refusal
from bridge.core.logs import info_once
from bridge.errors import UsageError
from bridge.rollouts.groups import Servers
from bridge.rollouts.sampler import Sampler
from bridge.scoring.score import FailedScore, Score, failed
from bridge.scoring.scorer import Scorer, Trajectory
from bridge.types import Completion, Problem, Result

logger = logging.getLogger(__name__)

Sample = Callable[[int, TurnRequest, int], Awaitable[Completion]]
"""Index of the turn, the request as tokens, and the maximum number of tokens to sample -> the turn."""
Room = Callable[[TurnRequest], Awaitable[int]]
"""A request as tokens -> the number of tokens that may follow."""
NUM_KEPT = 256
"""Number of cached conversations, one per set of tools."""
REHEARSED_TURNS = 8
"""Maximum number of turns of an agent in a rehearsal."""


class AgentRuns(TrajectorySampler):
    """Runs the agents of one environment. Agents write their own prompts, so none is checked in advance."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        scorer: Scorer,
        max_turns: int,
        conversation: Callable[[Tools], Conversation],
        recorder: Recorder,
    ) -> None:
        super().__init__(tokenizer, sampler, scorer, max_turns)
        self._conversation = conversation
        self._recorder = recorder

    async def rehearse(self, problem: Problem, text: str) -> Score | FailedScore:
        """Score a run in which the agent gets the same made-up completion for each turn."""
        ids = (*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id)
        completion = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), text=text, finish_reason="stop")

        async def room(_: TurnRequest) -> int:
            return sys.maxsize

        async def sample(*_: Any) -> Completion:
            return completion

        async with self._scorer.trajectory(problem) as trajectory:
            recording = Recording(self._conversation)
            run = Run(recording, sample, room, max_turns=REHEARSED_TURNS)
            return await scored(run, self._recorder, trajectory, problem)

    async def close(self) -> None:
        await self._recorder.close()

    async def _trajectory(
        self, servers: Servers, problem: Problem, *, seed: int, number: int, **params: float
    ) -> tuple[list[SequenceBuilder], Score | FailedScore]:
        async def room(request: TurnRequest) -> int:
            most = await self._sampler.longest(pinned(servers, number))
            left = self._sampler.config.longest - request.num_behind_prompt
            return left if most is None else min(left, most - len(request.token_ids))

        async def sample(turn: int, request: TurnRequest, max_tokens: int) -> Completion:
            has_experts = request.before is not None and request.before.completion.experts
            with trajectory.held():
                return await self._turn(
                    servers, request.token_ids, seed=seed, number=number, turn=turn, stop=request.chat.stop,
                    max_tokens=max_tokens,
                    num_routed=len(request.token_ids) - len(request.added) - 1 if has_experts else 0, **params,
                )  # fmt: skip

        async with self._scorer.trajectory(problem) as trajectory:
            recording = Recording(self._conversation)
            run = Run(recording, sample, room, max_turns=self._max_turns)
            try:
                result = await scored(run, self._recorder, trajectory, problem)
            finally:
                for remark in sorted(recording.remarks):
                    info_once(logger, remark)
            return run.written(), result


def conversations(
    tokenizer: PreTrainedTokenizerBase, model_name: str, **template: Any
) -> Callable[[Tools], Conversation]:
    """Return a function from a set of tools to the model's conversation with these tools; results are cached."""
    without = Conversation(tokenizer, model_name, answers=None, **template)

    @lru_cache(NUM_KEPT)
    def conversation(tools: str) -> Conversation:
        return without.with_tools(json.loads(tools))

    return lambda tools: conversation(json.dumps(tools)) if tools else without


async def scored(run: "Run", recorder: Recorder, trajectory: Trajectory, problem: Problem) -> Score | FailedScore:
    """Run the agent to its end, and return its reward."""
    async with recorder.run(run.answer) as base_url:
        result = await run.or_fault(trajectory.run(base_url))
    if run.unreadable:
        return failed(problem, "", run.unreadable, run.unreadable)
    turns = run.recording.turns
    if isinstance(result, FailedScore):  # many clients raise an error on a truncated turn
        is_truncated = bool(turns) and result.is_raised and run.is_truncated
        return await trajectory.score(turns[-1].completion.text) if is_truncated else result
    if not turns:
        kind = "the agent's run ended without requesting a turn of the model from its base_url"
        return failed(problem, "", kind, kind)
    return result if isinstance(result, Score) else await trajectory.score(turns[-1].completion.text)


class Run:
    """One run of an agent: answers its requests within its limits."""

    def __init__(self, recording: Recording, sample: Sample, room: Room, *, max_turns: int) -> None:
        self.recording = recording
        self._sample = sample
        self._room = room
        self._max_turns = max_turns
        self._num_turns = 0
        """Number of sampled turns."""
        self._num_limited = 0
        """Number of requests beyond a limit."""
        self.unreadable = ""
        """Why a sampled turn could not be recorded; empty if all could."""
        self._fault: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.Lock()
        """Held while a request is tokenized, so that the requests of a run keep their order."""

    async def answer(self, body: Any) -> Document:
        """Answer a request."""
        try:
            async with self._reading:  # in a thread: a long conversation takes a while, and other runs must not wait
                request = await asyncio.to_thread(self._as_tokens, body)
        except Refusal:
            raise
        except UsageError as error:
            raise Refusal(error.message) from error
        except Exception as error:  # an agent may send anything
            raise Refusal(f"the request cannot be parsed: {type(error).__name__}{reason_of(error)}") from error
        try:
            completion = await self._sampled(request)
        except Exception as error:  # not the agent's fault: `or_fault` raises it
            if not self._fault.done():
                self._fault.set_exception(error)
            raise Refusal("sampling from the model failed", status=500) from error
        if completion is None:
            return self._limited(request)
        try:
            return _document(request, completion, self.recording.add(request, completion))
        except Exception as error:  # a model may write anything
            self.unreadable = f"a turn of the model cannot be parsed: {type(error).__name__}{reason_of(error)}"
            raise Refusal(self.unreadable) from error

    def _as_tokens(self, body: Any) -> TurnRequest:
        """Tokenize a request; may raise any exception."""
        chat = chat_request.read(body)
        if chat.ignored:
            self.recording.remarks.add(
                f"an agent sets {', '.join(chat.ignored)} in a request, which is ignored: its turns are sampled and"
                f" trained on with the run's own settings ({flag('temperature')} and others)"
            )
        if chat.forces_call:
            self.recording.remarks.add(
                "an agent forces a tool call with tool_choice in a request, which is ignored: its turns are sampled and"
                " trained on as the model writes them, and a turn without a call reaches the agent as text"
            )
        return self.recording.begin(chat)

    async def _sampled(self, request: TurnRequest) -> Completion | None:
        """Sample the model's turn, and return it; None if a limit of the run is reached."""
        room = await self._room(request)
        if room < 1 or self._num_turns >= self._max_turns:
            return None
        self._num_turns += 1
        return await self._sample(self._num_turns - 1, request, min(room, request.chat.max_tokens or room))

    async def or_fault(self, result: Awaitable[Result]) -> Result:
        """Await `result`, unless sampling for a request fails first; then raise that error."""
        task = asyncio.ensure_future(result)
        try:
            await asyncio.wait({task, self._fault}, return_when=asyncio.FIRST_COMPLETED)
            return self._fault.result() if self._fault.done() else task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the run was reached, or the last turn was truncated."""
        turns = self.recording.turns
        return bool(self._num_limited) or (bool(turns) and turns[-1].completion.finish_reason == "length")

    def written(self) -> list[SequenceBuilder]:
        """Return the run's sequences; the first one has the reason why the run ended as its `finish_reason`."""
        sequences = self.recording.sequences() or [SequenceBuilder()]
        if self.is_truncated:
            sequences[0].finish_reason = "length"
        elif self.recording.turns:
            sequences[0].finish_reason = self.recording.turns[-1].completion.finish_reason
        return sequences

    def _limited(self, request: TurnRequest) -> Document:
        """Answer a request beyond a limit: first with empty turns, at which most agents stop, then with an error."""
        self._num_limited += 1
        if self._num_limited > self._max_turns:
            raise Refusal(
                f"this run has reached a limit: --max-turns {self._max_turns}, or --max-new-tokens for a sequence"
            )
        empty = Completion(token_ids=(), logprobs=(), text="", finish_reason="length")
        return _document(request, empty, as_message("", ()))


def _document(request: TurnRequest, completion: Completion, message: dict[str, Any]) -> Document:
    reason = "length"
    if message.get("tool_calls"):
        reason = "tool_calls"
    elif completion.finish_reason == "stop":
        reason = "stop"
    num_prompt = len(request.token_ids)
    num_sampled = len(completion.token_ids)
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }
