"""Parse tool calls from the text of a turn, in each syntax in which models write them."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bridge.rollouts.chat_template import THOUGHT_BEGINS, THOUGHT_ENDS, call_arguments


@dataclass(frozen=True, kw_only=True)
class Format:
    """A syntax for tool calls in JSON."""

    marks: re.Pattern[str]
    """Matches the text before the JSON (an object or a list of objects), or the end of a thought."""
    ends: re.Pattern[str]
    """Matches the text after the JSON."""
    begins: re.Pattern[str]
    """Matches the begin of a call, whether or not it can be read."""
    last: re.Pattern[str] | None = None
    """Matches the end of a call; text after the last match, such as an unclosed `<tool_call>`, is not searched."""


FORMATS: Mapping[str, Format] = {
    "hermes": Format(
        marks=re.compile(rf"{THOUGHT_ENDS}|<tool_call>\s*(?=\{{)"),
        ends=re.compile(r"\s*</tool_call>"),
        begins=re.compile("<tool_call>"),
        last=re.compile(r"\}\s*</tool_call>"),
    ),
    "mistral": Format(
        marks=re.compile(rf"{THOUGHT_ENDS}|\[TOOL_CALLS\]\s*(?=\[)"),
        ends=re.compile(""),
        begins=re.compile(r"\[TOOL_CALLS\]"),
    ),
    "llama": Format(
        marks=re.compile(rf"{THOUGHT_ENDS}|(?:\A|(?<={THOUGHT_ENDS}))\s*(?:<\|python_tag\|>)?(?=\{{)"),
        ends=re.compile(r"\s*\Z"),
        begins=re.compile(r"""\A\s*(?:<\|python_tag\|>|\[?\{\s*["']name["'])"""),
    ),
}
"""Name -> format; `Conversation` detects a template's format from how it renders a call."""
DECODER = json.JSONDecoder()
ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments of a call."""
BESIDE_ARGUMENTS = {"name", "id", "type"}
"""The other keys of a call; a call without arguments has no further ones, which might be its arguments."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = "call00000"
    """The id that the model wrote, or a made-up one; some templates expect nine letters and digits."""

    def as_message(self) -> dict[str, Any]:
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": dict(self.arguments)}}

    def answered(self, content: str) -> dict[str, Any]:
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": content}


def parsed(text: str, form: str) -> tuple[Call, ...]:
    """Return the calls in the text of a turn, in the format named `form`; none if any of them is malformed."""
    return split(text, form)[1]


def split(text: str, form: str) -> tuple[str, tuple[Call, ...]]:
    """Return the text of a turn without its calls, and the calls; no calls if any of them is malformed."""
    try:
        written = _written(text, FORMATS[form]) if form else []
        calls = tuple(_calls(content for _, _, content in written))
    except Exception:  # noqa: BLE001  a model may write anything
        return text, ()
    ends = [0, *(end for _, end, _ in written)]
    starts = [*(start for start, _, _ in written), len(text)]
    return "".join(text[end:start] for end, start in zip(ends, starts, strict=True)), calls


def is_unreadable(text: str, form: str) -> bool:
    """Return whether the text of a turn without calls begins a call outside a thought: the call is malformed."""
    said = text.rpartition(THOUGHT_ENDS)[2].partition(THOUGHT_BEGINS)[0]
    return bool(form) and FORMATS[form].begins.search(said) is not None


def _written(text: str, form: Format) -> list[tuple[int, int, Any]]:
    """Return the start, the end and the parsed JSON of each call; text inside a thought is ignored.

    The end of a call follows from its JSON, because strings in it may contain any marker, such as `</tool_call>` or
    `</think>`.

    Raises:
        ValueError: a call is malformed.
    """
    last = len(text)
    if form.last is not None:
        last = max((end.end() for end in form.last.finditer(text)), default=0)
    written = list[tuple[int, int, Any]]()
    position = 0
    while mark := form.marks.search(text, position):
        position = mark.end()
        if mark[0] == THOUGHT_ENDS:
            written.clear()
        elif position < last:
            ended = None
            with suppress(ValueError, RecursionError):
                content, end = DECODER.raw_decode(text, position)
                ended = form.ends.match(text, end)
            if ended is not None:
                written.append((mark.start(), ended.end(), content))
                position = ended.end()
            elif (position := text.find(THOUGHT_ENDS, position)) < 0:
                raise ValueError("a call cannot be read")
    return written


def _calls(written: Iterable[Any]) -> Iterator[Call]:
    number = 0
    for content in written:
        for call in content if isinstance(content, list) else [content]:
            given: Any = next((call[name] for name in ARGUMENTS if name in call), None)
            arguments = call_arguments(given)
            if call.keys().isdisjoint(ARGUMENTS) and call.keys() - BESIDE_ARGUMENTS:
                raise TypeError(call)
            call_id = call.get("id")
            if not isinstance(call["name"], str) or not isinstance(arguments, dict):
                raise TypeError(call)
            known = call_id if isinstance(call_id, str) and re.fullmatch(r"\w{9}", call_id) else f"call{number:05d}"
            yield Call(name=call["name"], arguments=arguments, id=known)
            number += 1
