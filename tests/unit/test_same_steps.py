"""What `benchmarks.same_steps` records of a run, and which differences it reports."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import same_steps


def recording(path: Path, **metrics: Any) -> Path:
    document = {"tree": path.name, "machine": {"torch": "2.13"}, "scenarios": {"grpo": {"metrics of step 1": metrics}}}
    path.write_text(json.dumps(document))
    return path


def test_equal_recordings_have_no_differences(tmp_path: Path) -> None:
    old = recording(tmp_path / "old", loss=0.1, kl=None, histogram=[0.5, 0.5])
    new = recording(tmp_path / "new", loss=0.1, kl=None, histogram=[0.5, 0.5])
    assert same_steps.compare(old, new, {}, []) == 0


@pytest.mark.parametrize("other", [math.nextafter(0.1, 1), -0.1, None, "0.1", [0.1]])
def test_any_different_value_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], other: Any) -> None:
    old, new = recording(tmp_path / "old", loss=0.1, kl=1.0), recording(tmp_path / "new", loss=other, kl=1.0)
    assert same_steps.compare(old, new, {}, []) == 1
    assert f"grpo | metrics of step 1 | loss: 0.1 -> {json.dumps(other)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        ({"loss": 0.0}, {"loss": -0.0}, [(("loss",), "0.0 -> -0.0")]),
        ({"loss": 1}, {"loss": 1.0}, [(("loss",), "1 -> 1.0")]),
        ({"loss": 1}, {"loss": True}, [(("loss",), "1 -> true")]),
        ({"a": {"kl": 0.5}}, {"a": {}}, [(("a", "kl"), "only in the old recording: 0.5")]),
        ({"a": {}}, {"a": {"kl": 0.5}}, [(("a", "kl"), "only in the new recording: 0.5")]),
        ({"a": {"kl": 0.5}}, {}, [(("a",), "only in the old recording")]),
        ({}, {"a": {"kl": 0.5}}, [(("a",), "only in the new recording")]),
        ({"grad_norm": 1.0}, {"gradient_norm": 1.0}, []),
        ({"grad_norm": 1.0}, {"gradient_norm": 2.0}, [(("gradient_norm",), "1.0 -> 2.0")]),
    ],
)
def test_differences_are_named_by_place(old: dict[str, Any], new: dict[str, Any], reported: list[Any]) -> None:
    assert same_steps.differences(old, new, {"grad_norm": "gradient_norm"}) == reported


def test_expected_difference_is_listed_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = recording(tmp_path / "old", loss=1.0), recording(tmp_path / "new", loss=2.0)
    assert same_steps.compare(old, new, {}, ["loss"]) == 0
    assert "expected: grpo | metrics of step 1 | loss: 1.0 -> 2.0" in capsys.readouterr().out


def test_times_and_memory_are_recorded_only_as_zero_or_nonzero() -> None:
    step = {"train_s": 0.25, "fence": {"publish_s": 0.0}, "peak_memory_gib": 3.0, "loss": 0.25, "s": 1}
    assert same_steps.figures(step) == {
        "train_s": "not zero", "fence.publish_s": "zero", "peak_memory_gib": "not zero", "loss": 0.25, "s": 1,
    }  # fmt: skip


def test_runs_on_several_gpus_have_several_ranks() -> None:
    several = {name for name, scenario in same_steps.RUN.items() if scenario.has_several_ranks}
    assert several == {"two replicas", "two parts", "two parts, an adapter"}
    assert not any(scenario.has_several_ranks for scenario in same_steps.TRAIN.values())


def test_tensors_are_compared_by_name_not_by_file(tmp_path: Path) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    (saved / "step_1" / "optimizer").mkdir(parents=True)
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    problem = {"images": [f"{tmp_path}/blue.png"]}
    groups = [
        {"step": 1, "problem": problem, "completions": [{"text": text, "reward": 1.0} for text in pair]}
        for pair in ("ab", "cd")
    ]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    (run / "summary.json").write_text(json.dumps({"checkpoint": f"{saved}/step_1"}))
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, saved / "step_1" / "model.safetensors", {"format": "pt"})
    save_file({"a.moment": torch.ones(2)}, saved / "step_1" / "optimizer" / "optimizer-1.safetensors")
    recording = same_steps.read(run, saved, hidden=str(tmp_path))
    assert recording["metrics of step 2"] == {"loss": 0.25}
    assert recording["rollouts of step 1"]["completions.text"] == [["a", "b"], ["c", "d"]]
    assert recording["rollouts of step 1"]["problem.images"] == [["/blue.png"], ["/blue.png"]]
    assert recording["summary"] == {"checkpoint": "/saved/step_1"}
    assert list(recording["step_1"]) == ["a", "b", "optimizer/a.moment"]

    save_file({"b": torch.ones(3)}, saved / "step_1" / "model.safetensors")
    save_file({"a": torch.tensor([0.0, 1e-7])}, saved / "step_1" / "model-2.safetensors")
    repeated = same_steps.read(run, saved, hidden=str(tmp_path))
    assert [path for path, _ in same_steps.differences(recording, repeated, {})] == [("step_1", "a")]
