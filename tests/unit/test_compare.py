"""The comparison of all modes: its table and its verdict, from made-up runs.

Not covered: the runs themselves (`make compare`, which fails if the modes disagree).
"""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.compare import Agreement


def steps(*rewards: float, rollouts: str = "") -> list[dict[str, Any]]:
    names = rollouts or "abcdefgh"[: len(rewards)]
    return [
        {
            "reward_mean": reward,
            "rollouts": name,
            "fence_pause_s": 0.002 * number,
            "fence_publish_s": 0.001,
            "peak_memory_gib": 0.5 * number,
        }
        for number, (reward, name) in enumerate(zip(rewards, names, strict=True), start=1)
    ]


def test_comparison_fails_if_modes_disagree_or_do_not_learn() -> None:
    row = compare.row("none", steps(0.1, 0.2, 0.3), {"weight_bytes": 7, "reward_before": 0.25, "reward_after": 0.75})
    assert row.sync_ms == pytest.approx(5.0), "of the median step"
    assert (row.steps, row.weight_bytes, row.trainer_peak_gib) == (3, 7, 1.5)
    shorter = compare.agree(("one", "two"), steps(0.5, 0.6, 0.7, 0.8), steps(0.5, 0.6, 0.5, rollouts="abx"))
    assert shorter == Agreement(
        runs=("one", "two"), steps=3, same_rollouts=2, same_rewards=2, reward_diff_max=abs(0.7 - 0.5)
    )
    rows = [row, replace(row, mode="lora_only, disk", steps=10)]
    agreement = replace(shorter, same_rollouts=3, same_rewards=3, reward_diff_max=0.0)
    assert list(compare.judge(rows, [agreement], 10)) == []
    assert [line.split()[0] for line in compare.table(rows).splitlines()[1:]] == ["none", "lora_only,"]
    rows[1] = replace(rows[1], reward_before=0.4, reward_after=0.45)
    first, second = compare.judge(rows, [shorter], 10)
    assert "one | two: the same rollouts in 2 of 3 steps" in first
    assert second == "lora_only, disk gained 0.050, expected at least 0.1"


def test_failed_run_ends_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        compare.run(tmp_path / "run", tmp_path / "no-model", ["--mode", "shared_vllm"])
    assert failed.value.returncode == 2
