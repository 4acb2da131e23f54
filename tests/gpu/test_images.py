"""Images on a GPU, with CUDA graphs and more than 100 million parameters: the scenarios of the CPU tests.

Not covered: the other families (`tests/cpu/test_images.py`), real sizes.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bridge.weights import skeleton
from tests import scenarios
from tests.cpu.test_images import MARKER, learns, refuses_other_tokens, sees_the_same, tower_is_unchanged, written
from tests.gpu.test_families import ENGINE, LEAST_PARAMETERS
from tests.models import colors
from tests.models.families import FAMILIES, large

pytestmark = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's module of the family imports it")
LR = "1e-4"


def test_task_with_images_is_learned(tmp_path: Path) -> None:
    model = written(large(FAMILIES["Qwen3-VL"]()), tmp_path)
    language = skeleton.build(str(model), torch.bfloat16).get_decoder()
    assert sum(parameter.numel() for parameter in language.parameters()) > LEAST_PARAMETERS
    data, _ = colors.write(tmp_path / "seen", MARKER)
    with scenarios.served(model, tmp_path / "server", *ENGINE) as server:
        sees_the_same(server, data.parent)
        refuses_other_tokens(server, data.parent)
        learns(server, tmp_path, "--lr", LR, steps=20)
        tower_is_unchanged(server, tmp_path)
        scenarios.verifies(server, tmp_path)
