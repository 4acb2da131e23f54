"""`bridge run` on rows of a file: a warm-up that is stopped and resumed in either phase, and rows that are refused.

A server in its own process stands in for vLLM: everything else of `bridge run` is real.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bridge.core.address import free_port
from bridge_cli import demo_model
from tests import forked
from tests.cli.test_documents import COMMAND
from tests.models import tiny

TASK = """
class Task:
    def __iter__(self):
        return ({"prompt": f"say {number}"} for number in range(8))

    def held_out(self):
        return [{"prompt": "say more"}]

    def score(self, problem, completion):
        return float(sum(map(ord, completion)) % 7)
"""
TIMES = {
    "rollout_s",
    "train_s",
    "mfu",
    "peak_memory_gib",
    "weight_version",
    "staleness",
    "staleness_mean",
    "lag_shares",
}
"""Metrics that differ between two runs, or after a restart of the server."""
STEPS, WARM_UP = 5, 3
LIMIT_S = 300.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny.write(tiny.llama(), tmp_path / "MODEL")
    (model / "chat_template.jinja").write_text(demo_model.TEMPLATE)
    (tmp_path / "task.py").write_text(TASK)
    rows = [
        {"messages": [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": f"{number}" * 3}]}
        for number in range(7)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def trained(folder: Path, run: str, *more: str) -> str:
    """Train with a warm-up in the run directory `run`, and return what was logged."""
    words = [
        "run", "--model", "MODEL", "--environment", "task.py:Task", "--run-dir", run, "--save-interval", "1",
        "--warm-up-data", "rows.jsonl", "--warm-up-steps", f"{WARM_UP}", "--training-steps", f"{STEPS}",
        "--batch-size", "4", "--group-size", "2", "--lr", "1e-3", "--max-new-tokens", "8",
        "--eval-samples", "1", "--eval-interval", "2", "--port", f"{free_port('127.0.0.1')}", *more,
    ]  # fmt: skip
    done = forked.ended(words, folder, program=COMMAND, environment={"LOGDIR": str(folder)}, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stderr


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    left_out = {name for row in rows for name in row if name in TIMES or name.startswith("fence")}
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]


def digests(folder: Path, run: str) -> dict[str, str]:
    """Return the hashes of the last checkpoint's weights and optimizer state."""
    saved = folder / run / "checkpoints" / f"step_{STEPS}"
    files = [saved / "model.safetensors", *sorted((saved / "optimizer").iterdir())]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("commands")
def test_warm_up_resumes_to_the_digit_in_either_phase(folder: Path) -> None:
    logged = trained(folder, "straight")
    assert f"step {WARM_UP}/{STEPS}  sft loss " in logged
    assert f"step {WARM_UP + 1}/{STEPS}  reward " in logged
    expected = metrics(folder, "straight")
    assert [row["objective"] for row in expected] == ["sft"] * WARM_UP + ["dapo"] * (STEPS - WARM_UP)
    assert all(row["updates"] == 1 for row in expected)
    for run, stop_at, step in (("in warm-up", "loss<=1e9", 1), ("after it", "reward_mean>=-1e9", WARM_UP + 1)):
        assert f"reached after step {step}" in trained(folder, run, "--stop-at", stop_at)
        assert f"resuming after step {step}" in trained(folder, run, "--resume")
        assert metrics(folder, run) == expected
        assert digests(folder, run) == digests(folder, "straight")


@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "line 8 has no message of the assistant to train on"),
        ({"messages": [{"role": "critic", "content": "no"}]}, "line 8 has no message of the assistant to train on"),
        ({"text": "hi"}, "line 8 has the columns text, expected messages, or prompt and completion"),
    ],
)
def test_bad_row_is_refused_before_the_server_starts(folder: Path, row: dict[str, Any], fault: str) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write(f"{json.dumps(row)}\n")
    words = ["run", "--model", "MODEL", "--loss", "sft", "--data", "rows.jsonl", "--run-dir", "run"]
    done = forked.ended(words, folder, program=COMMAND, environment={"LOGDIR": str(folder)}, limit_s=LIMIT_S)
    assert done.returncode == 2
    assert f"error: rows.jsonl: 1 of 8 rows are bad: {fault}" in done.stderr
    assert "hint: fix these rows" in done.stderr
    assert not (folder / "run").exists()
