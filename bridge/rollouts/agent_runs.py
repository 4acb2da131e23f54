"""Runs of an agent that gets its turns from an OpenAI-compatible base URL, many at once.

Each request becomes tokens by what is recorded of its run (`recording.py`), and is sampled like any prompt.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from bridge.config import TrainConfig
from bridge.config.choices import flag
from bridge.core.foreign_code import said
from bridge.core.together import together
from bridge.errors import UsageError
from bridge.rollouts import chat_request
from bridge.rollouts.chat_request import Refusal
from bridge.rollouts.conversation import Conversation
from bridge.rollouts.recorder import Document, Recorder
from bridge.rollouts.recording import Asked, Recording, Tools, as_message
from bridge.rollouts.sampler import Sampler
from bridge.rollouts.servers import Server
from bridge.rollouts.trajectories import Written, joined
from bridge.scoring.score import FailedScore, Score, failed
from bridge.scoring.scorer import Scorer, Trajectory
from bridge.types import Completion, Problem

Result = TypeVar("Result")
Sample = Callable[[int, Asked, int], Awaitable[Completion]]
"""The number of the turn, the request as tokens and how many it may become -> the turn."""
Room = Callable[[Asked], Awaitable[int]]
"""A request as tokens -> the tokens that may follow."""


NUM_KEPT = 256
"""Sets of tools for which the chat template is prepared."""


class AgentRuns:
    """Runs the agents of one environment."""

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        scorer: Scorer,
        note: Callable[[str], None],
    ) -> None:
        """Check the model's chat template.

        Raises:
            UsageError: there is none, or it ends a turn without a token at which the server stops.
        """
        self._config, self._sampler, self._scorer, self._note = config, sampler, scorer, note
        self._recorder = Recorder(config.model_name)
        self._conversation = conversations(tokenizer, config.model_name, **config.task.chat_template_kwargs)

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
        """Return what all sequences begin with, `num_samples` runs and their rewards; as `Trajectories.group`."""
        first = index * num_samples
        return joined(
            await together(
                self._one(servers, problem, seed=seed, number=first + sample, **other) for sample in range(num_samples)
            )
        )

    async def close(self) -> None:
        await self._recorder.close()

    async def _one(
        self, servers: Callable[[], Sequence[Server]], problem: Problem, *, seed: int, number: int, **other: float
    ) -> tuple[list[Written], Score | FailedScore]:
        longest, max_turns = self._config.sampling.longest, self._config.rollouts.max_turns

        def server() -> Server:
            listed = servers()
            return listed[number % len(listed)]  # the same in every turn: it has the prefix in its cache

        async def room(asked: Asked) -> int:
            whole = await self._sampler.longest(server())
            left = longest - asked.num_behind_prompt
            return left if whole is None else min(left, whole - len(asked.token_ids))

        async def sample(turn: int, asked: Asked, most: int) -> Completion:
            index = number * max_turns + turn
            with trajectory.held():
                (completion,) = await self._sampler.one(
                    [server()], asked.token_ids, num_samples=1, seed=seed, index=index, stop=asked.request.stop,
                    max_tokens=most, **other,
                )  # fmt: skip
            return completion

        async with self._scorer.trajectory(problem) as trajectory:
            run = Run(Recording(self._conversation, self._note), sample, room, max_turns=max_turns, note=self._note)
            found = await scored(run, self._recorder, trajectory, problem)
            return run.written(), found


def conversations(
    tokenizer: PreTrainedTokenizerBase, model_name: str, **template: Any
) -> Callable[[Tools], Conversation]:
    """Return what finds the model's conversation with any tools.

    Raises:
        UsageError: it has no chat template, or one that ends a turn without a token at which the server stops.
    """
    without = Conversation(tokenizer, model_name, answers=None, **template)

    @lru_cache(NUM_KEPT)
    def conversation(tools: str) -> Conversation:
        return without.with_tools(json.loads(tools))

    return lambda tools: conversation(chat_request.tools_key(tools)) if tools else without


async def scored(run: "Run", recorder: Recorder, trajectory: Trajectory, problem: Problem) -> Score | FailedScore:
    """Let the agent run to its end, and return its reward."""
    async with recorder.run(run.answer) as base_url:
        result = await run.unless_it_fails(trajectory.run(base_url))
    if run.unreadable:
        return failed(problem, "", run.unreadable, run.unreadable)
    turns = run.recording.turns
    if isinstance(result, FailedScore):  # many clients raise when they get a truncated turn
        is_truncated = bool(turns) and result.is_raised and run.is_truncated
        return await trajectory.score(turns[-1].said.text) if is_truncated else result
    if not turns:
        kind = "the agent's run ended without a turn of the model: it requested none from its base_url"
        return failed(problem, "", kind, kind)
    return result if isinstance(result, Score) else await trajectory.score(turns[-1].said.text)


class Run:
    """One run: answers its requests one by one, within its limits."""

    def __init__(
        self, recording: Recording, sample: Sample, room: Room, *, max_turns: int, note: Callable[[str], None]
    ) -> None:
        self.recording = recording
        self._sample, self._room, self._max_turns, self._note = sample, room, max_turns, note
        self._num_turns = self._num_limited = 0
        """Requests that were sampled, and those beyond a limit."""
        self.unreadable = ""
        """Why a sampled turn could not be recorded; empty: all were."""
        self._fault: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def answer(self, body: Any) -> Document:
        """Answer a request.

        Raises:
            Refusal: it cannot be answered.
        """
        try:
            asked = self._as_tokens(body)
        except Refusal:
            raise
        except UsageError as error:
            raise Refusal(error.message) from error
        except Exception as error:  # an agent may send anything
            raise Refusal(f"the request cannot be read: {type(error).__name__}{said(error)}") from error
        try:
            completion = await self._sampled(asked)
        except Exception as error:  # not the agent's fault: whoever waits for the run gets it
            if not self._fault.done():
                self._fault.set_exception(error)
            raise Refusal("the model cannot be sampled from", status=500) from error
        if completion is None:
            return self._limited(asked)
        try:
            return _document(asked, completion, self.recording.add(asked, completion))
        except Exception as error:  # a model may say anything
            self.unreadable = f"a turn of the model cannot be read: {type(error).__name__}{said(error)}"
            raise Refusal(self.unreadable) from error

    def _as_tokens(self, body: Any) -> Asked:
        """Return a request as tokens; it may raise anything."""
        request = chat_request.read(body)
        if request.ignored:
            self._note(
                f"an agent sets {', '.join(request.ignored)} in a request, which is ignored: its turns are sampled, and"
                f" learned from, with the run's own settings ({flag('temperature')} and others)"
            )
        if request.forces_call:
            self._note(
                "an agent forces a call by tool_choice in a request, which is ignored: its turns are sampled and"
                " trained on as the model writes them, and a turn without a call reaches the agent as text"
            )
        return self.recording.begin(request)

    async def _sampled(self, asked: Asked) -> Completion | None:
        """Return the model's turn; None at a limit of the run."""
        room = await self._room(asked)
        if room < 1 or self._num_turns >= self._max_turns:
            return None
        self._num_turns += 1
        return await self._sample(self._num_turns - 1, asked, min(room, asked.request.max_tokens or room))

    async def unless_it_fails(self, result: Awaitable[Result]) -> Result:
        """Return a result, or raise what went wrong with a request meanwhile."""
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
        return bool(self._num_limited) or (bool(turns) and turns[-1].said.finish_reason == "length")

    def written(self) -> list[Written]:
        """Return its sequences; the first one says why the run ended."""
        found = self.recording.sequences() or [Written()]
        if self.is_truncated:
            found[0].finish_reason = "length"
        elif self.recording.turns:
            found[0].finish_reason = self.recording.turns[-1].said.finish_reason
        return found

    def _limited(self, asked: Asked) -> Document:
        """Answer that a limit is reached: by an empty turn, which ends most agents, and at last by an error."""
        self._num_limited += 1
        if self._num_limited > self._max_turns:
            raise Refusal(
                f"this run is at a limit: --max-turns {self._max_turns}, or --max-new-tokens for each of its sequences"
            )
        empty = Completion(token_ids=(), logprobs=(), text="", finish_reason="length")
        return _document(asked, empty, as_message("", ()))


def _document(asked: Asked, completion: Completion, message: dict[str, Any]) -> Document:
    reason = "tool_calls" if message.get("tool_calls") else "stop" if completion.finish_reason == "stop" else "length"
    num_read, num_said = len(asked.token_ids), len(completion.token_ids)
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": num_read, "completion_tokens": num_said, "total_tokens": num_read + num_said},
    }
