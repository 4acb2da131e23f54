"""Families at more than 100 million parameters on a GPU, CUDA graphs and torch.compile on: the CPU's proof.

Not covered: the other families, and the table (`tests/cpu/test_families.py`).
"""

from math import prod
from pathlib import Path

import pytest
import torch

from bridge.weights import skeleton
from tests import family_proof
from tests.models.families import FAMILIES, large

LEAST_PARAMETERS = 100_000_000
CHOSEN = ("Qwen2, Qwen2.5", "Llama 3, 3.1", "Mistral", "Gemma 2", "Phi-3", "Mixtral")
KV_CACHE = ("--kv-cache-memory-bytes", "1073741824")
"""A size and no share of the GPU, so that nothing is measured and several of these tests may run at once."""
LR = 5e-5


@pytest.mark.parametrize("family", CHOSEN)
def test_a_large_family_trains_in_place_and_equals_its_checkpoint(family: str, tmp_path: Path) -> None:
    result = family_proof.prove(large(FAMILIES[family]()), tmp_path, engine=KV_CACHE, lr=LR)
    built = skeleton.build(str(tmp_path / "model"), torch.bfloat16)
    num_parameters = sum(map(prod, skeleton.shapes(built).values()))
    assert num_parameters > LEAST_PARAMETERS
    assert "CUDA graph" in (tmp_path / "server" / "serve.log").read_text()
    print(family, f"{num_parameters:,}", result)  # noqa: T201  pytest -s shows what was found
