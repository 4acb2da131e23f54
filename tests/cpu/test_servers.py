"""`bridge train` on servers that were started separately and keep running: one in parts, or several replicas.

Not covered: which servers are refused (`tests/cli/test_running_servers.py`), and servers that a run starts
(`test_gpus.py`).
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import scenarios
from tests.cpu.test_gpus import BATCH_SIZE, LIMIT_S, everything, left, metrics, started, wait_for_steps
from tests.models import tiny

pytestmark = pytest.mark.slow
BRIDGE = sys.executable, "-c", "from bridge_cli.main import main; main()"


def trainer(model: Path, folder: Path, *more: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    argv = [
        *BRIDGE, "train", "--model-name", str(model), "--environment", f"{scenarios.ENVIRONMENT}:Vowels",
        "--run-dir", str(folder / "run"), "--lr", str(scenarios.LR), "--batch-size", str(BATCH_SIZE),
        "--group-size", "4", "--max-new-tokens", "12", *more,
    ]  # fmt: skip
    return started(argv, folder / "out")


def train(model: Path, folder: Path, *more: str) -> str:
    process = trainer(model, folder, *more)
    assert process.wait(LIMIT_S) == 0, (folder / "out").read_text()[-4000:]
    return (folder / "out").read_text()


def is_exact(row: dict[str, object]) -> bool:
    return row["updates"] == 1 and float(str(row["logprob_diff_mean"])) < scenarios.PARITY_LIMIT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("model"), std=0.06)


def test_sharded_server_can_be_reattached_after_a_kill(model: Path, tmp_path: Path) -> None:
    with scenarios.served(model, tmp_path / "server", num_parts=2) as server:
        named = "--vllm-config-path", str(server.path)
        process = trainer(model, tmp_path / "killed", *named, "--training-steps", "1000", "--save-interval", "1")
        wait_for_steps(tmp_path / "killed", process, 2)
        refused = trainer(model, tmp_path / "refused", *named, "--training-steps", "1")
        assert refused.wait(LIMIT_S) == 4
        assert (
            f"run {tmp_path / 'killed' / 'run'}) is updating this server" in (tmp_path / "refused" / "out").read_text()
        )
        assert not (tmp_path / "refused" / "run").exists()
        tree = everything(process)
        process.kill()
        process.wait()
        assert left([one for one in tree if "VLLM" not in one.name()]) == []
        resumed = train(model, tmp_path / "killed", *named, "--resume", "--training-steps", "6")
        assert "resuming after step" in resumed
        rows = metrics(tmp_path / "killed")
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert all(map(is_exact, rows))
        verified = subprocess.run([*BRIDGE, "verify", *named], capture_output=True, text=True, check=False)
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_replicas_train_on_existing_servers(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(scenarios.served(model, tmp_path / name)) for name in ("a", "b")]
        paths = [server.path for server in servers]
        both = "--servers", f"{paths[0]},{servers[1].manifest.url}"
        train(model, tmp_path / "first", *both, "--training-steps", "3")
        assert all(map(is_exact, metrics(tmp_path / "first")))
        numbers = {json.loads(line)["number"] for line in (tmp_path / "first" / "run" / "rollouts.jsonl").open()}
        assert numbers == {*range(3 * BATCH_SIZE // 4)}
        train(model, tmp_path / "alone", "--vllm-config-path", str(paths[0]), "--training-steps", "1")
        differ = trainer(model, tmp_path / "differ", *both, "--training-steps", "1")
        assert differ.wait(LIMIT_S) != 0
        assert "the servers of replicas 0 and 1 differ" in (tmp_path / "differ" / "out").read_text()
        last = tmp_path / "first" / "run" / "checkpoints" / "step_3"
        for path in paths:
            restored = subprocess.run([*BRIDGE, "restore", str(last), "--vllm-config-path", str(path)], check=False)
            assert restored.returncode == 0
        versions = [server.status().version for server in servers]
        assert versions[0] != versions[1], "the first was trained alone"
        train(model, tmp_path / "second", *both, "--training-steps", "2")
        rows = metrics(tmp_path / "second")
        assert [row["weight_version"] for row in rows] == [max(versions) + 2, max(versions) + 3]
        assert all(map(is_exact, rows))


def test_lost_external_server_ends_the_run_with_its_last_step(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(scenarios.served(model, tmp_path / name)) for name in ("a", "b"))
        process = trainer(
            model, tmp_path / "run", "--servers", f"{first.path},{second.path}", "--training-steps", "1000"
        )
        wait_for_steps(tmp_path / "run", process, 2)
        os.kill(second.manifest.server.pid, signal.SIGKILL)
        assert process.wait(LIMIT_S) == 5
        assert first.status().state == "serving"
    text = (tmp_path / "run" / "out").read_text()
    assert "error: " in text
    assert "resume:     bridge train" in text
    last = metrics(tmp_path / "run")[-1]["step"]
    saved = tmp_path / "run" / "run" / "checkpoints" / f"step_{last}"
    assert (saved / "optimizer" / "state.json").exists()
