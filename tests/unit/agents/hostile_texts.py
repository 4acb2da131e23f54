"""Hostile texts that a model, an agent or a reward may produce, and requests with such texts; seeded."""

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from bridge.types import Problem

PROBLEM: Problem = {"prompt": "2+3=", "answer": "5"}
ATOMS = (
    "\ud800", "\udfff", "\ud83d", "\x00", "\x1b[2J", "\x1b]0;title\x07", "\x07", "\u202e", "\u2066", "\u200f", "\ufeff",
    "\u2028", "\x85", "\r", "\r\n", "\n", "\t", "\x7f", "\x9b31m", "\u200d", "\ue000", "\U000e0001",
    "e\u0301", "👩‍👩‍👧",
    "<|im_end|>", "<|im_start|>system\n", "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "</s>",
    "{{ 7 * 7 }}", "{% for x in range(10**9) %}", "{% endfor %}", "[[[[", "]]]]", '{"a": ', "}", '"', "\\", "\\ud83d",
    '\\u0000', "NaN", "Infinity", "-inf", "1e999", "1e308", "-1e308", "9" * 400, "null", "true", '"1.0"', "%s%n", "%",
    "https://user:password@host/x?key=value&", "://", "<script>alert(1)</script>", "[red]", "`", "$(x)", "a", " ", "42",
)  # fmt: skip
CALL = '{"name": "act", "arguments": %s}'


def texts(count: int, seed: int = 0, *, num_long: int = 10) -> Iterator[str]:
    """Yield `count` texts, `num_long` of them with a megabyte on one line."""
    draw = random.Random(seed)
    for number in range(count):
        if number < num_long:
            atom = draw.choice([text for text in ATOMS if "\n" not in text])
            yield atom * (2**20 // len(atom))
        else:
            yield draw.choice(KINDS)(draw)


def _mixed(draw: random.Random) -> str:
    return "".join(draw.choices(ATOMS, k=draw.randrange(1, 12)))


def _nested(draw: random.Random) -> str:
    depth = draw.choice((3, 200, 500, 990, 2_000, 20_000))
    begin, end = draw.choice((("[", "]"), ('{"a":', "}"), ("(", ")")))
    return begin * depth + draw.choice(("", "1", '"\\ud800"')) + end * draw.choice((depth, 0))


def _called(draw: random.Random) -> str:
    given = draw.choice((_nested(draw), _mixed(draw), '{"a": NaN}', '"x"', "[]", "3", "null", '{"a": "\\ud800"}'))
    call = draw.choice((CALL % given, CALL % json.dumps(given), "{}", '{"name": 3}', '{"name": [[]]}', f"[{given}]"))
    forms = ("<tool_call>\n%s\n</tool_call>", "[TOOL_CALLS] [%s]", '[TOOL_CALLS] ["x", %s]', "<|python_tag|>%s", "%s")
    return draw.choice(forms) % call


def _number(draw: random.Random) -> str:
    return draw.choice(("nan", "-inf", "1e400", "1e308", "1e-400", "0x10", "१२", "1_000", "9" * 5_000, "--1", "1e31"))


KINDS: tuple[Callable[[random.Random], str], ...] = (_mixed, _mixed, _nested, _called, _number)


def request(draw: random.Random, text: str) -> bytes:
    """Return the body of a chat request with `text` somewhere in it."""
    user: dict[str, Any] = {"role": "user", "content": "Begin."}
    call = {"id": "1", "type": "function", "function": {"name": "act", "arguments": "{}"}}
    nested: Any = text
    for _ in range(draw.choice((1, 2, 300))):
        nested = [{"type": "text", "text": nested}]
    tool: dict[str, Any] = {"type": "function", "function": {"name": "act", "description": "d", "parameters": {}}}
    bodies: tuple[Callable[[], Any], ...] = (
        lambda: {"messages": [{**user, "content": text}]},
        lambda: {"messages": [{**user, "content": nested}]},
        lambda: {"messages": [{**user, "name": text}]},
        lambda: {"messages": [{"role": text, "content": text}]},
        lambda: {"messages": [{"role": "system", "content": text}, {"role": "system", "content": ""}, user]},
        lambda: {"messages": [user, _turn(call, arguments=text), {"role": "tool", "content": text}]},
        lambda: {"messages": [user, _turn(call, name=text), {"role": "tool", "content": "", "tool_call_id": text}]},
        lambda: {"messages": [user, {"role": "assistant", "content": text}, user]},
        lambda: {"messages": [user], "tools": [{**tool, "function": {"name": text, "parameters": {text: text}}}]},
        lambda: {"messages": [user], "tools": [{text: nested}]},
        lambda: {"messages": [user], text: text},
        lambda: {"messages": [user], "max_tokens": text, "n": text, "model": nested},
        lambda: {"messages": text, "tools": text, "stop": text},
        lambda: {"messages": [nested, text]},
    )
    form = draw.randrange(len(bodies) + 3)
    if form < len(bodies):
        return json.dumps(bodies[form]()).encode()
    raw = text.encode(errors="surrogatepass")
    if form == len(bodies):
        return raw
    if form == len(bodies) + 1:
        return b'{"messages": [{"role": "user", "content": "' + raw + b'"}]}'
    return b'{"messages": [{"role": "user", "content": "x"}], "metadata": ' + raw + b"}"


def _turn(call: dict[str, Any], **function: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{**call, "function": call["function"] | function}]}


class Judge:
    """A reward that raises an exception or returns a value, depending on the text."""

    def score(self, problem: Problem, completion: str) -> Any:
        kind = len(completion) % 6
        if kind == 0:
            raise ValueError(f"cannot read {completion}")
        if kind == 1:
            name = completion.replace("\0", "")[:50].encode(errors="replace").decode()
            raise type(name, (Exception,), {})(completion)
        if kind == 2:
            return float(completion) if len(completion) < 400 else 10 ** len(completion)
        if kind == 3:
            return [float(len(completion)), 1e308, 1e308]
        if kind == 4:
            return json.loads(completion)
        return completion

    def run(self, problem: Problem, base_url: str) -> Any:
        return self.score(problem, problem["answer"])

    def reset(self, **problem: Any) -> str:
        return str(self.score(PROBLEM, problem["answer"]))

    def act(self, text: str) -> str:
        return str(self.score(PROBLEM, text))


class Parts:
    """Returns a reward with parts named by the text."""

    def scores(self, problem: Problem, completion: str) -> Any:
        return math.pow(10, len(completion) % 400), {completion: len(completion)}

    score = scores
