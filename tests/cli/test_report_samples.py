"""Completions over time: which are shown, and where they are truncated."""

import json
from pathlib import Path
from typing import Any

import pytest

from bridge_cli.report import samples
from tests.cli import report_runs
from tests.cli.test_report import written


def read(path: Path, *groups: dict[str, Any]) -> samples.Samples:
    return samples.read(write(path, *groups), [])


def group(step: int, prompt: str, *rewards: float, text: str = "so") -> dict[str, Any]:
    completions = [{"text": f"{text} {reward}", "reward": reward} for reward in rewards]
    return {"step": step, "problem": {"prompt": prompt, "answer": "1"}, "completions": completions, "unscored": []}


def write(path: Path, *groups: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in groups))
    return path


def test_problems_that_come_up_again_are_followed(tmp_path: Path) -> None:
    lines = [group(step, f"problem {step % 2}", 0.0, 0.5, 1.0) for step in range(1, 21)]
    found = read(tmp_path / "rollouts.jsonl", *lines, group(20, "once", 0.0))
    assert [series.problem["prompt"] for series in found.series] == ["problem 1", "problem 0"]
    assert [step.number for step in found.series[0].steps] == list(range(1, 20, 2))


def test_without_such_problems_steps_are_shown_from_the_first_to_the_last(tmp_path: Path) -> None:
    lines = [group(step, f"{step}-{number}", 0.0, 1.0) for step in range(1, 101) for number in range(2)]
    found = read(tmp_path / "rollouts.jsonl", *lines)
    (series,) = found.series
    numbers = [step.number for step in series.steps]
    assert (numbers[0], numbers[-1], len(numbers)) == (1, 100, samples.NUM_STEPS)
    assert not series.problem
    assert series.steps[0].rewards == [0.0, 0.0, 1.0, 1.0]
    assert (found.num_groups, found.num_steps) == (200, 100)


def test_the_best_the_median_and_the_worst_are_shown(tmp_path: Path) -> None:
    (series,) = read(tmp_path / "r.jsonl", group(1, "p", 0.5, -1.0, 2.0, 0.1, 0.7)).series
    shown = [(each["label"], each["reward"]) for each in series.steps[0].completions]
    assert shown == [("best", 2.0), ("median", 0.5), ("worst", -1.0)]


def test_of_equal_rewards_one_completion_is_shown(tmp_path: Path) -> None:
    (series,) = read(tmp_path / "r.jsonl", group(1, "p", 1.0, 1.0, 1.0)).series
    assert [each["label"] for each in series.steps[0].completions] == ["all rewards equal"]


def test_a_completion_without_a_reward_is_shown_with_its_fault(tmp_path: Path) -> None:
    line = group(1, "p") | {"unscored": [{"text": "x", "fault": "ZeroDivisionError: division by zero"}]}
    (series,) = read(tmp_path / "r.jsonl", line).series
    assert series.steps[0].num_unscored == 1
    assert [each["fault"] for each in series.steps[0].completions] == ["ZeroDivisionError: division by zero"]


def test_repeated_steps_of_a_resumed_run_replace_the_lost_ones(tmp_path: Path) -> None:
    first = [group(step, f"a{step}", 0.0, text="lost") for step in range(1, 6)]
    again = [group(step, f"b{step}", 1.0, text="kept") for step in range(3, 8)]
    (series,) = read(tmp_path / "r.jsonl", *first, *again).series
    assert [step.completions[0]["text"] for step in series.steps] == ["lost 0.0"] * 2 + ["kept 1.0"] * 5


def test_long_texts_are_cut_in_their_middle(tmp_path: Path) -> None:
    line = group(1, "begin" + "p" * 90_000 + "end", 0.0, text="begin" + "x" * 90_000)
    (series,) = samples.read(write(tmp_path / "r.jsonl", line), [], longest=3_000).series
    (shown,) = series.steps[0].completions
    for text, start, end in ((shown["text"], "beginx", " 0.0"), (shown["problem"]["prompt"], "beginp", "pend")):
        assert len(text) < 3_100
        assert text.startswith(start)
        assert text.endswith(end)
        assert "characters left out" in text


def test_damaged_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", group(1, "p", 1.0), group(2, "q", 1.0))
    path.write_bytes(b"\n".join([b"{", b"[1]", b'"x"', b"\xff\xfe"]) + b"\n" + path.read_bytes() + b'{"step": 5, "comp')
    notes: list[str] = []
    (series,) = samples.read(path, notes).series
    assert notes == ["r.jsonl: skipped 5 incomplete or damaged lines"]
    assert [step.number for step in series.steps] == [1, 2]


PROMPTS = (
    ("plain text", "plain text"),
    ([{"role": "user", "content": "hello"}], "userhello"),
    ([{"role": "user", "content": [{"type": "image"}]}], '[{"type": "image"}]'),
    ([None, 7, "text", {"content": None}], "null7textnull"),
    (None, "null"),
    (10**400, str(10**400)),
    ({"a": 1}, '{"a": 1}'),
)


@pytest.mark.parametrize(("prompt", "shown"), PROMPTS)
def test_a_prompt_may_be_text_messages_or_any_other_json(prompt: object, shown: str, tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    line = group(1, "", 1.0) | {"problem": {"prompt": prompt, "answer": 317}}
    report_runs.write_rollouts(run, iter([line]))
    page = written(run.path, out=run.report)
    assert shown in page.text
    assert "answer 317" in page.text


ODD = (
    {"step": 10**400},
    {"problem": None},
    {"completions": None},
    {"completions": [7]},
    {"completions": [{"text": "x", "reward": 10**400}]},
    {"unscored": "none"},
)


def test_rows_that_do_not_fit_are_skipped_in_one_line(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    report_runs.write_rollouts(run, iter([*(group(1, "p", 0.0) | odd for odd in ODD), group(1, "the good one", 0.0)]))
    page = written(run.path, out=run.report)
    assert f"rollouts.jsonl: skipped {len(ODD)} incomplete or damaged lines" in page.text
    assert "the good one" in page.text
    assert "1 groups from 1 steps" in page.text


def test_other_odd_values_of_a_completion_are_shown_as_text(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    odd: dict[str, Any] = {"text": None, "reward": None, "parts": None, "tokens": 10**400, "weight_version": {}}
    whole: dict[str, Any] = {"text": 5, "reward": 1, "parts": {"a": 10**30, "b": None, "c": "well"}, "tokens": None}
    report_runs.write_rollouts(run, iter([group(1, "p") | {"completions": [odd, whole], "unscored": [odd]}]))
    page = written(run.path, out=run.report)
    for expected in (f"a {10**30}", "b –", "c well", "(an empty completion)", f"{10**400} tokens"):
        assert expected in page.text


def test_no_file_has_no_completions(tmp_path: Path) -> None:
    assert samples.read(tmp_path / "none.jsonl", []) == samples.Samples()


def test_the_made_up_runs_have_what_training_writes(tmp_path: Path) -> None:
    line = next(report_runs.groups(1))
    assert {"step", "problem", "completions", "unscored"} == line.keys()
    assert {"text", "reward", "parts", "tokens", "finish_reason", "weight_version"} == line["completions"][0].keys()


TURNS = [
    {"role": "assistant", "text": "I look it up.", "tool_calls": [{"name": "look_up"}], "reward": 0.25},
    {"role": "tool", "name": "look_up", "text": "nothing there", "is_error": True},
    {"sequence": 2, "role": "repeated", "text": "", "messages": 3},
    {"role": "assistant", "text": "half \ud83d a pair"},
]


def test_turns_are_shown_with_their_calls_results_and_rewards(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    line = group(1, "p", 1.0)
    line["problem"] |= {"hidden": 42}
    line["completions"][0] |= {"turns": TURNS, "text": "not shown", "staleness": 3, "weight_version": 7}
    report_runs.write_rollouts(run, iter([line]))
    page = " ".join(written(run.path, out=run.report).text.split())
    for shown in ("hidden 42", "assistant reward 0.25 calls look_up", "I look it up.", "look_up error nothing there",
                  "sequence 3 its first 3 messages", "weights v7, staleness 3", "half ⟨U+D83D⟩ a pair"):  # fmt: skip
        assert shown in page, shown
    assert "not shown" not in page


@pytest.mark.parametrize("turns", [7, "turns", [], [7, "x", None], [{}], [{"text": 7, "tool_calls": [7]}], {"a": 1}])
def test_turns_of_any_other_form_break_no_page(tmp_path: Path, turns: object) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    line = group(1, "the problem", 1.0)
    line["completions"][0]["turns"] = turns
    report_runs.write_rollouts(run, iter([line]))
    assert "the problem" in written(run.path, out=run.report).text


def test_many_turns_share_the_room_of_one_text(tmp_path: Path) -> None:
    line = group(1, "p", 0.0)
    line["completions"][0]["turns"] = [{"role": "assistant", "text": "x" * 90_000}] * 100
    (series,) = samples.read(write(tmp_path / "r.jsonl", line), []).series
    (shown,) = series.steps[0].completions
    mark = "\n[… 89,700 characters left out …]\n"
    assert {len(turn["text"]) for turn in shown["turns"]} == {samples.SHORTEST_TURN + len(mark)}
