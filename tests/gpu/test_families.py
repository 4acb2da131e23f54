"""Families with more than 100 million parameters on a GPU, with CUDA graphs and torch.compile; checked as on the CPU.

By default, only some of them run. With `--record-into FILE`, every family runs whose result is not in the file. Each
result is appended as a line as soon as it is known, so that an aborted run loses nothing, and several processes can
share the families:

    for gpu in 0 1; do CUDA_VISIBLE_DEVICES=$gpu pytest tests/gpu/test_families.py --record-into FILE & done; wait
    python -m tests.family_results FILE

Not covered: tiny models (`tests/cpu/test_families.py`).
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import family_proof, family_results, scenarios
from tests.models.families import FAMILIES, ON_GPUS, WITH_VISION, large

LEAST_PARAMETERS = 100_000_000
ALL = {**FAMILIES, **ON_GPUS}
SUBSET = ("Qwen2, Qwen2.5", "Llama 3, 3.1", "Mistral", "Gemma 2", "Phi-3", "Phi-3.5-mini", "Phi-4-mini", "Mixtral")
"""Families that run by default."""
ENGINE = ("--kv-cache-memory-bytes", "1073741824", "--max-num-seqs", "64", "--gdn-prefill-backend", "triton")
"""A fixed size instead of a share of the GPU: nothing is profiled, and several of these tests can run at once.

It holds the states of fewer sequences than vLLM serves by default, and fewer graphs are captured for fewer sequences.
vLLM's default prefill kernel of GatedDeltaNet is FlashInfer's, which is compiled for minutes where it is installed.
"""
LR = 1e-4
SLOWER = {"Phi-2": 2e-5, "StarCoder2": 2e-5}
"""Learning rates for families that would learn to repeat one token in two steps, and nothing in the third."""
WINDOWED = ("Mistral", "Phi-3")
"""Families with a sliding window in every layer."""
WIDER_HEADS = ("Gemma 4 (text)",)
"""Families for which vLLM uses FlashAttention 4, which needs nvidia-cutlass-dsl."""
LONG_WINDOW = 4096
"""Window in tokens, longer than any sequence here: with a shorter one, Bridge keeps attention out of CUDA graphs."""


@pytest.mark.parametrize("family", ALL)
def test_large_model_trains_in_place_and_matches_checkpoint(
    family: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    file: Path | None = pytestconfig.getoption("--record-into")
    if file is None and family not in SUBSET:
        pytest.skip("--record-into runs it, too")
    if family in WITH_VISION and find_spec("torchvision") is None:
        pytest.skip("vLLM's module of the family imports torchvision")
    if file is not None and not family_results.claim(family, file):
        pytest.skip("its result is known, or another process proves it")
    config = large(ALL[family]())
    triton = ("--attention-backend", "TRITON_ATTN")
    backend = triton if family in WIDER_HEADS and find_spec("cutlass") is None else ()
    if family in WINDOWED:
        config.sliding_window = LONG_WINDOW
    result = family_proof.prove(config, tmp_path, engine=(*ENGINE, *backend), lr=SLOWER.get(family, LR))
    assert result.num_parameters > LEAST_PARAMETERS
    assert "CUDA graph" in (tmp_path / "server" / "serve.log").read_text()
    if file is not None:
        family_results.write(family, result, file)


def test_window_shorter_than_a_sequence_decodes_correctly(tmp_path: Path) -> None:
    config = large(FAMILIES["Mistral"]())
    assert config.sliding_window < scenarios.MAX_MODEL_LEN
    family_proof.prove(config, tmp_path, engine=ENGINE, lr=LR)
    assert "PIECEWISE" in (tmp_path / "server" / "serve.log").read_text()
