"""The real `tinker` client trains all weights of a real vLLM on the CPU: a random model, and what it samples."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bridge.core.address import free_port
from tests import tinker_sdk
from tests.documents import ROOT
from tests.models import tiny
from tests.unit.tinker.test_client import PAIRS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), tinker_sdk.needs_client]


@contextmanager
def door(model: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Run `bridge tinker` with a vLLM of its own; yield its address and its log."""
    port, log = free_port("127.0.0.1"), folder / "door.log"
    sdk = tinker_sdk.package(folder / "sdk")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", str(ROOT)), str(sdk)])}
    argv: list[str | Path] = [
        sys.executable, "-m", "bridge", "tinker", "--model", model, "--base-model", "tiny", "--all-weights",
        "--max-model-len", "512", "--port", str(port), "--save-path", folder / "runs",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, cwd=folder)
    try:
        while True:
            assert process.poll() is None, log.read_text()
            try:
                if httpx.get(f"{url}/api/v1/healthz", headers={"x-api-key": "tml-x"}, trust_env=False).is_success:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield url, log
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_real_client_passes_its_checks_on_vllm(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.write(tiny.llama(), model)
    about = tinker_sdk.expected(model, base="tiny", pairs=PAIRS, lr=1e-3, tolerance=0.05, is_real=True)
    with door(model, tmp_path) as (url, _):
        printed = tinker_sdk.checks(url, about, tmp_path, limit_s=900)
    assert printed.count("PASS") > 60, printed
