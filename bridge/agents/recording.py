"""Record the turns of an agent's run from requests that each hold a full conversation.

A request whose messages begin with an already answered conversation continues that conversation's tokens. Any other
request begins a new sequence: a second agent in the same run, a history that was edited or shortened, or a chat
template that changes earlier turns. If several requests continue the same turn, all but the first begin a new sequence,
too. Such sequences share earlier turns, and each turn is trained on in only one of them.

Only the messages that a request adds are kept, and a digest of its conversation. So the memory of a run grows with its
text, not with its text times its number of turns.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from bridge.agents import chat_request
from bridge.agents.chat_request import ChatRequest
from bridge.agents.conversation import UNREADABLE, Conversation, placeholder_turn
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
    """Digest of the tools and of all messages including this turn; a request with this prefix continues the turn."""
    calls: tuple[Call, ...]
    shown: Mapping[str, Any]
    """A placeholder for this turn, to render with the chat template."""
    is_unreadable: bool = False
    """Whether the turn calls a tool in a form that cannot be read."""

    @property
    def history(self) -> list[Mapping[str, Any]]:
        """Return all messages including this turn for the chat template, with placeholders for sampled turns."""
        turns = [*self.request.turns, self]
        return [message for turn in turns for message in (*turn.request.messages, turn.shown)]


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnRequest:
    """A tokenized request for a turn."""

    chat: ChatRequest
    """The request without its messages."""
    key: bytes
    """Digest of the tools and of all messages."""
    before: Turn | None
    """The turn that this request continues; None if it begins a new sequence."""
    added: tuple[int, ...]
    """The tokens that follow the turn `before`; the whole prompt if that is None."""
    messages: tuple[Mapping[str, Any], ...]
    """The messages that this request adds."""

    @property
    def turns(self) -> list[Turn]:
        """Return the earlier turns of the sequence, the first one first."""
        turns = list[Turn]()
        turn = self.before
        while turn is not None:
            turns.append(turn)
            turn = turn.request.before
        return turns[::-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens of the prompt."""
        pieces = [(*turn.request.added, *turn.completion.token_ids) for turn in self.turns]
        return (*(token for piece in pieces for token in piece), *self.added)

    @property
    def num_behind_prompt(self) -> int:
        first = next((turn.request for turn in self.turns), self)
        return len(self.token_ids) - len(first.added)


class Recording:
    """The turns of one run."""

    def __init__(self, conversation: Callable[[Tools], Conversation]) -> None:
        """`conversation` returns the model's conversation with a set of tools."""
        self.turns: list[Turn] = []
        """Turns in the order in which they were answered."""
        self.remarks: set[str] = set()
        """Remarks about the requests, to be logged for the user; a rehearsal drops them."""
        self._conversation = conversation
        self._call_numbers = count()
        self._known: dict[bytes, Turn] = {}
        self._tools: dict[str, tuple[Mapping[str, Any], ...]] = {}
        """Sets of tools by their JSON, each stored once, because every request repeats them."""

    def begin(self, chat: ChatRequest) -> TurnRequest:
        """Tokenize a request: the exact tokens of the turn that it continues, followed by the tokens that it adds."""
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
        """Record the completion of a request, and return it as a message.

        If a stop text of the request ended the turn, it is removed from the message's text. Its tokens stay, because
        they were sampled.
        """
        until = request.chat.stop_in(completion)
        completion = replace(completion, text=completion.text.partition(until)[0]) if until else completion
        conversation = self._conversation(request.chat.tools)
        text, calls = conversation.read(completion.token_ids, until=until)
        is_whole = completion.finish_reason == "stop" and not until
        is_unreadable = is_whole and not calls and conversation.has_unreadable_call(completion.token_ids)
        if is_unreadable:
            self.remarks.add(UNREADABLE)
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
            is_unreadable=is_unreadable,
        )
        self.turns.append(turn)
        self._known[turn.key] = turn
        return message

    def sequences(self) -> list[SequenceBuilder]:
        """Return the run's token sequences. Each turn counts as sampled in one of them, as context in the others."""
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
                written.tool_errors += turn.is_unreadable
            written_turns.update(turns)
            sequences.append(written)
        return sequences

    def _named(self, index: int, call: Call) -> Call:
        """Return a call with an id that is unique in the run, unless the model wrote an id."""
        is_numbered = call.id == f"call{index:05d}"
        return replace(call, id=f"call{next(self._call_numbers):05d}") if is_numbered else call


def _read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message of a request to its form in a transcript."""
    entry = {"role": message["role"], "text": message["content"]}
    if calls := message.get("tool_calls"):
        entry["tool_calls"] = [{"id": call["id"], **shallow(call["function"])} for call in calls]
    if "tool_call_id" in message:
        entry["id"] = message["tool_call_id"]
    return entry


def as_message(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Return a turn as a message in OpenAI's format, with its thought in a separate field."""
    thought, end, rest = text.rpartition(THOUGHT_ENDS)
    if not end and text.lstrip().startswith(THOUGHT_BEGINS):
        thought, end, rest = text, THOUGHT_ENDS, ""  # the thought was truncated
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
    """Return the digest of a conversation, given the digest `before` its last message and that message's key."""
    return hashlib.sha256(before + text.encode()).digest()
