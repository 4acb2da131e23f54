"""Experts on the CPU: what they make of their tokens, compiled too, and which are left to vLLM."""

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from patches import cpu_backend

TOKENS, EXPERTS, CHOSEN, HIDDEN, INNER = 7, 4, 2, 16, 12


class Activation(Enum):
    """As vLLM's."""

    SILU = "silu"


def given(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(TOKENS, HIDDEN, dtype=dtype),
        "w1": torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype) / 4,
        "w2": torch.randn(EXPERTS, HIDDEN, INNER, dtype=dtype) / 4,
        "topk_weights": torch.rand(TOKENS, CHOSEN),
        "topk_ids": torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(TOKENS)]),  # the last has no token
        "activation": Activation.SILU,
    }


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Experts as vLLM has them, patched."""

    class CPUUnquantizedExperts:
        def process_weights_after_loading(self, layer: Any) -> None:
            raise AssertionError(f"{layer} is packed")

        def apply(self, **given: Any) -> None:
            raise AssertionError(f"packed experts are read: {given}")

        def finalize_weight_and_reduce_impl(self) -> None: ...

    module = ModuleType(cpu_backend.EXPERTS)
    module.__spec__ = ModuleSpec(cpu_backend.EXPERTS, loader=None)
    module.CPUUnquantizedExperts = CPUUnquantizedExperts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cpu_backend.EXPERTS, module)
    cpu_backend.patch_experts()
    made = CPUUnquantizedExperts()
    made.process_weights_after_loading(SimpleNamespace(activation=Activation.SILU, expert_map=None))
    return made


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
def test_each_token_gets_what_its_experts_make_of_it(
    dtype: torch.dtype, tolerance: float, weighed: bool, experts: Any
) -> None:
    inputs = given(dtype)
    output = torch.full((TOKENS, HIDDEN), torch.nan, dtype=dtype)
    experts.apply(output=output, apply_router_weight_on_input=weighed, expert_map=None, **inputs)
    expected = one_by_one(inputs, weighed)
    assert (output.float() - expected).norm() / expected.norm() < tolerance


def test_a_compiled_model_calls_its_experts_as_one_operator(experts: Any) -> None:
    """One graph holds the whole model: nothing in it may depend on which experts are chosen."""

    def layer(output: Tensor, **inputs: Any) -> Tensor:
        experts.apply(output=output, apply_router_weight_on_input=False, expert_map=None, **inputs)
        return output * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in range(2):  # the second batch has other tokens, and chooses others
        inputs = given(torch.float32)
        inputs["topk_ids"] = (inputs["topk_ids"][seed:] + seed) % EXPERTS
        inputs |= {name: inputs[name][seed:] for name in ("hidden_states", "topk_weights")}
        output = torch.zeros_like(inputs["hidden_states"])
        torch.testing.assert_close(compiled(output, **inputs), 2 * one_by_one(inputs, weighed=False))


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
    assert cpu_backend.is_known(layer) == known
