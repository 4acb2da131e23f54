"""`lora_only` on a GPU with CUDA graphs and torch.compile: the CPU's scenario, and what only a GPU can show.

Not covered: sizes and speed (`benchmarks/lora.py`), resuming and failures (`tests/cpu/test_lora_only.py`).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.config import TrainConfig
from bridge.modes.lora import LoraMemory
from bridge.modes.mode import RunContext
from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from tests import scenarios
from tests.fenced import publish
from tests.models import tiny
from tests.scenarios import LiveServer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("llama")
    config = tiny.llama()
    config.head_dim = 64
    model = tiny.write(config, folder / "model", std=0.06)
    with scenarios.served(model, folder / "server", max_lora_rank=scenarios.LORA_RANK) as server:
        yield server


def test_an_adapter_is_trained_whatever_run_was_there_before(llama: LiveServer, tmp_path: Path) -> None:
    for number, handover in enumerate(("memory", "disk", "memory")):
        folder = tmp_path / str(number)
        folder.mkdir()
        scenarios.trains_an_adapter(llama, folder, handover)


def test_cuda_graphs_are_on(llama: LiveServer) -> None:
    assert "CUDA graph" in llama.child.log.read_text()


def test_base_and_adapter_take_no_memory_of_the_trainers_own(llama: LiveServer, tmp_path: Path) -> None:
    config = TrainConfig.of(
        model_name=llama.manifest.model, mode="lora_only", lora_r=scenarios.LORA_RANK, vllm_config_path=llama.path
    )
    mode = LoraMemory(config, RunContext(name="run", scratch=tmp_path / "served", note=lambda _: None))
    opened = mode.open()
    try:
        assert opened.weight_bytes == 0
        assert opened.device.type == "cuda"
        assert {opened.model.get_parameter(name).device.type for name in opened.lr_factors} == {"cuda"}
    finally:
        mode.close()


def test_an_adapter_in_its_slot_outlives_a_sleep_of_the_kv_cache(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.trains_an_adapter(llama, tmp_path, "memory")
    name = scenarios.adapter_name(llama.manifest.url)
    before = llama.sample(name)
    with BridgeClient(llama.manifest, timeout_s=60) as client:
        publish(fence.publish(client, Update(sleep=True), writes="adapter"))
    assert scenarios.same_samples(llama.sample(name), before)
    assert not scenarios.same_samples(llama.sample(), before)


def test_verify_passes_beside_an_adapter(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.verifies(llama, tmp_path)
