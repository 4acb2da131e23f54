"""FP8 from the shared weights on a GPU: identical to vLLM's bytes, at the addresses in CUDA graphs, after every update.

Not covered: speed (`benchmarks/fp8.py`, `benchmarks/grpo.py`), the numbers on a CPU (`tests/cpu/test_fp8.py`).
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.types import Quantization
from bridge.weights import fp8
from bridge.weights.attach import attach
from tests import scenarios, torn_tokens
from tests.cpu.test_fp8 import rows
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.scenarios import LiveServer
from tests.torn_tokens import Alternation, Load
from tests.unit.weights.test_fp8 import HOWS

COPIES = 1.55
"""Most memory for weights, as a multiple of the shared weights' size."""
LOAD = Load(
    num_tokens=int(os.environ.get("TORN_TOKENS", "200_000")), num_fences=100, num_requests=16, num_samples=16,
    max_tokens=256, prompt_tokens=96, fence_every_s=0.1, dtype="float16", tolerance=0.6, undecided=0.7,
    quantization="fp8_per_block",
)  # fmt: skip
"""Both sides round each layer's inputs to FP8, after their own earlier rounding errors: up to 0.19 nats in 6,000
tokens on a CPU. With only the weights in FP8, the tolerance is 0.02 (`tests/cpu/test_fp8.py`)."""
FEWER = replace(LOAD, num_tokens=20_000, num_fences=2)
SHAPES = [(4608, 3584), (3584, 18944), (37888, 3584), (1000, 1536), (130, 130)]
"""Weight shapes, including those of a 7B model."""


def stock(weight: Tensor, how: Quantization) -> tuple[Tensor, Tensor]:
    """Return vLLM's own quantization of a weight on loading."""
    from vllm import _custom_ops
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    values: Tensor
    scales: Tensor
    if how == "fp8_per_block":
        values, scales = per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
    else:
        values, scales = _custom_ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True)
    return values, scales


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_bit_identical_to_vllm(how: Quantization, shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(shape, device="cuda", generator=generator) * torch.rand(shape[0], 1, device="cuda")
    weight = (weight * 0.05).bfloat16()
    weight[7] = 0
    values, scales = fp8.quantized(weight, how)
    theirs, their_scales = stock(weight, how)
    differing = (values.view(torch.int8) != theirs.view(torch.int8)).sum().item()
    assert (differing, (scales != their_scales).sum().item()) == (0, 0), (shape, weight.numel(), scales.numel())


@pytest.fixture(scope="module", params=HOWS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder, config = tmp_path_factory.mktemp(request.param), tiny.llama()
    config.hidden_size, config.head_dim, config.intermediate_size = 256, 64, 1024
    model = tiny.write(config, folder / "model", std=0.05)
    with scenarios.served(model, folder / "server", quantization=request.param) as server:
        yield server


def test_cuda_graphs_are_enabled(server: LiveServer) -> None:
    log = server.child.log.read_text()
    assert "CUDA graph" in log
    print(*re.findall(r"Selected \w+ for \w+", log), sep="\n")  # noqa: T201  pytest -s shows vLLM's kernel


@torch.no_grad()
def test_fp8_matches_vllm_after_each_update(server: LiveServer) -> None:
    attached, before = attach(server.manifest), server.sample()
    shadows = server.manifest.quantized
    with BridgeClient(server.manifest, timeout_s=60) as client:
        for sleep in (False, True):
            with fence.publish(client, Update(sleep=sleep)):
                for parameter in attached.model.parameters():
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
            served = client.digests(quantized=True)
            own = {name: fp8.digest(*stock(attached.server_tensors[name], how)) for name, how in shadows.items()}
            assert served == own
    assert not scenarios.same_samples(before, server.sample()), "graphs still read the FP8 before the update"


def test_verify_distinguishes_fp8_from_a_copy(server: LiveServer, tmp_path: Path) -> None:
    scenarios.verifies(server, tmp_path)
    weight = attach(server.manifest).model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        weight[3, 5] += 1.0  # without the fence
    torch.cuda.synchronize()
    checks = rows(server, tmp_path, expect=3)
    assert (checks["checksums"]["status"], checks["FP8"]["status"]) == ("PASS", "FAIL")
    assert "1 of 8 served tensors" in checks["FP8"]["found"]
    with BridgeClient(server.manifest, timeout_s=60) as client, fence.publish(client, Update()):
        pass
    assert rows(server, tmp_path)["FP8"]["status"] == "PASS"


def test_training_reports_the_fp8_mismatch(server: LiveServer, tmp_path: Path) -> None:
    scenarios.trained(server, tmp_path)
    scenarios.check_metrics(tmp_path / "run", parity_limit=0.15)
    steps = scenarios.metrics(tmp_path / "run")
    print([(step["logprob_diff_mean"], step["mismatch_kl"]) for step in steps])  # noqa: T201  pytest -s shows them
    assert rows(server, tmp_path)["FP8"]["status"] == "PASS"


def test_experts_are_served_in_fp8(tmp_path: Path) -> None:
    config: Any = FAMILIES["Qwen3-MoE"]()
    config.hidden_size, config.head_dim, config.moe_intermediate_size = 256, 64, 256
    model = tiny.write(config, tmp_path / "model", std=0.05)
    with scenarios.served(model, tmp_path / "server", quantization="fp8_per_block") as server:
        quantized = server.manifest.quantized
        assert any("w13_weight" in name for name in quantized)
        assert not any(".gate." in name for name in quantized), "a router of 4 rows, which CUTLASS does not take"
        scenarios.verifies(server, tmp_path)
        scenarios.trained(server, tmp_path)
        assert rows(server, tmp_path)["FP8"]["status"] == "PASS"


def test_fp8_weights_take_one_and_a_half_copies(tmp_path: Path) -> None:
    """All but a thousandth of the weights are in linear layers: 1.5 copies, plus other allocations by vLLM.

    At half of these widths that was 0.06 GiB: at these it is 0.02 of a copy if it is a workspace of cuBLAS, and 0.07,
    which is too much, if it is as large as the largest matrix.
    """
    config = tiny.llama()
    config.hidden_size, config.head_dim, config.num_attention_heads = 4096, 128, 32
    config.num_key_value_heads, config.intermediate_size, config.num_hidden_layers = 8, 16384, 8
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    tiny.write_tokenizer(tmp_path / "model", tiny.VOCABULARY)
    with scenarios.served(
        tmp_path / "model", tmp_path / "server", "--load-format", "dummy", quantization="fp8_per_block"
    ) as server:
        (gib,) = re.findall(r"Model loading took ([\d.]+) GiB", server.child.log.read_text())
        shared = 2 * server.manifest.num_params / 2**30
        print("copies", float(gib) / shared)  # noqa: T201  pytest -s shows it
        assert 1.45 < float(gib) / shared < COPIES


@pytest.fixture(scope="module")
def alternation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alternation]:
    config, folder = tiny.llama(), tmp_path_factory.mktemp("torn_tokens")
    config.head_dim = 64
    with torn_tokens.alternating(config, folder, LOAD, "--async-scheduling", std=0.06) as alternation:
        yield alternation


def test_server_computes_with_the_dequantized_weights(alternation: Alternation) -> None:
    torn_tokens.agrees_without_fences(alternation, FEWER)


def test_each_token_comes_from_one_published_fp8_state(alternation: Alternation) -> None:
    assert torn_tokens.finds_no_torn_token(alternation, LOAD).spanning > 0


def test_stale_fp8_is_detected(alternation: Alternation) -> None:
    """Write the other state without the fence: embedding, norms and head come from it, but the FP8 does not."""
    verdict_before = alternation.judge(alternation.under_load(FEWER, lambda: None), LOAD.tolerance)
    assert verdict_before.neither == 0, verdict_before
    alternation.write(1 - alternation.published[max(alternation.published)])
    torch.cuda.synchronize()
    verdict = alternation.judge(alternation.under_load(FEWER, lambda: None), LOAD.tolerance)
    print("stale FP8", verdict)  # noqa: T201  pytest -s shows it
    assert verdict.neither > 0.1 * verdict.num_tokens, verdict
    alternation.publish("keep")
    torn_tokens.agrees_without_fences(alternation, FEWER)
