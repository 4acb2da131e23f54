"""A real vLLM without Bridge's patches, on the CPU: it gets weights by restarts, and adapters from disk.

Not covered: servers other than vLLM (`tests/unit/modes/test_none.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from bridge.checkpoints.metrics import StepMetrics
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import ServeConfig, TrainConfig
from bridge.core.address import free_port
from bridge.processes.server_command import ServerCommand
from bridge.processes.server_process import StartedServer
from bridge.run.trainer import Run
from bridge_environments import registry
from tests import scenarios
from tests.listener import Listener
from tests.models import tiny

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stock")]
ENVIRONMENT = f"{scenarios.ENVIRONMENT}:Vowels"


@dataclass(frozen=True)
class Stock:
    """An unpatched vLLM that can be restarted."""

    engine: StartedServer
    model: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def pid_of(engine: StartedServer) -> int:
    assert engine._server is not None
    return engine._server.process.pid


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    folder = tmp_path_factory.mktemp("stock")
    model = tiny.write(tiny.llama(), folder / "model", std=0.06)
    config = ServeConfig(
        model=str(model), port=free_port("127.0.0.1"), max_model_len=2048, max_lora_rank=scenarios.LORA_RANK
    )
    command = scenarios.with_forked_engine(ServerCommand.of(config, scenarios.EAGER, shares_weights=False))
    with StartedServer(command, folder / "serve.log", limit_s=scenarios.START_LIMIT_S).running() as engine:
        yield Stock(engine, model, config.port)


def test_stock_server_gets_the_adapter_by_disk(stock: Stock, tmp_path: Path) -> None:
    stderr = scenarios.bridge(
        *("train", "--mode", "lora_only", "--lora-handover", "disk", "--lora-r", str(scenarios.LORA_RANK)),
        *("--vllm-port", str(stock.port), "--model-name", stock.model, "--lr", str(scenarios.LR)),
        *("--environment", ENVIRONMENT, "--training-steps", "2", "--max-new-tokens", "16"),
        *("--run-dir", tmp_path / "run", "--save-path", tmp_path / "saved"),
        folder=tmp_path,
    ).stderr
    after = scenarios.sampled(stock.url, scenarios.adapter_name(stock.url))
    assert "the base model is a second copy" in stderr
    assert "no manifest" in stderr
    scenarios.equals_the_adapters_samples(stock.model, tmp_path / "saved" / "adapter_step_2", after, device="cpu")
    assert [step["weight_version"] for step in scenarios.metrics(tmp_path / "run")] == [1, 2]


def test_stock_server_restarts_with_the_trained_weights(stock: Stock, tmp_path: Path) -> None:
    assert httpx.get(f"{stock.url}/bridge/status").status_code == httpx.codes.NOT_FOUND
    before, pids = scenarios.sampled(stock.url), [pid_of(stock.engine)]

    def report(_: StepMetrics) -> None:
        pids.append(pid_of(stock.engine))

    config = TrainConfig.of(
        model_name=str(stock.model), mode="none", training_steps=3, save_interval=1, batch_size=64, group_size=8,
        lr=3e-3, max_new_tokens=16, vllm_port=stock.port, save_path=tmp_path / "saved", environment=ENVIRONMENT,
    )  # fmt: skip
    run = RunDirectory.create(tmp_path / "run", environment="vowels")
    summary = Run(config, registry.load(config.task), run, Listener(report), process=stock.engine).train()
    after = scenarios.sampled(stock.url)
    scenarios.equals_the_samples_after(tmp_path / "saved" / "step_2", before, after, device="cpu")
    assert len({*pids}) == 3, pids
    steps = scenarios.metrics(tmp_path / "run")
    assert [step["weight_version"] for step in steps] == [1, 2, 2]  # the server ends with the run: no final restart
    assert all(step["logprob_diff_mean"] < scenarios.PARITY_LIMIT for step in steps), steps
    whole = load_file(stock.model / "model.safetensors")
    assert summary.weight_bytes == sum(tensor.nbytes for tensor in whole.values())
