"""`none --reload transfer` against the real vLLM on the CPU, whose engine sends over gloo instead of NCCL.

The model's head is not tied: on CPUs with bf16 instructions, a stock vLLM packs a copy of a tied head for its kernels,
and does not update it when new weights are loaded (0.32, `dispatch_cpu_unquantized_gemm`). On a GPU it packs nothing.

Not covered: NCCL itself, and servers that fail (`tests/unit/modes/test_transfer.py`).
"""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import ServeConfig, TrainConfig
from bridge.core.address import free_port
from bridge.errors import AttachError
from bridge.processes.server_command import ServerCommand
from bridge.processes.server_process import StartedServer
from bridge.run.trainer import Run
from bridge.types import Quantization
from bridge.weights import fp8
from bridge_environments import registry
from tests import gloo_transfer, scenarios
from tests.cpu.test_fp8 import QUANTIZED_PARITY
from tests.listener import Listener
from tests.models import tiny

ROWS: Quantization = "fp8_per_channel"
"""vLLM's only kind of FP8 that runs on a CPU without AMX."""
ROOT = Path(__file__).parents[2]
FEEDS: dict[str, Any] = {
    "mode": "none", "reload": "transfer", "training_steps": 3, "batch_size": 64, "group_size": 8, "lr": 3e-3,
    "max_new_tokens": 16, "environment": f"{scenarios.ENVIRONMENT}:Vowels",
}  # fmt: skip
DYING = """
import json, sys
from tests import gloo_transfer
from tests.cpu.test_transfer import trained
from pathlib import Path
gloo_transfer.send_over_gloo(dies_after=7)
trained(sys.argv[1], Path(sys.argv[2]), model_name=sys.argv[3])
"""


def trained(url: str, folder: Path, **choices: Any) -> list[dict[str, Any]]:
    """Train on the server at `url`, or the one of this manifest, and return the metrics of each step."""
    config = TrainConfig.of(**FEEDS | {"servers": url, "save_path": folder / "saved"} | choices)
    Run(
        config, registry.load(config.task), RunDirectory.create(folder / "run", environment="vowels"), Listener()
    ).train()
    return scenarios.metrics(folder / "run")


@contextmanager
def fed_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, shares_weights: bool, quantization: Quantization | None = None
) -> Iterator[str]:
    """Run a vLLM that receives over gloo, and yield its address."""
    gloo_transfer.install(folder / "site")
    monkeypatch.syspath_prepend(folder / "site")  # a patched server loads the plugins that this process finds
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'site'}{os.pathsep}{ROOT}")
    if not shares_weights:
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    model = tiny.write(tiny.qwen2(), folder / "model", std=0.06)
    config = ServeConfig(
        model=str(model), port=free_port("127.0.0.1"), max_model_len=2048, quantization=quantization,
        vllm_config_path=folder / "manifest.json",
    )  # fmt: skip
    flags = [*scenarios.EAGER, "--weight-transfer-config", '{"backend": "nccl"}']
    command = scenarios.with_forked_engine(ServerCommand.of(config, flags, shares_weights=shares_weights))
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    with StartedServer(command, folder / "serve.log", limit_s=scenarios.START_LIMIT_S).running():
        yield f"http://127.0.0.1:{config.port}"


def test_stock_server_never_serves_half_sent_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gloo_transfer.send_over_gloo(replace=monkeypatch.setattr)
    with fed_server(tmp_path, monkeypatch, shares_weights=False) as url:
        model = str(tmp_path / "model")
        before = scenarios.sampled(url)
        steps = trained(url, tmp_path / "first", model_name=model)
        scenarios.equals_the_samples_after(
            tmp_path / "first" / "saved" / "step_3", before, scenarios.sampled(url), device="cpu"
        )
        scenarios.check_metrics(tmp_path / "first" / "run")
        assert [step["weight_version"] for step in steps] == [1, 2, 3]
        assert served_checksums(url).items() >= checksums(tmp_path / "first" / "saved" / "step_3").items()
        served = httpx.get(f"{url}/weight_info").json()["weight_version"]
        assert served.startswith(f"{tmp_path / 'first' / 'run'}: version 3 (")

        dying = [sys.executable, "-P", "-c", DYING, url, str(tmp_path / "second"), model]
        died = subprocess.run(dying, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert httpx.get(f"{url}/is_paused").json() == {"is_paused": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "1", "max_tokens": 1}, timeout=2)
        with pytest.raises(AttachError, match="is paused"):
            trained(url, tmp_path / "third", model_name=model)


def test_stock_server_quantizes_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gloo_transfer.send_over_gloo(replace=monkeypatch.setattr)
    with fed_server(tmp_path, monkeypatch, shares_weights=False, quantization=ROWS) as url:
        assert served_checksums(url).items() >= rows_in_fp8(tmp_path / "model").items()
        trained(url, tmp_path / "first", model_name=str(tmp_path / "model"))
        saved = tmp_path / "first" / "saved" / "step_3"
        assert served_checksums(url).items() >= {**checksums(saved), **rows_in_fp8(saved)}.items()
        differences = [step["logprob_diff_mean"] for step in scenarios.metrics(tmp_path / "first" / "run")]
        assert all(0.005 < difference < QUANTIZED_PARITY for difference in differences), differences


@pytest.mark.slow
def test_patched_server_reports_the_version_of_each_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gloo_transfer.send_over_gloo(replace=monkeypatch.setattr)
    with fed_server(tmp_path, monkeypatch, shares_weights=True) as url:
        before = scenarios.sampled(url)
        steps = trained(str(tmp_path / "manifest.json"), tmp_path / "first", model_name=str(tmp_path / "model"))
        scenarios.equals_the_samples_after(
            tmp_path / "first" / "saved" / "step_3", before, scenarios.sampled(url), device="cpu"
        )
        assert [step["weight_version"] for step in steps] == [2, 3, 4]
        assert [step["staleness"] for step in steps] == [0, 0, 0]


def served_checksums(url: str) -> dict[str, str]:
    """Return vLLM's own checksum of each of its parameters."""
    answer = httpx.post(f"{url}/weight_checker", json={"action": "checksum"}, timeout=60)
    return {name.rpartition(":")[2]: text for name, text in answer.raise_for_status().json()["checksums"].items()}


def checksums(checkpoint: Path) -> dict[str, str]:
    """Return the same checksums for a checkpoint's parameters that vLLM keeps unchanged, under their own names."""
    model = scenarios.loaded(checkpoint)
    names = [name for name, _ in model.named_parameters() if "norm" in name]
    return {name: hashlib.sha256(_bytes(model.get_parameter(name))).hexdigest() for name in names}


def rows_in_fp8(model: Path) -> dict[str, str]:
    """Return the FP8 checksums of a layer that vLLM makes from one weight, and of one that it fuses from two."""
    weights = scenarios.loaded(model).state_dict()
    layer = "model.layers.1.mlp."
    gate_up = torch.cat([weights[f"{layer}{name}_proj.weight"] for name in ("gate", "up")])
    sums = {}
    for name, source in {"down": weights[f"{layer}down_proj.weight"], "gate_up": gate_up}.items():
        values, scales = fp8.quantized(source.to(torch.bfloat16), ROWS)
        for leaf, tensor in {"weight": values.t(), "weight_scale": scales}.items():
            sums[f"{layer}{name}_proj.{leaf}"] = hashlib.sha256(_bytes(tensor)).hexdigest()
    return sums


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
