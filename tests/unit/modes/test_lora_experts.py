"""`lora_only` with an adapter of routed experts: in the server's slots, saved, restored and refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bridge.errors import AttachError, UsageError
from bridge.weights import stored_tensors
from tests.models.families import FAMILIES
from tests.unit import toy_server
from tests.unit.modes.lora_runs import Running, World, world_in
from tests.unit.modes.lora_server import SLOT
from tests.unit.toy_server import FILLER

RANK = 8
UP = "model.layers.1.mlp.experts.lora.up_proj"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world_in(tmp_path, monkeypatch, FAMILIES["Qwen3-MoE"](), RANK) as world:
        world.export()
        yield world


def opened(world: World, handover: str = "memory", **choices: Any) -> Running:
    return world.opened(handover, lora_target_modules="all-linear,experts", lora_r=RANK, **choices)


def test_adapter_slot_contains_what_the_trainer_writes(world: World) -> None:
    running = opened(world)
    assert running.adapter_is_in_the_slot()
    a, b = world.server.toy.slots[UP]
    assert not b[SLOT].any()
    running.publish()
    assert (b[SLOT] == 0.25).all()
    assert (b[0] == FILLER).all()
    assert (a[0] == FILLER).all()
    assert running.adapter_is_in_the_slot()


def test_step_reaches_every_projection_of_chosen_experts(world: World) -> None:
    running = opened(world)
    running.publish()  # B is no longer zero
    model, ids = running.opened.model, torch.arange(3, 35).view(2, 16)
    model(ids).logits.float().logsumexp(-1).sum().backward()
    for name in running.opened.lr_factors:
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        if ".experts." in name:
            assert gradient.flatten(1).any(1).any(), name
    with torch.no_grad():
        up = model.get_submodule(UP).get_parameter("lora_B.default.weight")
        up.add_(up.grad, alpha=-1.0)
    assert torch.equal(world.server.toy.slots[UP][1][SLOT], up)


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_adapter_checkpoint_is_restored_in_trainer_and_server(world: World, handover: str) -> None:
    running = opened(world, handover)
    running.publish()
    saved, folder = running.adapter(), world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    running.publish()
    running.mode.restore(folder, version=40)
    assert all(torch.equal(saved[name], value) for name, value in running.adapter().items())
    if handover == "memory":
        assert running.adapter_is_in_the_slot()
    else:
        last = "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight"
        stored = load_file(folder / "adapter_model.safetensors")
        assert torch.equal(world.server.adapters["bridge-adapter-40"][last], stored[last])


def test_restored_adapter_is_checked_against_its_slots(world: World) -> None:
    running = opened(world)
    folder = world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    shard = world.server.toy.manifest.shards[0]
    stored_tensors.check_adapter(folder, shard)
    smaller = toy_server.with_slots(world.server.toy, RANK // 2).manifest.shards[0]
    with pytest.raises(UsageError, match=r"down_proj\.lora_A\.weight has shape \(8, 64\), its slot \(4, 64\)"):
        stored_tensors.check_adapter(folder, smaller)
    without = toy_server.with_slots(world.server.toy, RANK, without="experts").manifest.shards[0]
    with pytest.raises(UsageError, match=r"no slot for .*experts\.0\.down_proj"):
        stored_tensors.check_adapter(folder, without)


def test_adapter_without_some_experts_is_refused(world: World) -> None:
    """If one expert's adapter is missing, vLLM would fail; if all are, it would serve none."""
    running = opened(world)
    folder = world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    shard, file = world.server.toy.manifest.shards[0], folder / "adapter_model.safetensors"
    matrices = load_file(file)
    one = "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight"
    save_file({name: matrix for name, matrix in matrices.items() if name != one}, file)
    with pytest.raises(UsageError, match=rf"does not fit the server's slots: {re.escape(one)} is absent\nhint"):
        stored_tensors.check_adapter(folder, shard)
    others = {name: matrix for name, matrix in matrices.items() if ".experts." not in name}
    save_file(others, file)
    with pytest.raises(UsageError, match=r"experts\.0\.down_proj\.lora_A\.weight is absent; .*; and 45 more"):
        stored_tensors.check_adapter(folder, shard)
    settings = folder / "adapter_config.json"
    document = json.loads(settings.read_text())
    named = [name for name in document["target_modules"] if not name.endswith(("gate_proj", "up_proj", "down_proj"))]
    for plain in (named, None, ".*self_attn.*_proj"):
        settings.write_text(json.dumps(document | {"target_modules": plain}))
        stored_tensors.check_adapter(folder, shard)
    settings.write_text(json.dumps(document | {"target_modules": 7}))
    with pytest.raises(UsageError, match="cannot be read"):
        stored_tensors.check_adapter(folder, shard)


def test_server_without_expert_slots_is_refused(world: World) -> None:
    world.server.toy = toy_server.with_slots(world.server.toy, RANK, without="experts")
    world.export()
    with pytest.raises(AttachError, match=r"no slot .* 6 modules, the first: .*experts\.lora\.down_proj") as caught:
        opened(world)
    assert "bridge serve-vllm with --lora-experts" in caught.value.hint
    assert world.server.calls == ["POST lease"]
