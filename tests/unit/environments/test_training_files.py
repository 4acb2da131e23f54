"""Files of rows to train on: every format gives the same rows, and each bad row is named with its place."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from bridge.config import TrainConfig
from bridge.errors import RewardError, UsageError
from bridge.rollouts.training_rows import digest
from bridge.weights import skeleton
from bridge_cli.task_environment import check_files, load_environment, load_rows
from tests.logged import logged
from tests.models import chat, tiny

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"{a}+1?"}, {"role": "assistant", "content": f"It is {a + 1}."}]}
    for a in range(4)
]
PAIR = {"prompt": "2+3=", "chosen": "5", "rejected": "6"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.qwen2(600).save_pretrained(folder)
    chat.tokenizer(folder, "qwen2_5")
    return folder


def written(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def config(model: Path, file: Path, **choices: Any) -> TrainConfig:
    return TrainConfig.of(**{"model_name": str(model), "loss": "sft", "data": str(file), **choices})


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_every_format_gives_the_same_rows(model: Path, tmp_path: Path, suffix: str) -> None:
    of_lines, of_file = (
        load_rows(config(model, written(tmp_path / f"rows{name}", ROWS)), None) for name in (".jsonl", suffix)
    )
    assert len(of_lines) == len(ROWS)
    assert digest(of_lines) == digest(of_file)


def test_bad_rows_are_named_by_file_and_line(model: Path, tmp_path: Path) -> None:
    file = written(
        tmp_path / "rows.jsonl", [ROWS[0], {"text": "5"}, ROWS[1], "{", {"messages": ROWS[0]["messages"][:1]}]
    )
    with pytest.raises(RewardError) as caught:
        load_rows(config(model, file), None)
    message = caught.value.message
    assert message.startswith(f"{file}: 3 of 5 rows are bad: line 2 has the columns text, expected messages, or prompt")
    assert "; line 4 is not JSON" in message
    assert "; line 5 has no message of the assistant to train on" in message
    assert "--prompt-column" not in caught.value.hint


def test_rows_that_are_too_long_are_left_out_and_counted(model: Path, tmp_path: Path) -> None:
    long = {"prompt": "2+3=", "completion": "5" * 300}
    file = written(tmp_path / "rows.jsonl", [*ROWS, long])
    with logged() as lines:
        rows = load_rows(config(model, file), 200)
    assert len(rows) == len(ROWS)
    (line,) = lines
    assert line.startswith(
        f"1 of the 5 rows of {file} have more tokens than a sequence may have, 200; the longest has 30"
    )
    with pytest.raises(
        RewardError, match=r"5 of the 5 rows of .* have more tokens than a sequence may have, 2"
    ) as caught:
        load_rows(config(model, file), 2)
    assert caught.value.hint.startswith("serve with --max-model-len 30")


def test_model_limits_rows_if_the_server_does_not(model: Path, tmp_path: Path) -> None:
    long = {"prompt": "2+3=", "completion": "x=" * 3000}
    assert len(load_rows(config(model, written(tmp_path / "rows.jsonl", [*ROWS, long])), None)) == len(ROWS)


def test_each_loss_reads_its_own_columns(model: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", [PAIR])
    (row,) = load_rows(config(model, file, loss="dpo", mode="lora_only"), None)
    assert len(row.completions) == 2
    with pytest.raises(RewardError, match="line 1 has the columns prompt, chosen, rejected, expected messages"):
        load_rows(config(model, file), None)
    warm = TrainConfig.of(model_name=str(model), warm_up_data=str(written(tmp_path / "w.jsonl", ROWS)), warm_up_steps=2)
    assert len(load_rows(warm, None)) == len(ROWS)
    assert load_rows(TrainConfig.of(model_name=str(model)), None) == []


def test_token_beyond_the_embeddings_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr(skeleton, "num_embeddings", lambda _: 20)
    with pytest.raises(
        RewardError, match=r"rows are bad: line 1 token \d+ of the row is beyond the model's 20 embeddi"
    ):
        load_rows(config(model, file), None)


def test_environment_of_a_run_on_rows_only_evaluates(model: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", ROWS)
    held_out = written(tmp_path / "held.jsonl", [{"prompt": "2+3=", "answer": "5"}])
    assert load_environment(config(model, file)) is None
    chosen = config(model, file, environment="jsonl", eval_data=str(held_out), eval_samples=1)
    check_files(chosen)
    environment = load_environment(chosen)
    assert environment is not None
    assert [problem["answer"] for problem in environment.held_out()] == ["5"]
    by_class = load_environment(config(model, file, environment="word_problems", eval_samples=1))
    assert by_class is not None
    assert by_class.held_out()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no rows": ({"data": None}, "--loss sft trains on the rows of a file, but --data is missing"),
    "no such file": ({"data": "missing.jsonl"}, "--data missing.jsonl: there is no such file or folder"),
    "no such warm-up": (
        {"loss": "dapo", "data": None, "warm_up_data": "missing.jsonl", "warm_up_steps": 1},
        "--warm-up-data missing.jsonl: there is no such file or folder",
    ),
    "nothing held out": (
        {"environment": "jsonl", "eval_samples": 1},
        "--environment jsonl has no held-out problems, since --data has the rows of --loss sft",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_missing_files_are_refused_before_anything_starts(model: Path, tmp_path: Path, case: str) -> None:
    choices, message = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        check_files(config(model, written(tmp_path / "rows.jsonl", ROWS), **choices))
    assert caught.value.message.startswith(message)
    assert caught.value.hint


CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "a warm-up without steps": ({"warm_up_data": "a.jsonl"}, "--warm-up-steps is missing: a warm-up needs a file"),
    "a warm-up without a file": ({"warm_up_steps": 2}, "--warm-up-data is missing: a warm-up needs a file"),
    "nothing after the warm-up": (
        {"warm_up_data": "a.jsonl", "warm_up_steps": 10}, "--warm-up-steps 10 must be less than --training-steps 10",
    ),
    "no environment": (
        {"loss": "sft", "data": "a.jsonl", "eval_samples": 1}, "--eval-samples 1 needs an environment with held-out",
    ),
    "half a pair": (
        {"loss": "dpo", "mode": "lora_only", "batch_size": 7}, "--batch-size 7 is odd, but --loss dpo trains on pairs",
    ),
    "a clip without a ratio": ({"loss": "sft", "clip_low": 0.1}, "--clip-low has no effect with --loss sft, only with"),
    "a beta without pairs": ({"loss": "sft", "dpo_beta": 0.2}, "--dpo-beta has no effect with --loss sft, only with"),
    "an unused reference": ({"loss": "sft", "reference_model": "m"}, "--reference-model would not be used: --kl-coef"),
    "a warm-up of other rollouts": (
        {"rollouts": "atropos", "warm_up_data": "a.jsonl", "warm_up_steps": 2},
        "--warm-up-data has no effect with --rollouts atropos, only with environment",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_choices_that_do_not_fit_are_refused(case: str) -> None:
    choices, message = CHOICES[case]
    with pytest.raises(UsageError) as caught:
        TrainConfig.resolve({"model_name": "m", **choices})
    assert caught.value.message.startswith(message)
    assert caught.value.hint
