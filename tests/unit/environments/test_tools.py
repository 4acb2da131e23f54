"""Classes with tools: loading, rehearsal, and the error for each misuse."""

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.agents import rehearsal
from bridge.agents.tools import LONGEST_ANSWER, Tools, awaited
from bridge.config import SamplingConfig, TaskConfig, TrainConfig
from bridge.errors import RewardError, UsageError
from bridge.types import Task
from bridge_cli.task_environment import load_environment
from bridge_environments import registry
from tests.logged import logged
from tests.models import chat, tiny

FILE = Path(__file__).parents[1] / "tools_sample.py"
RESETS = "class Task:\n    def reset(self, **row):\n        pass\n"
ITERATES = "    def __iter__(self):\n        return iter([{'prompt': '3+4='}])\n"
SCORES = "    def score(self, problem, completion):\n        return 1.0\n"
ADDS = """
    def add(self, a: int, b: int) -> int:
        '''Add.

        Args:
            a: One.
            b: Two.
        '''
        return a + b
"""
Load = Callable[[str], Task]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_source(source: str) -> Task:
        (tmp_path / "task.py").write_text(source)
        loaded = registry.load(TaskConfig(environment=f"{tmp_path / 'task.py'}:Task"))
        assert loaded.interaction == "tools"
        return loaded

    return load_source


def test_class_with_a_reset_method_has_tools_with_schemas(load: Load) -> None:
    task = load(RESETS + ITERATES + SCORES + ADDS)
    assert list(task) == [{"prompt": "3+4="}]
    (schema,) = task.schemas
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert isinstance(task.recipe(), Tools)


def test_problems_may_come_from_rows_and_rewards_from_flags(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "3+4=", "answer": 7, "start": 3}))
    task = registry.load(TaskConfig(environment=f"{FILE}:Bench", data=str(data), reward="math", system_prompt="Add."))
    (problem,) = task
    assert problem["start"] == 3  # type: ignore[typeddict-item]
    assert problem["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]
    config = TaskConfig(environment=f"{FILE}:Bench", reward="math")
    assert isinstance(scorer := registry.scorer(config), Tools)
    assert scorer.origin.name == "Rewards.scores"
    assert registry.scorer(TaskConfig(environment=f"{FILE}:Rewarded")).origin.name == "Rewarded.get_reward"


def test_held_out_rows_require_training_rows() -> None:
    with pytest.raises(
        UsageError, match=r"--eval-data, --answer-column: only with --data, because .*:Bench has its own"
    ):
        registry.load(TaskConfig(environment=f"{FILE}:Bench", eval_data="rows.jsonl", answer_column="right"))


@pytest.mark.parametrize(
    ("first", "second"),
    [("a (int):", "b (str, optional):"), ("a (int) :", "b :"), ("a:", "b (dict[str, int] or (int, str)):")],
)
def test_docstring_may_repeat_the_types(load: Load, first: str, second: str) -> None:
    method = f'''
    def find(self, a: int, b: str = "x") -> str:
        """Find (a): it.

        Args:
            {first} Such as (x): 3
                and more.
            {second} Text.

        Returns:
            str: All.
        """
'''
    (tool,) = load(RESETS + ITERATES + SCORES + method).schemas
    assert tool["function"]["description"] == "Find (a): it."
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "Such as (x): 3 and more."},
            "b": {"type": "string", "description": "Text."},
        },
        "required": ["a"],
    }


MISUSES = {
    "no tools": (RESETS + ITERATES + SCORES, "has a method reset, but no tools"),
    "no hints": (RESETS + ITERATES + SCORES + ADDS.replace("a: int", "a"), "describing its tools add raised TypeHint"),
    "no docstring": (
        RESETS + ITERATES + SCORES + "    def add(self):\n        pass\n",
        "describing its tools add raised Doc",
    ),
    "generator": (
        RESETS + ITERATES + SCORES + ADDS.replace("return a + b", "yield a + b"),
        "has the tool add, which yields, expected a method that returns",
    ),
    "asynchronous generator": (
        RESETS + ITERATES + SCORES + ADDS.replace("return a + b", "yield a + b").replace("def add", "async def add"),
        "has the tool add, which yields, expected a method that returns",
    ),
    "no score": (RESETS + ITERATES + ADDS, "has no method score"),
    "no problems": (RESETS + SCORES + ADDS, "is not iterable"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_each_agent_misuse_is_a_one_line_error(load: Load, case: str) -> None:
    source, expected = MISUSES[case]
    with pytest.raises(RewardError) as caught:
        load(source)
    assert expected in caught.value.message
    assert "\n" not in caught.value.message + caught.value.hint


HINTED = """
import datetime, enum, pathlib, typing
from dataclasses import dataclass
class Mode(str, enum.Enum):
    FAST = "fast"
    SLOW = "slow"
@dataclass
class Point:
    x: int
class Row(typing.TypedDict):
    x: int
class Tree(typing.TypedDict):
    value: typing.Required[typing.Literal["a", "b"]]
    label: typing.NotRequired[str | None]
    rows: list[Row]
    parts: "list[Tree]"
class Odd(typing.TypedDict, total=False):
    at: Point
class Several(typing.TypedDict):
    rows: typing.Sequence[Row]
class Named(typing.TypedDict):
    rows: typing.Mapping[str, Row]
class Many(typing.TypedDict):
    rows: tuple[Row, ...]
"""
ROW = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "string", "enum": ["a", "b"]},
        "label": {"type": "string", "nullable": True},
        "rows": {"type": "array", "items": ROW},
        "parts": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["value", "rows", "parts"],
}


@pytest.mark.parametrize(
    ("hint", "named", "fix"),
    [
        ("Mode", "Mode", "Literal['fast', 'slow']"),
        ("Mode | None", "Mode", "Literal['fast', 'slow']"),
        ("list[Mode]", "Mode", "Literal['fast', 'slow']"),
        ("list[Odd]", "Point", "such as str, as its type hint, and convert it to a Point in add"),
        ("dict[str, Point]", "Point", "such as str, as its type hint, and convert it to a Point in add"),
        ("datetime.date", "date", "such as str, as its type hint, and convert it to a date in add"),
        ("pathlib.Path", "Path", "such as str,"),
    ],
)
def test_type_hint_without_a_json_type_is_refused(load: Load, hint: str, named: str, fix: str) -> None:
    source = HINTED + RESETS + ITERATES + SCORES + ADDS.replace("a: int", f"a: {hint}")
    with pytest.raises(RewardError) as caught:
        load(source)
    assert f"has the tool add, whose argument a is a {named}, which JSON schemas" in caught.value.message
    assert fix in caught.value.hint


@pytest.mark.parametrize(
    ("signature", "what"),
    [
        ("a: int, b: int, /", "a: int is positional-only"),
        ("a: int, *b: int", "*b: int takes any number of values"),
        ("a: int, **b: int", "**b: int takes values of any name"),
    ],
)
def test_tool_argument_without_a_name_is_refused(load: Load, signature: str, what: str) -> None:
    with pytest.raises(RewardError) as caught:
        load(RESETS + ITERATES + SCORES + ADDS.replace("a: int, b: int", signature))
    assert f"has the tool add, whose argument {what}, but calls of tools name each" in caught.value.message


@pytest.mark.parametrize(
    "hint",
    [
        "typing.Literal['fast', 'slow']", "typing.Optional[int]", "int | str | None", "list[dict[str, float]]", "Row",
        "dict", "list", "tuple[int, str]", "typing.Any", "typing.Annotated[int, 'a number']", "typing.Text", "bool",
    ],
)  # fmt: skip
def test_type_hint_with_a_json_type_is_accepted(load: Load, hint: str) -> None:
    (schema,) = load(HINTED + RESETS + ITERATES + SCORES + ADDS.replace("a: int", f"a: {hint}")).schemas
    assert schema["function"]["parameters"]["required"] == ["a", "b"]


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        ("Row", ROW),
        ("Tree", TREE),
        ("list[Row]", {"type": "array", "items": ROW}),
        ("typing.Optional[Row]", {**ROW, "nullable": True}),
        ("Row | str | None", {"anyOf": [ROW, {"type": "string"}], "nullable": True}),
        ("dict[str, list[Row]]", {"type": "object", "additionalProperties": {"type": "array", "items": ROW}}),
        ("tuple[int, Row]", {"type": "array", "prefixItems": [{"type": "integer"}, ROW]}),
    ],
)
def test_keys_of_a_typed_dict_are_in_the_schema(load: Load, hint: str, schema: dict[str, Any]) -> None:
    (tool,) = load(HINTED + RESETS + ITERATES + SCORES + ADDS.replace("a: int", f"a: {hint}")).schemas
    argument = dict(tool["function"]["parameters"]["properties"]["a"])
    assert argument.pop("description")
    assert argument == schema


@pytest.mark.parametrize("hint", ["Several", "list[Named]", "Many"])
def test_key_that_transformers_cannot_describe_is_refused(load: Load, hint: str) -> None:
    with pytest.raises(RewardError, match="describing its tools add raised TypeHintParsingException"):
        load(HINTED + RESETS + ITERATES + SCORES + ADDS.replace("a: int", f"a: {hint}"))


def test_optional_keys_stay_optional_with_postponed_annotations(load: Load) -> None:
    source = HINTED + RESETS + ITERATES + SCORES + ADDS.replace("a: int", "a: Tree")
    (tool,) = load(f"from __future__ import annotations\n{source}").schemas
    assert tool["function"]["parameters"]["properties"]["a"]["required"] == TREE["required"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.qwen2(600).save_pretrained(folder)
    chat.tokenizer(folder, "qwen2_5")
    return folder


def rehearsed(model: Path, environment: str, **choices: Any) -> list[str]:
    config = TaskConfig(environment=environment, **({"reward_processes": 1} | choices))
    with logged() as lines:
        rehearsal.rehearse(str(model), config, SamplingConfig(), registry.load(config))
    return lines


def test_rehearsal_resets_scores_and_checks_the_template(model: Path, tmp_path: Path) -> None:
    assert rehearsed(model, f"{FILE}:Bench") == []
    assert rehearsed(model, f"{FILE}:Rewarded", reward_processes=0) == []
    other = tmp_path / "gemma"
    shutil.copytree(model, other)
    chat.tokenizer(other, "gemma3")
    with pytest.raises(UsageError, match=f"the chat template of {other} rejects messages with the roles"):
        rehearsed(other, f"{FILE}:Bench")


@pytest.mark.parametrize("processes", [0, 1])
def test_rehearsal_names_a_reset_that_cannot_be_called(model: Path, tmp_path: Path, processes: int) -> None:
    (tmp_path / "task.py").write_text(RESETS.replace("**row", "answer") + ITERATES + SCORES + ADDS)
    with pytest.raises(RewardError) as caught:
        rehearsed(model, f"{tmp_path / 'task.py'}:Task", reward_processes=processes)
    assert (
        "Task.reset raised TypeError: Task.reset() got an unexpected keyword argument 'prompt'" in caught.value.message
    )
    (tmp_path / "task.py").write_text(RESETS.replace("pass", "return 7") + ITERATES + SCORES + ADDS)
    with pytest.raises(RewardError, match="raised TypeError: returned a int, expected text or None"):
        rehearsed(model, f"{tmp_path / 'task.py'}:Task", reward_processes=processes)


@pytest.mark.parametrize("of_rows", [False, True])
def test_reset_gets_only_the_problems_own_keys(model: Path, tmp_path: Path, *, of_rows: bool) -> None:
    resets = RESETS.replace("**row", "prompt, number")
    iterates = ITERATES.replace("{'prompt': '3+4='}", "{'prompt': '3+4=', 'number': 7}")
    (tmp_path / "task.py").write_text(resets + iterates + SCORES + ADDS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4=", "number": 7}\n')
    choices = {"data": str(tmp_path / "rows.jsonl")} if of_rows else {}
    notes = rehearsed(model, f"{tmp_path / 'task.py'}:Task", system_prompt="Be brief.", **choices)
    assert notes == (["the model does not see the columns number; rewards get them"] if of_rows else [])


def test_reset_observation_is_truncated_like_a_tool_result(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(RESETS.replace("pass", "return 'x' * 20_000") + ITERATES + SCORES + ADDS)
    tools = registry.scorer(TaskConfig(environment=f"{tmp_path / 'task.py'}:Task"))
    begun = tools.begin({"prompt": "3+4="})
    assert len(begun.text) == LONGEST_ANSWER
    assert begun.text.endswith("... (truncated from 20,000 characters)")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("[{'type': 'text', 'text': 'It is '}, {'type': 'text', 'text': '19.'}]", "It is 19."),
        ("[{'type': 'text', 'text': 'See:'}, {'type': 'image', 'image': 'x'}]", "image, expected text"),
        ("[{'type': 'image', 'url': 'x'}]", "image, expected text"),
        ("[{'type': 'film', 'text': 'x'}]", "[{'type': 'film', 'text': 'x'}]"),
        ("[{'type': 'text', 'name': 'a.txt'}]", "[{'type': 'text', 'name': 'a.txt'}]"),
        ("[{'type': 'video', 'title': 'x'}]", "[{'type': 'video', 'title': 'x'}]"),
        ("[]", "[]"),
        ("{'type': 'text', 'text': 'x'}", "{'type': 'text', 'text': 'x'}"),
        ("None", "None"),
    ],
)
def test_parts_of_a_tool_result_reach_the_model_as_text(tmp_path: Path, result: str, text: str) -> None:
    (tmp_path / "task.py").write_text(RESETS + ITERATES + SCORES + ADDS.replace("a + b", result))
    tools = registry.scorer(TaskConfig(environment=f"{tmp_path / 'task.py'}:Task"))
    tools.begin({"prompt": "3+4="})
    reply = tools.call("add", {"a": 1, "b": 2})
    is_refused = "expected text" in text
    assert reply.text == (f"error: TypeError: returned a part of the type {text}" if is_refused else text)
    assert reply.is_error == is_refused


def test_limits_of_tools_are_refused_without_tools() -> None:
    with pytest.raises(UsageError, match="--max-turns and --tool-timeout-s: only for an environment with tools"):
        load_environment(TrainConfig.of(model_name="m", max_turns=3, tool_timeout_s=1.0, eval_samples=1))
    config = TrainConfig.of(model_name="m", max_turns=3, environment=f"{FILE}:Bench")
    assert load_environment(config.changed(eval_samples=1)) is not None


@pytest.mark.timeout(60)
def test_ctrl_c_interrupts_a_tool_that_awaits_forever() -> None:
    is_awaited, ends = threading.Event(), threading.Event()

    async def forever() -> None:
        is_awaited.set()
        await asyncio.to_thread(ends.wait)

    def press() -> None:
        is_awaited.wait()
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        awaited(forever())
    presser.join()
    ends.set()
