"""Images on a GPU, with CUDA graphs and more than 100 million parameters: the CPU's scenarios.

Not covered: the other families (`tests/cpu/test_images.py`), real sizes.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from bridge.weights import skeleton
from tests import scenarios
from tests.cpu.test_images import PLACE, learns, refuses_other_tokens, sees_the_same, tower_is_unchanged, written
from tests.gpu.test_families import KV_CACHE, LEAST_PARAMETERS
from tests.models import colors
from tests.models.families import FAMILIES, LARGE, large

pytestmark = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's module of the family imports it")
LR = "1e-4"


def of_size() -> PretrainedConfig:
    """Return Qwen3-VL with a language model of more than 100 million parameters, and a small tower."""
    config = FAMILIES["Qwen3-VL"]()
    document = config.to_dict()
    text = large(config.text_config).to_dict()
    document["text_config"] = {name: value for name, value in text.items() if name != "layer_types"}
    tower = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": LARGE["hidden_size"]}
    document["vision_config"] |= tower
    return type(config).from_dict(document)


def test_a_task_with_images_is_learned(tmp_path: Path) -> None:
    config = of_size()
    assert sum(parameter.numel() for parameter in skeleton_of(config)) > LEAST_PARAMETERS
    model = written(config, tmp_path)
    data, _ = colors.write(tmp_path / "seen", PLACE)
    with scenarios.served(model, tmp_path / "server", *KV_CACHE) as server:
        sees_the_same(server, data.parent)
        refuses_other_tokens(server, data.parent)
        learns(server, tmp_path, "--lr", LR, steps=40)
        tower_is_unchanged(server, tmp_path)
        scenarios.verifies(server, tmp_path)


def skeleton_of(config: PretrainedConfig) -> list[object]:
    """Return the parameters of its language model, without their weights."""
    import torch
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = skeleton.auto_class(config).from_config(config, dtype=torch.bfloat16)
    return [*model.get_decoder().parameters()]
