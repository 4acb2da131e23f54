"""Conversations as token ids: the tokens between two turns of the model, and the text and tool calls of a turn.

Sampled tokens are decoded to parse them, and never encoded again. The tokens between two turns come from the chat
template: it renders a conversation with a placeholder turn, and the text after that turn is used. This is correct only
if the template renders earlier turns the same way no matter what follows. For environments with tools, `Conversation`
verifies this before a run starts. An agent may send any messages, so there it is checked for each request.
"""

import os
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal, NoReturn

from transformers import PreTrainedTokenizerBase

from bridge.agents.tool_calls import FORMATS, Call, is_unreadable, parsed, split
from bridge.core.foreign_code import described, reason_of, shortened
from bridge.errors import UsageError
from bridge.rollouts.chat_template import THOUGHT_ENDS, applied, end_of_turn, lost, stop_ids

THOUGHT = f"<think>\nI see.\n{THOUGHT_ENDS}"
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*$")
"""The empty thought with which a template starts a turn when thinking is off."""
NUM_PROVEN_TURNS = 3
SHOWN = 40
"""Number of characters that an error shows on each side of a difference between renderings."""
MOST_ROLES = 20
"""Maximum number of roles that an error about rejected messages lists."""
KEEPS_TURNS = (
    "give the model a chat template that keeps earlier turns unchanged, as chat_template.jinja in its folder: TRL ships"
    " some in trl/chat_templates/*_training.jinja"
)


UNREADABLE = (
    "a turn of the model calls a tool in a form that cannot be read, so it is taken as text without a call:"
    " tool_errors counts such calls, and rollouts.jsonl shows them (reported once)"
)
PROBE = Call(name="look_up", arguments={"number": 7})
USER = {"role": "user", "content": "What do you see?"}


class Conversation:
    """A model's chat template, verified to leave earlier turns unchanged."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answers: Literal["tool", "user"] | None = "tool",
        **template: Any,
    ) -> None:
        """Verify the template for turns followed by messages with the role `answers`.

        With None, nothing is verified here; `tokens_following` checks each request. `tools` are the JSON schemas of the
        tools. `template` is passed to the chat template.
        """
        self._tokenizer = tokenizer
        self._model_name = model_name
        self.template = {**template, **({"tools": list(tools)} if tools else {})}
        """Arguments of the chat template other than the messages."""
        if tokenizer.chat_template is None:
            self._refuse("is missing from its tokenizer", "use a model with a chat template")
        self._server_stops = stop_ids(tokenizer, model_name)
        self._find_end()
        self._format = ""
        if answers is not None:
            self._prove(answers)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Conversation":
        """Return a copy with different tools, for which the template is not verified."""
        copied = copy(self)
        copied.template = {**self.template, "tools": list(tools)}
        if isinstance(self._tokenizer.chat_template, Mapping):  # messages with tools have a template of their own
            copied._find_end()
        copied._format = copied._format_of([PROBE])
        return copied

    def _find_end(self) -> None:
        """Find the token that ends a turn, and refuse the template if the server does not stop there."""
        self._end = self._end_of_turn()
        self._end_id: int = self._tokenizer.convert_tokens_to_ids(self._end)
        self._stops = {self._end_id, *self._server_stops}
        if self._end_id not in self._server_stops and self._end != end_of_turn(self._tokenizer, **self.template):
            self._refuse(
                f"ends a turn with {self._end!r} and further tokens, but the server does not stop at the first of them",
                f"add {self._end_id} to eos_token_id in the model's generation_config.json",
            )

    def read(self, token_ids: Sequence[int], *, until: str = "") -> tuple[str, tuple[Call, ...]]:
        """Return the text of a sampled turn without its tool calls, and the calls; no calls if any is malformed.

        The turn is only read up to the text `until`, unless that is empty.
        """
        kept = [token for token in token_ids if token not in self._stops]

        def decoded(**how: bool) -> str:
            text: str = self._tokenizer.decode(kept, clean_up_tokenization_spaces=False, **how)
            return text.partition(until)[0] if until else text

        text, calls = split(decoded(), self._format)
        return (text, calls) if calls else (decoded(skip_special_tokens=True), ())

    def has_unreadable_call(self, token_ids: Sequence[int]) -> bool:
        """Return whether a sampled turn in which `read` finds no calls begins one all the same."""
        kept = [token for token in token_ids if token not in self._stops]
        return is_unreadable(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False), self._format)

    def tokens_between(self, calls: Sequence[Call], answers: Sequence[Mapping[str, Any]], last: int) -> tuple[int, ...]:
        """Return the tokens from the end of a turn with these `calls`, through the `answers`, to the next turn's start.

        `last` is the last sampled token. If it is not a stop token, the token that ends a turn is included.
        """
        _, behind = self._split([USER], placeholder_turn(calls), answers)
        return self._ended(behind, last)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of a conversation up to the start of the model's turn.

        Raises:
            UsageError: the template rejects the messages, or drops one of them.
        """
        text = self._rendered(messages, is_open=True)
        self._refuse_lost(messages)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def tokens_following(
        self, history: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]], last: int
    ) -> tuple[int, ...] | None:
        """Return the tokens from the end of the last turn of `history`, through `added`, to the start of the next turn.

        Sampled turns in `history` are placeholders (`placeholder_turn`); for `last`, see `tokens_between`. Return None
        if the template renders something before the end of that last turn differently once `added` follows.
        """
        before = self._rendered(history[:-1], is_open=True)
        whole = self._rendered([*history, *added], is_open=True)
        turn_text, end, behind = whole[len(before) :].partition(self._end)
        thought = THOUGHT.removeprefix("<think>\n" if before.rstrip().endswith("<think>") else "")
        is_kept = turn_text.lstrip().startswith(thought) or THOUGHT not in history[-1]["content"]
        if not whole.startswith(before) or not end or not is_kept:
            return None
        if any(message["content"].strip() not in behind for message in added):  # most templates do not change text
            self._refuse_lost([*history, *added])
        added_ids = self._encoded(behind)
        together = self._tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
        is_cut_alike = added_ids[0] == self._end_id and tuple(together[-len(added_ids) :]) == added_ids
        return self._ended(behind, last) if is_cut_alike else None

    @property
    def changes_turns(self) -> str:
        """The message to log when `tokens_following` returns None."""
        return (
            f"the chat template of {self._model_name} changes an earlier turn once an agent's next messages follow:"
            f" the turns from there on become a separate sequence; {KEEPS_TURNS}"
        )

    def _ended(self, behind: str, last: int) -> tuple[int, ...]:
        token_ids = self._encoded(behind)
        return token_ids[1:] if last in self._stops else token_ids

    def _encoded(self, behind: str) -> tuple[int, ...]:
        """Return the id of the token that ends a turn, followed by the ids of the text after it."""
        return tuple(self._tokenizer(self._end + behind, add_special_tokens=False)["input_ids"])

    def _end_of_turn(self) -> str:
        text = "I see."
        whole = self._rendered([USER, {"role": "assistant", "content": text}])
        behind = whole[whole.rfind(text) + len(text) :]
        special = {*self._tokenizer.all_special_tokens, *map(str, self._tokenizer.added_tokens_decoder.values())}
        ends: list[str] = [token for token in special if token and behind.startswith(token)]
        if not ends:
            self._refuse(f"ends a turn with {shortened(repr(behind))}, expected a special token", KEEPS_TURNS)
        return max(ends, key=len)

    def _prove(self, answers: Literal["tool", "user"]) -> None:
        """Render conversations of several turns, with and without thoughts, and compare each with its prefixes."""
        begun = self._rendered([USER], is_open=True).rstrip()
        source = applied(self._tokenizer.chat_template, has_tools="tools" in self.template)
        thinks = THOUGHT_ENDS in source and not begun.endswith(THOUGHT_ENDS)
        calls = [PROBE] if answers == "tool" else []
        answer = PROBE.answered("It is 8.") if calls else {"role": "user", "content": "It is 8."}
        expected = THOUGHT.removeprefix("<think>\n" if begun.endswith("<think>") else "")
        _, behind = self._split([USER], _turn(calls), [answer])
        if calls:
            self._format = self._format_of(calls)
        if "It is 8." not in behind:
            self._refuse(f"does not render messages with the role {answers}", "use a model that was trained with tools")
        for thoughts in product(["", THOUGHT] if thinks else [""], repeat=NUM_PROVEN_TURNS):
            history = [USER]
            for thought in thoughts:
                turn = _turn(calls, thought)
                turn_text, rest = self._split(history, turn, [answer])
                if thought and not turn_text.lstrip().startswith(expected):
                    self._refuse_difference(turn_text, expected)
                if rest != behind:
                    self._refuse_difference(rest, behind)
                history += [turn, answer]
        whole = self._tokenizer.apply_chat_template(
            history, add_generation_prompt=True, tokenize=True, return_dict=False, **self.template
        )
        added = self._encoded(behind)
        if added[0] != self._end_id or tuple(whole[-len(added) :]) != added:
            self._refuse("is tokenized differently when its text is split at the end of a turn", KEEPS_TURNS)

    def _format_of(self, calls: Sequence[Call]) -> str:
        """Return the name of the format in which the template writes tool calls."""
        before = EMPTY_THOUGHT.sub("", self._rendered([USER], is_open=True))
        whole = self._rendered([USER, _turn(calls)])
        turn_text = EMPTY_THOUGHT.sub("", whole[len(before) :]).partition(self._end)[0]
        expected = [(call.name, call.arguments) for call in calls]
        read = [
            name for name in FORMATS if [(call.name, call.arguments) for call in parsed(turn_text, name)] == expected
        ]
        if not read:
            self._refuse(
                f"writes a tool call as {shortened(repr(turn_text))}, which Bridge cannot parse",
                "use a model that writes tool calls as JSON, such as Qwen 2.5, Qwen 3, Llama 3 or Mistral",
            )
        return read[0]

    def _split(
        self, history: Sequence[Mapping[str, Any]], turn: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str]:
        """Return the rendered text of a turn that follows `history`, and the text after the turn's end token."""
        before = self._rendered(history, is_open=True)
        whole = self._rendered([*history, turn, *answers], is_open=True)
        if not whole.startswith(before):
            self._refuse_difference(whole, before)
        turn_text, end, behind = whole[len(before) :].partition(self._end)
        if not end:
            self._refuse(f"does not end this turn with {self._end!r}: {shortened(repr(turn_text))}", KEEPS_TURNS)
        return turn_text, behind

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, is_open: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=is_open, tokenize=False, **self.template
            )
        except Exception as error:  # noqa: BLE001  a template computes with the messages, and may raise anything
            roles = ", ".join(message["role"] for message in messages[:MOST_ROLES])
            self._refuse(
                f"rejects messages with the roles {roles}: {type(error).__name__}{reason_of(error)}",
                "use a model that was trained with tools",
            )
        return encodable(text)

    def _refuse_lost(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a conversation if the template drops a message; it may drop earlier turns of the model."""
        known = [dict(message) for message in messages]
        missing = lost(partial(self._rendered, is_open=True), known)
        for message in (known[index] for index in missing if known[index]["role"] != "assistant"):
            self._refuse(
                f"drops the message with the role {message['role']}, so the model would not see"
                f" {described(message['content'])}",
                "send it as a user message, or use a model whose template renders it",
            )

    def _refuse_difference(self, rendered: str, expected: str) -> NoReturn:
        index = len(os.path.commonprefix([rendered, expected]))  # noqa: RUF071  the first difference
        shown = [repr(text[max(index - SHOWN, 0) : index + SHOWN]) for text in (expected, rendered)]
        self._refuse(f"changes an earlier turn once a new one follows: {shown[0]} becomes {shown[1]}", KEEPS_TURNS)

    def _refuse(self, what: str, hint: str) -> NoReturn:
        raise UsageError(f"the chat template of {self._model_name} {what}", hint=hint)


def encodable(text: str) -> str:
    """Replace each lone surrogate in `text`, which JSON allows but UTF-8 does not, by a replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def placeholder_turn(calls: Sequence[Call], *, has_thought: bool = False) -> dict[str, Any]:
    """Return a stand-in for a sampled turn, with the same tool calls: the turn's own text may contain the end token."""
    known = [replace(call, arguments={}) if call.name.isidentifier() else PROBE for call in calls]
    return _turn(known, THOUGHT if has_thought else "")


def _turn(calls: Sequence[Call], thought: str = "") -> dict[str, Any]:
    content = f"{thought}\n\n" if thought else ""
    if not calls:
        return {"role": "assistant", "content": f"{content}I see."}
    return {"role": "assistant", "content": content, "tool_calls": [call.as_message() for call in calls]}
