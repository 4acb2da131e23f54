"""`bridge run --gpus 2` on the CPU: two real vLLMs are trained in lockstep, and one of them may be lost.

Not covered: what ranks compute (`tests/unit/ranks/test_ranks.py`), and NCCL.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from bridge.core.address import free_port
from bridge.errors import ServerUnreachableError
from bridge.processes.leash import GRACE_S
from bridge.server import manifest
from bridge_cli.rank_process import MAIN
from tests import scenarios
from tests.models import tiny

pytestmark = pytest.mark.slow
BATCH_SIZE = 16
LIMIT_S = 400.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("model"), std=0.06)


def command(model: Path, folder: Path, *more: str, gpus: int = 2) -> list[str]:
    is_stock = "none" in more and "in-place" not in more  # it writes no manifest
    return [
        sys.executable, "-c", "from bridge_cli.main import main; main()", "run", "--gpus", str(gpus),
        "--model", str(model), "--environment", f"{scenarios.ENVIRONMENT}:Vowels",
        "--run-dir", str(folder / "run"), "--lr", str(scenarios.LR),
        "--batch-size", str(BATCH_SIZE), "--group-size", "4", "--max-new-tokens", "12",
        "--max-model-len", str(scenarios.MAX_MODEL_LEN), "--port", str(free_port("127.0.0.1")),
        *([] if is_stock else ["--vllm-config-path", str(folder / manifest.MANIFEST_NAME)]),
        *more, "--", *scenarios.EAGER,
    ]  # fmt: skip


def started(argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(argv, env={**os.environ, **scenarios.IN_THE_ENGINE}, stdout=output, stderr=output)


def run(model: Path, folder: Path, *more: str, gpus: int = 2) -> None:
    folder.mkdir(exist_ok=True)
    process = started(command(model, folder, *more, gpus=gpus), folder / "out")
    assert process.wait(LIMIT_S) == 0, (folder / "out").read_text()[-4000:]


def metrics(folder: Path) -> list[dict[str, object]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def content(checkpoint: Path) -> dict[str, bytes]:
    """Return every tensor of a checkpoint, the optimizer's state included."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {
        f"{file.name}/{name}": bytes(tensor.view(-1).contiguous().untyped_storage())
        for file in files
        for name, tensor in load_file(file).items()
    }


def wait_for_steps(folder: Path, process: subprocess.Popen[bytes], count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len(metrics(folder)) < count:
        assert process.poll() is None, (folder / "out").read_text()[-4000:]
        assert time.monotonic() < deadline, (folder / "out").read_text()[-4000:]
        time.sleep(0.1)


def everything(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def ranks_of(tree: Sequence[psutil.Process], number: int) -> list[psutil.Process]:
    return [process for process in tree if MAIN in process.cmdline() and process.environ()["RANK"] == str(number)]


def left(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S + 10)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_replicas_train_in_lockstep_and_resume_at_any_size(model: Path, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(model, whole, "--training-steps", "3", "--save-interval", "2")
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    assert all(row["updates"] == 1 and float(str(row["logprob_diff_mean"])) < scenarios.PARITY_LIMIT for row in rows)
    assert {
        number for line in (whole / "run" / "rollouts.jsonl").open() for number in [json.loads(line)["number"]]
    } == {*range(3 * BATCH_SIZE // 4)}
    checkpoints = whole / "run" / "checkpoints"
    new_checkpoints = resumed / "checkpoints"
    shutil.copytree(checkpoints / "step_2", new_checkpoints / "step_2")
    continued = "--resume", "--save-path", str(new_checkpoints), "--training-steps"
    run(model, resumed, *continued, "3")
    assert content(new_checkpoints / "step_3") == content(checkpoints / "step_3"), (
        "a resumed run is not the same to the bit"
    )
    assert metrics(resumed)[0]["rollouts"] == rows[2]["rollouts"]
    run(model, resumed, *continued, "4", gpus=1)
    run(model, resumed, *continued, "5")
    assert [row["step"] for row in metrics(resumed)] == [3, 4, 5]
    state = json.loads((new_checkpoints / "step_5" / "optimizer" / "state.json").read_text())
    assert set(state["steps"].values()) == {5}


WAYS = {
    "an adapter by memory": ("--mode", "lora_only", "--lora-r", "8"),
    "an adapter by disk": ("--mode", "lora_only", "--lora-r", "8", "--lora-handover", "disk"),
    "a state in host memory, of the most uncertain tokens": ("--offload-optimizer", "--top-entropy", "0.5"),
    "updates in the backward pass": ("--gradient-release",),
    "a copy in place": ("--mode", "none", "--reload", "in-place"),
    "a stream": (
        "--max-staleness", "3", "--skip-without-signal", "--updates-per-batch", "2", "--optimizer", "adamw-8bit",
        "--eval-samples", "2", "--eval-interval", "2", "--save-interval", "1", "--keep-last", "1",
    ),
}  # fmt: skip


FEWER = "an adapter by disk", "a copy in place", "updates in the backward pass"
"""Ways of publishing whose parts are tested with toy servers (`tests/unit/modes/test_none_ranks.py`) or without one."""


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.several) if way in FEWER else way for way in WAYS])
def test_every_way_of_publishing_works_on_two_ranks(model: Path, tmp_path: Path, way: str) -> None:
    run(model, tmp_path, "--training-steps", "5", *WAYS[way])
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    fresh = [row for row in rows if row["staleness"] == 0 and row["updates"]]  # a step may have no signal
    assert fresh
    assert all(float(str(row["logprob_diff_mean"])) < scenarios.PARITY_LIMIT for row in fresh)
    numbers = [json.loads(line)["number"] for line in (tmp_path / "run" / "rollouts.jsonl").open()]
    assert len(numbers) == len({*numbers}) >= 5 * BATCH_SIZE // 4
    assert len([*(tmp_path / "run" / "checkpoints").iterdir()]) == 1


def test_stock_servers_restart_with_their_ranks_copy(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, "--training-steps", "4", "--mode", "none", "--vllm-restart-interval", "2")
    rows = metrics(tmp_path)
    assert [row["weight_version"] for row in rows] == [0, 1, 1, 1]
    fresh = [float(str(row["logprob_diff_mean"])) for row in rows if row["step"] in (1, 3)]
    assert max(fresh) < scenarios.PARITY_LIMIT
    for log in (tmp_path / "run" / "serve.log", tmp_path / "run" / "ranks" / "1" / "serve.log"):
        assert re.findall(r"vLLM is (?:restarted with \S+/)?(\w+), ", log.read_text()) == ["started", "version_1"]
    assert not [*(tmp_path / "run").rglob("version_*")]


def test_dead_server_is_restarted_without_losing_a_step(model: Path, tmp_path: Path) -> None:
    process = started(command(model, tmp_path, "--training-steps", "12"), tmp_path / "out")
    wait_for_steps(tmp_path, process, 2)
    (pid,) = re.findall(r"starting vLLM \(pid (\d+)", (tmp_path / "run" / "ranks" / "1.log").read_text())
    os.kill(int(pid), signal.SIGKILL)
    assert process.wait(LIMIT_S) == 0, (tmp_path / "out").read_text()[-4000:]
    assert [row["step"] for row in metrics(tmp_path)] == [*range(1, 13)]
    output = (tmp_path / "out").read_text()
    assert "the server died" in output
    assert len(re.findall(r"vLLM is ready", output)) == 1, "the first rank's server was restarted, too"


def test_server_that_fails_to_start_ends_the_run(model: Path, tmp_path: Path) -> None:
    process, log = started(command(model, tmp_path), tmp_path / "out"), tmp_path / "run" / "ranks" / "1.log"
    while not (pids := re.findall(r"starting vLLM \(pid (\d+)", log.read_text() if log.exists() else "")):
        assert process.poll() is None, (tmp_path / "out").read_text()[-4000:]
        time.sleep(0.05)
    tree = everything(process)
    os.kill(int(pids[0]), signal.SIGKILL)
    assert process.wait(LIMIT_S) == ServerUnreachableError.exit_code
    assert not left(tree)
    output = (tmp_path / "out").read_text()
    assert f"error: vLLM (pid {pids[0]}) ended with SIGKILL" in output
    assert "vLLM is ready" not in output
    assert "Traceback" not in output


def test_killed_rank_ends_the_run_with_weights_saved(model: Path, tmp_path: Path) -> None:
    process = started(command(model, tmp_path, "--training-steps", "500"), tmp_path / "out")
    wait_for_steps(tmp_path, process, 2)
    tree = everything(process)
    (rank,) = ranks_of(tree, 1)
    rank.kill()
    assert process.wait(LIMIT_S) == 1
    assert not left(tree)
    output = (tmp_path / "out").read_text()
    assert "error: rank 1 of 2 was killed by SIGKILL" in output
    assert "Traceback" not in output
    (saved,) = re.findall(r"without the optimizer's state, are in (\S+)", output)
    assert load_file(Path(saved, "model.safetensors"))


@pytest.mark.core
def test_lost_rank_restarts_a_run_of_verified_servers(model: Path, tmp_path: Path) -> None:
    choices = "--training-steps", "50000", "--save-interval", "1", "--keep-last", "2", "--restarts", "1"
    process = started(command(model, tmp_path, *choices), tmp_path / "out")
    wait_for_steps(tmp_path, process, 2)
    verify = [
        sys.executable,
        "-c",
        "from bridge_cli.main import main; main()",
        "verify",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    proof = subprocess.run(verify, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert proof.returncode == 0, proof.stderr
    assert re.search(r"PASS  replicas: 2 servers have equal checksums of \d+ tensors, version \d+", proof.stderr)
    assert proof.stderr.count("PASS  checksums") == 2
    (rank,) = ranks_of(everything(process), 1)
    num_steps = len(metrics(tmp_path))
    rank.kill()
    wait_for_steps(tmp_path, process, num_steps + 5)
    process.send_signal(signal.SIGINT)  # instead of a number of steps, since `verify` may take longer
    assert process.wait(LIMIT_S) == 130, (tmp_path / "out").read_text()[-4000:]
    steps = [row["step"] for row in metrics(tmp_path)]
    assert steps == [*range(1, len(steps) + 1)]
    assert all(1 <= float(str(row["rank_token_balance"])) < 2 for row in metrics(tmp_path) if row["updates"])
    output = (tmp_path / "out").read_text()
    assert "rank 1 of 2 was killed by SIGKILL; restarting from the newest checkpoint, 0 restarts left" in output
    assert "Traceback" not in output


def test_no_process_outlives_a_killed_launcher(model: Path, tmp_path: Path) -> None:
    process = started(command(model, tmp_path, "--training-steps", "500"), tmp_path / "out")
    wait_for_steps(tmp_path, process, 1)
    tree = everything(process)
    process.kill()
    process.wait()
    assert not left(tree)
