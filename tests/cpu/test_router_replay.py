"""A mixture of experts on the real vLLM on the CPU: with replay its largest mismatch is that of rounding.

Not covered: which experts a token names while weights change (`test_torn_tokens.py`), the proof of each family
(`test_families.py`), passes (`tests/unit/passes/test_routing.py`).
"""

from pathlib import Path
from statistics import fmean

from tests import scenarios
from tests.models import tiny
from tests.models.families import FAMILIES

STEPS = 6
FLAGS = ("--lr", "1e-6", "--batch-size", "16", "--group-size", "4", "--max-staleness", "1")


def test_replay_removes_what_other_experts_do_to_log_probabilities(tmp_path: Path) -> None:
    """In a stream, whose requests run across publications; the weights hardly move, so that rounding is the rest."""
    model, steps = tiny.write(FAMILIES["Qwen3-MoE"](), tmp_path / "model"), {}
    with scenarios.served(model, tmp_path / "server") as server:
        assert server.status().experts == (2, 2)
        for choice in ("--router-replay", "--no-router-replay"):
            folder = tmp_path / choice
            folder.mkdir()
            scenarios.trained(server, folder, *FLAGS, choice, steps=STEPS)
            steps[choice] = [step for step in scenarios.metrics(folder / "run") if step["tokens_trained"]]
        scenarios.verifies(server, tmp_path)
    on, off = steps["--router-replay"], steps["--no-router-replay"]
    assert all(0 <= step["rerouted_share"] < 0.05 for step in on), on
    assert any(step["rerouted_share"] > 0 for step in on), on
    assert all(step["rerouted_share"] is None for step in off), off
    largest = {choice: max(step["logprob_diff_max"] for step in taken) for choice, taken in steps.items()}
    assert 3 * largest["--router-replay"] < largest["--no-router-replay"], largest
    assert fmean(step["logprob_diff_mean"] for step in on) < fmean(step["logprob_diff_mean"] for step in off)
