"""Floating-point operations of a pass, compared with torch's own counter, and pair by pair."""

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from bridge.passes.flops import Flops, num_pairs, peak_flops, peak_of
from bridge.passes.kernels import head_size
from bridge.passes.packing import Sample, packs
from bridge.weights import skeleton
from tests.models import tiny
from tests.models.families import FAMILIES

NUM_TOKENS = 24
CPU = torch.device("cpu")
ROTARY = 0.002
"""Share of a tiny model's operations that compute RoPE angles, which torch counts as a matrix product."""


def built(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model whose matrix products are all visible to torch's counter."""
    torch.manual_seed(0)
    config.get_text_config()._experts_implementation = "eager"
    model: PreTrainedModel = skeleton.auto_class(config).from_config(config, attn_implementation="eager")
    return model.eval()


def counted(model: PreTrainedModel) -> int:
    """Return the operations that torch counts in a forward and a backward pass, with attention unmasked."""
    tokens = torch.arange(3, 3 + NUM_TOKENS).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return int(counter.get_total_flops())


def unmasked(flops: Flops) -> float:
    """Return Bridge's operations of the same pass, also with attention unmasked."""
    return (flops.of_token + flops.of_row) * NUM_TOKENS + sum(flops.of_pair.values()) * NUM_TOKENS**2


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Compute the gated delta rule as defined, token by token; transformers computes chunks of 64 tokens."""
    q_TAD, k_TAD, v_TAE = (tensor[0].unsqueeze(2) for tensor in (query, key, value))
    state_ADE, outputs = (k_TAD[0].mT @ v_TAE[0]).detach().zero_().requires_grad_(), []
    for q, k, v, decay, rate in zip(q_TAD, k_TAD, v_TAE, g[0].exp(), beta[0], strict=True):
        state_ADE = state_ADE * decay[:, None, None]
        state_ADE = state_ADE + k.mT @ ((v - k @ state_ADE) * rate[:, None, None])
        outputs.append(q @ state_ADE)
    return torch.stack(outputs).squeeze(2).unsqueeze(0), None


def unfolded(hidden_states: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Compute a depthwise convolution as a product, since torch miscounts its weight's gradient."""
    width = weight.shape[1]
    windows = functional.pad(hidden_states[0], (width - 1, 0)).unfold(1, width, 1)
    return functional.silu(windows @ weight.unsqueeze(2)).squeeze(2).unsqueeze(0)


@pytest.fixture(autouse=True)
def _states_in_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", token_by_token)
        monkeypatch.setattr(module, "causal_conv1d_fn", unfolded)


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_match_torchs_flop_counter(family: str) -> None:
    model = built(FAMILIES[family]())
    assert unmasked(Flops.of(model)) == pytest.approx(counted(model), rel=ROTARY)


def test_head_size_is_the_largest_of_all_layers() -> None:
    assert head_size(FAMILIES["Gemma 4 (text)"]()) == 128


def test_frozen_weights_need_no_weight_gradient_flops() -> None:
    model = built(tiny.llama())
    whole = Flops.of(model).of_token
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear"), model)
    model.enable_input_require_grads()  # otherwise no gradient flows below the first adapter
    flops = Flops.of(model)
    assert unmasked(flops) == pytest.approx(counted(model), rel=ROTARY)
    assert 0.66 * whole < flops.of_token < 0.75 * whole


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("before", [0, 2, 6])
def test_pair_count_matches_enumeration(queries: int, before: int, window: int) -> None:
    keys = before + queries
    pairs = [
        (query, key)
        for query in range(before, keys)
        for key in range(keys)
        if key <= query and (not window or query - key < window)
    ]
    assert num_pairs((queries, keys), window) == len(pairs)


def batch_of(samples: list[Sample], **choices: Any) -> Any:
    (batch,) = packs(samples, max_tokens=1000, device=CPU, **choices)
    return batch


def test_flops_of_a_pass_follow_its_spans() -> None:
    flops = Flops(of_token=1000.0, of_row=100.0, of_pair={0: 1.0, 2: 10.0})
    numbers = (0.0,) * 3
    samples = [
        Sample(
            prompt_token_ids=(1,) * 5, token_ids=(token,) * 3, sampled_logprobs=numbers, advantages=numbers, weight=1.0
        )
        for token in (2, 3)
    ]
    apart = flops.of_batch(batch_of(samples))
    assert apart == 16 * 1000 + 6 * 100 + 2 * 36 + 2 * 15 * 10
    shared = flops.of_batch(batch_of(samples, share_prompts=True))
    assert apart - shared == 5 * 1000 + 15 + 9 * 10, "the prompt's second time"


def test_flops_of_each_part_include_its_attention_share() -> None:
    model = built(tiny.llama())
    whole, half = Flops.of(model).of_pair, Flops.of(model, 2).of_pair
    assert {window: 2 * count for window, count in half.items()} == whole


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", math.nan), ("NVIDIA GeForce RTX 4090", math.nan),
    ],
)  # fmt: skip
def test_peak_flops_are_found_by_gpu_name(name: str, teraflops: float) -> None:
    assert peak_of(name) == pytest.approx(teraflops * 1e12, nan_ok=True)


def test_peak_flops_of_a_cpu_are_unknown() -> None:
    assert math.isnan(peak_flops(CPU))
