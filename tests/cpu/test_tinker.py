"""The real `tinker` client trains all weights of a real vLLM on the CPU: a random model, and what it samples."""

from pathlib import Path

import pytest

from tests import tinker_sdk
from tests.models import tiny
from tests.unit.tinker.test_client import PAIRS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), tinker_sdk.needs_client]


def test_the_real_client_passes_its_checks_on_vllm(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.write(tiny.llama(), model)
    about = tinker_sdk.expected(model, base="tiny", pairs=PAIRS, lr=1e-3, tolerance=0.05, is_real=True)
    argv = ["--model", str(model), "--base-model", "tiny", "--max-model-len", "512"]
    with tinker_sdk.door(tmp_path, *argv) as (url, process, log):
        printed = tinker_sdk.checks(url, about, tmp_path, limit_s=900)
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
    assert printed.count("PASS") > 60, printed
