"""Experts on the CPU: what they make of their tokens, and which are left to vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from patches import cpu_experts

TOKENS, EXPERTS, CHOSEN, HIDDEN, INNER = 7, 4, 2, 16, 12


def given(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(TOKENS, HIDDEN, dtype=dtype),
        "w1": torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype) / 4,
        "w2": torch.randn(EXPERTS, HIDDEN, INNER, dtype=dtype) / 4,
        "topk_weights": torch.rand(TOKENS, CHOSEN),
        "topk_ids": torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(TOKENS)]),  # the last has no token
        "activation": SimpleNamespace(value="silu"),
    }


def one_by_one(inputs: dict[str, Any], weighed: bool) -> Tensor:
    rows = []
    for token, (row, ids, weights) in enumerate(
        zip(inputs["hidden_states"], inputs["topk_ids"], inputs["topk_weights"], strict=True)
    ):
        total = torch.zeros(HIDDEN)
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (inputs["w1"][expert].float() @ row.float()).chunk(2)
            made = inputs["w2"][expert].float() @ (functional.silu(gate) * up)
            total += made * (1.0 if weighed else weight)
        rows.append(total)
        assert token < TOKENS
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("weighed", [False, True])
def test_each_token_gets_what_its_experts_make_of_it(dtype: torch.dtype, tolerance: float, weighed: bool) -> None:
    inputs = given(dtype)
    output = torch.full((TOKENS, HIDDEN), torch.nan, dtype=dtype)
    cpu_experts.apply_plain(output=output, apply_router_weight_on_input=weighed, **inputs)
    expected = one_by_one(inputs, weighed)
    assert (output.float() - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, True),
        ({"activation": SimpleNamespace(value="swigluoai")}, False),
        ({"expert_map": torch.zeros(4)}, False),
        ({"w13_bias": torch.zeros(4)}, False),
    ],
)
def test_experts_of_another_kind_are_left_to_vllm(changes: dict[str, Any], known: bool) -> None:
    layer = SimpleNamespace(**{"activation": SimpleNamespace(value="gelu"), "expert_map": None, **changes})
    assert cpu_experts.is_known(layer) == known
