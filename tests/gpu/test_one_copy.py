"""One copy on a GPU with CUDA graphs and torch.compile: the scenarios of the CPU tests, and GPU-only behavior.

Not covered: sizes and speed (`benchmarks/one_copy.py`), tensor parallelism.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from bridge.checks.one_copy_proof import bytes_allocated
from bridge.errors import AttachError
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.server.protocol import VERSION_HEADER
from bridge.weights.attach import attach
from tests import scenarios
from tests.fenced import publish
from tests.models import tiny
from tests.scenarios import LiveServer, bridge

GIB = 2**30
LEAST_KV_SHARE = 0.1
"""Fraction of the GPU. `scenarios.served` gives a tiny model twice as much, nearly all of it for the KV cache."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("llama")
    config = tiny.llama()
    config.head_dim = 64
    model = scenarios.with_defaults_of_its_own(tiny.write(config, folder / "model", std=0.06))
    with scenarios.served(model, folder / "server") as server:
        yield server


def test_models_sampling_defaults_are_ignored(llama: LiveServer) -> None:
    with httpx.Client(base_url=llama.manifest.url, timeout=120, trust_env=False) as http:
        scenarios.samples_the_whole_distribution(llama, http)


def test_llama_trains_in_place_and_matches_its_checkpoint(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.trains_in_place(llama, tmp_path)


def test_checkpoint_is_restored_into_the_live_weights(llama: LiveServer, tmp_path: Path) -> None:
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


def test_trainer_with_its_own_copy_reloads_in_place(llama: LiveServer, tmp_path: Path) -> None:
    bridge("restore", llama.manifest.model, "--vllm-config-path", llama.path, folder=tmp_path)
    scenarios.trains_in_place(llama, tmp_path, "--reload", "in-place", mode="none")


def test_verify_passes_without_changing_weights(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.verifies(llama, tmp_path)


def test_cuda_graphs_are_enabled(llama: LiveServer) -> None:
    assert "CUDA graph" in llama.child.log.read_text()


def test_attaching_allocates_nothing(llama: LiveServer) -> None:
    attached = attach(llama.manifest)
    assert bytes_allocated(attached).status == "PASS"
    assert attached.device.type == "cuda"


def fill_the_gpu() -> torch.Tensor:
    """Allocate all but 2 GiB of the free memory, and write to it."""
    return torch.ones(torch.cuda.mem_get_info()[0] - 2 * GIB, dtype=torch.uint8, device="cuda")


def test_trainer_can_use_the_kv_caches_memory_in_the_fence(llama: LiveServer) -> None:
    attached, samples = attach(llama.manifest), llama.sample()
    weights = {name: tensor.clone() for name, tensor in attached.model.named_parameters()}
    before, total = torch.cuda.mem_get_info()
    inside: list[int] = []

    def prepare() -> None:
        inside.append(torch.cuda.mem_get_info()[0])
        fill_the_gpu()
        assert all(torch.equal(weights[name], tensor) for name, tensor in attached.model.named_parameters())

    with BridgeClient(llama.manifest, timeout_s=60) as client:
        assert client.status().can_sleep
        version = client.status().version
        times = publish(fence.publish(client, Update(sleep=True)), prepare=prepare)
    assert times.version == version + 1
    assert inside[0] - before > LEAST_KV_SHARE * total
    assert inside[0] - torch.cuda.mem_get_info()[0] > LEAST_KV_SHARE * total
    assert scenarios.same_samples(llama.sample(), samples)


def test_kv_cache_wakes_once_memory_is_free(llama: LiveServer) -> None:
    attach(llama.manifest)
    samples, kept = llama.sample(), list[torch.Tensor]()
    with BridgeClient(llama.manifest, timeout_s=60) as client:
        version = client.status().version
        with pytest.raises(AttachError, match="GiB are needed, and") as refused:
            publish(fence.publish(client, Update(sleep=True)), lambda: kept.append(fill_the_gpu()))
        assert "\n" not in refused.value.message
        assert (client.status().state, client.status().version) == ("paused", version)
        with pytest.raises(AttachError, match="GiB are needed, and"):
            client.publish()
        kept.clear()
        torch.cuda.empty_cache()
        assert client.publish().version == version + 1
    assert scenarios.same_samples(llama.sample(), samples)


def test_error_before_the_first_write_frees_the_memory(llama: LiveServer) -> None:
    attach(llama.manifest)
    samples = llama.sample()

    def prepare() -> None:
        room = fill_the_gpu()
        raise ZeroDivisionError(len(room))

    with BridgeClient(llama.manifest, timeout_s=60) as client:
        before = client.status()
        with pytest.raises(ZeroDivisionError):
            publish(fence.publish(client, Update(sleep=True)), lambda: pytest.fail("it wrote"), prepare=prepare)
        assert client.status() == before
    assert scenarios.same_samples(llama.sample(), samples)


def test_in_flight_requests_survive_a_kv_cache_sleep(llama: LiveServer) -> None:
    num_tokens = 2000
    body = {"model": llama.manifest.model, "prompt": [5, 6, 7], "n": 16, "max_tokens": num_tokens, "ignore_eos": True}
    http = httpx.Client(base_url=llama.manifest.url, timeout=120, trust_env=False)
    with http, BridgeClient(llama.manifest, timeout_s=60) as client, ThreadPoolExecutor() as background:
        before = client.status().version
        pending = background.submit(http.post, "/v1/completions", json=body)
        time.sleep(0.5)
        assert not pending.done(), "it ended before the fence: request more tokens"
        publish(fence.publish(client, Update(sleep=True)))
        answer = pending.result().raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == 16 * num_tokens
    assert answer.headers[VERSION_HEADER] == f"{before}-{before + 1}"


def test_manifest_of_a_different_gpu_is_refused_naming_both(llama: LiveServer, tmp_path: Path) -> None:
    document = json.loads(llama.path.read_text())
    document["gpu_uuid"] = "GPU-00000000-0000-0000-0000-000000000000"
    path = tmp_path / manifest.MANIFEST_NAME
    path.write_text(json.dumps(document))
    stderr = bridge("verify", "--vllm-config-path", path, folder=tmp_path, expect=4).stderr
    assert "GPU-00000000" in stderr
    assert f"{torch.cuda.get_device_properties(0).uuid}" in stderr


def test_doctor_passes_with_a_live_server(llama: LiveServer, tmp_path: Path) -> None:
    output = bridge("doctor", "--json", "--vllm-config-path", llama.path, folder=tmp_path).stdout
    checks = [json.loads(line) for line in output.splitlines()]
    assert not [check for check in checks if check["status"] == "FAIL"], checks
    assert [check for check in checks if "CUDA IPC" in check["name"] and check["status"] == "PASS"], checks
