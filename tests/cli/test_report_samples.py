"""Completions over time: which are picked, within which bounds."""

import json
from pathlib import Path
from typing import Any

from cli.report import cards, samples
from tests.cli import report_runs


def group(step: int, prompt: str, *rewards: float, text: str = "so") -> dict[str, Any]:
    completions = [{"text": f"{text} {reward}", "reward": reward} for reward in rewards]
    return {"step": step, "problem": {"prompt": prompt, "answer": "1"}, "completions": completions, "unscored": []}


def write(path: Path, *groups: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in groups))
    return path


def test_problems_that_come_up_again_are_followed(tmp_path: Path) -> None:
    lines = [group(step, f"problem {step % 2}", 0.0, 0.5, 1.0) for step in range(1, 21)]
    found = samples.read(write(tmp_path / "rollouts.jsonl", *lines, group(20, "once", 0.0)))
    assert [strip.prompt for strip in found.strips] == [[("", "problem 1")], [("", "problem 0")]]
    assert [frame.step for frame in found.strips[0].frames] == list(range(1, 20, 2))


def test_without_such_problems_steps_are_shown_from_the_first_to_the_last(tmp_path: Path) -> None:
    lines = [group(step, f"{step}-{number}", 0.0, 1.0) for step in range(1, 101) for number in range(2)]
    found = samples.read(write(tmp_path / "rollouts.jsonl", *lines))
    (strip,) = found.strips
    steps = [frame.step for frame in strip.frames]
    assert (steps[0], steps[-1], len(steps)) == (1, 100, samples.MOST_FRAMES)
    assert strip.prompt == []
    assert strip.frames[0].rewards == [0.0, 0.0, 1.0, 1.0]
    assert (found.num_groups, found.num_steps) == (200, 100)


def test_the_best_the_median_and_the_worst_are_shown(tmp_path: Path) -> None:
    (strip,) = samples.read(write(tmp_path / "r.jsonl", group(1, "p", 0.5, -1.0, 2.0, 0.1, 0.7))).strips
    shown = [(card.label, card.reward) for card in strip.frames[0].cards]
    assert shown == [("best", 2.0), ("median", 0.5), ("worst", -1.0)]


def test_completions_of_one_reward_are_shown_once(tmp_path: Path) -> None:
    (strip,) = samples.read(write(tmp_path / "r.jsonl", group(1, "p", 1.0, 1.0, 1.0))).strips
    assert [card.label for card in strip.frames[0].cards] == ["all alike"]


def test_a_completion_without_a_reward_is_shown_with_its_fault(tmp_path: Path) -> None:
    line = group(1, "p") | {"unscored": [{"text": "x", "fault": "ZeroDivisionError: division by zero"}]}
    (strip,) = samples.read(write(tmp_path / "r.jsonl", line)).strips
    assert strip.frames[0].unscored == 1
    assert [card.fault for card in strip.frames[0].cards] == ["ZeroDivisionError: division by zero"]


def test_of_a_run_that_went_on_from_before_the_later_completions_count(tmp_path: Path) -> None:
    first = [group(step, f"a{step}", 0.0, text="lost") for step in range(1, 6)]
    again = [group(step, f"b{step}", 1.0, text="kept") for step in range(3, 8)]
    found = samples.read(write(tmp_path / "r.jsonl", *first, *again))
    texts = [frame.cards[0].text for frame in found.strips[0].frames]
    assert texts == ["lost 0.0"] * 2 + ["kept 1.0"] * 5


def test_long_texts_are_cut_in_their_middle_so_that_all_fit(tmp_path: Path) -> None:
    lines = [group(step, f"p{step}", 0.0, 0.5, 1.0, text="begin" + "x" * 90_000) for step in range(12)]
    found = samples.read(write(tmp_path / "r.jsonl", *lines))
    texts = [card.text for frame in found.strips[0].frames for card in frame.cards]
    assert sum(map(len, texts)) < 1.1 * samples.TEXT_BUDGET
    assert all(text.startswith("beginx") and text.endswith((" 0.0", " 0.5", " 1.0")) for text in texts)
    assert "characters left out" in texts[0]
    assert found.notes[0].startswith("36 texts are longer than ")


def test_short_texts_leave_their_room_to_long_ones(tmp_path: Path) -> None:
    lines = [group(step, f"p{step}", 0.0, text="x" * (9_000 if step == 3 else 5)) for step in range(12)]
    found = samples.read(write(tmp_path / "r.jsonl", *lines))
    assert len(found.strips[0].frames[3].cards[0].text) == 9_004
    assert found.notes == []


def test_broken_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", group(1, "p", 1.0), group(2, "q", 1.0))
    odd = [
        b"{",
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b'{"step": "one"}',
        b'{"step": 3}',
        b'{"step": 4, "completions": [7, {}]}',
    ]
    path.write_bytes(b"\n".join(odd) + b"\n" + path.read_bytes() + b'{"step": 5, "comp')
    found = samples.read(path)
    assert found.notes == ["5 lines of r.jsonl are no JSON objects, and are left out"]
    assert [frame.step for frame in found.strips[0].frames] == [1, 2]


def test_a_prompt_may_be_text_messages_or_anything(tmp_path: Path) -> None:
    assert cards.messages("text") == [("", "text")]
    assert cards.messages([{"role": "user", "content": "hi"}]) == [("user", "hi")]
    assert cards.messages([{"role": "user", "content": [{"type": "text"}]}]) == [("user", '[{"type": "text"}]')]
    assert cards.messages({"odd": 1}) == [("", '{"odd": 1}')]
    assert cards.messages(None) == []


def test_no_file_has_no_completions(tmp_path: Path) -> None:
    assert samples.read(tmp_path / "none.jsonl").strips == ()


def test_the_made_up_runs_have_what_training_writes(tmp_path: Path) -> None:
    line = next(report_runs.groups(1))
    assert {"step", "problem", "completions", "unscored"} == line.keys()
    assert {"text", "reward", "parts", "tokens", "finish_reason", "weight_version"} == line["completions"][0].keys()
