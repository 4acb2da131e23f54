"""`lora_only` with the real vLLM on the CPU: trained by both hand-overs in turn, resumed, torn and mended.

Not covered: the slots themselves (`test_lora_slots.py`), refusals, which need no vLLM (`tests/unit/test_lora_only.py`).
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.config import ServeConfig
from bridge.server.client import BridgeClient
from bridge.server.protocol import Status
from cli.engine import StartedServer
from cli.serve import free_port
from cli.server_command import ServerCommand
from tests import disturbed, scenarios
from tests.disturbed import Disturbance
from tests.ground import UNEVEN
from tests.models import tiny
from tests.scenarios import LiveServer

KILLED_IN_STEP = 3
NUM_MATRICES = 2 * 7 * 2
"""A and B of seven projections in two layers."""
LIMIT_S = 240


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("lora_only")
    model = tiny.write(tiny.llama(), folder / "model", std=0.06)
    with scenarios.served(model, folder / "server", max_lora_rank=scenarios.LORA_RANK) as server:
        yield server


def status(server: LiveServer) -> Status:
    with BridgeClient(server.manifest, timeout_s=60) as client:
        return client.status()


def adapter_flags(handover: str) -> tuple[str, ...]:
    return "--mode", "lora_only", "--lora-handover", handover, "--lora-r", str(scenarios.LORA_RANK)


def test_an_adapter_is_trained_whatever_run_was_there_before(llama: LiveServer, tmp_path: Path) -> None:
    for number, handover in enumerate(("memory", "disk", "memory")):
        folder = tmp_path / str(number)
        folder.mkdir()
        scenarios.trains_an_adapter(llama, folder, handover)


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_a_run_goes_on_from_its_adapter_and_takes_each_step_once(
    llama: LiveServer, tmp_path: Path, handover: str
) -> None:
    base = llama.sample()
    scenarios.trained(llama, tmp_path, *adapter_flags(handover), steps=2)
    told = scenarios.trained(llama, tmp_path, *adapter_flags(handover), "--resume", steps=4).stderr
    assert f"going on after step 2, from {tmp_path / 'saved' / 'adapter_step_2'}" in told
    assert "the base is the server's own, 0 bytes of it here" in told
    steps = scenarios.metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[0]["weight_version"] < steps[1]["weight_version"] < steps[2]["weight_version"]
    assert all(step["logprob_diff_mean"] < scenarios.PARITY_LIMIT for step in steps), steps
    scenarios.serves_the_adapter(llama, tmp_path / "saved" / "adapter_step_4", base)


def killed_while_it_writes(server: LiveServer, folder: Path, *flags: str) -> int:
    """Train until the trainer kills itself after half of its third write; return its pid."""
    (folder / "uneven.py").write_text(UNEVEN)
    killed = Disturbance(fault="SIGKILL", phase="writing", step=KILLED_IN_STEP, num_pieces=NUM_MATRICES // 2)
    argv = [sys.executable, "-c", disturbed.program(killed), "train", *adapter_flags("memory"), *flags]
    argv += ["--model-name", server.manifest.model, "--environment", "uneven.py:Uneven", "--training-steps", "5"]
    argv += ["--batch-size", "8", "--group-size", "4", "--lr", "3e-3", "--max-new-tokens", "16"]
    argv += ["--vllm-config-path", str(server.path), "--run-dir", "run", "--save-path", "saved"]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as trainer:
        try:
            said = trainer.communicate(timeout=LIMIT_S)[1]
        finally:
            trainer.kill()
    assert trainer.returncode == -signal.SIGKILL, said.decode()
    return trainer.pid


def check_named(server: LiveServer, folder: Path, remedy: Path, trainer_pid: int) -> None:
    """Check that doctor says what is torn, by whom, and what mends it."""
    printed = scenarios.bridge("doctor", "--json", "--vllm-config-path", server.path, folder=folder, expect=3).stdout
    (fence,) = [row for row in map(json.loads, printed.splitlines()) if row["name"] == "Fence"]
    assert (fence["status"], fence["remedy"]) == ("FAIL", f"bridge restore {remedy}")
    assert "the adapter may be half-written" in fence["found"]
    assert f"process {trainer_pid} died inside the fence" in fence["found"]


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (("--save-interval", "1"), f"saved/adapter_step_{KILLED_IN_STEP - 1}"),
        ((), "run/served/bridge-adapter"),  # before the first checkpoint
    ],
)
def test_an_adapter_left_torn_is_named_and_mended_and_the_base_is_as_it_was(
    llama: LiveServer, tmp_path: Path, flags: tuple[str, ...], remedy: str
) -> None:
    base, whole = llama.sample(), tmp_path / remedy
    pid = killed_while_it_writes(llama, tmp_path, *flags)
    torn = status(llama)
    assert (torn.state, torn.writes, torn.last_checkpoint) == ("torn", "adapter", str(whole))
    check_named(llama, tmp_path, whole, pid)
    for handover in ("memory", "disk"):
        again = ("--save-path", "elsewhere", "--run-dir", f"refused_{handover}")
        refused = scenarios.bridge(
            *("train", *adapter_flags(handover), *again, "--model-name", llama.manifest.model),
            *("--vllm-config-path", llama.path),
            folder=tmp_path,
            expect=4,
        )
        assert refused.stderr.splitlines()[-1] == f"hint: bridge restore {whole}"
        assert not (tmp_path / f"refused_{handover}").exists()
    told = scenarios.bridge("restore", "--json", whole, "--vllm-config-path", llama.path, folder=tmp_path).stdout
    assert json.loads(told)["version"] == torn.version + 1 == status(llama).version
    assert status(llama).state == "serving"
    if flags:
        scenarios.serves_the_adapter(llama, whole, base)
    else:  # it is new still: B is zero
        assert scenarios.adapter_name(llama.manifest.url) == "bridge-adapter"
        assert scenarios.alike(llama.sample("bridge-adapter"), llama.sample())
    assert scenarios.alike(llama.sample(), base)


def test_a_run_that_goes_on_mends_the_adapter_by_itself(llama: LiveServer, tmp_path: Path) -> None:
    base = llama.sample()
    killed_while_it_writes(llama, tmp_path, "--save-interval", "1")
    scenarios.trained(llama, tmp_path, *adapter_flags("memory"), "--resume", steps=4)
    assert [step["step"] for step in scenarios.metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert status(llama).state == "serving"
    scenarios.serves_the_adapter(llama, tmp_path / "saved" / "adapter_step_4", base)


@contextmanager
def stock(model: Path, log: Path) -> Iterator[int]:
    """Run a vLLM without our patches, which takes adapters, and give its port."""
    config = ServeConfig(
        model=str(model), port=free_port("127.0.0.1"), max_model_len=2048, max_lora_rank=scenarios.LORA_RANK
    )
    command = ServerCommand.of(config, scenarios.EAGER, shares_weights=False)
    with StartedServer(command, log, limit_s=scenarios.START_LIMIT_S).running():
        yield config.port


def test_beside_a_stock_server_the_base_is_a_second_copy_and_the_adapter_goes_by_disk(tmp_path: Path) -> None:
    model = tiny.write(tiny.llama(), tmp_path / "model", std=0.06)
    with stock(model, tmp_path / "serve.log") as port:
        url = f"http://127.0.0.1:{port}"
        told = scenarios.bridge(
            *("train", *adapter_flags("disk"), "--vllm-port", str(port), "--model-name", str(model), "--lr", "3e-3"),
            *("--environment", f"{scenarios.ENVIRONMENT}:Vowels", "--training-steps", "2", "--max-new-tokens", "16"),
            *("--run-dir", tmp_path / "run", "--save-path", tmp_path / "saved"),
            folder=tmp_path,
        ).stderr
        after = scenarios.sampled(url, scenarios.adapter_name(url))
    assert "the base is a second copy" in told
    assert "no manifest" in told
    scenarios.equals_the_adapters_samples(model, tmp_path / "saved" / "adapter_step_2", after, device="cpu")
    assert [step["weight_version"] for step in scenarios.metrics(tmp_path / "run")] == [1, 2]
