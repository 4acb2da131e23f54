"""The trainer's model without its weights: what comes from the server, and what is trained."""

from pathlib import Path

import torch
from transformers import Glm4MoeConfig

from bridge.weights import skeleton
from tests.models.families import EXPERTS, SMALL


def test_a_buffer_of_the_files_comes_from_the_server_and_is_not_trained(tmp_path: Path) -> None:
    """The bias of GLM-4.5's router, with which vLLM chooses experts, too."""
    config = Glm4MoeConfig(**SMALL, **EXPERTS, head_dim=64, n_routed_experts=4, moe_intermediate_size=64)
    config.architectures = ["Glm4MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    model = skeleton.build(str(tmp_path), torch.bfloat16)
    bias = model.get_parameter("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.is_meta
    assert bias.dtype == torch.float32
    assert not bias.requires_grad
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in skeleton.shapes(model)
    assert not any(buffer.is_meta for buffer in model.buffers())
