"""The model sizes of the GPU tests of families: transformers reads each configuration, builds the model and runs it.

Not covered: whether vLLM takes them (`tests/gpu/test_families.py`).
"""

from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call
from transformers import AutoConfig, PretrainedConfig

from bridge.weights import skeleton
from bridge.weights.model_folder import state
from tests import family_proof
from tests.models import tiny
from tests.models.families import FAMILIES, ON_GPUS, large

LEAST_PARAMETERS = 100_000_000
ALL = {**FAMILIES, **ON_GPUS}


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_sizes_of_a_large_test_model_are_consistent(family: str, tmp_path: Path) -> None:
    config = large(ALL[family]())
    config.save_pretrained(tmp_path)
    assert _fields(AutoConfig.from_pretrained(tmp_path)) == _fields(config)
    model = skeleton.build(str(tmp_path), torch.bfloat16)
    assert model.num_parameters() > LEAST_PARAMETERS
    with torch.no_grad():
        output = functional_call(model, _zeros(model), kwargs={"input_ids": torch.arange(20).unsqueeze(0)})
    assert output.logits.shape == (1, 20, config.get_text_config().vocab_size)


@pytest.mark.parametrize("family", ALL)
def test_large_test_model_keeps_its_familys_special_features(family: str) -> None:
    config, scaled = ALL[family](), large(ALL[family]())
    assert _peculiarities(scaled.get_text_config()) == _peculiarities(config.get_text_config())
    if (tower := getattr(scaled, "vision_config", None)) is not None and hasattr(tower, "head_dim"):
        assert tower.head_dim * tower.num_attention_heads == tower.hidden_size


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma", "Gemma 2", "Granite"])
def test_large_test_model_is_never_certain_of_a_token(family: str, tmp_path: Path) -> None:
    """Updates are visible in log-probabilities, which stay 0 for a model that only repeats each token."""
    config = large(ALL[family]())
    folder = tiny.write(config, tmp_path, std=family_proof.GAIN / sqrt(config.hidden_size))
    model = skeleton.auto_class(config).from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logprobs = model(input_ids=torch.arange(20, 40).unsqueeze(0)).logits.float().log_softmax(-1)
    assert -(logprobs.exp() * logprobs).sum(-1).mean() > 0.9 * log(config.vocab_size)


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the configuration's fields, without those that saving and loading add."""
    return {name: value for name, value in config.to_dict().items() if name not in {"_name_or_path", "architectures"}}


def _zeros(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a tensor for each parameter and stored buffer, backed by a single element where kernels accept that."""
    return {
        name: torch.zeros(held.shape, dtype=held.dtype)
        if held.dim() > 2
        else torch.zeros((), dtype=held.dtype).expand(held.shape)
        for name, held in state(model).items()
    }


def _peculiarities(config: PretrainedConfig) -> dict[str, object]:
    return {
        "one KV head": config.num_key_value_heads == 1,
        "a KV head per head": config.num_key_value_heads == config.num_attention_heads,
        "layers differ": getattr(config, "is_heterogeneous", False),
        "queries through a narrower layer": getattr(config, "q_lora_rank", None) is not None,
    }
