"""Training on groups that were started under earlier versions, on the real vLLM on the CPU, in every mode.

Not covered: which groups a step takes (`tests/unit/rollouts/test_staleness.py`), the versions of tokens
(`test_torn_tokens.py`).
"""

import json
from pathlib import Path

import pytest

from tests import scenarios
from tests.scenarios import LORA_RANK, LiveServer

STEPS, MAX_STALENESS = 8, 2
FLAGS = ("--max-staleness", str(MAX_STALENESS), "--batch-size", "16", "--group-size", "4", "--lr", "1e-4")
LORA = ("--mode", "lora_only", "--lora-r", str(LORA_RANK), "--lora-handover")


def streamed(server: LiveServer, folder: Path, *flags: str) -> None:
    """Train, and check how old the tokens of each step were and that no problem was used twice."""
    scenarios.trained(server, folder, *FLAGS, *flags, steps=STEPS)
    steps = scenarios.metrics(folder / "run")
    assert [step["step"] for step in steps] == [*range(1, STEPS + 1)]
    assert max(step["staleness"] for step in steps) in (1, 2), steps
    assert all(abs(sum(step["lag_shares"]) - 1) < 1e-6 for step in steps), steps
    assert all(step["groups_in_flight"] == 4 * MAX_STALENESS for step in steps), steps
    lines = (folder / "run" / "rollouts.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["number"] for line in lines]
    assert len(set(numbers)) == len(numbers) == 4 * STEPS


def test_stale_groups_train_weights_in_place(llama: LiveServer, tmp_path: Path) -> None:
    before = llama.sample()
    streamed(llama, tmp_path)
    checkpoint = tmp_path / "saved" / f"step_{STEPS}"
    assert not scenarios.different(llama, checkpoint)
    assert not scenarios.same_samples(llama.sample(), before)
    scenarios.verifies(llama, tmp_path)


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_stale_groups_train_an_adapter(lora_llama: LiveServer, tmp_path: Path, handover: str) -> None:
    streamed(lora_llama, tmp_path, *LORA, handover)


def test_stale_groups_train_with_in_place_reloads(llama: LiveServer, tmp_path: Path) -> None:
    streamed(llama, tmp_path, "--mode", "none", "--reload", "in-place")
