"""`benchmarks.learning`: minutes without evaluations, medians over seeds, and the same task on both sides."""

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import _curves, _results, _trl, _trl_times, learning
from benchmarks._stamped import Run
from bridge.config import TaskConfig
from bridge_environments import registry

OPTIONS = argparse.Namespace(steps=2, completions=16, group=8, seed=0)


def evaluated(step: int, accuracy: float, seconds: float = 6.0) -> dict[str, Any]:
    return {"evaluation": {"step": step, "reward_mean": accuracy, "seconds": seconds}}


def row(side: str, seed: int, accuracies: list[float], minutes: float) -> dict[str, Any]:
    points = [
        {"step": 10 * n, "accuracy": accuracy, "minutes": n * minutes, "minutes_of_command": n * minutes + 1}
        for n, accuracy in enumerate(accuracies)
    ]
    return {"side": side, "seed": seed, "seconds": 9.0, "points": points, "steps": []}


ROWS = [row("bridge", 0, [0.1, 0.2, 0.4], 1), row("bridge", 1, [0.1, 0.3, 0.5], 1), row("trl", 0, [0.1, 0.2, 0.3], 2)]


def test_minutes_exclude_evaluations() -> None:
    lines = [evaluated(0, 0.1), {"reward_mean": 0.2}, {"reward_mean": 0.3}, evaluated(2, 0.5)]
    run = Run(begun=100.0, stamps=[136.0, 148.0, 154.0, 160.0], lines=lines)
    before, after = learning.curve(run)
    assert (before["step"], before["minutes"], before["minutes_of_command"]) == (0, 0.0, 0.5)
    assert (after["accuracy"], after["minutes"], after["minutes_of_command"]) == (0.5, 0.3, 0.8)


def test_minutes_are_compared_at_shared_gains() -> None:
    results = learning.summary(ROWS)
    assert results["gains"] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    ours, trl = (results["minutes_to_gain"][side]["minutes"] for side in learning.SIDES)
    assert ours[1] == pytest.approx({"median": 0.75, "least": 0.5, "most": 1.0})
    assert trl[1]["median"] == pytest.approx(2.0)
    table = learning.table({"rows": ROWS, **results})
    assert [line[0] for line in table] == ["", "bridge", "trl", "TRL / Bridge", "with the start"]
    assert table[3][5] == "2.67x"
    made = _curves.picture({side: learning.points_of(ROWS, side) for side in learning.SIDES})
    assert len(ET.fromstring(made).findall(".//{http://www.w3.org/2000/svg}polyline")) == 6


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    _results.write("learning", {"settings": {"lr": 1.0}, "rows": ROWS}, tmp_path)
    assert learning.earlier({"lr": 1.0}, tmp_path) == ROWS
    with pytest.raises(SystemExit, match="choose another --out"):
        learning.earlier({"lr": 2.0}, tmp_path)


def test_trl_gets_the_same_problems_and_scores() -> None:
    task = registry.load(TaskConfig(environment=learning.TASK))
    columns = _trl.columns(task, OPTIONS)
    assert len(columns["prompt"]) == 4
    answers = [json.loads(problem)["answer"] for problem in columns["problem"]]
    chat = [[{"role": "assistant", "content": f"That is {answer}"}] for answer in answers]
    clock = _trl_times.Clock(task)
    assert clock.reward([*chat[:3], [{"content": "none"}]], [[1]] * 4, problem=columns["problem"]) == [1, 1, 1, 0]
