"""`bridge run` on two GPUs of one host: equal replicas, parts that equal their checkpoint, and failures under NCCL.

Not covered: speed (`benchmarks/grpo.py`), exchanges without servers (`test_nccl.py`).
"""

import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import replicas
from bridge.checks.one_copy_proof import logprob_diffs
from bridge.passes.prepared_model import PreparedModel
from tests import scenarios
from tests.cpu import test_gpus
from tests.models import tiny

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHARE = "--gpu-memory-utilization", "0.2"
IN_PARTS = "--tensor-parallel-size", "2"
ADAPTER = "--mode", "lora_only", "--lora-r", str(scenarios.LORA_RANK)
GROWTH_LIMIT_MIB = 64.0
"""Limit for all processes of two ranks and two servers together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(config(), tmp_path_factory.mktemp("model"), std=0.06)


def config() -> LlamaConfig:
    made = tiny.llama()
    made.head_dim = 64
    return made


@pytest.mark.parametrize("parts", [1, 2])
def test_replicas_are_equal_after_every_step_and_memory_is_flat(model: Path, tmp_path: Path, parts: int) -> None:
    result = replicas.stays_equal(model, tmp_path, 2, parts)
    print(json.dumps(result))  # noqa: T201  pytest -s shows the result
    assert result["exit_code"] == 130, result
    assert result["digests"]["ranks"] == 2
    assert result["digests"]["steps"] >= replicas.STEPS
    assert parts == 2 or result["digests"]["equal"] == result["digests"]["steps"]
    assert result["digests"]["different_weights"] > 0.9 * replicas.STEPS
    assert all(growth < GROWTH_LIMIT_MIB for growth in result["growth_mib"].values()), result
    assert result["verify"]["exit_code"] == 0, result


@pytest.mark.parametrize("parts", [1, 2])
def test_killed_server_and_killed_rank_lose_no_step(model: Path, tmp_path: Path, parts: int) -> None:
    result = replicas.outlives_losses(model, tmp_path, 2, parts)
    print(json.dumps(result))  # noqa: T201  pytest -s shows the result
    assert (result["exit_code"], result["steps"]) == (0, replicas.FAULT_STEPS), result
    assert result["processes_left"] == 0
    assert parts == 2 or result["digests"]["equal"] == result["digests"]["steps"]


def test_run_resumes_on_one_two_and_one_ranks(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    kept = *SHARE, "--save-path", str(saved), "--training-steps"
    test_gpus.run(model, tmp_path, *kept, "3", gpus=2)
    test_gpus.run(model, tmp_path, "--resume", *kept, "5", gpus=1)
    test_gpus.run(model, tmp_path, "--resume", *kept, "7", gpus=2)
    test_gpus.run(model, tmp_path, "--resume", *IN_PARTS, *kept, "9", gpus=2)
    rows = test_gpus.metrics(tmp_path)
    assert [row["step"] for row in rows] == [*range(1, 10)]
    assert all(float(str(row["logprob_diff_mean"])) < scenarios.PARITY_LIMIT for row in rows)
    state = json.loads((saved / "step_9" / "optimizer" / "state.json").read_text())
    assert set(state["steps"].values()) == {9}


@pytest.mark.parametrize("way", [(), ADAPTER], ids=["all weights", "adapter"])
def test_tensor_parallel_weights_equal_their_checkpoint(tmp_path: Path, way: tuple[str, ...]) -> None:
    model = tiny.write(config(), tmp_path / "model", std=0.06)
    rank = scenarios.LORA_RANK if way else None
    with scenarios.served(model, tmp_path / "server", num_parts=2, max_lora_rank=rank) as server:
        before = server.sample()
        plain = scenarios.loaded(model).to("cuda")
        assert logprob_diffs(PreparedModel(plain), before).mean().item() < scenarios.PARITY_LIMIT
        scenarios.trained(server, tmp_path, *way)
        if way:
            scenarios.serves_the_adapter(server, tmp_path / "saved" / "adapter_step_3", before)
        else:
            saved = tmp_path / "saved" / "step_3"
            scenarios.equals_the_samples_after(saved, before, server.sample(), device="cuda")
        scenarios.check_metrics(tmp_path / "run")


@pytest.mark.parametrize("parts", [1, 2])
def test_ctrl_c_saves_the_last_step_and_leaves_nothing(model: Path, tmp_path: Path, parts: int) -> None:
    argv = test_gpus.command(
        model, tmp_path, *SHARE, "--tensor-parallel-size", str(parts), "--training-steps", "5000", gpus=2
    )
    process = test_gpus.started(argv, tmp_path / "out")
    test_gpus.wait_for_steps(tmp_path, process, 20)
    tree = test_gpus.everything(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(test_gpus.LIMIT_S) == 130, (tmp_path / "out").read_text()[-4000:]
    assert not test_gpus.left(tree)
    output = (tmp_path / "out").read_text()
    assert "Traceback" not in output
    last = test_gpus.metrics(tmp_path)[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step_{last}" / "optimizer").is_dir(), output[-3000:]
