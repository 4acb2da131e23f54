"""The comparison of all modes: its table and its verdict, from made-up runs.

Not covered: the runs themselves (`make compare`, which fails if the modes disagree).
"""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.compare import Agreement, Row


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


def made(mode: str, *, count: int = 10, before: float = 0.4, after: float = 0.8) -> Row:
    return Row(
        mode=mode, steps=count, sync_ms=1.0, weight_bytes=0, trainer_peak_gib=0.5, reward_before=before,
        reward_after=after,
    )  # fmt: skip


def test_row_has_median_sync_and_last_peak() -> None:
    summary = {"weight_bytes": 7, "reward_before": 0.25, "reward_after": 0.75}
    row = compare.row("none", steps(0.1, 0.2, 0.3), summary)
    assert row.sync_ms == pytest.approx(5.0)
    assert (row.steps, row.weight_bytes, row.trainer_peak_gib) == (3, 7, 1.5)
    assert (row.reward_before, row.reward_after) == (0.25, 0.75)


def test_runs_are_compared_over_the_shorter_one() -> None:
    agreement = compare.agree(("one", "two"), steps(0.5, 0.6, 0.7, 0.8), steps(0.5, 0.6, 0.5, rollouts="abx"))
    assert agreement == Agreement(
        runs=("one", "two"), steps=3, same_rollouts=2, same_rewards=2, reward_diff_max=abs(0.7 - 0.5)
    )


def test_comparison_fails_if_modes_disagree_or_do_not_learn() -> None:
    rows = [made("shared_vllm"), made("none", count=3, after=0.4), made("lora_only, disk")]
    agreement = Agreement(runs=("one", "two"), steps=3, same_rollouts=3, same_rewards=3, reward_diff_max=0.0)
    assert list(compare.judge(rows, [agreement], 10)) == []
    assert [line.split()[0] for line in compare.table(rows).splitlines()[1:]] == ["shared_vllm", "none", "lora_only,"]
    rows[2] = made("lora_only, disk", after=0.45)
    first, second = compare.judge(rows, [replace(agreement, same_rollouts=2)], 10)
    assert "one | two: the same rollouts in 2 of 3 steps" in first
    assert second == "lora_only, disk gained 0.050, expected at least 0.1"


def test_failed_run_ends_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        compare.run(tmp_path / "run", tmp_path / "no-model", ["--mode", "shared_vllm"])
    assert failed.value.returncode == 2
