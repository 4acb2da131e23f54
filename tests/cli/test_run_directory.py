import json
import math
from pathlib import Path

import pytest

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.run_directory import RunDirectory
from bridge.training.metrics import StepMetrics

FIELDS = [
    "step",
    "weight_version",
    "reward_mean",
    "reward_std",
    "loss",
    "grad_norm",
    "logprob_diff_mean",
    "logprob_diff_max",
    "changed_weight_share",
    "rollout_s",
    "train_s",
    "fence_pause_s",
    "fence_write_s",
    "fence_publish_s",
    "tokens_generated",
    "peak_memory_gib",
]


def metrics(step: int, **changed: float) -> StepMetrics:
    values = dict.fromkeys(FIELDS, 0.5) | {"step": step, "weight_version": step, "tokens_generated": 9} | changed
    return StepMetrics(**values)  # type: ignore[arg-type]


def test_every_step_is_one_object_with_the_documented_names(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", environment="arithmetic")
    for step in (1, 2):
        run.append(metrics(step))
        written = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert len(written) == step
    assert list(written[0]) == FIELDS
    assert [step["step"] for step in written] == [1, 2]


def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, environment="arithmetic")
    run.append(metrics(1, loss=math.nan, grad_norm=math.inf))
    (line,) = run.metrics.read_text().splitlines()
    assert "NaN" not in line
    assert (json.loads(line)["loss"], json.loads(line)["grad_norm"]) == (None, None)


def test_the_resolved_choices_are_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, environment="arithmetic")
    config = TrainConfig(model_name="m", save_path=tmp_path / "saved")
    run.write_config(config)
    assert TrainConfig.model_validate(json.loads(run.config.read_text())) == config
    assert list(tmp_path.iterdir()) == [run.config]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, environment="arithmetic").append(metrics(1))
    with pytest.raises(UsageError, match="another run"):
        RunDirectory.create(tmp_path, environment="arithmetic")


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        RunDirectory.create(tmp_path / "file", environment="arithmetic")


def test_the_default_is_named_by_time_and_task_and_never_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [RunDirectory.create(None, environment=name) for name in ("arithmetic", "a/b.py:Task", "arithmetic")]
    assert len({run.path for run in runs}) == 3
    assert {run.path.parent for run in runs} == {Path("runs")}
    assert "arithmetic" in runs[0].path.name
    assert runs[1].path.name.endswith("-Task")
