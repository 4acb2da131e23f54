"""LoRA slots with the real vLLM on the CPU: exported, filled by vLLM, written by another process, and served.

Not covered: training an adapter (`bridge/modes/lora.py`), and tensor parallelism, which exports no slots.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from bridge.checks.one_copy_proof import NUM_SAMPLES, logprob_diffs, verify
from bridge.config import SamplingConfig
from bridge.errors import AttachError
from bridge.modes.open_slots import OpenSlots
from bridge.passes.prepared_model import PreparedModel
from bridge.rollouts.sampler import Sampler
from bridge.server import api_key, fence
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update
from bridge.server.manifest import AnyHandle, SharedMemoryHandle
from bridge.types import Group
from bridge.weights import shared_memory
from bridge.weights.adapter import AdapterCopy
from bridge.weights.attach import attach
from tests import scenarios
from tests.fenced import publish
from tests.models import tiny
from tests.scenarios import LiveServer

RANK, ALPHA, LAYERS = 4, 8, 2
"""The adapters use half of their slots' rank."""
PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
MODULES = {
    f"model.layers.{layer}.{block}.{projection}"
    for layer in range(LAYERS)
    for block, projections in PROJECTIONS.items()
    for projection in projections
}
LORA = ("--enable-lora", "--max-loras", "1")
"""vLLM's own flags for adapters; the largest rank is vLLM's default, 16."""
PARITY_LIMIT = 0.06
"""In nats; above the limit without LoRA, since PEFT rounds the products of A and B to bf16, vLLM only the sum."""
BLOCK_TOKENS = 128
"""vLLM's cache block on the CPU: prefixes are cached from this length on."""
PROMPT = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}


def adapted(server: LiveServer, seed: int) -> Any:
    """Return the model in PEFT, with random A and B on every linear layer."""
    base = AutoModelForCausalLM.from_pretrained(server.manifest.model, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    fill(model, seed)
    return model


def fill(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def sides(model: Any, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and the scaled B of one module."""
    layer = model.get_submodule(f"base_model.model.{module}")
    return layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach() * ALPHA / RANK


def opened(handle: AnyHandle) -> torch.Tensor:
    assert isinstance(handle, SharedMemoryHandle)
    storage = shared_memory.open_storage(handle.path, handle.storage_size)
    dtype = getattr(torch, handle.dtype)
    return torch.empty(0, dtype=dtype).set_(storage, handle.tensor_offset, handle.shape, handle.stride)


def slots(server: LiveServer) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    exported = server.manifest.shards[0].lora_slots
    return {name: (opened(slot.lora_a), opened(slot.lora_b)) for name, slot in exported.items()}


def assert_slot_holds(server: LiveServer, slot: int, model: Any) -> None:
    for module, (lora_a, lora_b) in slots(server).items():
        a, b = sides(model, module)
        assert torch.equal(lora_a[slot, 0, :RANK], a), module
        assert torch.equal(lora_b[slot, 0, :, :RANK], b), module
        assert not lora_a[slot, 0, RANK:].any()
        assert not lora_b[slot, 0, :, RANK:].any()


def write(server: LiveServer, slot: int, model: Any) -> None:
    for module, (lora_a, lora_b) in slots(server).items():
        a, b = sides(model, module)
        lora_a[slot, 0, :RANK].copy_(a)
        lora_b[slot, 0, :, :RANK].copy_(b)


def sampled_long(server: LiveServer, name: str) -> list[Group]:
    """Sample completions of a prompt that is long enough to be cached."""
    prompt = tuple(3 + number % 97 for number in range(BLOCK_TOKENS + 40))
    endpoint = Endpoint(url=server.manifest.url, model=name)
    with Sampler(SamplingConfig(max_new_tokens=8, request_timeout_s=60)) as sampler:
        (completions,) = sampler.sample([endpoint], [prompt], num_samples=NUM_SAMPLES, seed=1)
    rewards = (0.0,) * NUM_SAMPLES
    return [Group(problem={"prompt": ""}, prompt_token_ids=prompt, completions=completions, rewards=rewards)]


def largest_difference(model: Any, groups: list[Group]) -> float:
    return logprob_diffs(PreparedModel(model.get_base_model()), groups).max().item()


def assert_verified(server: LiveServer) -> None:
    checks = list(verify(server.path, timeout_s=120))
    assert len(checks) >= 7
    assert [check.status for check in checks] == ["PASS"] * len(checks), checks


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_only_linear_layers_have_lora_slots(lora_llama: LiveServer) -> None:
    slots = lora_llama.manifest.shards[0].lora_slots
    assert slots.keys() == MODULES
    assert slots["model.layers.1.self_attn.k_proj"].lora_a.shape == (1, 1, scenarios.LORA_RANK, 128)
    assert slots["model.layers.1.self_attn.k_proj"].lora_b.shape == (1, 1, 64, scenarios.LORA_RANK)
    assert {slot.lora_a.dtype for slot in slots.values()} == {"bfloat16"}


def test_verify_passes_on_a_server_with_lora(lora_llama: LiveServer) -> None:
    assert_verified(lora_llama)


def test_server_uses_what_is_written_into_a_lora_slot(lora_llama: LiveServer, tmp_path: Path) -> None:
    model, base = adapted(lora_llama, seed=1), lora_llama.sample()
    with BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        slot = client.adapter("trained", saved(model, tmp_path / "adapter"))
        assert_slot_holds(lora_llama, slot, model)
        first = lora_llama.sample("trained")
        assert largest_difference(model, first) < PARITY_LIMIT
        for seed in (2, 3):
            fill(model, seed)
            with fence.publish(client, Update()):
                write(lora_llama, slot, model)
            assert largest_difference(model, lora_llama.sample("trained")) < PARITY_LIMIT
            assert largest_difference(model, first) > 5 * PARITY_LIMIT
            assert_slot_holds(lora_llama, slot, model)  # vLLM has not overwritten it with its own copy
        after = lora_llama.sample()
    assert scenarios.same_samples(after, base)


def test_concurrent_requests_for_both_names_keep_the_slot(lora_llama: LiveServer, tmp_path: Path) -> None:
    model = adapted(lora_llama, seed=4)
    with BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        slot = client.adapter("trained", saved(model, tmp_path / "adapter"))
        fill(model, 5)
        with fence.publish(client, Update()):
            write(lora_llama, slot, model)
    for _ in range(3):
        with ThreadPoolExecutor() as background:
            base, trained = background.map(lora_llama.sample, (None, "trained"))
        assert largest_difference(model, trained) < PARITY_LIMIT
        assert largest_difference(model, base) > 5 * PARITY_LIMIT
        with model.disable_adapter():
            assert largest_difference(model, base) < PARITY_LIMIT
    assert_slot_holds(lora_llama, slot, model)


def test_prompt_logprobs_of_several_requests_match_single_ones(lora_llama: LiveServer, tmp_path: Path) -> None:
    with BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        client.adapter("trained", saved(adapted(lora_llama, seed=13), tmp_path / "adapter"))
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13] * 9]
    http = httpx.Client(base_url=lora_llama.manifest.url, headers=api_key.headers(), timeout=120, trust_env=False)

    def scored(name: str, prompts: list[list[int]]) -> list[float]:
        body = {"model": name, "prompt": prompts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        choices = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        positions = [position for choice in choices for position in choice["prompt_logprobs"] if position]
        return [one["logprob"] for position in positions for one in position.values()]

    names = (lora_llama.manifest.model, "trained")
    with http, ThreadPoolExecutor() as background:
        alone = [[one for prompt in prompts for one in scored(name, [prompt])] for name in names]
        for _ in range(3):
            for expected, actual in zip(alone, background.map(lambda name: scored(name, prompts), names), strict=True):
                assert actual == pytest.approx(expected, abs=PARITY_LIMIT)


def test_second_run_takes_over_the_slot_of_the_first(lora_llama: LiveServer, tmp_path: Path) -> None:
    with BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        for seed in (6, 7):
            model = adapted(lora_llama, seed)
            assert client.adapter("trained", saved(model, tmp_path / "adapter")) == 0
            assert_slot_holds(lora_llama, 0, model)
            assert largest_difference(model, lora_llama.sample("trained")) < PARITY_LIMIT
        client.adapter("other", tmp_path / "adapter")
    http = httpx.Client(base_url=lora_llama.manifest.url, headers=api_key.headers(), trust_env=False)
    listed = http.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == [lora_llama.manifest.model, "other"]
    assert listed[1]["parent"] == lora_llama.manifest.model
    refused = http.post("/v1/completions", json={**PROMPT, "model": "trained"})
    assert refused.status_code == 404


def test_cached_adapter_prefix_is_dropped_when_weights_change(lora_llama: LiveServer, tmp_path: Path) -> None:
    model = adapted(lora_llama, seed=10)
    with BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        slot = client.adapter("trained", saved(model, tmp_path / "adapter"))
        assert largest_difference(model, sampled_long(lora_llama, "trained")) < PARITY_LIMIT
        fill(model, 11)
        write(lora_llama, slot, model)  # written without the fence, so the prompt's cached keys and values are stale
        assert largest_difference(model, sampled_long(lora_llama, "trained")) > PARITY_LIMIT
        publish(fence.publish(client, Update()))
        assert largest_difference(model, sampled_long(lora_llama, "trained")) < PARITY_LIMIT
        fill(model, 12)
        client.adapter("trained", saved(model, tmp_path / "adapter"))  # same name, same path
        assert largest_difference(model, sampled_long(lora_llama, "trained")) < PARITY_LIMIT


def opened_slots(server: LiveServer, client: BridgeClient, folder: Path) -> OpenSlots:
    return OpenSlots(attach(server.manifest), client, sorted(MODULES), folder)


def test_adapters_in_turn_in_a_slot_have_separate_caches(lora_llama: LiveServer, tmp_path: Path) -> None:
    models = [adapted(lora_llama, seed) for seed in (14, 15)]
    folders = [saved(model, tmp_path / str(number)) for number, model in enumerate(models)]
    with BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        slots = opened_slots(lora_llama, client, folders[0])
        for turn in range(3):
            for number, model in enumerate(models):
                name = f"{number}-{turn}"
                slots.serve(name, AdapterCopy.read(folders[number]))
                for _ in range(2):  # the second time, the prompt's keys and values are cached
                    assert largest_difference(model, sampled_long(lora_llama, name)) < PARITY_LIMIT
                assert largest_difference(models[1 - number], sampled_long(lora_llama, name)) > 5 * PARITY_LIMIT
                assert_slot_holds(lora_llama, slots.numbers[0], model)
        assert [model.id for model in client.models()] == [lora_llama.manifest.model, "1-2"]
        client.release_adapter()


def test_requests_in_flight_keep_the_slot_until_they_end(lora_llama: LiveServer, tmp_path: Path) -> None:
    models = [adapted(lora_llama, seed) for seed in (16, 17)]
    folders = [saved(model, tmp_path / str(number)) for number, model in enumerate(models)]
    body = {
        **PROMPT, "model": "first", "max_tokens": 400, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    http = httpx.Client(base_url=lora_llama.manifest.url, headers=api_key.headers(), timeout=120, trust_env=False)
    with http, ThreadPoolExecutor() as background, BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        slots = opened_slots(lora_llama, client, folders[0])
        slots.serve("first", AdapterCopy.read(folders[0]))
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            next(lines)  # it is in flight
            serving = background.submit(slots.serve, "second", AdapterCopy.read(folders[1]))
            while any(model.id == "first" for model in client.models()):
                assert not serving.done()
            assert not serving.done()
            assert_slot_holds(lora_llama, slots.numbers[0], models[0])
            assert http.post("/v1/completions", json={**PROMPT, "model": "first"}).status_code == 404
            (*_, last) = lines
        serving.result(60)
        usage = json.loads(last.removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 400, "it was not ended"
        assert_slot_holds(lora_llama, slots.numbers[0], models[1])
        assert largest_difference(models[1], lora_llama.sample("second")) < PARITY_LIMIT
        client.release_adapter()


def test_requests_end_when_their_adapter_is_replaced(lora_llama: LiveServer, tmp_path: Path) -> None:
    model = adapted(lora_llama, seed=8)
    body = {
        **PROMPT,
        "model": "trained",
        "max_tokens": 2000,
        "ignore_eos": True,
        "n": 16,
        "temperature": 1,
        "stream": True,
    }
    http = httpx.Client(base_url=lora_llama.manifest.url, headers=api_key.headers(), timeout=120)
    with http, BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        client.adapter("trained", saved(model, tmp_path / "adapter"))
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")  # it is in flight
            client.adapter("trained", tmp_path / "adapter")
            num_chunks = sum(line.startswith("data: ") for line in lines)
    assert num_chunks < 16 * 1900, "they ran to their end"
    assert largest_difference(model, lora_llama.sample("trained")) < PARITY_LIMIT


def test_unusable_adapter_is_refused_and_the_old_one_stays(lora_llama: LiveServer, tmp_path: Path) -> None:
    model = adapted(lora_llama, seed=9)
    with BridgeClient(lora_llama.manifest, timeout_s=120) as client:
        client.adapter("trained", saved(model, tmp_path / "adapter"))
        with pytest.raises(AttachError, match=r"no adapter_config\.json"):
            client.adapter("trained", tmp_path)
        assert largest_difference(model, lora_llama.sample("trained")) < PARITY_LIMIT
        with pytest.raises(AttachError, match="conflicts with a served base model"):
            client.adapter(lora_llama.manifest.model, tmp_path / "adapter")


def test_server_without_lora_names_the_missing_flag(llama: LiveServer, tmp_path: Path) -> None:
    assert llama.manifest.shards[0].lora_slots == {}
    with (
        BridgeClient(llama.manifest, timeout_s=60) as client,
        pytest.raises(AttachError, match="started without LoRA") as caught,
    ):
        client.adapter("trained", tmp_path)
    assert "bridge serve-vllm --max-lora-rank 16" in caught.value.hint


@pytest.mark.slow
def test_qwen2_with_lora_is_exported_completely(tmp_path: Path) -> None:
    model = tiny.write(tiny.qwen2(), tmp_path / "model", std=0.06)
    with scenarios.served(model, tmp_path / "server", *LORA) as server:
        assert server.manifest.shards[0].lora_slots.keys() == MODULES
        assert_verified(server)
        adapter = adapted(server, seed=1)
        with BridgeClient(server.manifest, timeout_s=120) as client:
            slot = client.adapter("trained", saved(adapter, tmp_path / "adapter"))
        assert_slot_holds(server, slot, adapter)
        assert largest_difference(adapter, server.sample("trained")) < PARITY_LIMIT
