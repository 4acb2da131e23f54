"""Every family in the table, on the real vLLM on the CPU: trained in place, and compared with its own checkpoint.

One is proved by `make test`, and all of them by `make test-all` and by `make families`, which also writes the table.
Not covered: what Llama shows in more detail (`test_one_copy.py`).
"""

from pathlib import Path

import pytest

from bridge.errors import UnsupportedModelError
from bridge.server.manifest import MANIFEST_NAME
from cli.serve import free_port
from tests import family_proof, family_results, scenarios
from tests.models import tiny
from tests.models.families import FAMILIES

QUICK = "Qwen2, Qwen2.5"
"""Biases, and a head of its own."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_trains_in_place_and_equals_its_checkpoint(
    family: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    result = family_proof.prove(FAMILIES[family](), tmp_path)
    if pytestconfig.getoption("--record-families"):
        family_results.record(family, result, device="cpu")


@pytest.mark.slow
def test_weights_that_vllm_derives_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention in its absorbed form computes with projections of its own, which no step would reach."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    model = tiny.write(FAMILIES["DeepSeek-V2-Lite"](), tmp_path / "model")
    port = str(free_port("127.0.0.1"))
    place = ("--port", port, "--vllm-config-path", tmp_path / MANIFEST_NAME)
    flags = ("--model", model, *place, "--", *scenarios.EAGER)  # the weights are refused, whatever is compiled of them
    said = scenarios.bridge("serve-vllm", *flags, folder=tmp_path, expect=UnsupportedModelError.exit_code)
    assert "W_UK_T" in said.stderr
    assert "derived by vLLM" in said.stderr
    assert not (tmp_path / MANIFEST_NAME).exists()
