"""FP8 made from the shared weights, with the real vLLM on the CPU: what is served, and that it follows every update.

vLLM's own kernels need AMX on a CPU, so layers multiply by the dequantized weights; inputs are not quantized.

Not covered: vLLM's kernels, CUDA graphs, memory and speed (`tests/gpu/test_fp8.py`, `benchmarks/fp8.py`).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.types import Quantization
from bridge.weights.attach import attach
from tests import scenarios, torn_tokens
from tests.models import tiny
from tests.scenarios import LiveServer, bridge
from tests.torn_tokens import Alternation, Load

LOAD = Load(
    num_tokens=5_000, num_fences=6, num_requests=4, num_samples=8, max_tokens=96, prompt_tokens=150,
    fence_every_s=0.05, dtype="float16", tolerance=0.02, quantization="fp8_per_block",
)  # fmt: skip
QUANTIZED_PARITY = 0.1
"""Mean difference in nats; quantizing a random model to FP8 moves log-probabilities by half of it."""


@pytest.fixture(scope="module")
def alternation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alternation]:
    with torn_tokens.alternating(tiny.llama(), tmp_path_factory.mktemp("fp8"), LOAD, std=0.06) as alternation:
        yield alternation


@pytest.fixture
def server(alternation: Alternation) -> LiveServer:
    return alternation.server


def rows(server: LiveServer, folder: Path, *, expect: int = 0) -> dict[str, dict[str, str]]:
    """Return the checks of `bridge verify` by name."""
    printed = bridge("verify", "--json", "--vllm-config-path", server.path, folder=folder, expect=expect).stdout
    return {row["name"]: row for row in map(json.loads, printed.splitlines())}


def test_each_token_comes_from_one_published_fp8_state(alternation: Alternation) -> None:
    assert torn_tokens.finds_no_torn_token(alternation, LOAD).spanning > 0


def test_server_computes_with_the_dequantized_weights(alternation: Alternation) -> None:
    torn_tokens.agrees_without_fences(alternation, LOAD)
    plain = alternation.states
    alternation.states = tuple(type(state)(state.config).to(state.dtype) for state in plain)
    for state, weights in zip(alternation.states, alternation.written, strict=True):
        torn_tokens._copy(dict(state.named_parameters()), weights)
    verdict = alternation.judge(alternation.under_load(LOAD, lambda: None), LOAD.tolerance)
    alternation.states = plain
    assert verdict.neither > 0.2 * verdict.num_tokens, "the unquantized weights explain the tokens just as well"


def test_verify_distinguishes_fp8_from_a_copy(server: LiveServer, tmp_path: Path) -> None:
    scenarios.verifies(server, tmp_path)
    assert server.manifest.quantized
    weight = attach(server.manifest).model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        weight[3, 5] += 1.0  # written without the fence: the FP8 still has the old weights
    checks = rows(server, tmp_path, expect=3)
    assert checks["checksums"]["status"] == "PASS"
    assert checks["FP8"]["status"] == "FAIL"
    assert "1 of 8 served tensors" in checks["FP8"]["found"]
    assert "model.layers.1.mlp.down_proj.weight" in checks["FP8"]["found"]
    with BridgeClient(server.manifest, timeout_s=60) as client, fence.publish(client, Update()):
        pass
    assert rows(server, tmp_path)["FP8"]["status"] == "PASS"


@pytest.mark.parametrize(
    ("how", "compiled"),
    [("fp8_per_channel", False), pytest.param("fp8_per_block", True, marks=pytest.mark.slow)],
)
def test_training_reports_the_fp8_mismatch(tmp_path: Path, how: Quantization, *, compiled: bool) -> None:
    model = tiny.write(tiny.llama(), tmp_path / "model", std=0.06)
    with scenarios.served(model, tmp_path / "server", quantization=how, compiled=compiled) as server:
        scenarios.verifies(server, tmp_path)
        done = scenarios.trained(server, tmp_path, "--mismatch", "none")
        assert f"{how} weights" in done.stderr
        scenarios.check_metrics(tmp_path / "run", parity_limit=QUANTIZED_PARITY)
        differences = [step["logprob_diff_mean"] for step in scenarios.metrics(tmp_path / "run")]
        assert min(differences) > 0.005, differences
        checks = rows(server, tmp_path)
        assert (checks["FP8"]["status"], checks["log-probabilities"]["status"]) == ("PASS", "PASS")


@pytest.mark.slow
def test_adapter_is_trained_on_an_fp8_base(tmp_path: Path) -> None:
    model = tiny.write(tiny.llama(), tmp_path / "model", std=0.06)
    with scenarios.served(
        model, tmp_path / "server", max_lora_rank=scenarios.LORA_RANK, quantization="fp8_per_block"
    ) as server:
        scenarios.trained(server, tmp_path, "--mode", "lora_only", "--lora-r", str(scenarios.LORA_RANK))
        scenarios.check_metrics(tmp_path / "run", parity_limit=QUANTIZED_PARITY)
        assert rows(server, tmp_path)["FP8"]["status"] == "PASS"


@pytest.mark.slow
def test_each_tensor_parallel_rank_quantizes_its_shard(tmp_path: Path) -> None:
    config = tiny.llama()
    config.hidden_size, config.head_dim, config.intermediate_size = 256, 64, 512
    model = tiny.write(config, tmp_path / "model", std=0.06)
    with scenarios.served(model, tmp_path / "server", num_parts=2, quantization="fp8_per_block") as server:
        parts = [attach(server.manifest, part, num_parts=2) for part in range(2)]
        with BridgeClient(server.manifest, timeout_s=60) as client, fence.publish(client, Update()), torch.no_grad():
            for part in parts:
                part.model.get_parameter("model.layers.0.self_attn.q_proj.weight").neg_()
        checks = rows(server, tmp_path)
        assert [checks[f"FP8, part {part}"]["status"] for part in range(2)] == ["PASS", "PASS"]
        with torch.no_grad():
            parts[1].model.get_parameter("model.layers.0.self_attn.q_proj.weight").neg_()
        checks = rows(server, tmp_path, expect=3)
        assert [checks[f"FP8, part {part}"]["status"] for part in range(2)] == ["PASS", "FAIL"]
