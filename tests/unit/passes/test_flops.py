"""Operations of a pass: against torch's own counter, and pair by pair."""

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from bridge.passes.flops import Flops, num_pairs, peak_flops, peak_of
from bridge.passes.packing import Sample, packs
from tests.models import tiny
from tests.models.families import FAMILIES

NUM_TOKENS = 24
CPU = torch.device("cpu")
ROTARY = 0.002
"""Share of a tiny model's operations that compute angles, which torch counts as a matrix product."""


def built(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model whose matrix products are all visible to torch's counter."""
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def counted(model: PreTrainedModel) -> int:
    """Return what torch counts in a forward and a backward pass; it counts attention without a mask."""
    tokens = torch.arange(3, 3 + NUM_TOKENS).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return int(counter.get_total_flops())


def unmasked(flops: Flops) -> float:
    """Return the operations of the same pass without a mask."""
    return (flops.of_token + flops.of_row) * NUM_TOKENS + sum(flops.of_pair.values()) * NUM_TOKENS**2


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_torch_counts(family: str) -> None:
    model = built(FAMILIES[family]())
    assert unmasked(Flops.of(model)) == pytest.approx(counted(model), rel=ROTARY)


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    model = built(tiny.llama())
    whole = Flops.of(model).of_token
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear"), model)
    model.enable_input_require_grads()  # else nothing before the first adapter is differentiated
    flops = Flops.of(model)
    assert unmasked(flops) == pytest.approx(counted(model), rel=ROTARY)
    assert 0.66 * whole < flops.of_token < 0.75 * whole


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("before", [0, 2, 6])
def test_pairs_are_counted_one_by_one(queries: int, before: int, window: int) -> None:
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


def test_a_pass_costs_its_spans() -> None:
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


def test_each_part_computes_its_share_of_attention() -> None:
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
def test_peaks_are_known_by_the_name_of_the_gpu(name: str, teraflops: float) -> None:
    assert peak_of(name) == pytest.approx(teraflops * 1e12, nan_ok=True)


def test_the_peak_of_a_cpu_is_unknown() -> None:
    assert math.isnan(peak_flops(CPU))
