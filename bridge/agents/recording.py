"""The turns of an agent's run, from requests that each hold a whole conversation.

A request whose messages begin with a conversation that was answered continues its tokens. Any other begins a sequence
of its own: another agent of the same run, a history that was edited or shortened, or a chat template that changes
earlier turns. So do all but the first of several requests that continue the same turn; they share what comes before,
and each turn is trained on in one sequence.

What is kept of a request are the messages that it adds, and a digest of the conversation: the memory of a run grows
with its text, not with its text times its turns.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from bridge.agents import chat_request
from bridge.agents.chat_request import ChatRequest
from bridge.agents.conversation import Conversation, placeholder_turn
from bridge.agents.tool_calls import Call
from bridge.agents.trajectories import SequenceBuilder, as_turn, shallow
from bridge.rollouts.chat_template import THOUGHT_BEGINS, THOUGHT_ENDS
from bridge.types import Completion

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One turn of the model."""

    request: "TurnRequest"
    completion: Completion
    key: bytes
    """Digest of the tools and of each message up to this turn's own: another request that begins so continues it."""
    calls: tuple[Call, ...]
    shown: Mapping[str, Any]
    """A made-up turn in place of this one, for the chat template."""

    @property
    def history(self) -> list[Mapping[str, Any]]:
        """Return the messages up to this turn's own for the chat template, with made-up turns."""
        turns = [*self.request.turns, self]
        return [message for turn in turns for message in (*turn.request.messages, turn.shown)]


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnRequest:
    """A request for a turn, as tokens."""

    chat: ChatRequest
    """The request without its messages."""
    key: bytes
    """Digest of the tools and of every message."""
    before: Turn | None
    """The turn that it continues."""
    added: tuple[int, ...]
    """The tokens that it adds to it; without one, the whole prompt."""
    messages: tuple[Mapping[str, Any], ...]
    """Messages that this turn adds."""

    @property
    def turns(self) -> list[Turn]:
        """Return the turns before it, the first one first."""
        turns = list[Turn]()
        turn = self.before
        while turn is not None:
            turns.append(turn)
            turn = turn.request.before
        return turns[::-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return every token that the model reads."""
        pieces = [(*turn.request.added, *turn.completion.token_ids) for turn in self.turns]
        return (*(token for piece in pieces for token in piece), *self.added)

    @property
    def num_behind_prompt(self) -> int:
        first = next((turn.request for turn in self.turns), self)
        return len(self.token_ids) - len(first.added)


class Recording:
    """The turns of one run."""

    def __init__(self, conversation: Callable[[Tools], Conversation]) -> None:
        """`conversation` returns that of the model with these tools."""
        self.turns: list[Turn] = []
        """Turns in the order of their answers."""
        self.remarks: set[str] = set()
        """What the user should know of its requests, which a rehearsal drops."""
        self._conversation = conversation
        self._call_numbers = count()
        self._known: dict[bytes, Turn] = {}
        self._tools: dict[str, tuple[Mapping[str, Any], ...]] = {}
        """Each set of tools once, by its JSON: every request has them all."""

    def begin(self, chat: ChatRequest) -> TurnRequest:
        """Return a request as tokens: those of the turn that it continues, exactly, and what it adds."""
        conversation = self._conversation(chat.tools)
        messages = chat.messages
        tools = json.dumps(chat.tools)
        kept = replace(chat, messages=(), tools=self._tools.setdefault(tools, chat.tools))
        key = _chained(b"", tools)
        end = 0
        answered = b""
        for index, message in enumerate(messages, start=1):
            key = _chained(key, chat_request.key(message))
            if message["role"] == "assistant":
                end = index
                answered = key
        before = self._known.get(answered)
        if before is not None:
            last = (before.completion.token_ids or (-1,))[-1]
            added = conversation.tokens_following(before.history, messages[end:], last)
            if added is not None:
                return TurnRequest(chat=kept, key=key, before=before, added=added, messages=messages[end:])
            self.remarks.add(conversation.changes_turns)
        return TurnRequest(chat=kept, key=key, before=None, added=conversation.prompt(messages), messages=messages)

    def add(self, request: TurnRequest, completion: Completion) -> dict[str, Any]:
        """Record the answer to a request, and return it as a message.

        A text of the request's `stop` that ended it is left out of its text; its tokens stay, as they were sampled.
        """
        until = request.chat.stop_in(completion)
        completion = replace(completion, text=completion.text.partition(until)[0]) if until else completion
        text, calls = self._conversation(request.chat.tools).read(completion.token_ids, until=until)
        if completion.finish_reason != "stop":
            text = completion.text
            calls = ()
        calls = tuple(self._named(index, call) for index, call in enumerate(calls))
        message = as_message(text, calls)
        own: dict[str, Any] = {"role": "assistant", "content": message["content"] or ""}
        if calls:
            own["tool_calls"] = [call.as_message() for call in calls]
        turn = Turn(
            request=request,
            completion=completion,
            key=_chained(request.key, chat_request.key(own)),
            calls=calls,
            shown=placeholder_turn(calls, has_thought=THOUGHT_ENDS in text),
        )
        self.turns.append(turn)
        self._known[turn.key] = turn
        return message

    def sequences(self) -> list[SequenceBuilder]:
        """Return the token sequences of the run; each turn is sampled in one of them, and read in the others."""
        continued = {turn.request.before for turn in self.turns}
        written_turns = set[Turn]()
        sequences = list[SequenceBuilder]()
        for last in (turn for turn in self.turns if turn not in continued):
            turns = [*last.request.turns, last]
            own = [turn for turn in turns if turn not in written_turns]
            written = SequenceBuilder(prompt=own[0].request.token_ids)
            for turn in turns:
                written.transcript += map(_read, turn.request.messages)
                if turn in written_turns:
                    written.add_experts(turn.completion.experts)
                    written.transcript.append(as_turn(turn.completion.text, turn.calls))
                    continue
                if turn is not own[0]:
                    written.add_answers(turn.request.added)
                written.add_turn(turn.completion, turn.calls)
            written_turns.update(turns)
            sequences.append(written)
        return sequences

    def _named(self, index: int, call: Call) -> Call:
        """Return a call with an id that no other of the run has, unless the model wrote one."""
        is_numbered = call.id == f"call{index:05d}"
        return replace(call, id=f"call{next(self._call_numbers):05d}") if is_numbered else call


def _read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a request for a transcript."""
    entry = {"role": message["role"], "text": message["content"]}
    if calls := message.get("tool_calls"):
        entry["tool_calls"] = [{"id": call["id"], **shallow(call["function"])} for call in calls]
    if "tool_call_id" in message:
        entry["id"] = message["tool_call_id"]
    return entry


def as_message(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Return a turn as a message of the protocol, with its thought in a separate field."""
    thought, end, rest = text.rpartition(THOUGHT_ENDS)
    if not end and text.lstrip().startswith(THOUGHT_BEGINS):
        thought, end, rest = text, THOUGHT_ENDS, ""  # it was truncated
    content = rest.strip() if end or calls else rest
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if end:
        message["reasoning_content"] = thought.strip().removeprefix(THOUGHT_BEGINS).strip()
    if calls:
        message["tool_calls"] = [_written(call) for call in calls]
    return message


def _written(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _chained(before: bytes, text: str) -> bytes:
    """Return the digest of a conversation: `before` is that without its last message, whose key is `text`."""
    return hashlib.sha256(before + text.encode()).digest()
