"""The trainer's cosines and sines equal those of vLLM's own RoPE classes, for every maximum length of the server."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PretrainedConfig, PreTrainedModel

from bridge.weights import rope

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM is installed")

SMALL: dict[str, Any] = {
    "vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
PHI: dict[str, Any] = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4_096}
"""RoPE settings of Phi-3.5-mini and Phi-4-mini."""
FACTORS: dict[str, Any] = {
    "short_factor": [1.0 + 0.02 * index for index in range(48)],
    "long_factor": [1.08 + 1.3 * index for index in range(48)],
}
MSCALES: dict[str, Any] = {"short_mscale": 1.1, "long_mscale": 1.3}


def phi(head_size: int = 96, **rope_parameters: Any) -> Phi3Config:
    given = {"rope_type": "longrope", "rope_theta": 10_000.0, **FACTORS, **rope_parameters}
    return Phi3Config(**SMALL, **PHI, hidden_size=2 * head_size, rope_parameters=given)


def dynamic() -> LlamaConfig:
    given = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    return LlamaConfig(**SMALL, hidden_size=64, max_position_embeddings=2_048, rope_parameters=given)


@contextmanager
def vllm_of(max_model_len: int) -> Iterator[None]:
    """Build vLLM's layers for a server with this maximum length."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.__dict__["model_config"] = SimpleNamespace(max_model_len=max_model_len)
    with set_current_vllm_config(config):
        yield


def of_vllm(config: PretrainedConfig, max_model_len: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return vLLM's cosines and sines from the rows of its cache that the layer reads."""
    from vllm.model_executor.layers import rotary_embedding

    head_size = config.hidden_size // config.num_attention_heads
    rotary_embedding._ROPE_DICT.clear()
    with vllm_of(max_model_len):
        layer = rotary_embedding.get_rope(
            head_size, config.max_position_embeddings, rope_parameters=config.rope_parameters, dtype=torch.float32
        )
    query = torch.zeros(len(positions), head_size)
    query[:, : layer.rotary_dim // 2] = 1.0  # (1, 0) rotated by an angle is that angle's cosine and sine
    turned, _ = (
        layer.forward_native(positions, query, query)
        if hasattr(layer, "forward_native")
        else layer(positions, query, query)
    )
    halves = turned[:, : layer.rotary_dim].chunk(2, dim=-1)
    return halves[0], halves[1]


def of_trainer(config: PretrainedConfig, max_model_len: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    rope.follow_server(model, max_model_len)
    outputs = [model.model.rotary_emb(torch.zeros(1), positions[None]) for _ in range(2)]
    assert torch.equal(outputs[0][0], outputs[1][0])
    cos, sin = (values[0, :, : values.shape[-1] // 2] for values in outputs[0])
    return cos, sin


@pytest.mark.parametrize("max_model_len", [2_048, 4_096, 4_097, 16_384])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(phi(), id="Phi-3.5-mini"),
        pytest.param(phi(128, partial_rotary_factor=0.75), id="Phi-4-mini"),
        pytest.param(phi(**MSCALES), id="short_mscale and long_mscale"),
        pytest.param(phi(attention_factor=2.0, factor=8.0), id="factors that vLLM ignores"),
    ],
)
def test_longrope_matches_vllm(config: PretrainedConfig, max_model_len: int) -> None:
    positions = torch.tensor([0, 1, 2, 1_000, max_model_len - 1])
    for ours, theirs in zip(
        of_trainer(config, max_model_len, positions), of_vllm(config, max_model_len, positions), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("max_model_len", [512, 2_048])
def test_dynamic_scaling_matches_vllm(max_model_len: int) -> None:
    positions = torch.tensor([0, 1, 2, 100, max_model_len - 1])
    config = dynamic()
    for ours, theirs in zip(
        of_trainer(config, max_model_len, positions), of_vllm(config, max_model_len, positions), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
