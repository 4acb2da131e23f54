"""OpenAI's Responses API, translated to chat-completion requests, and their results to responses."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from bridge.agents import chat_request, responses_api
from bridge.core.http_limits import Refusal

ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 3}'}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
TEXT = {"type": "output_text", "text": "I add.", "annotations": []}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [TEXT]}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
USER, TOOL = {"role": "user", "content": "3+4?"}, {"role": "tool", "tool_call_id": "c1", "content": "7"}


def test_plain_text_input_becomes_a_user_message() -> None:
    chat = responses_api.as_chat({"model": "m", "instructions": "Be brief.", "input": "3+4?", "tools": None})
    assert chat == {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, USER]}


TURNS: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {
    "a call": ([CALL, RESULT], [{"role": "assistant", "tool_calls": [CHAT_CALL]}, TOOL]),
    "a thought, a text and two calls": (
        [THOUGHT, MESSAGE, CALL, {**CALL, "call_id": "c2"}, RESULT],
        [
            {
                "role": "assistant",
                "reasoning_content": "Hm.",
                "content": "I add.",
                "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
            },
            TOOL,
        ],
    ),
    "two turns": ([MESSAGE, MESSAGE], [{"role": "assistant", "content": "I add."}] * 2),
    "parts": (
        [{"role": "user", "content": [{"type": "input_text", "text": "3"}, {"type": "input_text", "text": "4"}]}],
        [{"role": "user", "content": "3\n4"}],
    ),
}


@pytest.mark.parametrize("case", TURNS)
def test_items_of_one_turn_become_one_message(case: str) -> None:
    items, expected = TURNS[case]
    assert responses_api.as_chat({"input": [USER, *items]})["messages"] == [USER, *expected]


def test_response_fields_become_chat_completion_fields() -> None:
    body = {
        "input": "3+4?", "tools": [ADD], "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 5,
        "temperature": 0.5, "text": {"format": {"type": "text"}, "verbosity": "low"}, "include": [], "store": False,
        "reasoning": {"effort": "low"}, "truncation": "disabled", "parallel_tool_calls": True, "stream": True,
    }  # fmt: skip
    request = chat_request.read(responses_api.as_chat(body))
    assert request.tools == (
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}},
    )
    assert (request.forces_call, request.max_tokens, request.ignored) == (True, 5, ("temperature",))


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([], "the request is not a JSON object"),
    "no input": ({}, "the request cannot be parsed: KeyError: 'input'"),
    "what is stored": ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id is not supported, bec"),
    "a background": ({"input": "x", "background": True}, "background=true is not supported"),
    "another field": ({"input": "x", "max_tool_calls": 3}, "the field max_tool_calls is not supported"),
    "a hosted tool": ({"input": "x", "tools": [{"type": "web_search"}]}, "tools has an entry of type web_search"),
    "a picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "a message has a part of type input_image, expected text",
    ),
    "an item of another kind": ({"input": [{"type": "item_reference", "id": "x"}]}, "input has an item of type i"),
    "logprobs": ({"input": "x", "include": ["message.output_text.logprobs"]}, "logprobs are not supported"),
    "a call without a name": (
        {"input": [{"type": "function_call", "call_id": "c1"}]},
        "the request cannot be parsed: K",
    ),
    "a schema": ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "response_format="),
    "a number": ({"input": 7}, "the request cannot be parsed: TypeError"),
    "numbers": ({"input": [7]}, "the request cannot be parsed: AttributeError"),
    "a text that is none": ({"input": "x", "text": 7}, "the request cannot be parsed: TypeError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_response_request_is_refused(case: str) -> None:
    body, expected = REFUSED[case]
    with pytest.raises(Refusal) as caught:
        chat_request.read(responses_api.as_chat(body))
    assert caught.value.message.startswith(expected)
    assert caught.value.status == 400


ANSWERS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "a text": ({"content": "7"}, "stop", ["message"]),
    "a call": ({"content": None, "tool_calls": [CHAT_CALL]}, "tool_calls", ["function_call"]),
    "everything": (
        {"content": "I add.", "reasoning_content": "Hm.", "tool_calls": [CHAT_CALL, CHAT_CALL]},
        "tool_calls",
        ["reasoning", "message", "function_call", "function_call"],
    ),
    "a turn at a limit": ({"content": ""}, "length", ["message"]),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_chat_answer_becomes_a_response_and_a_stream(case: str) -> None:
    message, reason, kinds = ANSWERS[case]
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    made = responses_api.as_document({"input": "x", "tools": [ADD]}, {"choices": [choice], "usage": usage})
    response = Response.model_validate(made)
    assert [item.type for item in response.output] == kinds
    assert response.output_text == (message["content"] or "")
    assert (response.status, response.usage and response.usage.total_tokens) == (
        "incomplete" if reason == "length" else "completed",
        7,
    )
    lines = responses_api.as_stream(made, {}).split("\n\n")[:-1]
    events = [TypeAdapter(ResponseStreamEvent).validate_json(line.partition("data: ")[2]) for line in lines]
    assert [line.partition("\n")[0] for line in lines] == [f"event: {event.type}" for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert json.loads(lines[-1].partition("data: ")[2])["response"] == made
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text
    back = responses_api.as_chat({"input": [USER, *made["output"], USER]})["messages"][1]
    expected = {name: value for name, value in message.items() if value is not None}
    assert back == {"role": "assistant", **expected}, "a client that sends it back continues the turn"
