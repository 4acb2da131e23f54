"""OpenAI's Responses API, translated to and from chat-completion requests.

A request must hold the full conversation, as the OpenAI Agents SDK sends it by default. Responses are not stored, so a
request that refers to an earlier response is refused. So are tools that run on OpenAI's servers.

Source: the reference of OpenAI's API, `POST /v1/responses`, and `openai.types.responses` of openai 3.57.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bridge.agents.chat_request import given_fields, text_of
from bridge.core.foreign_code import reason_of, shortened
from bridge.core.http_limits import Refusal

WITHOUT_EFFECT = ("include", "truncation", "reasoning", "prompt_cache_retention", "prompt_cache_options")
STORED = ("previous_response_id", "conversation", "prompt")
TRANSLATED = ("input", "instructions", "tools", "tool_choice", "text", "max_output_tokens")
"""Fields that have a different form in a chat-completion request; `chat_request.py` checks the others."""
TEXT_PARTS = ("input_text", "output_text", "text")
Item = Mapping[str, Any]


def as_chat(body: Any) -> dict[str, Any]:
    """Translate a request to a chat-completion request."""
    try:
        return _chat(given_fields(body))
    except Refusal:
        raise
    except Exception as error:  # an agent may send anything
        raise Refusal(f"the request cannot be parsed: {type(error).__name__}{reason_of(error)}") from error


def _chat(given: Item) -> dict[str, Any]:
    for name in STORED:
        if name in given:
            raise Refusal(f"{name} is not supported, because nothing is stored: send the whole conversation as input")
    if "message.output_text.logprobs" in given.get("include", ()):
        raise Refusal("logprobs are not supported while a run is recorded for training")
    chat = {name: value for name, value in given.items() if name not in {*WITHOUT_EFFECT, *TRANSLATED}}
    chat["messages"] = _messages(given)
    if given.get("tools"):
        chat["tools"] = [_tool(tool) for tool in given["tools"]]
    if choice := given.get("tool_choice"):
        is_named = isinstance(choice, dict) and choice.get("type") == "function"
        chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if is_named else choice
    if "format" in given.get("text", {}):
        chat["response_format"] = given["text"]["format"]
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = given["max_output_tokens"]
    return chat


def as_document(body: Item, answer: Item) -> dict[str, Any]:
    """Convert a chat-completion response into the response to `body`, the original request."""
    (choice,) = answer["choices"]
    is_cut = choice["finish_reason"] == "length"
    usage = answer["usage"]
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": body.get("model") or "",
        "output": list(_items(choice["message"], "incomplete" if is_cut else "completed")),
        "instructions": body.get("instructions"),
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        "metadata": body.get("metadata"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def as_stream(response: Item, _: Item) -> str:
    """Return a response as a stream of events, with each text in one piece."""
    written = (
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"
        for number, event in enumerate(_events(response))
    )
    return "".join(written)


def _messages(given: Item) -> list[dict[str, Any]]:
    """Return the conversation as messages; all items of a turn of the model become one message."""
    instructions = given.get("instructions")
    items = given["input"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    turn: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind in ("function_call", "reasoning") or (kind == "message" and item["role"] == "assistant"):
            if turn is None or (kind == "message" and turn.keys() & {"content", "tool_calls"}):
                turn = {"role": "assistant"}
                messages.append(turn)
            _add(turn, kind, item)
            continue
        turn = None
        if kind == "function_call_output":
            text = text_of(item["output"], TEXT_PARTS)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind == "message":
            messages.append({"role": item["role"], "content": text_of(item["content"], TEXT_PARTS)})
        else:
            raise Refusal(f"input has an item of type {shortened(str(kind))}, expected messages and function calls")
    return messages


def _add(turn: dict[str, Any], kind: str, item: Item) -> None:
    """Add an item that the model wrote to the message of its turn."""
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif kind == "reasoning":
        turn["reasoning_content"] = "\n".join(part["text"] for part in item.get("content") or item.get("summary") or [])
    else:
        turn["content"] = text_of(item["content"], TEXT_PARTS)


def _tool(tool: Item) -> dict[str, Any]:
    if tool["type"] != "function":
        raise Refusal(f"tools has an entry of type {shortened(str(tool['type']))}, expected only functions")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _items(message: Item, status: str) -> Iterator[dict[str, Any]]:
    """Yield the items of a turn of the model: its thought, its text, and its tool calls."""
    if thought := message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": thought}]
        yield {"type": "reasoning", "id": _id("rs"), "summary": [], "content": parts, "status": status}
    calls: Sequence[Item] = message.get("tool_calls", ())
    if message["content"] or not calls:
        text = message["content"] or ""
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        yield {"type": "message", "id": _id("msg"), "role": "assistant", "status": status, "content": [part]}
    for call in calls:
        yield {"type": "function_call", "id": _id("fc"), "call_id": call["id"], **call["function"], "status": status}


def _events(response: Item) -> Iterator[dict[str, Any]]:
    in_progress: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    begun = {**response, **in_progress}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        at = {"output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", **at, "item": {**item, **empty}}
        yield from ({**event, **at, "item_id": item["id"]} for event in _pieces(item))
        yield {"type": "response.output_item.done", **at, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _pieces(item: Item) -> Iterator[dict[str, Any]]:
    """Yield the events for an item's text, without the fields that identify the item."""
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        arguments = item["arguments"]
        yield {"type": f"{kind}.delta", "delta": arguments}
        yield {"type": f"{kind}.done", "arguments": arguments, "name": item["name"]}
        return
    (part,) = item["content"]
    at = {"content_index": 0}
    kind = f"response.{part['type']}"
    logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"{kind}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
