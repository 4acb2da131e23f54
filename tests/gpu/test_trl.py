"""TRL's `GRPOTrainer` with a 1.5B model on one copy of the weights learns the same as a stock script with two copies.

Not covered: memory and speed (`benchmarks/grpo.py`); resuming, and how many lines change (`tests/cpu/test_trl.py`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bridge
from benchmarks._models import model_config
from tests import scenarios
from tests.cpu.test_trl import AT_THE_END, EXAMPLE, rewards, stock
from tests.models import tiny

STEPS = 40
LEAST_GAIN, NOISE = 0.2, 0.1
TASK = {
    "float(text.strip() == wanted)": "sum(map(str.islower, text)) / 16 + 0.0 * len(wanted)",
    "learning_rate=2e-4": "learning_rate=2e-5",
    "max_completion_length=4": "max_completion_length=16",
}
"""Text of the example -> a task that a model with random weights can learn: writing lowercase letters."""


@pytest.mark.timeout(1200)
def test_bridge_learns_what_a_stock_trl_script_learns(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    config = model_config("1.5b", eos_token_id=2)
    config.vocab_size = 128
    model = tiny.write(config, tmp_path / "model", std=0.02)
    ours, theirs = EXAMPLE, stock(str(model))
    for words, meant in TASK.items():
        assert ours.count(words) == theirs.count(words) == 1, words
        ours, theirs = ours.replace(words, meant), theirs.replace(words, meant)
    for name in ("ours", "stock"):
        (tmp_path / name).mkdir()
    with scenarios.served(model, tmp_path / "server", *scenarios.EAGER) as server:
        ours = ours.replace("attach()", f"attach({str(server.path)!r})")
        curves = {"ours": rewards(ours, tmp_path / "ours", str(STEPS))}
        with bridge.attach(server.path) as policy:
            checks = policy.verify()
    curves["stock"] = rewards(theirs, tmp_path / "stock", str(STEPS))
    record_property("rewards", curves)
    assert all(check.status == "PASS" for check in checks), checks
    (first, last), (_, stocks) = (
        (sum(curve[:AT_THE_END]) / AT_THE_END, sum(curve[-AT_THE_END:]) / AT_THE_END) for curve in curves.values()
    )
    assert last - first >= LEAST_GAIN, curves
    assert abs(last - stocks) <= NOISE, curves
