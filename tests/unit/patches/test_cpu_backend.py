"""On the CPU: experts, eager and compiled; LoRA kernels; seeded requests with chunked prefill.

Not covered: sampling such requests in vLLM (`tests/cpu/test_torn_tokens.py`, where every update causes them).
"""

import sys
from enum import Enum
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bridge_patches import cpu_backend

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 7, 4, 2, 16, 12


class Activation(Enum):
    """vLLM's activation enum."""

    SILU = "silu"


def given(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(TOKENS, HIDDEN, dtype=dtype),
        "w1": torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype) / 4,
        "w2": torch.randn(EXPERTS, HIDDEN, INNER, dtype=dtype) / 4,
        "topk_weights": torch.rand(TOKENS, TOP_K),
        "topk_ids": torch.stack(
            [torch.randperm(EXPERTS - 1)[:TOP_K] for _ in range(TOKENS)]
        ),  # the last expert gets no token
        "activation": Activation.SILU,
    }


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's patched experts."""

    class CPUUnquantizedExperts:
        def process_weights_after_loading(self, layer: Any) -> None:
            raise AssertionError(f"{layer} is packed")

        def apply(self, **given: Any) -> None:
            raise AssertionError(f"packed experts are read: {given}")

        def finalize_weight_and_reduce_impl(self) -> None: ...

    class FusedMoEConfig:
        def __init__(self, is_lora_enabled: bool) -> None:
            self.is_lora_enabled = is_lora_enabled
            self.__post_init__()

        def __post_init__(self) -> None: ...

    configuration = ModuleType(cpu_backend.CONFIGURATION)
    configuration.FusedMoEConfig = FusedMoEConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cpu_backend.CONFIGURATION, configuration)
    module = ModuleType(cpu_backend.EXPERTS)
    module.__spec__ = ModuleSpec(cpu_backend.EXPERTS, loader=None)
    module.CPUUnquantizedExperts = CPUUnquantizedExperts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cpu_backend.EXPERTS, module)
    cpu_backend.patch_experts()
    assert not FusedMoEConfig(is_lora_enabled=True).is_lora_enabled  # otherwise vLLM would choose Triton kernels
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
def test_each_token_gets_the_output_of_its_experts(
    dtype: torch.dtype, tolerance: float, weighed: bool, experts: Any
) -> None:
    inputs = given(dtype)
    output = torch.full((TOKENS, HIDDEN), torch.nan, dtype=dtype)
    experts.apply(output=output, apply_router_weight_on_input=weighed, expert_map=None, **inputs)
    expected = one_by_one(inputs, weighed)
    assert (output.float() - expected).norm() / expected.norm() < tolerance


def test_compiled_model_calls_experts_as_one_operator(experts: Any) -> None:
    """One graph contains the full model, so it must not depend on which experts are chosen."""

    def layer(output: Tensor, **inputs: Any) -> Tensor:
        experts.apply(output=output, apply_router_weight_on_input=False, expert_map=None, **inputs)
        return output * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in range(2):  # the second batch has different tokens and experts
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
def test_unsupported_experts_are_left_to_vllm(changes: dict[str, Any], known: bool) -> None:
    layer = SimpleNamespace(**{"activation": SimpleNamespace(value="gelu"), "expert_map": None, **changes})
    assert cpu_backend.is_known(layer) == known


SLOTS = torch.tensor([-1, 0, 2, 0, -1])
"""Adapters of five rows, of which there are three."""


def reference(inputs: Tensor, weights: Tensor) -> Tensor:
    """Return each row's product with its own adapter's matrix, in float64."""
    rows = [
        torch.zeros(weights.shape[-2], dtype=torch.float64) if slot < 0 else weights[slot].squeeze(0).double() @ row
        for slot, row in zip(SLOTS.tolist(), inputs.double(), strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 1, 4, 6)])
def test_each_row_is_multiplied_by_its_own_adapter(shape: tuple[int, ...]) -> None:
    inputs, weights, before = torch.randn(5, 6), torch.randn(shape), torch.randn(5, 9)
    expected = reference(inputs, weights)

    output = before.clone()
    cpu_backend.shrink(inputs, weights, output, SLOTS, 0.5)
    torch.testing.assert_close(output[:, :4], 0.5 * expected.float())
    assert output[:, 4:].equal(before[:, 4:])

    for adds in (True, False):
        base = before.double() * adds
        output = before.clone()
        cpu_backend.expand(inputs, weights, output, SLOTS, adds)
        torch.testing.assert_close(output[:, :4], (base[:, :4] + expected).float())
        assert output[:, 4:].equal(before[:, 4:])

        output = before.clone()
        cpu_backend.expand_slice(inputs, weights, output, SLOTS, 3, 4, adds)
        torch.testing.assert_close(output[:, 3:7], (base[:, 3:7] + expected).float())
        assert output[:, :3].equal(before[:, :3])
        assert output[:, 7:].equal(before[:, 7:])


def test_padded_columns_of_an_adapter_are_left_out() -> None:
    inputs, weights, output = torch.randn(5, 6), torch.randn(3, 1, 8, 6), torch.zeros(5, 4)
    cpu_backend.expand(inputs, weights, output, SLOTS, True)
    torch.testing.assert_close(output, reference(inputs, weights)[:, :4].float())


ROOM = 8
"""Rows of the mask; a step fills the first few."""


class Runner:
    """The part of vLLM's runner that samples a token per request and rewinds generators."""

    def __init__(self, unfinished: list[bool], *, fails: bool = False) -> None:
        mask = np.ones(ROOM, dtype=bool)
        mask[: len(unfinished)] = unfinished
        self.discard_request_mask = SimpleNamespace(np=mask)
        generators = {index: torch.Generator().manual_seed(index) for index in range(len(unfinished)) if index != 1}
        self.input_batch = SimpleNamespace(num_reqs=len(unfinished), generators=generators)
        self.fails = fails

    def sample_tokens(self, grammar_output: Any) -> list[float]:
        assert grammar_output is None
        made = [
            torch.rand(1, generator=self.input_batch.generators.get(index)).item()
            for index in range(self.input_batch.num_reqs)
        ]
        if self.fails:
            raise ZeroDivisionError
        for index in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            generator = self.input_batch.generators.get(int(index))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        return made


sample_tokens = partial(cpu_backend.without_unfinished_prompts, Runner.sample_tokens)


def states(runner: Runner) -> dict[int, bytes]:
    return {
        index: generator.get_state().numpy().tobytes() for index, generator in runner.input_batch.generators.items()
    }


def test_unpatched_vllm_fails_on_chunked_prefill() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        Runner([False, False, True]).sample_tokens(None)


def test_unfinished_prompt_keeps_its_generator() -> None:
    runner = Runner([True, True, False, True])
    before = states(runner)
    sample_tokens(runner, None)
    after = states(runner)
    assert after.keys() == before.keys()
    assert [index for index in before if after[index] != before[index]] == [2]


def test_other_requests_get_vllms_own_result() -> None:
    runner, plain = Runner([False, True, False]), Runner([False, False, False])
    ours, theirs = sample_tokens(runner, grammar_output=None), plain.sample_tokens(None)
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    assert states(runner) == states(plain)


def test_generators_are_restored_after_an_error() -> None:
    runner = Runner([True, False], fails=True)
    with pytest.raises(ZeroDivisionError):
        sample_tokens(runner, None)
    assert list(runner.input_batch.generators) == [0]


class Punica:
    """The part of vLLM's LoRA code that selects the adapter of each row of logits."""

    token_lora_indices = torch.tensor([0, 0, 0, -1, -1, 1, 1])
    sampler_indices = property(lambda _: torch.tensor([0, -1, 1]))

    def logits(self, hidden_states: Tensor) -> Tensor:
        weights = torch.tensor([10.0, 20.0, 30.0])[self.sampler_indices]  # -1 selects the last slot
        return torch.einsum("b,b->b", hidden_states, weights)


class PatchedPunica(Punica):
    sampler_indices = cpu_backend.adapter_of_one_request(Punica.sampler_indices)


class Scoring:
    """The part of vLLM's runner that computes prompt log-probabilities."""

    def __init__(self, punica: Punica) -> None:
        self.num_prompt_logprobs = {"c": 0, "gone": 0, "a": 0, "b": 0}
        self.query_start_loc = SimpleNamespace(np=np.array([0, 3, 5, 7]))
        self.input_batch = SimpleNamespace(req_id_to_index={"a": 0, "b": 1, "c": 2})
        self.punica = punica

    def _get_prompt_logprobs_dict(self, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        logits = {}
        for name in self.num_prompt_logprobs:
            if (count := num_scheduled_tokens.get(name)) is not None:
                first = self.query_start_loc.np[self.input_batch.req_id_to_index[name]]
                logits[name] = self.punica.logits(hidden_states[first : first + count]).tolist()
        for name in ("a", "c"):  # the prompt of b is prefilled in chunks
            if name in logits:
                del self.num_prompt_logprobs[name]
        return logits


def test_prompt_logits_use_the_adapter_of_their_request() -> None:
    hidden_states, scheduled = torch.arange(7.0), {"a": 3, "b": 2, "c": 2}
    with pytest.raises(RuntimeError, match="einsum"):
        Scoring(Punica())._get_prompt_logprobs_dict(hidden_states, scheduled)
    runner = Scoring(PatchedPunica())
    logits = cpu_backend.one_prompt_at_a_time(Scoring._get_prompt_logprobs_dict, runner, hidden_states, scheduled)
    assert logits == {"a": [0, 10, 20], "b": [90, 120], "c": [100, 120]}
    assert runner.num_prompt_logprobs == {"gone": 0, "b": 0}
    assert runner.punica.sampler_indices.tolist() == [0, -1, 1]
