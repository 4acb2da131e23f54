"""`none` with the real vLLM on the CPU: the trainer's own copy reaches the server by a restart, or in place.

Not covered: servers that are no vLLM (`tests/unit/test_none.py`).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from bridge.checks.verify import NEW_TOKENS, sample
from bridge.config import ServeConfig, TrainConfig
from bridge.rollouts.sampler import Sampler
from bridge.run import loop
from bridge.run.metrics import StepMetrics
from bridge.run.reporting import Listener
from bridge.run.run_directory import RunDirectory
from bridge.server.endpoint import Endpoint
from bridge.types import Group
from cli.engine import StartedServer
from cli.serve import free_port
from cli.server_command import ServerCommand
from environments import registry
from tests import scenarios
from tests.models import tiny

ENVIRONMENT = f"{scenarios.ENVIRONMENT}:Vowels"
ONE_STEP = ("--batch-size", "16", "--group-size", "4", "--lr", "3e-3", "--max-new-tokens", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("none") / "model", std=0.06)


@dataclass(frozen=True)
class Stock:
    """A vLLM without our patches, which is started again."""

    engine: StartedServer
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sample(self) -> list[Group]:
        with Sampler(max_new_tokens=NEW_TOKENS, temperature=1.0, timeout_s=120) as sampler:
            return sample(sampler, Endpoint(url=self.url), tiny.VOCABULARY)


@contextmanager
def stock(model: Path, log: Path) -> Iterator[Stock]:
    config = ServeConfig(model=str(model), port=free_port("127.0.0.1"), max_model_len=2048)
    command = ServerCommand.of(config, scenarios.EAGER, shares_weights=False)
    with StartedServer(command, log, limit_s=scenarios.START_LIMIT_S).running() as engine:
        yield Stock(engine, config.port)


def test_in_place_the_server_gets_each_checkpoint_without_a_restart(model: Path, tmp_path: Path) -> None:
    with scenarios.served(model, tmp_path / "server") as server:
        scenarios.trains_in_place(server, tmp_path, "--reload", "in-place", mode="none")
        pid = server.manifest.server.pid
        assert server.child.is_alive()
        assert server.child.process.pid == pid
        scenarios.verifies(server, tmp_path)
    assert not (tmp_path / "run" / "served").exists()


def test_a_stock_server_is_another_process_after_each_step_and_serves_what_was_trained(
    model: Path, tmp_path: Path
) -> None:
    pids: list[int | None] = []
    with stock(model, tmp_path / "serve.log") as server:
        assert httpx.get(f"{server.url}/bridge/status").status_code == httpx.codes.NOT_FOUND
        before = server.sample()
        pids.append(server.engine.pid)

        def report(_: StepMetrics) -> None:
            pids.append(server.engine.pid)

        config = TrainConfig.of(
            model_name=str(model), mode="none", training_steps=3, save_interval=1, batch_size=64, group_size=8, lr=3e-3,
            max_new_tokens=16, vllm_port=server.port, save_path=tmp_path / "saved", environment=ENVIRONMENT,
        )  # fmt: skip
        run = RunDirectory.create(tmp_path / "run", environment="vowels")
        summary = loop.train(config, registry.load(config.task), run, Listener(report), process=server.engine)
        scenarios.equals_the_samples_after(tmp_path / "saved" / "step_2", before, server.sample(), device="cpu")
    assert len({*pids}) == 3, pids
    steps = scenarios.metrics(tmp_path / "run")
    assert [step["weight_version"] for step in steps] == [1, 2, 2]  # the server ends with the run: no last restart
    assert all(step["logprob_diff_mean"] < scenarios.PARITY_LIMIT for step in steps), steps
    assert summary.weight_bytes == sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())


@pytest.mark.slow
def test_every_second_step_reaches_the_server_and_the_log_probabilities_say_so(model: Path, tmp_path: Path) -> None:
    done = scenarios.bridge(
        *("run", "--mode", "none", "--model", model, "--training-steps", "5", "--vllm-restart-interval", "2"),
        *("--environment", ENVIRONMENT, *ONE_STEP, "--max-model-len", "2048"),
        *("--port", str(free_port("127.0.0.1")), "--run-dir", tmp_path / "run", "--save-path", tmp_path / "saved"),
        folder=tmp_path,
    )
    steps = scenarios.metrics(tmp_path / "run")
    assert [step["weight_version"] for step in steps] == [0, 1, 1, 2, 2]
    fresh, stale = [steps[0], steps[2]], [steps[1], steps[3]]
    assert max(step["logprob_diff_mean"] for step in fresh) < scenarios.PARITY_LIMIT
    assert min(step["logprob_diff_mean"] for step in stale) > 3 * max(step["logprob_diff_mean"] for step in fresh)
    started = re.findall(r"=== .*started.* ===", (tmp_path / "run" / "serve.log").read_text())
    assert len(started) == 3, started
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "served").exists()
