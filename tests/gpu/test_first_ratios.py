"""Compiled layers on a GPU: with unchanged weights, every ratio is 1, and GSPO keeps its full gradient."""

from typing import Any

import pytest
import torch

from tests.unit.run.test_first_ratios import Still, groups, model
from tests.unit.run.test_learner import updated

LENGTHS = (300, 340, 380, 400)
"""Lengths for which differently compiled code moved 59 % of the completions outside the clip range."""


def learnt(*, compile_layers: bool, gradient_checkpointing: bool | None = None) -> dict[str, Any]:
    torch._dynamo.reset()
    trained = model(num_hidden_layers=4, head_dim=64).cuda()
    return updated(
        trained, groups(LENGTHS), batch_size=8, updates_per_batch=2, loss="gspo", make_optimizer=Still,
        micro_batch_tokens=800, compile_layers=compile_layers, gradient_checkpointing=gradient_checkpointing,
    )  # fmt: skip


@pytest.mark.parametrize("recomputed", [False, True])
def test_gspo_keeps_its_gradient_with_compiled_layers(recomputed: bool) -> None:
    plain = learnt(compile_layers=False)
    compiled = learnt(compile_layers=True, gradient_checkpointing=recomputed)
    assert compiled["updates"] == 2
    assert (compiled["clipped_low_share"], compiled["clipped_high_share"]) == (0, 0)
    assert compiled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.02)
