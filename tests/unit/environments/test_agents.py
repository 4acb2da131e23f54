"""Agents: loading, rehearsal, the error for each misuse, and the supported fields of their requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.agents import chat_request
from bridge.agents.tools import Agent
from bridge.config import TaskConfig, TrainConfig
from bridge.core.http_limits import Refusal
from bridge.errors import RewardError, UsageError
from bridge.types import Completion
from bridge_cli.task_environment import load_environment
from bridge_environments import registry
from tests.models import chat, tiny
from tests.unit.environments.test_tools import ITERATES, SCORES, rehearsed

FILE = Path(__file__).parents[1] / "agents_sample.py"
RUNS = "class Task:\n    def run(self, problem, base_url):\n        RUN\n"
IMPORTS = "import openai\n"
ASKS = "openai.OpenAI(base_url=base_url, api_key='x').chat.completions.create(model='m', messages=MESSAGES)"
ASKS = ASKS.replace("MESSAGES", "[{'role': 'user', 'content': problem['prompt']}]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.qwen2(600).save_pretrained(folder)
    chat.tokenizer(folder, "qwen2_5")
    return folder


def test_class_with_a_run_method_is_an_agent(tmp_path: Path) -> None:
    task = registry.load(TaskConfig(environment=f"{FILE}:Calling"))
    assert task.interaction == "agent"
    assert isinstance(task.recipe(), Agent)
    assert registry.load(TaskConfig()).interaction == "completion"
    scorer: Any = registry.scorer(TaskConfig(environment=f"{FILE}:Calling"))
    assert scorer.origin.name == "Calling.run"
    assert registry.scorer(TaskConfig(environment=f"{FILE}:Scored")).origin.name == "Scored.score"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "3+4=", "answer": "7", "start": 3}))
    (problem,) = registry.load(TaskConfig(environment=f"{FILE}:Calling", data=str(tmp_path / "rows.jsonl")))
    assert problem["start"] == 3  # type: ignore[typeddict-item]
    config = TrainConfig.of(model_name="m", max_turns=3, tool_timeout_s=1.0, environment=f"{FILE}:Calling")
    assert load_environment(config.changed(eval_samples=1)) is not None


MISUSES = {
    "another signature": (
        RUNS.replace(", base_url", "") + ITERATES,
        "is an agent whose run cannot be called with (problem, base_url): too many positional arguments",
    ),
    "a reset": (
        RUNS + "    def reset(self):\n        pass\n" + ITERATES,
        "has a method reset, so that run(problem, base_url) would be a tool that the model calls",
    ),
    "no problems": (RUNS, "is not iterable"),
    "a wrong score": (RUNS + ITERATES + SCORES.replace(", completion", ""), "score cannot be called with"),
    "an async score": (RUNS + ITERATES + SCORES.replace("def", "async def"), "score is an async function"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_each_agent_misuse_is_a_one_line_error(tmp_path: Path, case: str) -> None:
    source, expected = MISUSES[case]
    (tmp_path / "task.py").write_text(source.replace("RUN", "return 1.0"))
    with pytest.raises(RewardError) as caught:
        registry.load(TaskConfig(environment=f"{tmp_path / 'task.py'}:Task"))
    assert expected in caught.value.message
    assert "\n" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize("kind", ["Calling", "Chatting", "Branching", "Scored"])
def test_rehearsal_runs_the_agent_with_made_up_answers(model: Path, kind: str) -> None:
    assert rehearsed(model, f"{FILE}:{kind}", reward_processes=int(kind == "Calling")) == []


REFUSED = {
    "raises": (f"{ASKS}\n        raise ValueError('no')", "Task.run raised ValueError: no (task.py line 5)"),
    "another attribute": (f"return {ASKS}.text", "Task.run raised AttributeError: 'ChatCompletion' object has no"),
    "no reward": (
        ASKS,
        "Task.run returned None, expected a finite number, one per turn, or a dict of finite numbers (task.py line",
    ),
    "no turn": ("return 1.0", "the agent's run ended without requesting a turn of the model from its base_url"),
    "an empty dict": (f"{ASKS}\n        return {{}}", "Task.run returned {}, expected a finite number"),
    "a part that is none": (
        f"{ASKS}\n        return {{'a': 'b', 'c': 1}}",
        "Task.run returned {'a': 'b', 'c': 1}, exp",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rehearsal_reports_why_there_is_no_reward(model: Path, tmp_path: Path, case: str) -> None:
    run, expected = REFUSED[case]
    (tmp_path / "task.py").write_text(IMPORTS + (RUNS + ITERATES).replace("RUN", run))
    with pytest.raises(RewardError) as caught:
        rehearsed(model, f"{tmp_path / 'task.py'}:Task", reward_processes=0)
    assert caught.value.message.startswith(
        f"none of 5 made-up completions of the first problems got a reward: {expected}"
    )
    assert "\n" not in caught.value.message


def test_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    tiny.qwen2(600).save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path, tiny.VOCABULARY)
    with pytest.raises(UsageError, match=f"the chat template of {tmp_path} is missing from its tokenizer"):
        rehearsed(tmp_path, f"{FILE}:Calling", reward_processes=0)


USER = {"role": "user", "content": "3+4?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
BAD: dict[str, tuple[dict[str, Any] | list[Any], str]] = {
    "no object": ([], "the request is not a JSON object"),
    "no messages": ({"messages": []}, "messages is empty or not a list"),
    "two answers": ({"messages": [USER], "n": 2}, "n=2 is not supported while a run is recorded for training"),
    "an empty stop": ({"messages": [USER], "stop": ["x", ""]}, 'stop=["x", ""] is neither a text nor a list of texts'),
    "a stop that is none": ({"messages": [USER], "stop": 7}, "stop=7 is neither a text nor a list of texts"),
    "logprobs": ({"messages": [USER], "logprobs": True}, "logprobs=true is not supported while"),
    "another field": ({"messages": [USER], "functions": []}, "the field functions is not supported"),
    "another role": (
        {"messages": [{"role": "function", "content": "x"}]},
        "a message cannot be parsed: {'role': 'function'",
    ),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "a message has a part of type image_url, expected text",
    ),
    "an odd call": ({"messages": [{"role": "assistant", "tool_calls": [{}]}, USER]}, "a message cannot be parsed"),
    "text that is none": ({"messages": [{"role": "user", "content": 7}]}, "a message cannot be parsed"),
    "a prefix": ({"messages": [USER, {"role": "assistant", "content": "7"}]}, "the last message is the assistant's"),
    "odd tools": ({"messages": [USER], "tools": ["add"]}, "tools is not a list of objects"),
    "no tokens": ({"messages": [USER], "max_tokens": 0}, "max_tokens is not a positive number"),
}


@pytest.mark.parametrize("case", BAD)
def test_unsupported_request_is_refused_in_one_sentence(case: str) -> None:
    body, expected = BAD[case]
    with pytest.raises(Refusal) as caught:
        chat_request.read(body)
    assert caught.value.message.startswith(expected)
    assert caught.value.status == 400


def test_request_options_reach_the_template() -> None:
    function = {"name": "add", "arguments": '{"b": 7, "a": 12}'}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "reasoning_content": "I add."}
    request = chat_request.read(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
                turn,
                {"role": "tool", "tool_call_id": "call00000", "content": "19"},
            ],
            "max_tokens": 9, "max_completion_tokens": 5, "temperature": 0.2, "top_p": None, "n": 1, "model": "any",
            "tools": [{"type": "function"}], "tool_choice": "auto",
        }
    )  # fmt: skip
    assert request.messages[0] == {"role": "system", "content": "Be\nbrief."}
    assert request.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 12, "b": 7}}
    assert (request.max_tokens, request.ignored, len(request.tools)) == (5, ("temperature",), 1)
    without = {**turn, "content": "", "reasoning_content": None, "tool_calls": json.loads(json.dumps(calls))}
    without["tool_calls"][0]["function"]["arguments"] = '{"a":12,"b":7}'
    (same,) = chat_request.read({"messages": [without, USER]}).messages[:1]
    assert chat_request.key(same) == chat_request.key(request.messages[1])
    without["tool_calls"][0]["function"]["arguments"] = '{"a":12,"b":8}'
    (other,) = chat_request.read({"messages": [without, USER]}).messages[:1]
    assert chat_request.key(other) != chat_request.key(request.messages[1])
    assert chat_request.read({"messages": [USER], "tools": [{}], "tool_choice": "none"}).tools == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ()), ("", ()), ([], ()), ("x", ("x",)), (["y", "x"], ("y", "x")), (["x", "\ud83d"], ("x",))],
)
def test_stop_may_be_one_string_or_several(given: Any, expected: tuple[str, ...]) -> None:
    assert chat_request.read({"messages": [USER], "stop": given}).stop == expected


def test_turn_ends_at_the_stop_string_vllm_checks_first() -> None:
    request = chat_request.read({"messages": [USER], "stop": ["c", "bc"]})
    cases = {("abc", "stop"): "c", ("ab", "stop"): "", ("abc", "length"): "", ("abcd", "stop"): "c"}
    for (text, reason), expected in cases.items():
        finish_reason: Any = reason
        completion = Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish_reason=finish_reason)
        assert request.stop_in(completion) == expected


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_tool_call_is_ignored(choice: Any) -> None:
    request = chat_request.read({"messages": [USER], "tools": [ADD], "tool_choice": choice})
    assert (request.forces_call, len(request.tools)) == (True, 1)
    assert not chat_request.read({"messages": [USER], "tools": [ADD], "tool_choice": "auto"}).forces_call
