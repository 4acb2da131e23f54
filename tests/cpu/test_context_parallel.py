"""`bridge run --gpus 2 --context-parallel-size 2` on the CPU: two vLLMs whose trainers compute each pass together.

Not covered: what slices compute (`tests/unit/passes/test_slices.py`), and NCCL (`tests/gpu/test_several_gpus.py`).
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bridge.ranks.watch import SILENT_LIMIT_S
from tests import scenarios
from tests.cpu import test_gpus
from tests.models import tiny

pytestmark = pytest.mark.slow
SLICES = "--context-parallel-size", "2"
MOST_AWAY = 0.1
"""Largest difference, as a share of how far weights moved: docs/scaling.md states 3 to 5 % for several bf16 ranks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("model"), std=0.06)


def test_two_slices_match_one_process_and_resume_anywhere(model: Path, tmp_path: Path) -> None:
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    kept = "--save-interval", "1", "--training-steps"
    test_gpus.run(model, alone, *kept, "1", gpus=1)
    test_gpus.run(model, cut, *SLICES, *kept, "1")
    (one,), (other,) = test_gpus.metrics(alone), test_gpus.metrics(cut)
    assert one["rollouts"] == other["rollouts"]
    assert one["tokens_trained"] == other["tokens_trained"]
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-3)
    assert other["entropy"] == pytest.approx(one["entropy"], rel=1e-3)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)
    assert float(str(other["logprob_diff_mean"])) < scenarios.PARITY_LIMIT
    before = load_file(model / "model.safetensors")
    mine, theirs = (
        load_file(folder / "run" / "checkpoints" / "step_1" / "model.safetensors") for folder in (cut, alone)
    )
    moved = sum(float((theirs[name].float() - weight.float()).square().sum()) for name, weight in before.items())
    apart = sum(float((theirs[name].float() - mine[name].float()).square().sum()) for name in before)
    assert 0 <= apart**0.5 < MOST_AWAY * moved**0.5
    checkpoints = cut / "run" / "checkpoints"
    continued = "--resume", "--save-path", str(checkpoints), "--training-steps"
    test_gpus.run(model, cut, *continued, "2", gpus=1)
    test_gpus.run(model, cut, *continued, "3")
    test_gpus.run(model, cut, *continued, "4", *SLICES)
    assert [row["step"] for row in test_gpus.metrics(cut)] == [1, 2, 3, 4]
    state = json.loads((checkpoints / "step_4" / "optimizer" / "state.json").read_text())
    assert set(state["steps"].values()) == {4}


@pytest.mark.parametrize("lost", [0, 1])
def test_killed_rank_ends_the_run(model: Path, tmp_path: Path, lost: int) -> None:
    choices = *SLICES, "--training-steps", "500"
    process = test_gpus.started(test_gpus.command(model, tmp_path, *choices), tmp_path / "out")
    test_gpus.wait_for_steps(tmp_path, process, 2)
    tree = test_gpus.everything(process)
    (rank,) = test_gpus.ranks_of(tree, lost)
    os.kill(rank.pid, signal.SIGKILL)
    assert process.wait(SILENT_LIMIT_S) == 1  # noticed by its exit, not by a timeout
    assert not test_gpus.left(tree)
    output = (tmp_path / "out").read_text()
    assert f"rank {lost} of 2 was killed by SIGKILL" in output
    assert "Traceback" not in output
    if lost:
        (saved,) = re.findall(r"without the optimizer's state, are in (\S+)", output)
        assert load_file(Path(saved, "model.safetensors"))
