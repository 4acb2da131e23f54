import json
import logging
import math
import os
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoints import rollout_record
from bridge.checkpoints.metrics import RECORDED, Evaluation, StepMetrics, Summary
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.core import folder_mark, json_lines
from bridge.errors import UsageError
from bridge.types import Completion, Group, Message, Unscored
from tests.unit.core.test_atomic_folder import largest_file


def metrics(step: int, **changed: float) -> StepMetrics:
    known: dict[str, object] = {
        "step": step,
        "weight_version": step,
        "tokens_generated": 9,
        "groups_in_flight": 0,
        "rollouts": "0a1b",
        "device": "cpu",
    }
    known |= {"logprob_diff_histogram": (0.5, 0.5), "lag_shares": (1.0,), "reward_parts": {"exact": 0.5}}
    return StepMetrics(dict.fromkeys(RECORDED, 0.5) | known | changed)


def test_step_metrics_have_the_documented_names(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", environment="arithmetic")
    for step in (1, 2):
        run.append(metrics(step))
        written = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert len(written) == step
    assert tuple(written[0]) == RECORDED
    assert [step["step"] for step in written] == [1, 2]


def test_non_finite_metric_becomes_null(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, environment="arithmetic")
    run.append(metrics(1, loss=math.nan, grad_norm=math.inf))
    (line,) = run.metrics.read_text().splitlines()
    assert "NaN" not in line
    assert (json.loads(line)["loss"], json.loads(line)["grad_norm"]) == (None, None)


def test_resolved_choices_are_written_to_the_config(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, environment="arithmetic")
    config = TrainConfig.of(model_name="m", save_path=tmp_path / "saved")
    run.write_config(config.document())
    assert TrainConfig.of(**run.choices()) == config
    assert [path for path in tmp_path.iterdir() if path.name != folder_mark.NAME] == [run.config]


def test_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, environment="arithmetic").append(metrics(1))
    with pytest.raises(UsageError, match="already holds a run"):
        RunDirectory.create(tmp_path, environment="arithmetic")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a model": lambda folder: (folder / "config.json").write_text('{"model_type": "llama", "save_path": "x"}'),
    "a log": lambda folder: (folder / "serve.log").touch(),
    "models that are served": lambda folder: (folder / "served" / "version_1").mkdir(parents=True),
    "a link": lambda folder: (folder / "events.log").symlink_to(folder / "diary.txt"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_folder_with_foreign_run_files_is_refused(tmp_path: Path, case: str) -> None:
    FOREIGN[case](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"was not created by Bridge, and these files would be replaced: ") as refused:
        RunDirectory.create(tmp_path, environment="arithmetic")
    assert sorted(tmp_path.rglob("*")) == before
    assert "--run-dir" in refused.value.hint


def test_folder_with_unrelated_files_may_hold_a_run(tmp_path: Path) -> None:
    for name in ("task.py", "vllm_bridge_config.json", "report.html", "checkpoints/best"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    run = RunDirectory.create(tmp_path, environment="arithmetic")
    run.write_config(TrainConfig.of(model_name="m").document())
    assert RunDirectory.create(tmp_path, environment="arithmetic").path == tmp_path


def test_unused_run_directory_leaves_no_marker_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new"):
        RunDirectory.create(folder, environment="arithmetic").remove_if_unused()
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_every_file_name_of_a_run_is_listed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    paths = [value for name in dir(RunDirectory) if isinstance(value := getattr(run, name), Path)]
    assert {path.name for path in paths if path.parent == tmp_path} <= run.names


def test_file_in_place_of_a_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot create the run directory"):
        RunDirectory.create(tmp_path / "file", environment="arithmetic")


def test_default_name_is_the_time_and_task_and_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [RunDirectory.create(None, environment=name) for name in ("arithmetic", "a/b.py:Task", "arithmetic")]
    assert len({run.path for run in runs}) == 3
    assert {run.path.parent for run in runs} == {Path("runs")}
    assert "arithmetic" in runs[0].path.name
    assert runs[1].path.name.endswith("-Task")


def completion(text: str, **changed: Any) -> Completion:
    known: dict[str, Any] = {"token_ids": (7, 8), "logprobs": (-0.5, -0.5), "finish_reason": "stop"}
    return Completion(**(known | {"text": text, "versions": (4, 4)} | changed))


def group(*texts: str, prompt: str | list[Message] = "2+3=", **changed: Any) -> Group:
    known: dict[str, Any] = {"problem": {"prompt": prompt, "answer": "5", "picture": b"large"}}
    known |= {"prompt_token_ids": (1, 2), "rewards": tuple(float(index) for index in range(len(texts)))}
    known["completions"] = tuple(completion(text) for text in texts)
    return Group(**(known | changed))


def evaluation(step: int, reward: float = 0.5) -> Evaluation:
    return Evaluation(
        step=step, weight_version=step, reward_mean=reward, reward_std=0.5, reward_parts={"exact": reward}, unscored=0,
        num_problems=8, completion_tokens_mean=4.0, truncated_share=0.0, seconds=1.0, pass_at_k={},
    )  # fmt: skip


def test_each_group_is_one_line_of_rollouts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    parts = {"exact": (0.0, 1.0), "short": (0.5, math.nan)}
    unscored = (Unscored(completion=completion("?"), fault="score raised ValueError"),)
    run.append_rollouts(3, [group("4", "5", reward_parts=parts, unscored=unscored), group()], version=6)
    full, empty = map(json.loads, run.rollouts.read_text().splitlines())
    assert list(full) == ["step", "number", "problem", "completions", "unscored"]
    assert (full["step"], full["problem"]) == (3, {"prompt": "2+3=", "answer": "5", "picture": "b'large'"})
    assert full["unscored"] == [{"text": "?", "fault": "score raised ValueError"}]
    right = {"text": "5", "reward": 1.0, "parts": {"exact": 1.0, "short": None}, "tokens": 2}
    right |= {"finish_reason": "stop", "truncated": False, "weight_version": 4, "staleness": 2}
    assert full["completions"][1] == right
    assert (len(full["completions"]), empty["completions"], empty["unscored"]) == (2, [], [])


@pytest.mark.parametrize(
    ("versions", "expected"), [((4, 4), 4), ((4, 5), "4-5"), ((5, 3), "3-5"), ((4, None), None), ((), None)]
)
def test_completion_has_a_version_if_every_token_has_one(
    tmp_path: Path, versions: tuple[int | None, ...], expected: int | str | None
) -> None:
    run = RunDirectory(tmp_path)
    run.append_rollouts(3, [group("4", completions=(completion("4", versions=versions),))])
    (line,) = map(json.loads, run.rollouts.read_text().splitlines())
    assert line["completions"][0]["weight_version"] == expected


class Unwritable:
    def __repr__(self) -> str:
        raise ValueError


COLUMNS: dict[str, tuple[Any, Any]] = {
    "a number": (7, 7),
    "a board": ({"rows": [[1, 0], [None, 2.5]]}, {"rows": [[1, 0], [None, 2.5]]}),
    "numbers": (list(range(10**5)), "[0, 1, 2, 3"),
    "a long text": ("a" * 5000, "aaaa"),
    "a large object": ({"of": b"x" * 10**6}, '{"of": "b\'xxx'),
    "an object without a text": ([Unwritable()], "(a list that cannot be written: ValueError)"),
    "a deep list": (json.loads("[" * 900 + "]" * 900), "(a list that cannot be written: RecursionError)"),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_large_columns_of_a_problem_are_shortened(tmp_path: Path, case: str) -> None:
    value, expected = COLUMNS[case]
    run = RunDirectory(tmp_path)
    run.append_rollouts(1, [group("4", problem={"prompt": "2+3=", "column": value})])
    column = json.loads(run.rollouts.read_text())["problem"]["column"]
    assert len(json.dumps(column)) < rollout_record.LONGEST_COLUMN + 100
    if column == value:
        assert column == expected
    else:
        assert column.startswith(expected)
        assert "left out" in column or "cannot be written" in column


def test_long_text_is_truncated_in_the_middle(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    spoken = ({"role": "assistant", "text": "b" * 10**6, "tokens": 2},)
    both = (completion("a" * 10**6), completion("b", transcript=spoken))
    run.append_rollouts(1, [group(completions=both, rewards=(0.0, 1.0))])
    single, several = json.loads(run.rollouts.read_text())["completions"]
    for text in (single["text"], several["text"], several["turns"][0]["text"]):
        assert rollout_record.LONGEST_TEXT < len(text) < rollout_record.LONGEST_TEXT + 100
        assert "[… 900,000 characters left out …]" in text


def test_no_text_or_answer_breaks_a_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    text = 'a\nb\r\x1b[31m\u2028\x85\ud83d "\\ 你好'
    answers = [{1, 2}, {"of": (1, math.inf)}, Path("a/b"), None, 3]
    for answer in answers:
        run.append_rollouts(1, [group(text, problem={"prompt": [{"role": "user", "content": text}], "answer": answer})])
    lines = [json.loads(line, parse_constant=pytest.fail) for line in run.rollouts.read_text().splitlines()]
    assert [line["problem"]["answer"] for line in lines] == ["{1, 2}", {"of": [1, None]}, "a/b", None, 3]
    assert {line["completions"][0]["text"] for line in lines} == {text}
    assert lines[0]["problem"]["prompt"] == [{"role": "user", "content": text}]


def test_rollouts_and_evaluations_are_cut_like_the_metrics(tmp_path: Path) -> None:
    run = with_steps(tmp_path, 1, 2, 3)
    run.append_evaluation(evaluation(0))
    for step in (1, 2, 3):
        run.append_rollouts(step, [group("4"), group("5")])
        run.append_evaluation(evaluation(step, math.nan))
    half = '{"step": 4, "prob'
    with run.rollouts.open("a") as file:
        file.write(half)
    RunDirectory.reopen(tmp_path, 2)
    assert (steps(run.rollouts), steps(run.evaluations)) == ([1, 1, 2, 2], [0, 1, 2])
    lost = json_lines.lost(run.rollouts).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lost[:-1]] == [3, 3]
    assert lost[-1] == half
    assert steps(json_lines.lost(run.evaluations)) == [3]
    run.append_rollouts(3, [group("6")])
    assert steps(run.rollouts) == [1, 1, 2, 2, 3]
    assert json.loads(run.evaluations.read_text().splitlines()[1])["reward_mean"] is None


def test_last_line_without_a_newline_counts_as_truncated(tmp_path: Path) -> None:
    run = with_steps(tmp_path, 1, 2)
    run.metrics.write_text(run.metrics.read_text().removesuffix("\n"))
    RunDirectory.reopen(tmp_path, 2)
    assert (steps(run.metrics), steps(run.lost_metrics)) == ([1], [2])


def test_kept_rollouts_are_not_loaded_into_memory(tmp_path: Path) -> None:
    run = with_steps(tmp_path, 1)
    for _ in range(40):
        run.append_rollouts(1, [group("x" * 500_000)])
    run.append_rollouts(2, [group("later")])
    inode = run.rollouts.stat().st_ino
    tracemalloc.start()
    try:
        RunDirectory.reopen(tmp_path, 1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(steps(run.rollouts)), run.rollouts.stat().st_ino) == (40, inode)
    assert peak_bytes < 6_000_000  # a few lines of the 20 MB


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def with_steps(path: Path, *numbers: int) -> RunDirectory:
    run = RunDirectory(path)
    for number in numbers:
        run.append(metrics(number))
    return run


def test_resumed_run_moves_later_steps_aside(tmp_path: Path) -> None:
    with_steps(tmp_path, 1, 2, 3, 4)
    run = RunDirectory.reopen(tmp_path, 2)
    assert (steps(run.metrics), steps(run.lost_metrics)) == ([1, 2], [3, 4])
    run.append(metrics(3))
    reopened = RunDirectory.reopen(tmp_path, 1)
    assert (steps(reopened.metrics), steps(reopened.lost_metrics)) == ([1], [3, 4, 2, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_mark.NAME, "metrics.jsonl", "metrics_lost.jsonl"]


def test_files_without_later_steps_are_left_unchanged(tmp_path: Path) -> None:
    before = with_steps(tmp_path, 1, 2).metrics.stat()
    run = RunDirectory.reopen(tmp_path, 2)
    after = run.metrics.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert not run.lost_metrics.exists()
    run.metrics.unlink()
    assert not RunDirectory.reopen(tmp_path, 2).metrics.exists()


def test_saved_step_without_a_metrics_line_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = with_steps(tmp_path, 1, 2)
    RunDirectory.reopen(tmp_path, 2)
    assert caplog.messages == []
    RunDirectory.reopen(tmp_path, 3)
    assert caplog.messages == [
        f"{run.metrics} has no line for step 3: the run was killed before writing it, or began in a different directory"
    ]
    assert caplog.messages[0] in run.events.read_text()
    assert steps(run.metrics) == [1, 2]


def log(run: RunDirectory, line: str) -> None:
    with run.recording():
        logging.getLogger("bridge.run").info(line)


def test_full_disk_error_names_the_file_and_the_free_space(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    writes: list[Callable[[], None]] = [
        lambda: run.append(metrics(1)),
        lambda: log(run, "the server died"),
        lambda: run.append_rollouts(1, [group("4")]),
        lambda: run.append_evaluation(evaluation(1)),
        lambda: run.write_config(TrainConfig.of(model_name="m" * 100).document()),
    ]
    paths = (run.metrics, run.events, run.rollouts, run.evaluations, run.config)
    for write, path in zip(writes, paths, strict=True):
        with largest_file(20), pytest.raises(UsageError) as refused:
            write()
        pattern = rf"cannot write {re.escape(str(path))}: File too large \(with \d+ bytes free\)"
        assert re.fullmatch(pattern, refused.value.message)
        assert "--resume" in refused.value.hint
    assert not run.config.exists()
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())
    RunDirectory.reopen(tmp_path, 0)
    run.append(metrics(1))
    assert steps(run.metrics) == [1]


def test_truncated_line_is_moved_aside_unchanged(tmp_path: Path) -> None:
    run = with_steps(tmp_path, 1, 2)
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "weig')
    RunDirectory.reopen(tmp_path, 2)
    assert steps(run.metrics) == [1, 2]
    assert run.lost_metrics.read_text() == '{"step": 3, "weig\n'


def test_kill_between_two_files_loses_or_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_steps(tmp_path, 1, 2, 3)

    def killed(path: Path, length: int) -> None:
        assert (path, steps(run.lost_metrics)) == (run.metrics, [2, 3])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "truncate", killed)
    with pytest.raises(KeyboardInterrupt):
        RunDirectory.reopen(tmp_path, 1)
    assert (steps(run.metrics), steps(run.lost_metrics)) == ([1, 2, 3], [2, 3])
    monkeypatch.undo()
    RunDirectory.reopen(tmp_path, 1)
    assert (steps(run.metrics), steps(run.lost_metrics)) == ([1], [2, 3])


def test_other_ranks_write_nothing_into_the_directory(tmp_path: Path) -> None:
    nothing: Any = None
    first = RunDirectory.create(tmp_path / "run", environment="arithmetic")
    first.append(metrics(1))
    before = sorted(path.name for path in first.path.iterdir())
    other = RunDirectory.join(first.path)
    log(other, "a request was retried")
    other.record("a request was retried")
    writes: list[Callable[[], object]] = [
        lambda: other.append(metrics(2)),
        lambda: other.append_rollouts(2, []),
        lambda: other.append_evaluation(nothing),
        lambda: other.write_config(TrainConfig.of(model_name="m").document()),
        lambda: other.write_summary(nothing),
        lambda: other.writable(other.checkpoints),
    ]
    for write in writes:
        with pytest.raises(AssertionError, match="only rank 0 of a run writes"):
            write()
    other.remove_if_unused()
    assert sorted(path.name for path in first.path.iterdir()) == before
    assert len(first.metrics.read_text().splitlines()) == 1


@pytest.mark.parametrize("exists", [True, False])
def test_rank_cannot_join_an_unclaimed_run_directory(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "run"
    if exists:
        path.mkdir()
    with pytest.raises(UsageError, match=f"no run is using the run directory {path}"):
        RunDirectory.join(path)
    assert path.exists() == exists
    RunDirectory.create(path, environment="arithmetic")
    RunDirectory.join(path)


def test_event_is_recorded_with_its_time_and_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create(tmp_path, environment="arithmetic")
    log(run, "the server died")
    logging.getLogger("bridge.run").info("after the run")
    events = [line.split(" ", 1) for line in run.events.read_text().splitlines()]
    assert [event for _, event in events] == ["the server died"]
    assert all(time.strptime(when, "%Y-%m-%dT%H:%M:%S%z") for when, _ in events)
    assert capfd.readouterr() == ("", "")


def test_summary_has_only_finite_numbers(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_summary(
        Summary(
            steps=3, weight_version=4, checkpoint=tmp_path / "step_3", reward_before=None, reward_after=0.5,
            rewards=(0.25, math.nan), logprob_diff_max=math.nan, fence_p50_ms=1.0, attach_ms=2.0, weight_bytes=0,
            updates=3,
        )
    )  # fmt: skip
    document = json.loads(run.summary.read_text(), parse_constant=pytest.fail)
    assert document["checkpoint"] == str(tmp_path / "step_3")
    assert (document["reward_before"], document["reward_after"], document["logprob_diff_max"]) == (None, 0.5, None)
    assert document["rewards"] == [0.25, None]
