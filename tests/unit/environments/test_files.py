"""Problem files: every format and path gives the same rows, nothing is cached, and bad files get clear errors."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from jinja2 import Environment as Jinja
from pyarrow import parquet

from bridge.config import TaskConfig
from bridge.core import hub
from bridge.errors import RewardError, UsageError
from bridge_environments import registry

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"y": {"enum": ["a"]}}}}}
CHAT = [
    {"prompt": [{"role": "user", "content": "hi"}], "tools": [SCHEMA], "level": 1, "answer": "x"},
    {"prompt": [{"role": "user", "content": "hi", "name": "bob"}], "tools": [OTHER], "level": 2, "answer": "y"},
    {
        "prompt": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes", "tool_calls": [CALL]},
            {"role": "user", "content": "ok"},
        ],
        "tools": [SCHEMA, OTHER],
        "level": 3,
        "answer": "z",
    },
]
NUMBERS = [
    {"prompt": "2+1", "answer": 3, "share": 0.5, "big": 2**62 + 1, "tags": ["a", "b"], "names": {"de": "drei"}},
    {"prompt": "näh  \u2028 ", "answer": -4, "share": 1e-9, "big": -(2**62) - 1, "tags": [], "names": {"de": ""}},
]


def rows_of(path: Path, **choices: Any) -> list[Any]:
    choices.setdefault("reward", "format")
    return list(registry.load(TaskConfig(environment="jsonl", data=str(path), **choices)))


def refusal(path: Path, **choices: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        rows_of(path, **choices)
    assert "\n" not in caught.value.message
    return caught.value


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("turn", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("images", [{}, {"images": []}])
def test_turn_with_calls_may_have_no_content(tmp_path: Path, turn: dict[str, Any], images: dict[str, Any]) -> None:
    said = {"role": "assistant", **turn, "tool_calls": [CALL]}
    prompt = [{"role": "user", "content": "hi"}, said, {"role": "tool", "content": "3"}]
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "x", **images}])
    (row,) = rows_of(tmp_path / "rows.jsonl")
    assert row["prompt"][1]["tool_calls"] == [CALL]
    assert not row["prompt"][1].get("content")


@pytest.mark.parametrize("turn", [{"role": "assistant", "tool_calls": []}, {"role": "user", "tool_calls": [CALL]}])
def test_other_turn_has_content(tmp_path: Path, turn: dict[str, Any]) -> None:
    prompt = [{"role": "user", "content": "hi"}, turn, {"role": "user", "content": "hi"}]
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "x"}])
    with pytest.raises(RewardError, match="is not a problem: message 2 of its prompt is"):
        rows_of(tmp_path / "rows.jsonl")


def write_list(path: Path, rows: list[Any]) -> None:
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))


def write_parquet(path: Path, rows: list[Any]) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), path)


WRITERS = {".jsonl": write_jsonl, ".JSONL": write_jsonl, ".json": write_list, ".txt": write_list}
WRITERS |= {".parquet": write_parquet, ".PARQUET": write_parquet, ".pq": write_parquet}
Write = Callable[[Path, list[Any]], None]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("rows", [CHAT, NUMBERS])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str, rows: list[Any]) -> None:
    path = tmp_path / f"data{suffix}"
    WRITERS[suffix](path, rows)
    assert rows_of(path) == rows


@pytest.mark.parametrize("template", ["{{ m.role }}{% if 'name' in m %}/{{ m.name }}{% endif %}", "{{ m }}"])
def test_every_format_gives_the_same_prompts(tmp_path: Path, template: str) -> None:
    rendered = set()
    for suffix, write in WRITERS.items():
        write(tmp_path / f"data{suffix}", CHAT)
        messages = [[dict(sorted(m.items())) for m in row["prompt"]] for row in rows_of(tmp_path / f"data{suffix}")]
        whole = Jinja().from_string(f"{{% for m in messages %}}{template}{{% endfor %}}")
        rendered.add(tuple(whole.render(messages=each) for each in messages))
    assert len(rendered) == 1


def test_null_keys_are_dropped_from_data_set_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "why_unreachable", lambda _: "")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": datasets.Dataset.from_list(CHAT)})
    assert rows_of(Path("someone/else")) == CHAT


@pytest.mark.parametrize("mixed", ["tools", "tool calls", "messages"])
def test_parquet_columns_of_type_json_are_parsed(tmp_path: Path, mixed: str) -> None:
    """The library datasets writes them where values of a key have different types; checked against the JSONL file."""
    rows = json.loads(json.dumps(CHAT))
    values = {"tools": ["a", 1], "tool calls": {"x": "one"}, "messages": {"x": "one", "y": [1, "a"]}}[mixed]
    if mixed == "tools":
        rows[0]["tools"][0]["function"]["parameters"]["properties"]["x"]["enum"] = values
    else:
        rows[2]["prompt"][1]["tool_calls"].append({"type": "function", "function": {"name": "g", "arguments": values}})
    write_jsonl(tmp_path / "d.jsonl", rows)
    made = datasets.load_dataset("json", data_files=str(tmp_path / "d.jsonl"), split="train", cache_dir=str(tmp_path))
    made.to_parquet(tmp_path / "d.parquet")
    assert "arrow.json" in str(parquet.ParquetFile(tmp_path / "d.parquet").schema_arrow)
    assert rows_of(tmp_path / "d.parquet") == rows_of(tmp_path / "d.jsonl") == rows


def test_invalid_json_in_a_parquet_column_is_named(tmp_path: Path) -> None:
    texts = pa.array(['{"a": 1}', "{", None])
    nested = pa.StructArray.from_arrays([pa.ExtensionArray.from_storage(pa.json_(), texts)], names=["inner"])
    parquet.write_table(pa.table({"prompt": ["p"] * 3, "more": nested}), tmp_path / "d.parquet")
    message = refusal(tmp_path / "d.parquet").message
    assert "1 of 3 rows are bad: row 2 has the column 'more' of type JSON, which is not JSON: " in message


def test_null_values_outside_messages_are_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "level": None, "names": {"de": None}}, {"prompt": "q", "level": 1, "names": {"de": "x"}}]
    for suffix, write in WRITERS.items():
        write(tmp_path / f"data{suffix}", rows)
        assert rows_of(tmp_path / f"data{suffix}") == rows


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize(
    "name", ["train[1]", "q?", "a*", "t::x", "lr=1e-5,seed=0", "a b", "hf://x", "{a,b}", "file:x", "#1%20", "'ü\""]
)
def test_path_characters_do_not_act_as_patterns(tmp_path: Path, name: str, suffix: str) -> None:
    for path in (
        tmp_path / f"{name}{suffix}",
        tmp_path / name / f"d{suffix}",
        tmp_path / name / "folder" / f"d{suffix}",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[suffix](path, [{"prompt": "right"}])
    for other in ("train1", "qz", "ab", "x", "hf:"):
        WRITERS[suffix](tmp_path / f"{other}{suffix}", [{"prompt": "ANOTHER FILE"}])
    for source in (tmp_path / f"{name}{suffix}", tmp_path / name / f"d{suffix}", tmp_path / name / "folder"):
        assert rows_of(source) == [{"prompt": "right"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_changed_file_is_read_again(tmp_path: Path, suffix: str, in_folder: bool) -> None:
    path = tmp_path / "folder" / f"train{suffix}"
    path.parent.mkdir()
    for text in ("old", "new"):
        WRITERS[suffix](path, [{"prompt": text}])
        os.utime(path, (1_700_000_000, 1_700_000_000))  # as cp -p, rsync -t and tar do
        assert rows_of(path.parent if in_folder else path) == [{"prompt": text}]


def test_tilde_in_a_data_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_parquet(tmp_path / "d.parquet", [{"prompt": "p"}])
    assert rows_of(Path("~/d.parquet")) == [{"prompt": "p"}]


def test_local_files_need_only_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        write_parquet(tmp_path / "data" / f"train-0000{number}-of-00002.parquet", [{"prompt": f"p{number}"}])
    program = (
        "import sys\nfrom bridge.config import TaskConfig\nfrom bridge_environments import registry\n"
        "rows = list(registry.load(TaskConfig(environment='jsonl', data=sys.argv[1], reward='format')))\n"
        "assert [row['prompt'] for row in rows] == ['p0', 'p1'], rows\n"
        "assert not {'datasets', 'pandas', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_missing_pyarrow_hint_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "d.parquet", [{"prompt": "p"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal(tmp_path / "d.parquet").hint.startswith("pip install pyarrow")


def test_data_frame_index_is_not_a_column(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["p"], "level": [1], "__index_level_0__": [17]})
    parquet.write_table(table, tmp_path / "d.parquet")
    assert rows_of(tmp_path / "d.parquet") == [{"prompt": "p", "level": 1}]


@pytest.mark.parametrize("is_file", [True, False])
def test_single_precision_numbers_are_read_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_file: bool
) -> None:
    written = [0.1, 3.0, None, 2.5e-07, -1234.56]
    table = pa.table({"prompt": ["p"] * len(written), "level": pa.array(written, pa.float32())})
    parquet.write_table(table, tmp_path / "d.parquet")
    monkeypatch.setattr(hub, "why_unreachable", lambda _: "")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": datasets.Dataset(table)})
    source = tmp_path / "d.parquet" if is_file else Path("someone/levels")
    assert [row["level"] for row in rows_of(source)] == written


# Folders


def held_out(path: Path) -> list[Any]:
    return registry.load(TaskConfig(environment="jsonl", data=str(path), reward="format")).held_out()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize(
    ("train", "test"),
    [
        (["train"], "test"),
        (["train-00000-of-00002", "train-00001-of-00002"], "test-00000-of-00001"),
        (["data/train-0", "data/train-1"], "data/test-0"),
        (["train/a", "train/b"], "test/a"),
        (["my_training_rows"], "my_eval_rows"),
        (["x", "y"], None),
    ],
)
def test_folder_files_are_split_by_name(tmp_path: Path, suffix: str, train: list[str], test: str | None) -> None:
    for number, name in enumerate([*train, *([test] if test else [])]):
        path = tmp_path / f"{name}{suffix}"
        path.parent.mkdir(exist_ok=True)
        WRITERS[suffix](path, [{"prompt": f"p{number}"}])
    (tmp_path / "dataset_info.json").write_text("{}")
    assert [row["prompt"] for row in rows_of(tmp_path)] == [f"p{number}" for number in range(len(train))]
    assert [row["prompt"] for row in held_out(tmp_path)] == ([f"p{len(train)}"] if test else [])


@pytest.mark.parametrize("form", ["list", "dict", "text"])
def test_data_set_card_may_list_the_files_of_each_split(tmp_path: Path, form: str) -> None:
    write_jsonl(tmp_path / "first.jsonl", [{"prompt": "a"}])
    write_jsonl(tmp_path / "second.jsonl", [{"prompt": "b"}])
    write_jsonl(tmp_path / "train.old.jsonl", [{"prompt": "old"}])
    forms = {
        "list": "[{split: train, path: first*}, {split: test, path: [second.jsonl]}]",
        "dict": "{train: first.jsonl, test: second.jsonl}",
        "text": "first.jsonl",
    }
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: x\n  data_files: {forms[form]}\n---\n")
    assert rows_of(tmp_path) == [{"prompt": "a"}]
    assert held_out(tmp_path) == ([] if form == "text" else [{"prompt": "b"}])


def test_data_set_card_with_several_configs_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    configs = "".join(f"- {{config_name: {name}, data_files: {name}.jsonl}}\n" for name in "ab")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert "has several configurations: a, b" in refusal(tmp_path).message
    (tmp_path / "README.md").write_text("---\nconfigs: [7]\n---\n")
    assert "README.md has metadata that cannot be read" in refusal(tmp_path).message


def test_split_in_two_formats_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-a.parquet", [{"prompt": "a"}])
    write_list(tmp_path / "train-a.json", [{"prompt": "a"}])
    assert "the split train in several formats: train-a.json, train-a.parquet" in refusal(tmp_path).message


def test_folder_with_other_formats_is_read_without_a_cache(tmp_path: Path) -> None:
    for text in ("old", "new"):
        (tmp_path / "train.csv").write_text(f"prompt\n{text}\n")
        os.utime(tmp_path / "train.csv", (1_700_000_000, 1_700_000_000))
        assert rows_of(tmp_path) == [{"prompt": text}]


def test_bad_row_error_names_its_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-0.jsonl", [{"prompt": "p"}])
    write_jsonl(tmp_path / "train-1.jsonl", [{"prompt": "p"}, {"prompt": ""}])
    message = refusal(tmp_path).message
    assert message == (
        f"{tmp_path}, split train: 1 of 3 rows are bad: train-1.jsonl line 2 is not a problem: its prompt is empty"
    )


# Errors


LONG = "1" + "0" * 4999


def test_integer_of_any_size_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        f'{{"prompt": "10^4999?", "answer": {LONG}}}\n{{"prompt": "1+1", "answer": {2**70}, "id": -{LONG}}}\n'
    )
    first, second = rows_of(path, reward="exact")
    assert (first["answer"], second["answer"], second["id"]) == (LONG, 2**70, f"-{LONG}")
    task = registry.load(TaskConfig(environment="jsonl", data=str(path)))
    assert task.score(first, f" {LONG}\n") == 1.0
    path.write_text(f'[{{"prompt": "10^4999?", "answer": {LONG}}}]')
    assert rows_of(path)[0]["answer"] == LONG


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_missing_chosen_column_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"d{suffix}"
    WRITERS[suffix](path, [{"prompt": "p", "answer": "1", "gold": "2"}])
    expected = f"--answer-column golt: no row of {path} has this column, found answer, gold, prompt"
    assert refusal(path, answer_column="golt").message == expected
    assert (
        "has no answer, but the reward exact compares with the column 'golt', found prompt, answer, gold"
        in refusal(path, answer_column="golt", reward="exact").message
    )
    assert "has no column 'question', found prompt, answer, gold" in refusal(path, prompt_column="question").message
    assert rows_of(path, answer_column="gold")[0]["answer"] == "2"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_column_may_be_a_key_of_another_column(tmp_path: Path, suffix: str) -> None:
    """The scripts of verl move the answer to reward_model.ground_truth, and the question to extra_info.question."""
    row = {
        "prompt": [{"role": "user", "content": "2+2? Think."}], "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"question": "2+2?", "more": {"answer": "2+2=4\n#### 4"}}, "dot.ted": "whole",
    }  # fmt: skip
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, [row])
    (problem,) = rows_of(path, reward="exact", answer_column="reward_model.ground_truth")
    assert problem["answer"] == "4"
    (problem,) = rows_of(path, reward="exact", answer_column="dot.ted", prompt_column="extra_info.question")
    assert (problem["prompt"], problem["answer"]) == ("2+2?", "whole")
    config = TaskConfig(
        environment="gsm8k", data=str(path), prompt_column="extra_info.question",
        answer_column="extra_info.more.answer",
    )  # fmt: skip
    (problem,) = registry.load(config)
    assert problem["answer"] == "4"
    found = "found prompt, reward_model, reward_model.style, reward_model.ground_truth, extra_info"
    assert found in refusal(path, reward="exact").message
    assert "extra_info.question" in refusal(path, prompt_column="extra_info.q").message


def test_missing_chosen_column_has_no_fallback(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "1", "gold": "2"}, {"prompt": "q", "answer": "3"}])
    assert [row.get("answer") for row in rows_of(tmp_path / "d.jsonl", answer_column="gold")] == ["2", None]


def damaged(path: Path, how: str) -> bytes:
    write_parquet(path, [{"prompt": "2+2="}] * 3)
    raw = path.read_bytes()
    return {
        "no bytes": b"",
        "magic only": b"PAR1PAR1",
        "cut": raw[: len(raw) // 2],
        "footer": raw[:-8] + b"\xff\xff\xff\x7fPAR1",
        "page": raw[:30] + bytes(byte ^ 255 for byte in raw[30:60]) + raw[60:],
        "text": b'{"prompt": "x"}\n',
    }[how]


@pytest.mark.parametrize("how", ["no bytes", "magic only", "cut", "footer", "page", "text"])
def test_damaged_parquet_file_error_shows_the_cause(tmp_path: Path, how: str) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(damaged(path, how))
    message = refusal(path).message
    assert message.startswith(f"{path} cannot be read as Parquet: ")
    assert "generating the dataset" not in message


def test_other_parquet_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    parquet.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    assert refusal(path).message == f"{path} has more than one column 'prompt'"
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert refusal(path).message == f"{path} has no rows"
    bad = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))
    parquet.write_table(pa.table({"prompt": bad}), path)
    assert f"{path}: 1 of 2 rows are bad: row 2 cannot be read: 'utf-8' codec" in refusal(path).message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n {"prompt": "a"},\n {"prompt": "b"\n]', "d.json is not JSON: Expecting ',' delimiter: line 4 column 1"),
        ('{\n "data": [\n  {"prompt": "a"}]}', "d.json is one JSON object with the keys data, expected rows"),
        ("[1]\n[2]\n", "line 1 is [1], expected a JSON object; line 2 is [2]"),
        ('[{"prompt": "a"}, 7]', "row 2 is 7, expected a JSON object"),
        pytest.param("[" * 100_000, "d.json is not JSON: nested too deeply", id="deep"),
        pytest.param('{"prompt": ' + "[" * 100_000, "line 1 is not JSON (nested too deeply", id="deep line"),
        ("[]", "d.json has no rows"),
    ],
)
def test_json_faults_are_reported_with_their_position(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    assert message in refusal(path).message


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("x" * 300 + ".jsonl", id="long"),
        pytest.param("a/" + "x" * 300, id="long name"),
        "\ud83d.jsonl",
        "~nobody-at-all/x",
    ],
)
def test_impossible_file_name_is_refused(name: str) -> None:
    assert refusal(Path(name)).hint
