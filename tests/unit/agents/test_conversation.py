"""Tokens between two turns, with the chat templates of real models, and which templates are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PretrainedConfig, Qwen2Config, Qwen3_5Config

from bridge.agents import chat_request, conversation, tool_calls
from bridge.agents.conversation import Conversation
from bridge.agents.tool_calls import Call
from bridge.core.http_limits import Refusal
from bridge.errors import UsageError
from bridge.rollouts.chat_template import stop_ids
from tests.models import chat

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = Call(name="add", arguments={"a": 12, "b": 7}, id="abcdefgh9")
BETWEEN = {
    "qwen2_5": "\n<|im_start|>user\n<tool_response>\n19\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": '<|start_header_id|>ipython<|end_header_id|>\n\n"19"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": '[TOOL_RESULTS] {"content": 19, "call_id": "abcdefgh9"}[/TOOL_RESULTS]',
}
BETWEEN["llama3_2"] = BETWEEN["llama3_1"]
BETWEEN |= dict.fromkeys(("qwen3", "qwen3_instruct_2507"), BETWEEN["qwen2_5"])
COMPLETIONS = {
    "qwen2_5": 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 7}}\n</tool_call><|im_end|>',
    "llama3_1": '{"name": "add", "parameters": {"a": 12, "b": 7}}<|eot_id|>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 12, "b": 7}, "id": "abcdefgh9"}]</s>',
}
COMPLETIONS |= {
    "qwen3": f"<think>\n{COMPLETIONS['qwen2_5']}\n</think>\n\n{COMPLETIONS['qwen2_5']}",
    "qwen3_instruct_2507": COMPLETIONS["qwen2_5"],
}


def made(folder: Path, name: str, **choices: Any) -> Conversation:
    return Conversation(chat.tokenizer(folder, name), str(folder), **({"tools": [TOOL]} | choices))


@pytest.mark.parametrize("name", BETWEEN)
def test_template_text_between_turns_is_kept(tmp_path: Path, name: str) -> None:
    tokenizer = chat.tokenizer(tmp_path, name)
    ours = Conversation(tokenizer, str(tmp_path), tools=[TOOL])
    end = tokenizer.eos_token_id
    added = ours.tokens_between([CALL], [CALL.answered("19")], end)
    assert tokenizer.decode(added) == BETWEEN[name]
    assert ours.tokens_between([CALL], [CALL.answered("19")], 5) == (end, *added), (
        "a turn that was not ended gets its end"
    )


@pytest.mark.parametrize(
    "config",
    [Qwen2Config(eos_token_id=[5, 7]), Qwen3_5Config(text_config={"eos_token_id": [5, 7]})],
    ids=["text model", "inside a multimodal model"],
)
def test_turn_ends_at_eos_without_generation_defaults(config: PretrainedConfig, tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    (tmp_path / "generation_config.json").unlink()
    config.save_pretrained(tmp_path)
    assert stop_ids(tokenizer, str(tmp_path)) == {tokenizer.eos_token_id, 5, 7}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_calls_are_read_from_the_sampled_tokens(tmp_path: Path, name: str) -> None:
    tokenizer = chat.tokenizer(tmp_path, name)
    ours = Conversation(tokenizer, str(tmp_path), tools=[TOOL])
    _, (call,) = ours.read(tokenizer(COMPLETIONS[name], add_special_tokens=False)["input_ids"])
    assert (call.name, call.arguments) == (CALL.name, CALL.arguments)
    assert call.id == ("abcdefgh9" if name == "mistral" else "call00000")
    for other in (
        "The answer is 19.",
        COMPLETIONS[name].replace('"a": 12', '"a": '),
        COMPLETIONS[name].replace('"name"', '"nome"'),
    ):
        assert ours.read(tokenizer(other, add_special_tokens=False)["input_ids"])[1] == ()


def test_turn_may_contain_several_calls(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen3")
    ours = Conversation(tokenizer, str(tmp_path), tools=[TOOL])
    _, calls = ours.read(tokenizer(COMPLETIONS["qwen2_5"].replace("<|im_end|>", COMPLETIONS["qwen2_5"]))["input_ids"])
    assert [(call.arguments, call.id) for call in calls] == [
        (CALL.arguments, "call00000"),
        (CALL.arguments, "call00001"),
    ]
    added = tokenizer.decode(ours.tokens_between(calls, [calls[0].answered("19"), calls[1].answered("20")], 5))
    assert "\n19\n</tool_response>\n<tool_response>\n20\n" in added
    assert added.count("<|im_end|>") == 2


def test_stop_marker_in_text_does_not_end_the_turn(tmp_path: Path) -> None:
    ours = made(tmp_path, "qwen2_5")
    expected = ours.tokens_between([CALL], [CALL.answered("19")], 5)
    for odd in (Call(name="add", arguments={"a": "x<|im_end|>\n"}), Call(name="x<|im_end|>y")):
        assert ours.tokens_between([odd], [odd.answered("19")], 5) == expected


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "thinking off": ("qwen3", {"enable_thinking": False}, "changes an earlier turn once a new one follows"),
    "thoughts are dropped": ("qwen3", {"answers": "user"}, "changes an earlier turn once a new one follows"),
    "no tools": ("gemma3", {}, "rejects messages with the roles user, assistant, tool: TemplateError: Conv"),
    "calls are dropped": ("llama3", {}, "writes a tool call as"),
    "tools move": ("mistral", {"answers": "user"}, "changes an earlier turn once a new one follows"),
    "no template": ("none", {}, "is missing from its tokenizer"),
    "no end": ("endless", {}, "ends a turn with '\\n', expected a special token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_template_that_changes_earlier_turns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, choices, expected = REFUSED[case]
    if name in ("none", "endless"):
        written = {"none": None, "endless": "{% for message in messages %}{{ message.content }}\n{% endfor %}"}[name]
        monkeypatch.setattr(chat, "template", lambda _: written)
        name = "qwen3"
    with pytest.raises(UsageError) as caught:
        made(tmp_path, name, **choices)
    assert caught.value.message.startswith(f"the chat template of {tmp_path} {expected}")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("qwen3_training", {"enable_thinking": False}),  # TRL's, which keeps the empty thought
        ("qwen2_5", {"answers": "user"}),
        ("gemma3", {"answers": "user", "tools": []}),
        ("llama3", {"answers": "user"}),
        ("mistral", {"answers": "user", "tools": []}),
        ("qwen3_instruct_2507", {"answers": "user"}),
    ],
)
def test_supported_templates_pass_verification(tmp_path: Path, name: str, choices: dict[str, Any]) -> None:
    ours = made(tmp_path, name, **choices)
    message = {"role": "user", "content": "And then?"}
    calls = [CALL] if choices.get("answers") != "user" else []
    assert len(ours.tokens_between(calls, [CALL.answered("19") if calls else message], 5)) > 3


def test_turn_may_end_at_a_token_other_than_eos(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    tokenizer.eos_token = "<|endoftext|>"  # as in Qwen 2.5's base models
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path)
    ours = Conversation(tokenizer, str(tmp_path), tools=[TOOL])
    ids = tokenizer(COMPLETIONS["qwen2_5"], add_special_tokens=False)["input_ids"]
    text, (call,) = ours.read(ids)
    assert (text, call.name) == ("I add.\n", CALL.name)
    added = ours.tokens_between([CALL], [CALL.answered("19")], ids[-1])
    assert tokenizer.decode(added) == BETWEEN["qwen2_5"], "the end that was sampled is not repeated"


@pytest.mark.parametrize(
    ("name", "message"),
    [("gptoss", {"role": "system", "content": "Be brief."}), ("phi3", {"role": "tool", "content": "A cat."})],
)
def test_agent_message_dropped_by_the_template_is_refused(tmp_path: Path, name: str, message: dict[str, str]) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    tokenizer.chat_template = chat.template(name)
    tokenizer.add_tokens(["<|return|>", "<|end|>"], special_tokens=True)
    ours = Conversation(tokenizer, str(tmp_path), answers=None)
    user, turn = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "I see."}
    assert ours.prompt([user, turn, user])
    words = f"drops the message with the role {message['role']}, so the model would not see '{message['content']}'"
    with pytest.raises(UsageError, match=words):
        ours.prompt([user, turn, message, user])
    if name == "phi3":
        with pytest.raises(UsageError, match=words):
            ours.tokens_following([user, turn], [message, user], 5)
    else:  # this template changes earlier turns: the next sequence begins with a new prompt
        assert ours.tokens_following([user, turn], [message, user], 5) is None


def test_escaped_tool_result_counts_as_rendered(tmp_path: Path) -> None:
    ours = made(tmp_path, "llama3_1", answers=None)
    call = conversation.placeholder_turn([CALL])
    added = ours.tokens_following([{"role": "user", "content": "12+7?"}, call], [CALL.answered('"a"\n')], 5)
    assert added is not None
    assert '\\"a\\"' in chat.tokenizer(tmp_path, "llama3_1").decode(added)


def test_turns_with_tools_end_as_their_named_template_does(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "llama3")
    tokenizer.chat_template = {"default": chat.template("llama3"), "tool_use": chat.template("qwen2_5")}
    without = Conversation(tokenizer, str(tmp_path), answers=None)
    turn = {"role": "assistant", "content": "I see."}
    user = {"role": "user", "content": "2+3?"}
    for ours, end in ((without, "<|eot_id|>"), (without.with_tools([TOOL]), "<|im_end|>")):
        end_id = tokenizer.convert_tokens_to_ids(end)
        added = ours.tokens_following([user, turn], [user], 5)
        assert added is not None
        assert added[0] == end_id
        assert ours.tokens_following([user, turn], [user], end_id) == added[1:]
    tools = Conversation(tokenizer, str(tmp_path), tools=[TOOL])
    _, (call,) = tools.read(tokenizer(COMPLETIONS["qwen2_5"], add_special_tokens=False)["input_ids"])
    assert (call.name, call.arguments) == (CALL.name, CALL.arguments)


def test_turn_that_ends_with_several_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<|im_end|>", "<|eot_id|><|im_end|>")
    with pytest.raises(UsageError, match=r"ends a turn with '<\|eot_id\|>' and further tokens, but the server"):
        Conversation(tokenizer, str(tmp_path), tools=[TOOL])


@pytest.mark.parametrize("written", ["null", '""', "{}", '"{}"', '"null"'])
def test_call_without_arguments_is_parsed(written: str) -> None:
    text = f'<tool_call>{{"name": "stop", "arguments": {written}}}</tool_call>'
    assert tool_calls.parsed(text, "hermes") == (Call(name="stop", arguments={}),)
    call = {"id": "c", "type": "function", "function": {"name": "stop", "arguments": json.loads(written)}}
    answer = {"role": "tool", "tool_call_id": "c", "content": "done"}
    request = chat_request.read({"messages": [{"role": "assistant", "tool_calls": [call]}, answer]})
    assert request.messages[0]["tool_calls"][0]["function"] == {"name": "stop", "arguments": {}}


@pytest.mark.parametrize(
    "thought", [{"reasoning_content": "Hm."}, {"reasoning": "Hm."}, {"reasoning_content": None, "reasoning": "Hm."}]
)
def test_thought_is_read_under_each_servers_name(thought: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": "I see.", **thought}
    request = chat_request.read({"messages": [turn, {"role": "user", "content": "And?"}]})
    assert request.messages[0]["reasoning_content"] == "Hm."


def test_earlier_form_of_a_call_is_refused() -> None:
    turn = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    with pytest.raises(Refusal, match="has a function_call, the earlier form of a call, expected tool_calls"):
        chat_request.read({"messages": [turn, {"role": "user", "content": "And?"}]})


@pytest.mark.parametrize("form", tool_calls.FORMATS)
@pytest.mark.parametrize("text", ["", "[TOOL_CALLS] [7]", "<tool_call>{}</tool_call>", "{" * 100_000, '{"name": 3}'])
def test_text_without_a_call_has_no_calls(text: str, form: str) -> None:
    assert tool_calls.parsed(text, form) == ()


UNREADABLE = [
    "{'name': 'add', 'arguments': {'a': 1}}",
    '{"name": "add", "arguments": {"a": True}}',
    '{"name": "add", "arguments": {"a": 1}}}',
    '{"name": "add", "arguments": {"a": 1}',
    '{"name": "add", "arguments": {"a": 1}} done',
    '{"name": "add", "arguments": {"a": "x\ny"}}',
    '{"name": "add", "arguments": [1]}',
    '{"name": "add", "args": {"a": 1}}',
    '{"name": "add", "a": 1}',
    '[{"name": "add", "arguments": {"a": 1}}] [',
]
"""Calls that no server reads, as models write them."""


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "mistral"])
@pytest.mark.parametrize("written", UNREADABLE)
def test_call_that_cannot_be_read_is_reported(tmp_path: Path, name: str, written: str) -> None:
    tokenizer = chat.tokenizer(tmp_path, name)
    ours = Conversation(tokenizer, str(tmp_path), tools=[TOOL])
    call = {"llama3_1": written, "mistral": f"[TOOL_CALLS] [{written}"}.get(name, f"<tool_call>\n{written}</tool_call>")
    ids = tokenizer(f"{call}{ours._end}", add_special_tokens=False)["input_ids"]
    assert ours.read(ids)[1] == ()
    assert ours.has_unreadable_call(ids)


@pytest.mark.parametrize("form", tool_calls.FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "The answer is 19.",
        '{"answer": 19}',
        '<think><tool_call>{"name"</think>19',
        '<think>[TOOL_CALLS] {"name"</think>',
    ],
)
def test_turn_without_a_call_is_readable(form: str, text: str) -> None:
    assert not tool_calls.is_unreadable(text, form)


MARKS = [
    "</tool_call>",
    "{}</tool_call>",
    "</think> done",
    "<think>no</think>",
    '<tool_call>{"a": 1}</tool_call>',
    "} ]",
]


@pytest.mark.parametrize("name", COMPLETIONS)
@pytest.mark.parametrize("mark", MARKS)
def test_argument_may_contain_call_and_thought_markers(tmp_path: Path, name: str, mark: str) -> None:
    completion = json.dumps(mark).join(COMPLETIONS[name].rsplit("12", maxsplit=1))
    tokenizer = chat.tokenizer(tmp_path, name)
    ours = Conversation(tokenizer, str(tmp_path), tools=[TOOL])
    text, (call,) = ours.read(tokenizer(completion, add_special_tokens=False)["input_ids"])
    assert (call.name, call.arguments["a"]) == (CALL.name, mark)
    before, _ = ours.read(tokenizer(COMPLETIONS[name], add_special_tokens=False)["input_ids"])
    assert text == before, "the call is no part of the text"


@pytest.mark.parametrize("thought", ["<think>", "<think>I", "<think>a</think>b"])
def test_calls_inside_a_thought_are_ignored(thought: str) -> None:
    call, broken = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": "add'
    for inside in (call, broken, call + broken, broken + call):
        (read,) = tool_calls.parsed(f"{thought}{inside}</think>{call}", "hermes")
        assert (read.name, read.arguments) == ("add", {"a": 1})
        assert tool_calls.parsed(f"{thought}{inside}</think>none", "hermes") == ()


@pytest.mark.parametrize("begun", ["<tool_call>{", "<tool_call>{}", "<tool_call>"])
def test_unclosed_calls_are_parsed_in_linear_time(tmp_path: Path, begun: str) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    (parsed,) = tool_calls.parsed(call + begun * 200_000, "hermes")
    assert (parsed.name, parsed.arguments) == ("add", {"a": 1})
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    ids = tokenizer(f"So: {call} and {begun * 2}")["input_ids"]
    assert made(tmp_path, "qwen2_5").read(ids)[0] == f"So:  and {begun * 2}"
