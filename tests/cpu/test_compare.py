"""The demo's task by every mode, through `bridge compare` and the real vLLM.

Not covered: what one mode does alone (`test_one_copy.py`, `test_lora_only.py`, `test_none.py`).
"""

import json
from pathlib import Path

import pytest

from tests.scenarios import bridge

STEPS, RESTARTS = 40, 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_modes_go_the_same_way_and_every_one_learns(tmp_path: Path) -> None:
    done = bridge(
        *("compare", "--steps", str(STEPS), "--restarts", str(RESTARTS), "--out", tmp_path / "out", "--json"),
        folder=tmp_path,
        limit_s=1700,
    )
    document = json.loads(done.stdout)
    rows = {row["mode"]: row for row in document["rows"]}
    assert document["faults"] == []
    shared_and_none, memory_and_disk = document["agreements"]
    assert (shared_and_none["steps"], shared_and_none["same_rollouts"]) == (RESTARTS, RESTARTS)
    assert (memory_and_disk["steps"], memory_and_disk["same_rollouts"]) == (STEPS, STEPS)
    assert {mode: row["steps"] for mode, row in rows.items()} == {
        "shared_vllm": STEPS,
        "none": RESTARTS,
        "lora_only, memory": STEPS,
        "lora_only, disk": STEPS,
    }
    assert rows["shared_vllm"]["weight_bytes"] == rows["lora_only, memory"]["weight_bytes"] == 0
    assert 0 < rows["lora_only, disk"]["weight_bytes"] < rows["none"]["weight_bytes"]
    assert rows["shared_vllm"]["sync_ms"] < rows["none"]["sync_ms"]
