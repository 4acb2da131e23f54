"""`lora_only` on a GPU with CUDA graphs and torch.compile: the scenario of the CPU tests, and GPU-only behavior.

All layers of a mixture of experts with more than 100 million parameters are adapted, including its routed experts.

Not covered: sizes and speed (`benchmarks/lora.py`), resuming and failures (`tests/cpu/test_lora_only.py`).
"""

from collections.abc import Iterator
from math import sqrt
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from bridge.checks.one_copy_proof import logprob_diffs
from bridge.config import TrainConfig
from bridge.modes.lora import LoraMemory
from bridge.modes.mode import RunContext
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.routing import RouterReplay
from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.weights.attach import attach
from tests import family_proof, scenarios
from tests.fenced import publish
from tests.gpu.test_families import ENGINE, LEAST_PARAMETERS
from tests.gpu.test_router_replay import CONFIG
from tests.models import tiny
from tests.scenarios import LiveServer

APART = 4
"""Minimum ratio of the base's distance from the server to that of PEFT with the adapter."""
EXPERTS_TELL = 2
"""Minimum ratio for PEFT without the experts' adapter: 3.3 at this learning rate, 1.0 if none is served."""
OF_EXPERTS = ("--mode", "lora_only", "--lora-r", str(scenarios.LORA_RANK), "--lr", "1e-3", "--lora-target-modules")
"""Learning rate; at 4e-3, every completion of the third step had the highest reward, leaving nothing to learn."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("llama")
    config = tiny.llama()
    config.head_dim = 64
    model = tiny.write(config, folder / "model", std=0.06)
    with scenarios.served(model, folder / "server", max_lora_rank=scenarios.LORA_RANK) as server:
        yield server


def test_adapter_trains_on_a_previously_used_server(llama: LiveServer, tmp_path: Path) -> None:
    for number, handover in enumerate(("memory", "disk", "memory")):
        folder = tmp_path / str(number)
        folder.mkdir()
        scenarios.trains_an_adapter(llama, folder, handover)


def test_cuda_graphs_are_enabled(llama: LiveServer) -> None:
    assert "CUDA graph" in llama.child.log.read_text()


def test_base_and_adapter_use_no_trainer_memory(llama: LiveServer, tmp_path: Path) -> None:
    config = TrainConfig.of(
        model_name=llama.manifest.model, mode="lora_only", lora_r=scenarios.LORA_RANK, vllm_config_path=llama.path
    )
    mode = LoraMemory(config, RunContext(name="run", scratch=tmp_path / "served"))
    opened = mode.open()
    try:
        assert opened.weight_bytes == 0
        assert opened.device.type == "cuda"
        assert {opened.model.get_parameter(name).device.type for name in opened.lr_factors} == {"cuda"}
    finally:
        mode.close()


def test_adapter_in_a_slot_survives_a_kv_cache_sleep(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.trains_an_adapter(llama, tmp_path, "memory")
    name = scenarios.adapter_name(llama.manifest.url)
    before = llama.sample(name)
    with BridgeClient(llama.manifest, timeout_s=60) as client:
        publish(fence.publish(client, Update(sleep=True), writes="adapter"))
    assert scenarios.same_samples(llama.sample(name), before)
    assert not scenarios.same_samples(llama.sample(), before)


def test_verify_passes_with_an_adapter(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.verifies(llama, tmp_path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("mixture")
    model = tiny.write(CONFIG, folder / "model", std=family_proof.GAIN / sqrt(CONFIG.hidden_size))
    rank = scenarios.LORA_RANK
    with scenarios.served(model, folder / "server", *ENGINE, max_lora_rank=rank, lora_experts=True) as server:
        yield server


def test_routed_experts_are_trained_in_their_slots(mixture: LiveServer, tmp_path: Path) -> None:
    """Before training, the server matches the base model; afterward, it matches PEFT with the saved adapter."""
    slots = [name for name in mixture.manifest.shards[0].lora_slots if ".experts.lora." in name]
    assert len(slots) == 3 * CONFIG.num_hidden_layers
    digests, before = scenarios.digests(attach(mixture.manifest)), mixture.sample()
    scenarios.trained(mixture, tmp_path, *OF_EXPERTS, "all-linear,experts")
    scenarios.check_metrics(tmp_path / "run", parity_limit=scenarios.FAMILY_PARITY_LIMIT)
    scenarios.check_replay(tmp_path / "run", is_on=True)
    url = mixture.manifest.url
    after = scenarios.sampled(url, scenarios.adapter_name(url), experts=True)
    plain = scenarios.loaded(Path(mixture.manifest.model)).to("cuda")
    assert plain.num_parameters() > LEAST_PARAMETERS
    prepared = PreparedModel(plain)
    prepared.replay = RouterReplay.of(plain, (CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok))
    base, moved = (logprob_diffs(prepared, samples).mean().item() for samples in (before, after))
    folder = tmp_path / "saved" / "adapter_step_3"
    adapted = PeftModel.from_pretrained(plain, str(folder), autocast_adapter_dtype=False)  # into `plain` itself
    parity = logprob_diffs(prepared, after).mean().item()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".experts." in name and "lora_B" in name:
                parameter.zero_()
    without_experts = logprob_diffs(prepared, after).mean().item()
    measures = {"base": base, "parity": parity, "without experts": without_experts, "moved": moved}
    assert max(base, parity) < scenarios.FAMILY_PARITY_LIMIT, measures
    assert moved > APART * parity, measures
    assert without_experts > EXPERTS_TELL * parity, measures
    assert scenarios.digests(attach(mixture.manifest)) == digests
    scenarios.verifies(mixture, tmp_path)


def test_expert_adapter_is_loaded_from_disk(mixture: LiveServer, tmp_path: Path) -> None:
    scenarios.trained(mixture, tmp_path, *OF_EXPERTS, "experts", "--lora-handover", "disk")
    assert len(scenarios.metrics(tmp_path / "run")) == 3
    assert scenarios.adapter_name(mixture.manifest.url) == "bridge-adapter-3"
