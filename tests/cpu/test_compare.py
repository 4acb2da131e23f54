"""The demo's task in every mode, through `benchmarks.compare` and the real vLLM.

Not covered: each mode by itself (`test_one_copy.py`, `test_lora_only.py`, `test_none.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios import IN_THE_ENGINE

STEPS, RESTARTS = 40, 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_modes_go_the_same_way_and_every_one_learns(tmp_path: Path) -> None:
    flags = ["--steps", str(STEPS), "--restarts", str(RESTARTS), "--out", str(tmp_path)]
    environment = {**os.environ, **IN_THE_ENGINE}
    subprocess.run([sys.executable, "-m", "benchmarks.compare", *flags], env=environment, check=True, timeout=1700)
    (result,) = tmp_path.glob("*.json")
    document = json.loads(result.read_text())["results"]
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
