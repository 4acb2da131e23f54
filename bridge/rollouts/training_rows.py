"""Rows of a file as token ids: given completions, and which of their tokens are trained on.

A row has chat messages, or a prompt and a completion, or a prompt with a chosen and a rejected completion. The
assistant's tokens are trained on. A chat template may mark them (`{% generation %}`); otherwise they are what the
template adds for a turn of the assistant after the prompt of that turn. A row is refused if its template drops or
rewrites a message, because the model would be trained on something else than the row.

Not covered: reading files (`bridge_environments/dataset.py`), the order of the rows (`row_stream.py`).
"""

import hashlib
import logging
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from bridge.core.foreign_code import LONE_SURROGATE, described, reason_of, shortened
from bridge.core.problem_form import problem_fault
from bridge.errors import RewardError
from bridge.rollouts import chat_template, problems
from bridge.types import Completion, Group, Message

logger = logging.getLogger(__name__)

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Matches the tag with which a chat template marks the assistant's tokens, as transformers looks for it."""
ASSISTANT = "assistant"
OWN_MARK = (
    "mark the assistant's tokens with {% generation %} in the chat template: chat_template.jinja in the model's folder"
)
SFT_FORMS = "messages, or prompt and completion"
DPO_FORMS = "prompt, chosen and rejected, or two conversations as chosen and rejected"


class Tokens(NamedTuple):
    """A text as token ids."""

    ids: Sequence[int]
    is_trained: Sequence[bool]
    """Which of the tokens are trained on."""

    @property
    def first(self) -> int:
        """The index of the first token that is trained on."""
        return self.is_trained.index(True)

    @property
    def end(self) -> int:
        """The index after the last token that is trained on."""
        return len(self.is_trained) - [*reversed(self.is_trained)].index(True)


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row of a file: a prompt, and one completion, or a chosen and a rejected one."""

    prompt: "array[int]"
    """Token ids."""
    completions: "tuple[tuple[array[int], bytes], ...]"
    """Token ids, and a byte for each that is 1 if the token is trained on."""

    @classmethod
    def of(cls, *texts: Tokens) -> "TrainingRow":
        """Return the row of one text, or of two; what they share before the first trained token is the prompt.

        Nothing depends on what follows the last trained token, so it is left out.
        """
        shared = takewhile(lambda pair: len({*pair}) == 1, zip(*(text.ids for text in texts), strict=False))
        begin = min(sum(1 for _ in shared), *(text.first for text in texts))
        return cls(
            array("i", texts[0].ids[:begin]),
            tuple((array("i", text.ids[begin : text.end]), bytes(text.is_trained[begin : text.end])) for text in texts),
        )

    @property
    def longest(self) -> int:
        """Length of the longest sequence in tokens."""
        return len(self.prompt) + max(len(ids) for ids, _ in self.completions)

    def group(self) -> Group:
        """Return the row as a group without rewards; a chosen completion has an advantage of 1, a rejected one of -1.

        Log-probabilities are unknown, because no server sampled the completions.
        """
        return Group(
            problem={"prompt": ""},
            prompt_token_ids=tuple(self.prompt),
            completions=tuple(
                Completion(
                    token_ids=tuple(ids),
                    logprobs=(math.nan,) * len(ids),
                    text="",
                    finish_reason="stop",
                    sampled=None if all(is_trained) else tuple(map(bool, is_trained)),
                )
                for ids, is_trained in self.completions
            ),
            rewards=(),
            advantages=((1.0,), (-1.0,))[: len(self.completions)],
        )


def digest(rows: Iterable[TrainingRow]) -> str:
    """Return a string that identifies the rows and their order: their number, and a hash of their tokens."""
    total = hashlib.blake2b(digest_size=16)
    count = 0
    for count, row in enumerate(rows, start=1):  # noqa: B007  the number of rows is used below
        for values in (row.prompt, *(part for completion in row.completions for part in completion)):
            content = bytes(values)
            total.update(len(content).to_bytes(8, "little") + content)
    return f"{count}:{total.hexdigest()}"


def fitting(rows: Sequence[TrainingRow], most_tokens: int | None, source: str) -> list[TrainingRow]:
    """Leave out the rows of more than `most_tokens` tokens, and log their number; `source` names the file.

    Raises:
        RewardError: all rows are too long.
    """
    kept = [row for row in rows if most_tokens is None or row.longest <= most_tokens]
    if len(kept) == len(rows):
        return kept
    longest = max(row.longest for row in rows)
    fault = (
        f"{len(rows) - len(kept):,} of the {len(rows):,} rows of {source} have more tokens than a sequence may have,"
        f" {most_tokens:,}; the longest has {longest:,}"
    )
    if not kept:
        raise RewardError(fault, hint=f"serve with --max-model-len {longest}, or shorten the rows")
    logger.warning(f"{fault}: they are left out")
    return kept


class RowEncoder:
    """Turns the rows of one file into token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], end_id: int | None) -> None:
        """Store the tokenizer; `template` are arguments of its chat template, and `end_id` ends a text."""
        self._tokenizer = tokenizer
        self._template = template
        self._end_id = end_id
        self._end_of_turn = chat_template.end_of_turn(tokenizer) if tokenizer.chat_template is not None else ""
        self._checked = set[tuple[object, ...]]()
        """The kinds of conversations in which the template was found to render every message."""

    def supervised(self, values: Mapping[str, Any]) -> TrainingRow:
        """Return a row of chat messages, or of a prompt and a completion.

        Every turn of the assistant in `messages` is trained on, but only those of a `completion`.

        Raises:
            RewardError: the row has other columns, or cannot be encoded.
        """
        _refuse_images(values)
        if "messages" in values:
            return TrainingRow.of(self._chat(values, _messages(values, "messages"), begin=0))
        if "prompt" in values and "completion" in values:
            return TrainingRow.of(self._answered(values, "completion"))
        raise _other_columns(values, SFT_FORMS)

    def preference(self, values: Mapping[str, Any]) -> TrainingRow:
        """Return a row of a prompt, a chosen and a rejected completion, as texts or as chat messages.

        Without a prompt, it is the messages with which both conversations begin.

        Raises:
            RewardError: the row has other columns, cannot be encoded, or its two completions are the same.
        """
        _refuse_images(values)
        if "chosen" not in values or "rejected" not in values:
            raise _other_columns(values, DPO_FORMS)
        if "prompt" in values:
            chosen, rejected = (self._answered(values, name) for name in ("chosen", "rejected"))
        else:
            both = [_messages(values, name) for name in ("chosen", "rejected")]
            begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False)))
            chosen, rejected = (self._chat(values, messages, begin=begin) for messages in both)
        if tuple(chosen.ids) == tuple(rejected.ids):
            raise _refusal("has the same completion as chosen and as rejected", "leave out rows without a preference")
        return TrainingRow.of(chosen, rejected)

    def _answered(self, values: Mapping[str, Any], name: str) -> Tokens:
        """Return the row's prompt with the completion in the column `name`."""
        prompt = values["prompt"]
        completion = values[name]
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._text(prompt, completion, name)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise _refusal(
                f"has {_kind(prompt)} as prompt and {_kind(completion)} as {name}, expected both as text or both as"
                " chat messages",
                "write both in the same way",
            )
        messages = _messages(values, "prompt")
        return self._chat(values, [*messages, *_messages(values, name)], begin=len(messages))

    def _text(self, prompt: str, completion: str, name: str) -> Tokens:
        """Return a prompt and its completion; the completion ends with an end-of-sequence token."""
        if LONE_SURROGATE.search(f"{prompt}{completion}"):
            raise _refusal(
                "has text with half of a surrogate pair, which is not a character", "remove it from the text"
            )
        before = problems.begun(self._tokenizer, prompt)
        own = [*self._tokenizer(completion, add_special_tokens=False)["input_ids"]]
        own += [self._end_id] if self._end_id is not None and own[-1:] != [self._end_id] else []
        if not before or not own:
            raise _refusal(f"has an empty {name if before else 'prompt'}", "leave out empty rows")
        return Tokens(before + own, [False] * len(before) + [True] * len(own))

    def _chat(self, values: Mapping[str, Any], messages: Sequence[Message], *, begin: int) -> Tokens:
        """Return a conversation; the assistant's turns from the message with the index `begin` on are trained on."""
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            raise _refusal(
                "has chat messages, but the model's tokenizer has no chat template",
                "write prompt and completion as text, or use a model with a chat template",
            )
        turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT and index >= begin]
        if not turns:
            raise _refusal(
                "has no message of the assistant to train on",
                "end each conversation with a message of the role assistant",
            )
        if not turns[0]:
            raise _refusal("begins with a message of the assistant, expected a prompt before it", "add a prompt")
        options = chat_template.arguments(tokenizer.chat_template, values, self._template)
        text, form = chat_template.whole_conversation(tokenizer, chat_template.as_known(messages), **options)

        def render(some: Sequence[Message], **more: Any) -> str:
            return str(tokenizer.apply_chat_template([*some], tokenize=False, **options, **more))

        self._refuse_lost(render, form, text)
        source = chat_template.applied_to(tokenizer.chat_template, values, options)
        if not MARKED.search(source):
            return self._by_prefix(render, form, text, turns)
        tokens = self._marked(form, options)
        if any(message["role"] == ASSISTANT for message in form[:begin]):
            first = self._by_prefix(render, form, text, turns).first
            tokens = Tokens(tokens.ids, [False] * first + [*tokens.is_trained[first:]])
        if True not in tokens.is_trained:
            raise _refusal("has no token of the assistant: the model's chat template marks none", OWN_MARK)
        return tokens

    def _marked(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Tokens:
        """Return a conversation with the tokens that the template marks as the assistant's."""
        encoded: Any = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        return Tokens([*encoded["input_ids"]], [bool(flag) for flag in encoded["assistant_masks"]])

    def _by_prefix(
        self, render: Callable[..., str], messages: Sequence[Message], text: str, turns: Sequence[int]
    ) -> Tokens:
        """Return a conversation with the tokens that the template adds for the `turns` of the assistant.

        A turn begins where its prompt ends, and ends with the token that ends a turn: a completion stops there, and
        never has what the template writes after it.
        """
        spans = []
        for index in turns:
            try:
                before = render(messages[:index], add_generation_prompt=True)
                after = render(messages[: index + 1])
            except Exception as error:  # a template computes with the messages, and may raise anything
                raise _refusal(
                    "has a turn of the assistant whose tokens cannot be found: the model's chat template rejects the"
                    f" messages before it{reason_of(error)}",
                    OWN_MARK,
                ) from error
            if not after.startswith(before) or not text.startswith(after):
                what = "is not continued by that turn" if text.startswith(after) else "is changed by later messages"
                raise _refusal(
                    "has a turn of the assistant whose tokens cannot be found: in this chat template, the prompt of a"
                    f" turn or the turn itself {what}",
                    f"{OWN_MARK}; or write each turn as a row of its own, with prompt and completion",
                )
            end = len(after)
            if self._end_of_turn and after.rstrip().endswith(self._end_of_turn):
                end = len(after.rstrip())
            spans.append(range(len(before), end))
        if not self._tokenizer.is_fast:
            raise _refusal("has chat messages, but the tokenizer does not report where its tokens begin", OWN_MARK)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        return Tokens([*encoded["input_ids"]], [any(start in span for span in spans) for start in starts])

    def _refuse_lost(self, render: Callable[..., str], messages: Sequence[Message], text: str) -> None:
        """Raise RewardError if the template drops a message, or rewrites one of the assistant.

        The text of every message is searched in the rendered one. If it is not there, or for the first conversation
        with these roles, `chat_template.lost` finds out whether the template drops it.
        """
        squeezed = _squeezed(text)
        absent = [
            index for index, message in enumerate(messages)
            if _squeezed(str(message.get("content") or "")) not in squeezed
        ]  # fmt: skip
        kind = tuple((message["role"], type(message.get("content")), "tool_calls" in message) for message in messages)
        if kind in self._checked and not absent:
            return
        chat_template.refuse_lost(render, messages)
        dropped = {*chat_template.lost(render, messages), *absent}
        if any(messages[index]["role"] == ASSISTANT for index in dropped):
            raise _refusal(
                "has a message of the assistant that the model's chat template drops or rewrites, such as a thought of"
                " an earlier turn",
                f"write the conversation as the template renders it, or {chat_template.OWN_TEMPLATE}",
            )
        self._checked.add(kind)


def _refusal(fault: str, hint: str) -> RewardError:
    """Return the error for a row; `fault` continues a sentence about it."""
    return RewardError(fault, hint=hint)


def _other_columns(values: Mapping[str, Any], expected: str) -> RewardError:
    found = shortened(", ".join(values)) or "none"
    return _refusal(f"has the columns {found}, expected {expected}", f"name the columns {expected}")


def _refuse_images(values: Mapping[str, Any]) -> None:
    if values.get("images"):
        raise _refusal("has images, which only environments support", "leave out rows with images")


def _messages(values: Mapping[str, Any], name: str) -> list[Message]:
    """Return the chat messages in the column `name`. RewardError: they are something else."""
    messages = values[name]
    is_list = isinstance(messages, list)
    fault = problem_fault({"prompt": messages}) if is_list else f"found {described(messages)}"
    if fault:
        raise _refusal(
            f"has no chat messages in {name!r}: {fault}",
            'write messages as [{"role": "user", "content": "..."}, ...]',
        )
    return [*messages]


def _kind(value: Any) -> str:
    return "text" if isinstance(value, str) else described(value)


def _squeezed(text: str) -> str:
    """Return a text without whitespace, which many templates change."""
    return "".join(text.split())
