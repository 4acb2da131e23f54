"""One row through every door: files, data sets, classes, tools, the library and `bridge env` accept and refuse alike.

Not covered: the requests of agents (`tests/unit/agents`).
"""

import builtins
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import bridge
from bridge.agents.trajectories import as_chat
from bridge.config import TaskConfig
from bridge.core import hub
from bridge.errors import BridgeError
from bridge.rollouts import problems
from bridge.weights import skeleton
from bridge_environments import registry
from tests.logged import logged
from tests.models import chat
from tests.unit import patched_server

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("doors")]
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
SOURCE = '''
import builtins

class Rows:
    def __iter__(self):
        return iter(builtins.ROWS)

class Late(Rows):
    """The row is not among the first ones."""

    def __iter__(self):
        return iter([*[{"prompt": "first"}] * 64, *builtins.ROWS])

class HeldOut(Rows):
    def __iter__(self):
        return iter([{"prompt": "first"}])

    def held_out(self):
        return builtins.ROWS

class Calculator(Rows):
    def reset(self, **problem):
        pass

    def add(self, a: int) -> int:
        """Add.

        Args:
            a: A number.
        """
        return a
'''
Door = Callable[[dict[str, Any]], str]
"""Row -> the prompt's text, as the model reads it."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bridge.Policy]:
    """Attach to a patched server, with the tokenizer and the chat template of Qwen 2.5."""
    folder = tmp_path_factory.mktemp("server")
    sampling = bridge.SamplingConfig(group_size=2, max_new_tokens=4, request_timeout_s=60)
    with pytest.MonkeyPatch.context() as patch, patched_server.tiny_llama(folder) as server:
        patch.setattr(skeleton, "num_embeddings", lambda _: None)
        with closing(bridge.attach(server.path, sampling=sampling, run_dir=folder / "run")) as policy:
            policy.use_tokenizer(chat.tokenizer(folder / "tokenizer", "qwen2_5"))
            yield policy


@pytest.fixture(params=["jsonl", "json", "parquet", "hub", "Rows", "Late", "HeldOut", "Calculator", "sample", "encode"])
def door(
    request: pytest.FixtureRequest, policy: bridge.Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Door:
    kind = request.param
    data = tmp_path / f"rows.{kind}"
    (tmp_path / "task.py").write_text(SOURCE)

    def listed(row: dict[str, Any]) -> list[Any]:
        if kind in ("jsonl", "json"):
            text = json.dumps(row)
            data.write_text(f"{text}\n" if kind == "jsonl" else f"[{text}]")
        elif kind == "parquet":
            parquet.write_table(pa.Table.from_pylist([row]), data)
        elif kind == "hub":
            splits = {"train": datasets.Dataset.from_list([row])}
            monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)
            monkeypatch.setattr(hub, "why_unreachable", lambda _: "")
        else:
            monkeypatch.setattr(builtins, "ROWS", [row], raising=False)
            task = registry.load(TaskConfig(environment=f"{tmp_path / 'task.py'}:{kind}", reward="format"))
            return task.held_out() if kind == "HeldOut" else [*task]
        source = "org/name" if kind == "hub" else str(data)
        return [*registry.load(TaskConfig(environment="jsonl", data=source, reward="format"))]

    def text(row: dict[str, Any]) -> str:
        if kind == "sample":
            (group,) = policy.sample([row])  # type: ignore[list-item]
            ids = group.prompt_token_ids
        elif kind == "encode":
            ids = policy.encode(row, "yes").prompt_token_ids  # type: ignore[arg-type]
        else:
            problem = listed(row)[-1]
            ids = problems.encode(policy.tokenizer, as_chat(problem) if kind == "Calculator" else problem)
        return str(policy.tokenizer.decode(ids)).partition("<|im_end|>\n")[2]

    return text


def skip_what_no_table_holds(door: Door, row: dict[str, Any]) -> str:
    try:
        return door(row)
    except (pa.ArrowException, UnicodeEncodeError, datasets.exceptions.DatasetGenerationError):
        pytest.skip("Arrow has no column with such values")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "its prompt is empty"),
        ([], "its prompt is []|no token ids"),
        (5, "prompt is 5"),
        (None, "prompt is None"),
        (["hi"], "message 1 of its prompt is 'hi'"),
        ([[USER]], "message 1 of its prompt is [{'role'"),
        ([{"content": "hi"}], "message 1 of its prompt is {'content': 'hi'}"),
        ([{"role": None, "content": "hi"}], "message 1 of its prompt is"),
        ([{"role": 1, "content": "hi"}], "message 1 of its prompt is"),
        ([{"from": "human", "value": "hi"}], "message 1 of its prompt is {'from': 'human'"),
        ([USER, {"role": "assistant", "content": None}, USER], "message 2 of its prompt is"),
        ([{"role": "user", "content": 5}], "message 1 of its prompt is"),
        ([{"role": "user", "content": ["hi"]}], "message 1 of its prompt is"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1 of its prompt is"),
        ([*CALLING, {"role": "tool", "content": {"sum": 3}}], "message 3 of its prompt is"),
        ([*CALLING, {"role": "tool", "content": 3}], "message 3 of its prompt is"),
        ("a\ud800", "has half of a surrogate pair"),
        ([{"role": "user", "content": "hi", "name": "a\ud800"}], "has half of a surrogate pair"),
        ([{"role": "human", "content": "hi"}], "drops the message with the role human"),
        (CALLING, "ends with tool calls"),
    ],
)
def test_bad_prompt_is_refused_at_every_door(door: Door, prompt: Any, words: str) -> None:
    with pytest.raises(BridgeError) as caught:
        skip_what_no_table_holds(door, {"prompt": prompt, "answer": "x"})
    assert "\n" not in caught.value.message
    assert any(expected in caught.value.message for expected in words.split("|"))


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else "x"


def test_deep_prompt_is_refused_at_every_door(door: Door) -> None:
    with pytest.raises(BridgeError, match="nested"):
        skip_what_no_table_holds(door, {"prompt": [{**USER, "extra": nested(150)}]})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([USER], "hi"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "hi"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "a\nb"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi", "image": None}]}], "hi"),
        ([{"role": "user", "content": ""}], ""),
        ([{"role": "user", "content": "a\0b"}], "a\0b"),
        ([{**USER, "name": None, "tool_calls": None}], "hi"),
    ],
)
def test_same_prompt_is_read_alike_at_every_door(door: Door, prompt: Any, expected: str) -> None:
    assert door({"prompt": prompt}) == f"<|im_start|>user\n{expected}<|im_end|>\n<|im_start|>assistant\n"


def test_answers_of_tools_may_be_in_parts_at_every_door(door: Door) -> None:
    """Otherwise, a template would write the list as Python does."""
    parts = [{"type": "text", "text": "3"}]
    calling = {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [CALL]}
    asked = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    text = skip_what_no_table_holds(door, {"prompt": [asked, calling, {"role": "tool", "content": parts}]})
    assert "<tool_response>\n3\n</tool_response>" in text


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "null"}])
def test_call_without_arguments_has_none_at_every_door(door: Door, given: dict[str, Any]) -> None:
    call = {"type": "function", "function": {"name": "add", **given}}
    calling = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    assert '{"name": "add", "arguments": {}}' in door({"prompt": calling})


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("tools", [{**TOOL, "more": "\ud800"}], "half of a surrogate pair"),
        ("plain_prompt", "\ud800", "its plain_prompt '.ud800' has half of a surrogate pair"),
        ("plain_prompt", 5, "its plain_prompt is 5"),
        ("chat_template_kwargs", {"messages": []}, r"chat_template_kwargs is {'messages': \[\]}, expected an object"),
        ("chat_template_kwargs", [1], "chat_template_kwargs is .1., expected an object"),
    ],
)
def test_bad_column_is_refused_at_every_door(door: Door, column: str, value: Any, words: str) -> None:
    with pytest.raises(BridgeError, match=words):
        skip_what_no_table_holds(door, {"prompt": [USER], column: value})


@pytest.mark.parametrize(
    ("answer", "is_valid"),
    [
        (3, True), (2.5, True), (np.int64(3), True), (np.float32(3), True), (Decimal("2.50"), True),
        (True, False), (None, False), (float("nan"), False), (np.float32("inf"), False), (Decimal("nan"), False),
        (Decimal("snan"), False), (date(2026, 1, 2), False), (b"3", False), ([3], False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["Rows", "parquet"])
def test_answer_may_be_any_finite_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, answer: Any, is_valid: bool
) -> None:
    (tmp_path / "task.py").write_text(SOURCE)
    monkeypatch.setattr(builtins, "ROWS", [{"prompt": "1+2=", "answer": answer}], raising=False)
    config = TaskConfig(environment=f"{tmp_path / 'task.py'}:Rows", reward="exact")
    if kind == "parquet":
        config = TaskConfig(environment="jsonl", data=str(tmp_path / "rows.parquet"), reward="exact")
        try:
            parquet.write_table(pa.Table.from_pylist([{"prompt": "1+2=", "answer": answer}]), config.data)
        except pa.ArrowException:
            pytest.skip("Arrow has no column with such values")
    if is_valid:
        task = registry.load(config)
        assert task.score(next(iter(task)), str(answer)) == 1.0
        return
    with pytest.raises(BridgeError, match=r"has the answer .*, expected text or a number"):
        registry.load(config)


def test_template_argument_needs_a_name(policy: bridge.Policy) -> None:
    """Keys of JSON are text, but not those of a class and of the library."""
    with pytest.raises(BridgeError, match=r"chat_template_kwargs is {5: 1}, expected an object"):
        policy.sample([{"prompt": [USER], "chat_template_kwargs": {5: 1}}])  # type: ignore[list-item]


@pytest.mark.parametrize("tools", ["[{", TOOL, ["f"], 5])
def test_library_names_columns_that_the_model_does_not_see(policy: bridge.Policy, tools: Any) -> None:
    with logged() as lines:
        policy.sample([{"prompt": [USER], "tools": tools}])  # type: ignore[list-item]
    assert any("the model does not see tools of the prompts" in line for line in lines)


def test_library_logs_what_a_run_logs_about_chat_messages(policy: bridge.Policy, tmp_path: Path) -> None:
    """A turn that ends without a special token never ends a completion, which must not stay unsaid."""
    before = policy.tokenizer
    policy.use_tokenizer(chat.tokenizer(tmp_path, "qwen2_5"))
    try:
        assert policy.tokenizer.chat_template is not None
        policy.tokenizer.chat_template = policy.tokenizer.chat_template.replace("<|im_end|>", "<|my_end|>")
        with logged() as lines:
            policy.sample(["text"])
            assert not any("chat template" in line for line in lines)
            for _ in range(2):
                policy.sample([[{**USER, "mood": "good"}]])
    finally:
        policy.use_tokenizer(before)
    assert [line.partition(" of /")[0] for line in lines if "does not end a turn" in line] == ["the chat template"]
    assert len([line for line in lines if "the model does not see mood in messages" in line]) == 1


@pytest.mark.parametrize("ids", ["abc", None, 5, [1.0], [True], ["a"]])
def test_wrong_token_ids_are_refused_by_name(policy: bridge.Policy, ids: Any) -> None:
    for call in (lambda row: policy.sample([row]), lambda row: policy.encode(row, "yes")):
        with pytest.raises(BridgeError, match=r"prompt_token_ids is .*, expected token ids"):
            call({"prompt": "hi", "prompt_token_ids": ids})


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_library_takes_any_sequence_of_messages(policy: bridge.Policy, kind: Any) -> None:
    expected = problems.encode(policy.tokenizer, {"prompt": [USER]})
    (group,) = policy.sample([kind([USER])])
    assert group.prompt_token_ids == policy.encode(kind([USER]), "yes").prompt_token_ids == expected
    assert group.problem["prompt"] == [USER]


def test_encoded_text_may_follow_token_ids(policy: bridge.Policy) -> None:
    sample = policy.encode([65, 66], "yes")
    assert sample.prompt_token_ids == (65, 66)
    assert sample.token_ids[-1] == policy.tokenizer.eos_token_id


def test_token_beyond_the_embedding_is_refused(policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass would end in an IndexError, on a GPU in an assertion of the device."""
    monkeypatch.setitem(vars(policy), "_vocabulary", replace(policy._vocabulary, num_embeddings=320))
    monkeypatch.delitem(vars(policy), "_sampler", raising=False)
    policy.encode([65, 66], "!")
    for call in (lambda: policy.sample([[65, 320]]), lambda: policy.encode([65, 320], "!")):
        with pytest.raises(BridgeError, match=r"token 320 of .*prompt.* is beyond the model's 320 embeddings"):
            call()
    with pytest.raises(BridgeError, match="of the completion is beyond the model's 320 embeddings"):
        policy.encode([65], "</s>")


@pytest.mark.parametrize("completion", [None, 5, b"yes", "\ud800"])
def test_completion_that_is_no_text_is_refused(policy: bridge.Policy, completion: Any) -> None:
    with pytest.raises(BridgeError, match=r"policy\.encode: completion is"):
        policy.encode([USER], completion)
