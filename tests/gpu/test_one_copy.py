"""One copy on a GPU, CUDA graphs and torch.compile on: the CPU's scenarios, and what a GPU alone can show.

Not covered: sizes and speed (`benchmarks/one_copy.py`), tensor parallelism.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bridge.verify import bytes_allocated
from bridge.weights import manifest
from bridge.weights.attach import attach
from tests import scenarios
from tests.models import tiny
from tests.scenarios import LiveServer, bridge


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("llama")
    config = tiny.llama()
    config.head_dim = 64
    model = tiny.write(config, folder / "model", std=0.06)
    with scenarios.served(model, folder / "server", "--enable-sleep-mode") as server:
        yield server


def test_a_llama_trains_in_place_and_equals_its_checkpoint(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.trains_in_place(llama, tmp_path)


def test_a_checkpoint_is_restored_into_the_live_weights(llama: LiveServer, tmp_path: Path) -> None:
    first = llama.sample()
    scenarios.trained(llama, tmp_path)
    assert llama.sample() != first
    bridge("restore", llama.manifest.model, "--vllm-config-path", llama.path, folder=tmp_path)
    first_model = Path(llama.manifest.model)
    restored = {name: tensor.cpu() for name, tensor in attach(llama.manifest).model.named_parameters()}
    saved = load_file(first_model / "model.safetensors")
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items() if name in restored)
    bridge("restore", tmp_path / "saved" / "step_3", "--vllm-config-path", llama.path, folder=tmp_path)
    assert not torch.equal(
        attach(llama.manifest).model.get_parameter("model.norm.weight").cpu(), restored["model.norm.weight"]
    )


def test_a_trainer_with_a_copy_of_its_own_loads_each_version_in_place(llama: LiveServer, tmp_path: Path) -> None:
    bridge("restore", llama.manifest.model, "--vllm-config-path", llama.path, folder=tmp_path)
    scenarios.trains_in_place(llama, tmp_path, "--reload", "in-place", mode="none")


def test_verify_passes_and_leaves_the_weights_alone(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.verifies(llama, tmp_path)


def test_cuda_graphs_are_on(llama: LiveServer) -> None:
    assert "CUDA graph" in llama.child.log.read_text()


def test_attaching_allocates_nothing(llama: LiveServer) -> None:
    attached = attach(llama.manifest)
    assert bytes_allocated(attached).status == "PASS"
    assert attached.device.type == "cuda"


def test_a_manifest_of_another_gpu_is_refused_with_both_named(llama: LiveServer, tmp_path: Path) -> None:
    document = json.loads(llama.path.read_text())
    document["gpu_uuid"] = "GPU-00000000-0000-0000-0000-000000000000"
    path = tmp_path / manifest.MANIFEST_NAME
    path.write_text(json.dumps(document))
    told = bridge("verify", "--vllm-config-path", path, folder=tmp_path, expect=4).stderr
    assert "GPU-00000000" in told
    assert f"{torch.cuda.get_device_properties(0).uuid}" in told


def test_doctor_finds_nothing_wrong_beside_a_live_server(llama: LiveServer, tmp_path: Path) -> None:
    told = bridge("doctor", "--json", "--vllm-config-path", llama.path, folder=tmp_path).stdout
    checks = [json.loads(line) for line in told.splitlines()]
    assert not [check for check in checks if check["status"] == "FAIL"], checks
    assert [check for check in checks if "CUDA IPC" in check["name"] and check["status"] == "PASS"], checks
