"""Every family in the table on the real vLLM on the CPU: trained in place and compared with its own checkpoint.

`make families` adds the variants and the compiler, and writes the table of docs/families.md.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from bridge.core.address import free_port
from bridge.errors import UnsupportedModelError
from bridge.server.manifest import MANIFEST_NAME
from tests import family_proof, family_results, scenarios
from tests.models import tiny
from tests.models.families import FAMILIES, VARIANTS, WITH_VISION

pytestmark = pytest.mark.slow
ONE_OF_EACH_KIND = "Mixtral", "Phi-2", "Phi-3", "Gemma 3 (text)", "DeepSeek-V2-Lite"
"""Families that cover experts; biases and layer norms; fused layers; windows, query and key norms; latent attention."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.core) if name in ONE_OF_EACH_KIND else name for name in FAMILIES]
)
def test_family_trains_in_place_and_matches_its_checkpoint(
    family: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    is_recorded = pytestconfig.getoption("--record-families")
    if family in VARIANTS and not is_recorded:
        pytest.skip("a variant of another family: make families")
    if family in WITH_VISION and find_spec("torchvision") is None:
        pytest.skip("vLLM's module of the family imports torchvision")
    result = family_proof.prove(FAMILIES[family](), tmp_path, engine=() if is_recorded else scenarios.TRACED)
    if is_recorded:
        family_results.record(family, result)


def test_derived_vllm_weights_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed latent attention computes with derived projections, which no training step would update."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    model = tiny.write(FAMILIES["DeepSeek-V2-Lite"](), tmp_path / "model")
    port = str(free_port("127.0.0.1"))
    flags_of_server = ("--port", port, "--vllm-config-path", tmp_path / MANIFEST_NAME)
    kernel = (
        "--attention-backend",
        "CPU_MLA",
    )  # with AMX, the default kernel supports only widths that are multiples of 32
    flags = ("--model", model, *flags_of_server, "--", *scenarios.EAGER, *kernel)
    refusal = scenarios.bridge("serve-vllm", *flags, folder=tmp_path, expect=UnsupportedModelError.exit_code)
    assert "W_UK_T" in refusal.stderr
    assert "derived by vLLM" in refusal.stderr
    assert not (tmp_path / MANIFEST_NAME).exists()
