"""Word problems and several rewards at once on the real vLLM on the CPU.

Not covered: which answers are right (`tests/unit/environments/test_answers.py`).
"""

from pathlib import Path

from bridge_environments.dataset import GSM8K
from tests import scenarios
from tests.scenarios import LiveServer

REWARDS = "def uneven(problem, completion):\n    return sum(map(ord, completion)) % 10 / 10\n"
"""Flags that always give groups a gradient, since random weights solve nothing."""


def test_bundled_problems_are_trained_on_end_to_end(llama: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    scenarios.trained(
        llama,
        tmp_path,
        *("--environment", "gsm8k", "--data", str(GSM8K.bundled), "--eval-samples", "1"),
        *("--reward", "math,format=0.5,rewards.py:uneven=0.1", "--batch-size", "16", "--max-new-tokens", "8"),
        steps=2,
    )
    scenarios.check_metrics(tmp_path / "run", steps=2)
    assert (tmp_path / "saved" / "step_2").is_dir()
    assert all(
        step["reward_parts"].keys() == {"math", "format", "uneven"} for step in scenarios.metrics(tmp_path / "run")
    )
