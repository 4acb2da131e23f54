"""Apply a model's chat template: messages and arguments, lost content, and the token that ends a turn."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from bridge.config.rollouts import SET_BY_BRIDGE
from bridge.core import json_lines
from bridge.core.foreign_code import LONE_SURROGATE, described, reason_of, shortened
from bridge.errors import RewardError
from bridge.types import Message, Problem

Render = Callable[[Sequence[Message]], str]
"""Messages -> the text of the prompt."""
MARKER = "bridgemark{}x"
"""Only letters and digits, because no template trims, escapes or splits these; some templates change their case."""
CONTINUED = "bridgeend"
"""Marker at the end of a message that the model continues."""
COLUMNS = ("tools", "documents")
"""Keys of a problem that are passed to the chat template if it uses them; their values are lists of objects."""
OWN_ARGUMENTS = "chat_template_kwargs"
"""Key of a problem that holds additional template arguments, as an object."""
SEEN_ANYWAY = ("prompt", "messages", "plain_prompt", "images", "answer", "solution")
"""Keys of a problem that hold its prompt or the reference for its score."""
NO_LOSS = ("role", "content", "type", "id", "tool_call_id")
"""Keys of a message that a template may leave out without a remark; the content is checked separately."""
THOUGHT_BEGINS = "<think>"
THOUGHT_ENDS = "</think>"
_EMPTY_THOUGHT = re.compile(rf"{THOUGHT_BEGINS}\s*{THOUGHT_ENDS}\s*")
AS_SYSTEM = "developer"
"""The role that OpenAI's newer models use instead of `system`; few templates support it."""
MEANT = {
    "human": "user", "question": "user", "instruction": "system", "gpt": "assistant", "model": "assistant",
    "bot": "assistant", "ai": "assistant", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
"""Role in other data formats -> the role that chat templates support."""
OWN_TEMPLATE = "give the model a chat template that renders it, as chat_template.jinja in its folder"
USER = {"role": "user", "content": "What do you see?"}
SEEN = "I see."
CALL = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"number": 7}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up", "description": "Look a number up.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}  # fmt: skip
PROBES: Mapping[str, Sequence[Message]] = {
    "system": [{"role": "system", "content": SEEN}, USER],
    "user": [{"role": "user", "content": SEEN}],
    "assistant": [USER, {"role": "assistant", "content": SEEN}, USER],
    "tool": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": SEEN},
    ],
}
"""Role -> a conversation with one message of this role, at a position where templates expect it."""


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], /, *, tokenize: bool, **options: Any
) -> Any:
    """Render a prompt with the chat template, as text or token ids, up to the point where the model continues.

    This is the start of a new turn of the assistant, or the end of the last message if that is the assistant's. A turn
    that calls tools and has no text is written in the form that the template expects.

    Raises:
        RewardError: the template rejects the messages, or the last one calls tools.
    """
    _refuse_bad_calls(messages)
    if _calls(messages[-1]):
        raise RewardError(
            f"the prompt {described(messages)} ends with tool calls, expected their results after them",
            hint="add the results as messages with the role tool, or leave the calls out",
        )
    text, _ = _rendered(messages, partial(_open, partial(tokenizer.apply_chat_template, tokenize=False, **options)))
    return [*tokenizer(text, add_special_tokens=False)["input_ids"]] if tokenize else text


def whole_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], /, **options: Any
) -> tuple[str, list[Message]]:
    """Render a conversation up to its last message, and return the text, and the messages in the form that it is of.

    Raises:
        RewardError: the template rejects the messages.
    """
    _refuse_bad_calls(messages)
    return _rendered(messages, partial(tokenizer.apply_chat_template, tokenize=False, **options))


def _rendered(messages: Sequence[Message], render: Callable[[list[Message]], str]) -> tuple[str, list[Message]]:
    """Return the text of the messages and the messages, in the form in which the template writes most of their calls.

    Raises:
        RewardError: the template rejects the messages in every form.
    """
    texts = list[tuple[str, list[Message]]]()
    failures = list[Exception]()
    for form in _forms(messages):
        try:
            texts.append((render(form), form))
        except Exception as error:  # noqa: BLE001  a template computes with the messages, and may raise anything
            failures.append(error)
    if not texts:
        roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
        raise RewardError(
            f"the model's chat template rejects the prompt {described(messages)} with the roles {roles}:"
            f" {type(failures[0]).__name__}{reason_of(failures[0])}",
            hint="use the roles that the model's template supports, in the order that it expects"
            + (" (--system-prompt '' leaves out the environment's own)" if messages[0]["role"] == "system" else ""),
        ) from failures[0]
    names = [str(call["function"].get("name")) for message in messages for call in _calls(message)]
    # the first one with the most calls
    text, form = max(texts, key=lambda pair: sum(map(pair[0].count, names)))
    if LONE_SURROGATE.search(text):
        raise RewardError(
            f"the prompt {described(messages)} is rendered with half of a surrogate pair, which is not a character",
            hint=f"remove it from the problem's {', '.join((*COLUMNS, OWN_ARGUMENTS))}",
        )
    return text, form


def _refuse_bad_calls(messages: Sequence[Message]) -> None:
    """Refuse tool calls without a name, or with arguments that are no object: a template would write them as they are.

    A call is an object with a `function`, or with the function's keys themselves, which some templates render, too.
    """
    for message in messages:
        calls: Any = message.get("tool_calls", [])
        entries = calls if isinstance(calls, list) else [None]
        functions = [entry.get("function", entry) if isinstance(entry, Mapping) else None for entry in entries]
        for function in functions:
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise RewardError(
                    f"the prompt {described(messages)} has the tool calls {described(calls)}, expected a list of"
                    " objects, each with the name of a function",
                    hint=f"write them as {json.dumps([CALL])}",
                )
            given: Any = function.get("arguments", {})
            if not isinstance(given, Mapping):
                raise RewardError(
                    f"the prompt {described(messages)} has a call of {function['name']} with the arguments"
                    f" {described(given)}, expected an object or its JSON",
                    hint='write them as {"city": "Rome"}, or leave the call and its result out',
                )


def _open(render: Callable[..., str], messages: Sequence[Message]) -> str:
    """Return the text of a prompt up to where the model continues.

    Templates trim messages, and some put an empty thought in front of one. A message that the model continues must stay
    open: a marker at its end protects its trailing whitespace, and a thought at its start is placed directly after the
    generation prompt.
    """
    last = messages[-1]
    if last.get("role") != "assistant":
        return render(messages, add_generation_prompt=True)
    content = last.get("content")
    if isinstance(content, list) and len(content) == 1:
        content = content[0].get("text")
    if isinstance(content, str) and content.lstrip().startswith(THOUGHT_BEGINS) and len(messages) > 1:
        begun = render(messages[:-1], add_generation_prompt=True)
        if begun.rstrip().endswith(THOUGHT_BEGINS):
            begun = begun.rstrip().removesuffix(THOUGHT_BEGINS)
        if not begun.rstrip().endswith(THOUGHT_ENDS):
            return f"{begun}{content.lstrip()}"
    text = render([*messages[:-1], _with_end(last, CONTINUED)], continue_final_message=True)
    return text.removesuffix(CONTINUED)


def _with_end(message: Message, end: str) -> Message:
    """Return the message with `end` appended to its last text."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": f"{content or ''}{end}"}
    parts = [*content]
    with_text = [index for index, part in enumerate(parts) if "text" in part]
    if with_text:
        last = parts[with_text[-1]]
        parts[with_text[-1]] = {"type": "text", **last, "text": f"{last['text']}{end}"}
    else:
        parts.append({"type": "text", "text": end})
    return {**message, "content": parts}


def _forms(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the messages in each form in which a template may expect turns with tool calls.

    The content of a turn without text is an empty string or null: many templates write null as `None`, while
    DeepSeek's recognize a call by it. DeepSeek's templates also concatenate a call's arguments with other text.
    """
    forms = list[list[Message]]()
    for calling in (messages, _with_calls(messages, _as_text)):
        for silence in ("", None):
            form = [
                {**message, "content": silence} if _calls(message) and not message.get("content") else message
                for message in calling
            ]
            forms += [form] if form not in forms else []
    return forms


def as_known(messages: Sequence[Message], *, keeps_parts: bool = False) -> list[Message]:
    """Return the messages in the form that templates support: without null values, and with `developer` as `system`.

    A Parquet file gives every message the keys of all messages, and templates only test whether a key exists: null
    values and empty lists of tool calls are dropped. Calls and
    arguments written as JSON text become objects: a template would render the text, or reject it. OpenAI's API writes
    arguments so, and data sets write calls so if their arguments have different types. Contents in parts are joined
    unless `keeps_parts` is set, because most templates of text models render the list itself, drop it, or reject it.
    """
    known: list[Message] = [json_lines.without_nulls(message) for message in messages]
    known = [{**message, "role": "system"} if message.get("role") == AS_SYSTEM else message for message in known]
    if not keeps_parts:
        known = [
            {**message, "content": text_of(message["content"])} if "content" in message else message
            for message in known
        ]
    known = [
        {**message, "tool_calls": _without_json_text(message["tool_calls"])} if "tool_calls" in message else message
        for message in known
    ]
    known = [
        {key: value for key, value in message.items() if key != "tool_calls" or value not in ("", [])}
        for message in known
    ]
    return _with_calls(known, call_arguments)


def text_of(content: Any) -> Any:
    """Return the text of a content, whose text parts are joined by line breaks, as vLLM joins them for such templates.

    Source: `_parse_chat_message_content_parts` in vLLM's `chat_utils.py`.
    """
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _calls(message: Message) -> list[Any]:
    """Return the tool calls of a message; empty if they are malformed."""
    calls: Any = message.get("tool_calls")
    is_list = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    return calls if is_list and all(isinstance(call.get("function"), dict) for call in calls) else []


def _with_calls(messages: Sequence[Message], convert: Callable[[Any], Any]) -> list[Message]:
    """Return the messages with `convert` applied to the arguments of every call, which are None if it has none."""
    return [
        {**message, "tool_calls": [_with_arguments(call, convert) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def call_arguments(written: Any) -> Any:
    """Return the arguments of a call, parsed if they are JSON text; empty text and null mean no arguments."""
    parsed = {} if written in ("", None) else _parsed(written)
    return {} if parsed is None else parsed


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping | list) else arguments


def _with_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": convert(function.get("arguments"))}}


def applied(named: Any, *, has_tools: bool) -> str:
    """Return the source of the chat template that transformers applies; empty if there is none.

    `named` is a tokenizer's `chat_template`: one source, several by name, or None.
    """
    if isinstance(named, Mapping):
        return str(named.get("tool_use" if has_tools and "tool_use" in named else "default", ""))
    return str(named or "")


def applied_to(named: Any, problem: Mapping[str, Any], template: Mapping[str, Any]) -> str:
    """Return the source of the chat template that is applied to a problem's messages."""
    return applied(named, has_tools=bool(template.get("tools") or objects(problem.get("tools"))))


def arguments(named: Any, problem: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for the chat template `named`: those in `template`, and those that the problem provides.

    Raises:
        RewardError: the problem's `chat_template_kwargs` is not an object, or has a key that Bridge sets; or no chat
            template is for these messages.
    """
    source = applied_to(named, problem, template)
    if isinstance(named, Mapping) and not source:
        raise RewardError(
            f"the model has the chat templates {', '.join(named)}, but none named default, which renders messages",
            hint="copy one of them to chat_template.jinja in the model's folder",
        )
    columns = {name: objects(problem.get(name)) for name in COLUMNS if name in source}
    own = _parsed(problem.get(OWN_ARGUMENTS)) or {}
    has_names = isinstance(own, Mapping) and all(isinstance(name, str) for name in own)
    if not has_names or own.keys() & SET_BY_BRIDGE:
        raise RewardError(
            f"the problem's {OWN_ARGUMENTS} is {described(own)}, expected an object without"
            f" {', '.join(sorted(SET_BY_BRIDGE))}",
            hint='write it as {"enable_thinking": false}',
        )
    own = {name: value for name, value in own.items() if value is not None}
    return {name: value for name, value in columns.items() if value} | {**template, **own}


def unused_arguments(given: Any, source: str) -> list[str]:
    """Return the names of template arguments, an object or its JSON, that the template `source` does not use."""
    parsed = _parsed(given)
    return [str(name) for name in parsed if str(name) not in source] if isinstance(parsed, Mapping) else []


def objects(value: Any) -> list[Any]:
    """Return a list of objects, parsed if any of it is JSON text; empty if `value` is anything else."""
    parsed = _without_json_text(value)
    is_list = isinstance(parsed, list) and all(isinstance(entry, Mapping) for entry in parsed)
    return [json_lines.without_nulls(entry) for entry in parsed] if is_list else []


def _without_json_text(value: Any) -> Any:
    """Return a list of tools, calls or documents, parsed if it, an entry or the function of an entry is JSON text."""
    listed = _parsed(value)
    if not isinstance(listed, list):
        return value
    entries = map(_parsed, listed)
    return [
        {**entry, "function": _parsed(entry["function"])}
        if isinstance(entry, Mapping) and "function" in entry
        else entry
        for entry in entries
    ]


def _parsed(value: Any) -> Any:
    try:
        return json_lines.parsed(value) if isinstance(value, str) else value
    except ValueError:
        return value


def lost(render: Render, messages: Sequence[Message]) -> list[int]:
    """Return the indices of the messages that a chat template drops.

    Each message gets its own marker, which the rendered text must contain. The marker is tried at the end of the
    message, then in the middle, then at the start: a template may test how a message begins or ends, and may leave out
    a thought. In a message without text, the names of its tool calls are marked.
    """
    missing = [index for index, message in enumerate(messages) if _marked(message, "", 1.0) is not None]
    is_rendered = False
    for place in (1.0, 0.5, 0.0):
        marked = [_marked(message, MARKER.format(index), place) or message for index, message in enumerate(messages)]
        try:
            text = render(marked).casefold()
        except Exception:  # noqa: BLE001, S112  a template computes with the messages, and may raise anything
            continue
        is_rendered = True
        missing = [index for index in missing if MARKER.format(index) not in text]
        if not missing:
            break
    return missing if is_rendered else []


def _marked(message: Message, marker: str, place: float) -> Message | None:
    """Return the message with `marker` in its text, or in the names of its tool calls; None if it has neither."""
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return {**message, "content": _with(content, marker, place)}
    if isinstance(content, list):
        parts = []
        has_text = False
        for part in content:
            if str(part.get("text") or "").strip():
                has_text = True
                parts.append({**part, "text": _with(part["text"], marker, place)})
            else:
                parts.append(part)
        return {**message, "content": parts} if has_text else None
    named = []
    for call in _calls(message):
        function = call["function"]
        named.append({**call, "function": {**function, "name": f"{function.get('name')}{marker}"}})
    return {**message, "tool_calls": named} if named else None


def _with(text: str, marker: str, place: float) -> str:
    cut = int(len(text) * place)
    return f"{text[:cut]}{marker}{text[cut:]}"


def refuse_lost(render: Render, given: Sequence[Message]) -> None:
    """Raise RewardError if the template drops a message; turns of the assistant are exempt (`remarks` reports them).

    `given` holds the messages as returned by `as_known`.
    """
    missing = [index for index in lost(render, given) if given[index]["role"] != "assistant"]
    if not missing:
        return
    index = missing[0]
    rendered = roles(render)
    role = given[index]["role"]
    first = given[0]["role"]
    place = " that is not the first message" if role == first == "system" and index else ""
    hint = f"write {MEANT[role]} in place of {role}" if role in MEANT else ""
    if isinstance(given[index].get("content"), list) and role in rendered:
        hint = "write its content as one text, not in parts"
    if role == "system":
        hint = "move its text into the user's message, and use --system-prompt '' if the environment adds it"
    raise RewardError(
        f"the model's chat template drops the message with the role {role}{place} in the prompt {described(given)}: the"
        f" model would not see {described(given[index].get('content'))}; the template renders"
        f" {'the roles ' + ', '.join(rendered) if rendered else 'no message whose content is text'}",
        hint=f"{hint}, or {OWN_TEMPLATE}" if hint else f"use a role that it renders, or {OWN_TEMPLATE}",
    )


def remarks(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    template: Mapping[str, Any],
    *,
    read: Collection[str | None] | None = None,
) -> Iterator[str]:
    """Yield one line for each part of the problems that the model sees in a different form, or not at all.

    `read` names the prompt and answer columns if the problems are rows of a file or data set, whose other columns a
    reward may use. None: the problems come from a class.
    """
    named = tokenizer.chat_template
    chats = [problem for problem in problems if named and not isinstance(problem["prompt"], str)]
    messages = [message for problem in chats for message in _of_chat(problem)]
    if any(message.get("role") == AS_SYSTEM for message in messages):
        yield f"messages with the role {AS_SYSTEM} are rendered as system messages, as in an agent's requests"
    if foreign := [role for role in MEANT if any(message.get("role") == role for message in messages)]:
        usual_roles = ", ".join(f"{MEANT[role]} for {role}" for role in foreign)
        yield f"the chat template writes unusual roles unchanged; most models are trained with {usual_roles}"
    if any(chat["prompt"][-1].get("role") == "assistant" for chat in chats):  # type: ignore[union-attr]
        yield "prompts that end with a message of the assistant are continued: a completion is the rest of that message"
    if any(_loses_turn(tokenizer, problem, template) for problem in chats):
        yield (
            "the model's chat template drops earlier turns of the assistant, or their tool calls: the model does not"
            f" see them; {OWN_TEMPLATE}"
        )
    unseen = dict.fromkeys(key for problem in chats for key in _unseen(tokenizer, problem, template))
    if THOUGHT_BEGINS in unseen:
        yield (
            "the model's chat template leaves out thoughts (<think>...</think>) of earlier turns of the assistant: the"
            f" model does not see them; {OWN_TEMPLATE}"
        )
    if keys := [key for key in unseen if key != THOUGHT_BEGINS]:
        yield f"the model does not see {', '.join(map(shortened, keys))} in messages: its chat template leaves them out"
    texts = [str(message.get("content")) for chat in chats if not chat.get("images") for message in _of_chat(chat)]
    if inside := [token for token in tokenizer.all_special_tokens if token and any(token in text for text in texts)]:
        yield (
            f"messages contain {', '.join(map(repr, inside))} as text, which is encoded as special tokens: the model"
            " may take the text after them for a new turn"
        )
    if len(chats) < len(problems) and any(_appended_end(tokenizer)):
        yield "the tokenizer appends an end-of-sequence token to every text; prompts are sent without it"
    if any(_is_json_of_chat(problem["prompt"]) for problem in problems):
        yield (
            "prompts are chat messages written as JSON text, which the model sees as text: write them as a list of"
            " messages to apply its chat template"
        )
    elif named and read is not None and len(chats) < len(problems):
        yield (
            "prompts that are text get no chat template; if the model was trained on chats, write them as messages:"
            ' [{"role": "user", "content": ...}]'
        )
    yield from _columns(named if chats else None, problems, template, read)


def missing_opening(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> str:
    """Return what the chat template writes in front of the assistant's text, but never at the end of a prompt."""
    render = partial(tokenizer.apply_chat_template, tokenize=False, **template)
    try:
        prompt = str(render([USER], add_generation_prompt=True))
        is_ignored = prompt == str(render([USER]))
        before = str(render([USER, {"role": "assistant", "content": SEEN}])).rpartition(SEEN)[0]
    except Exception:  # noqa: BLE001  a template may raise anything
        return ""
    opening = _EMPTY_THOUGHT.sub("", before.removeprefix(prompt)) if before.startswith(prompt) else ""
    return opening if is_ignored and opening.strip() else ""


def own_system_message(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> str:
    """Return the system message that the chat template writes in front of a prompt without one; empty if none."""
    render = partial(tokenizer.apply_chat_template, tokenize=False, **template)
    try:
        before, _, behind = str(render([{"role": "system", "content": MARKER}, USER])).partition(MARKER)
        text = str(render([USER]))
    except Exception:  # noqa: BLE001  the template has no system messages, or may raise anything
        return ""
    own = text.removeprefix(before).removesuffix(behind)
    return own.strip() if behind and f"{before}{own}{behind}" == text else ""


def _is_json_of_chat(prompt: Any) -> bool:
    """Return whether a prompt is the JSON of chat messages, as text."""
    written = _parsed(prompt) if isinstance(prompt, str) and prompt.lstrip().startswith("[") else None
    if not isinstance(written, list) or not written:
        return False
    return all(isinstance(message, dict) and "role" in message for message in written)


def _of_chat(problem: Problem) -> list[Any]:
    return [message for message in problem["prompt"] if isinstance(message, dict)]


def _loses_turn(tokenizer: PreTrainedTokenizerBase, problem: Problem, template: Mapping[str, Any]) -> bool:
    if problem.get("images"):
        return False
    messages: Any = as_known(problem["prompt"])  # type: ignore[arg-type]
    if not any(message.get("role") == "assistant" for message in messages):
        return False
    given = arguments(tokenizer.chat_template, problem, template)
    render = partial(apply_chat_template, tokenizer, tokenize=False, **given)
    try:
        return any(messages[index]["role"] == "assistant" for index in lost(render, messages))
    except RewardError:  # the template takes only contents in parts
        return False


def _unseen(tokenizer: PreTrainedTokenizerBase, problem: Problem, template: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of messages whose text the chat template leaves out; `<think>` stands for a thought."""
    if problem.get("images"):
        return
    messages: Any = as_known(problem["prompt"])  # type: ignore[arg-type]
    marked = [_marked_inside(message, MARKER.format(index)) for index, message in enumerate(messages)]
    if not any(marks for _, marks in marked):
        return
    try:
        given = arguments(tokenizer.chat_template, problem, template)
        text = apply_chat_template(tokenizer, [message for message, _ in marked], tokenize=False, **given).casefold()
    except RewardError:  # the template rejects markers, for example because it compares the values
        return
    yield from (key for _, marks in marked for key, marker in marks.items() if marker not in text)


def _marked_inside(message: Message, marker: str) -> tuple[Message, dict[str, str]]:
    """Return the message with markers in its thought and in texts other than the content, and the markers by key."""
    keys = [key for key, value in message.items() if isinstance(value, str) and value.strip()]
    role = message.get("role")
    no_loss = (*NO_LOSS, "name") if MEANT.get(str(role), role) == "tool" else NO_LOSS
    marks = {key: f"{marker}{number}y" for number, key in enumerate(keys) if key not in no_loss}
    changed = {**message, **{key: f"{message[key]}{mark}" for key, mark in marks.items()}}
    content = message.get("content")
    if role == "assistant" and isinstance(content, str) and THOUGHT_ENDS in content:
        marks[THOUGHT_BEGINS] = f"{marker}thought"
        before, _, rest = content.partition(THOUGHT_ENDS)
        changed["content"] = f"{before.rstrip()}{marks[THOUGHT_BEGINS]}\n{THOUGHT_ENDS}{rest}"
    return changed, marks


def _appended_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    encoded = tokenizer("2+3=", return_special_tokens_mask=True)
    added = [*encoded["special_tokens_mask"]]
    return added[-1:] if 0 in added else []


def _columns(
    named: Any, problems: Sequence[Problem], template: Mapping[str, Any], read: Collection[str | None] | None
) -> Iterator[str]:
    """Yield notes about columns that the chat template gets, that it does not use, and that the model never sees."""
    names = dict.fromkeys(name for problem in problems for name in problem)
    sources = [applied_to(named, problem, template) for problem in problems]
    source = "\n".join(dict.fromkeys(sources))
    with_sources = [*zip(problems, sources, strict=True)]
    taken = [
        name for name in COLUMNS
        if name not in template and any(name in used and objects(problem.get(name)) for problem, used in with_sources)
    ]  # fmt: skip
    taken += [OWN_ARGUMENTS] if OWN_ARGUMENTS in names and source else []
    if taken:
        yield f"the model's chat template gets {', '.join(taken)} of each problem"
    ignored = dict.fromkeys(
        name for problem, used in with_sources if used for name in unused_arguments(problem.get(OWN_ARGUMENTS), used)
    )
    if ignored:
        yield f"{', '.join(ignored)} in {OWN_ARGUMENTS} of a problem has no effect: its chat template does not use it"
    unused = [name for name in names if name in (*COLUMNS, OWN_ARGUMENTS) and name not in taken]
    if unused:
        why = "their prompts are text"
        if source:
            why = "its chat template does not use it, it is not a list of objects, or the environment sets its own"
        yield f"the model does not see {', '.join(unused)} of the problems: {why}"
    known = {*COLUMNS, OWN_ARGUMENTS, *SEEN_ANYWAY, *(read or ())}
    alike = [name for name in names if name in _variables(source) - SET_BY_BRIDGE and name not in known]
    if alike:
        yield (
            f"the chat template has arguments with the names of the columns {', '.join(alike)}, but does not get their"
            f' values: write them in {OWN_ARGUMENTS}, as {{"{alike[0]}": ...}}, or use --chat-template-kwargs'
        )
    others = [name for name in names if name not in {*known, *alike}]
    if others and read is not None:
        yield f"the model does not see the columns {', '.join(map(shortened, others))}; rewards get them"


def unseen_columns(named: Any, problems: Sequence[Problem], template: Mapping[str, Any]) -> list[str]:
    """Return the columns of some problem that the chat template `named` does not get, or does not use."""
    unseen = dict[str, None]()
    for problem in problems:
        source = "" if isinstance(problem["prompt"], str) else applied_to(named, problem, template)
        of_problem: Mapping[str, Any] = problem
        given = [name for name in COLUMNS if of_problem.get(name)]
        unseen |= dict.fromkeys(name for name in given if name not in source or not objects(of_problem[name]))
    return [*unseen]


def _variables(source: str) -> set[str]:
    """Return the names of the arguments that a chat template reads."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)  # noqa: S701  nothing is rendered
        return meta.find_undeclared_variables(parsed)
    except TemplateError:  # tags that only transformers knows
        return set()


def roles(render: Render) -> list[str]:
    """Return which of the common roles a template renders."""
    return [role for role, messages in PROBES.items() if _is_rendered(render, role, messages)]


def _is_rendered(render: Render, role: str, messages: Sequence[Message]) -> bool:
    try:
        render(messages)
    except Exception:  # noqa: BLE001  the template rejects the role
        return False
    return not any(messages[index]["role"] == role for index in lost(render, messages))


def end_of_turn(tokenizer: PreTrainedTokenizerBase, **template: Any) -> str:
    """Return the token that the chat template writes after a turn of the model; empty if it writes none.

    If there are several, the last one is returned. Some templates end a turn only with the token that begins the next
    turn.
    """
    render = partial(tokenizer.apply_chat_template, tokenize=False, **template)
    try:
        last = str(render([USER, {"role": "assistant", "content": SEEN}]))
        followed = str(render([USER, {"role": "assistant", "content": SEEN}, USER]))
    except Exception:  # noqa: BLE001  a template may raise anything
        return ""
    if SEEN not in last:
        return ""
    before, _, behind = last.rpartition(SEEN)
    behind = behind.strip()
    opening = before.rpartition(USER["content"])[2].rstrip()  # with the end of the user's turn in front
    same_end = os.path.commonprefix([opening[::-1], behind[::-1]])[::-1]  # noqa: RUF071  it works for any text
    if any(token in same_end for token in _tokens(tokenizer)):  # the template begins another turn unasked
        return _first_token(tokenizer, behind)
    if not behind:
        return _first_token(tokenizer, followed.rpartition(SEEN)[2].lstrip())
    end = ""
    while token := _first_token(tokenizer, behind):
        end = token
        behind = behind.removeprefix(token)
    return end


def _first_token(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the special or added token at the start of a text; empty if there is none."""
    return max((token for token in _tokens(tokenizer) if text.startswith(token)), key=len, default="")


def _tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the texts of the special and the added tokens."""
    return {*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())} - {""}


def stop_ids(tokenizer: PreTrainedTokenizerBase, model_name: str) -> set[int]:
    """Return the ids of the tokens at which vLLM stops, from the tokenizer and the model's generation configuration."""
    ids: Any = None
    try:
        ids = GenerationConfig.from_pretrained(model_name).eos_token_id
    except Exception:  # noqa: BLE001  no generation configuration, or an invalid one, which is refused elsewhere
        with suppress(Exception):  # only the model's own code can read its configuration
            config = AutoConfig.from_pretrained(model_name, trust_remote_code=False)
            ids = GenerationConfig.from_model_config(config).eos_token_id  # as vLLM does
    stops = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}
    return {token for token in stops if token is not None}
