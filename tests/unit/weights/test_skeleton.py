"""The model without its weights: which classes are refused by name, before any weight is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    GPT2Config,
    Llama4TextConfig,
    ModernBertDecoderConfig,
    MptConfig,
    OPTConfig,
    PretrainedConfig,
)

from bridge.errors import UnsupportedModelError, UsageError
from bridge.weights import skeleton

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DECODER, NO_POSITIONS = "has no decoder that transformers finds", "takes no position_ids"


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        (MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1), "MptForCausalLM", NO_POSITIONS),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2), "BloomForCausalLM", NO_POSITIONS),
        (
            Llama4TextConfig(
                **SIZES, num_local_experts=2, head_dim=16, intermediate_size_mlp=32, num_key_value_heads=2
            ),
            "Llama4ForCausalLM",
            NO_DECODER,
        ),
        (
            ModernBertDecoderConfig(**SIZES, cls_token_id=1, sep_token_id=2),
            "ModernBertDecoderForCausalLM",
            NO_DECODER,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_class_that_cannot_be_trained_is_refused_by_name(
    config: PretrainedConfig, name: str, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        skeleton.build(str(tmp_path), torch.bfloat16)
    assert caught.value.message.startswith(f"{tmp_path} cannot be trained: its {name} {reason}")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2),
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=32,
        ),
    ],
)
def test_older_ways_of_building_a_language_model_pass(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    assert skeleton.shapes(skeleton.build(str(tmp_path), torch.bfloat16))


@pytest.mark.parametrize(
    "document",
    [
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 0}',
        '{"model_type": "no-such-type"}',
        '{"model_type": ["llama"]}',
    ],
)
def test_a_configuration_of_nothing_ends_in_one_line(document: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(document)
    with pytest.raises(UsageError) as caught:
        skeleton.build(str(tmp_path), torch.bfloat16)
    assert "\n" not in caught.value.message
