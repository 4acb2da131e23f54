"""Families with more than 100 million parameters on a GPU, with CUDA graphs and torch.compile: the CPU's proof.

Not covered: the other families, and the table (`tests/cpu/test_families.py`).
"""

from pathlib import Path

import pytest

from tests import family_proof, family_results, scenarios
from tests.models.families import FAMILIES, large

LEAST_PARAMETERS = 100_000_000
SUBSET = ("Qwen2, Qwen2.5", "Llama 3, 3.1", "Mistral", "Gemma 2", "Phi-3", "Phi-3.5-mini", "Phi-4-mini", "Mixtral")
KV_CACHE = ("--kv-cache-memory-bytes", "1073741824")
"""A fixed size instead of a share of the GPU: nothing is profiled, and several of these tests can run at once."""
LR = 5e-5
WINDOWED = ("Mistral", "Phi-3")
"""Families with a sliding window in every layer."""
LONG_WINDOW = 4096
"""Tokens, more than the longest sequence here: with a shorter window Bridge leaves attention out of the CUDA graphs."""


@pytest.mark.parametrize("family", SUBSET)
def test_a_large_family_trains_in_place_and_equals_its_checkpoint(
    family: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    config = large(FAMILIES[family]())
    if family in WINDOWED:
        config.sliding_window = LONG_WINDOW
    result = family_proof.prove(config, tmp_path, engine=KV_CACHE, lr=LR)
    assert result.num_parameters > LEAST_PARAMETERS
    assert "CUDA graph" in (tmp_path / "server" / "serve.log").read_text()
    print(family, result)  # noqa: T201  pytest -s shows what was found
    if pytestconfig.getoption("--record-families"):
        family_results.record(family, result, device="gpu")


def test_a_window_shorter_than_a_sequence_is_decoded_rightly(tmp_path: Path) -> None:
    config = large(FAMILIES["Mistral"]())
    assert config.sliding_window < scenarios.MAX_MODEL_LEN
    family_proof.prove(config, tmp_path, engine=KV_CACHE, lr=LR)
    assert "PIECEWISE" in (tmp_path / "server" / "serve.log").read_text()
