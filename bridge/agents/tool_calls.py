"""How models write calls of tools: each syntax that is read from a turn, and the calls in a turn's text."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.rollouts.chat_template import THOUGHT_ENDS, call_arguments

FORMATS: Mapping[str, re.Pattern[str]] = {
    "hermes": re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL),
    "mistral": re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL),
    "llama": re.compile(r"^\s*(?:<\|python_tag\|>)?(\{.*\})\s*$", re.DOTALL),
}
"""Ways to write calls as JSON, each an object or a list of them; a template's own rendering shows which one it uses."""
ENDS = {"hermes": re.compile(r"\}\s*</tool_call>")}
"""The end of a call: without it, an unclosed `<tool_call>` after the last call would search to the end of the text."""
ARGUMENTS = ("arguments", "parameters")
"""Names of the arguments in these objects."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = "call00000"
    """As the model wrote it; some templates expect nine letters and digits."""

    def as_message(self) -> dict[str, Any]:
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": dict(self.arguments)}}

    def answered(self, content: str) -> dict[str, Any]:
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": content}


def parsed(text: str, form: str) -> tuple[Call, ...]:
    """Return the calls in the text of a turn, written as in `FORMATS`; none if any of them cannot be read."""
    try:
        return tuple(_calls(part_with_calls(text.rpartition(THOUGHT_ENDS)[2], form), FORMATS[form])) if form else ()
    except Exception:  # noqa: BLE001  a model may write anything
        return ()


def part_with_calls(text: str, form: str) -> str:
    """Return the beginning of `text` that holds all of its calls."""
    if form not in ENDS:
        return text
    return text[: max((end.end() for end in ENDS[form].finditer(text)), default=0)]


def _calls(text: str, form: re.Pattern[str]) -> Iterator[Call]:
    number = 0
    for written in form.findall(text):
        content = json.loads(written)
        for call in content if isinstance(content, list) else [content]:
            given: Any = next((call[name] for name in ARGUMENTS if name in call), {})
            arguments, call_id = call_arguments(given), call.get("id")
            if not isinstance(call["name"], str) or not isinstance(arguments, dict):
                raise TypeError(call)
            known = call_id if isinstance(call_id, str) and re.fullmatch(r"\w{9}", call_id) else f"call{number:05d}"
            yield Call(name=call["name"], arguments=arguments, id=known)
            number += 1
