"""Chat-completion requests from agents: which fields are read, ignored or refused, and the format of responses.

Source: the reference of OpenAI's API, `POST /v1/chat/completions`.
"""

import json
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.core.foreign_code import LONE_SURROGATE, shortened
from bridge.core.http_limits import Refusal
from bridge.rollouts.chat_template import call_arguments
from bridge.types import Completion

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
"""Fields that would change the sampling distribution; they are ignored in favor of the run's settings."""
WITHOUT_EFFECT = (
    "model", "user", "store", "metadata", "parallel_tool_calls", "stream_options", "service_tier", "reasoning_effort",
    "verbosity", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},),
    "stream": (True, False), "background": (False,), "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
"""Field -> its supported values."""
READ = ("messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role in a request -> role for the chat template; templates do not support `developer`."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """The content of a request for one turn."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages in the form that the chat template expects."""
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    ignored: tuple[str, ...]
    """Sampling fields that the request sets, but that are ignored."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn, in the order in which vLLM looks for them."""
    forces_call: bool = False
    """Whether the request forces a tool call with `tool_choice`."""

    def stop_in(self, completion: Completion) -> str:
        """Return the stop text that ended a turn; empty if none did.

        vLLM ends a turn at the first token that completes a stop text, so an earlier token did not complete any.
        """
        if completion.finish_reason != "stop":
            return ""
        return next((text for text in self.stop if text in completion.text), "")


def as_chat(body: Any) -> Any:
    """Return the request unchanged; the counterpart of `responses_api.as_chat`."""
    return body


def as_document(body: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap `answer` as the chat-completion response to the request `body`."""
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": body.get("model"),
        "object": "chat.completion",
        **answer,
    }


def as_stream(document: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """Return a response as a stream of events: everything in one chunk, the usage if requested, and the end marker."""
    (choice,) = document["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    chunk = {**document, "object": "chat.completion.chunk"}
    usage = chunk.pop("usage")
    own = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"], "logprobs": None}
    chunks = [{**chunk, "choices": [own]}]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**chunk, "choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in chunks) + "data: [DONE]\n\n"


def read(body: Any) -> ChatRequest:
    """Parse a request; raise Refusal if it is invalid or not supported."""
    given = given_fields(body)
    _check_fields(given)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages is empty or not a list")
    read_messages = tuple(_message(message) for message in messages)
    if read_messages[-1]["role"] == "assistant":
        raise Refusal("the last message is the assistant's, expected a message for the assistant to answer")
    tools = given.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refusal("tools is not a list of objects")
    choice = given.get("tool_choice", "auto")
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    return ChatRequest(
        messages=read_messages,
        tools=tuple(tools) if choice != "none" else (),
        max_tokens=min(limits, default=None),
        ignored=tuple(name for name in SAMPLING if name in given),
        stop=_stop(given.get("stop") or []),
        forces_call=choice not in ("auto", "none"),
    )


def given_fields(body: Any) -> dict[str, Any]:
    """Return the fields of a request that are not null; raise Refusal if the request is not an object."""
    if not isinstance(body, dict):
        raise Refusal("the request is not a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def _check_fields(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise Refusal(
                f"{name}={shortened(json.dumps(value))} is not supported while a run is recorded for training"
            )
        if name not in {*NEUTRAL, *SAMPLING, *WITHOUT_EFFECT, *READ}:
            raise Refusal(f"the field {name} is not supported")
        if name in ("max_tokens", "max_completion_tokens") and (type(value) is not int or value < 1):
            raise Refusal(f"{name} is not a positive number")


def _stop(given: Any) -> tuple[str, ...]:
    """Return the stop texts, without those that a model cannot write because they contain lone surrogates."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refusal(f"stop={shortened(json.dumps(given))} is neither a text nor a list of texts")
    return tuple(text for text in texts if not LONE_SURROGATE.search(text))


def key(message: Mapping[str, Any]) -> str:
    """Return a key built from a message's role, text and tool calls; equal messages have equal keys."""
    role = message["role"]
    content = message["content"]
    if role == "assistant":
        content = content.strip()
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
    return json.dumps([role, content, calls, message.get("tool_call_id")], sort_keys=True)


def _message(message: Any) -> dict[str, Any]:
    try:
        role = ROLES[message["role"]]
        content = text_of(message.get("content"))
        if message.get("function_call"):
            raise Refusal("a message has a function_call, the earlier form of a call, expected tool_calls")
        made: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant" and message.get("tool_calls"):
            made["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        kept = {"assistant": "reasoning_content", "tool": "tool_call_id"}.get(role, "name")
        given = message.get(kept)
        if role == "assistant" and given is None:
            given = message.get("reasoning")  # vLLM's and OpenRouter's name for it
        return made | ({kept: given} if isinstance(given, str) else {})
    except (KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"a message cannot be parsed: {shortened(repr(message))}") from error


def text_of(content: Any, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a message's content; its parts may only have these `kinds`."""
    if isinstance(content, list):
        if wrong := [str(part.get("type")) for part in content if part.get("type") not in kinds]:
            raise Refusal(f"a message has a part of type {shortened(wrong[0])}, expected text")
        return "\n".join(text_of(part["text"]) for part in content)
    if not isinstance(content, str | None):
        raise TypeError(content)
    return content or ""


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as chat templates expect."""
    function = call["function"]
    return {
        "type": "function",
        "id": str(call["id"]),
        "function": {"name": function["name"], "arguments": call_arguments(function.get("arguments"))},
    }
