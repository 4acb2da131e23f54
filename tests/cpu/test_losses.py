"""Every policy loss learns: the demo's task on one live vLLM on the CPU, always from the same initial weights.

Not covered: the values of the losses (`tests/unit/learn/test_policy_loss.py`), and the demo itself (`test_demo.py`).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.checkpoints.metrics import StepMetrics
from bridge_cli import demo_model
from tests.cpu import demo_server
from tests.cpu.demo_server import DemoServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("losses")]
OWN = f"{Path(__file__).parents[2] / 'examples' / 'own_loss_file.py'}:soft_clip"
STEPS = 16
LEAST_GAIN = 0.15
"""Held-out reward; a right answer scores 1, and the model starts with about half of them right."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with demo_server.served(tmp_path_factory.mktemp("losses")) as server:
        yield server


@pytest.mark.parametrize(
    ("loss", "updates"),
    [("dapo", 2), ("grpo", 1), ("dr_grpo", 1), ("gspo", 2), ("cispo", 2), ("rloo", 1), (OWN, 2)],
    ids=["dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo", "own"],
)
def test_every_loss_raises_the_held_out_reward(server: DemoServer, tmp_path: Path, loss: str, updates: int) -> None:
    server.load_initial_weights()
    steps: list[StepMetrics] = []
    choices = {"training_steps": STEPS, "eval_samples": 8, "loss": loss, "updates_per_batch": updates}
    summary = server.train(tmp_path, steps.append, **choices)
    assert summary.reward_before is not None
    assert summary.reward_after is not None
    assert summary.reward_after - summary.reward_before >= LEAST_GAIN, summary
    assert max(step.updates for step in steps) == updates
    if loss == OWN:
        assert all(0.5 < step.ratio < 1.5 for step in steps), steps
        assert any(step.ratio != 1 for step in steps), "of the second updates"
        return
    met_a_clip = any(step.clipped_low_share + step.clipped_high_share > 0 for step in steps)
    if loss != "cispo":  # CISPO clips only above 5
        assert met_a_clip == (updates > 1), steps  # with one update all ratios are 1


def test_distillation_raises_the_held_out_reward(server: DemoServer, tmp_path: Path) -> None:
    """The teacher was only shown right answers; no reward is trained on."""
    recipe = {**demo_model.RECIPE, "mixed": {"num_steps": 120, "right_share": 1.0, "lr": 1e-3}}
    teacher = demo_model.make(demo_model.cache_folder(), progress=lambda *_: None, recipe=recipe)
    server.load_initial_weights()
    steps: list[StepMetrics] = []
    choices = {"training_steps": STEPS, "eval_samples": 8, "loss": "distill", "teacher": str(teacher), "group_size": 1}
    summary = server.train(tmp_path, steps.append, **choices)
    assert summary.reward_before is not None
    assert summary.reward_after is not None
    assert summary.reward_after - summary.reward_before >= LEAST_GAIN, summary
    assert sum(step.divergence for step in steps[-3:]) < 0.8 * sum(step.divergence for step in steps[:3]), steps
