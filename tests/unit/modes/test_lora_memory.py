"""`lora_only --lora-handover memory`: where base and adapter are stored, and the order of requests to the server.

Not covered: the adapter itself (`tests/unit/weights/test_adapter.py`).
"""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bridge.errors import AttachError, ManifestError, ServerUnreachableError, UsageError
from bridge.ranks.world import Ranks
from bridge.server.client import BridgeClient
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import as_json
from tests.unit.modes.lora_runs import RANK, World, world_in
from tests.unit.modes.lora_server import refusal
from tests.unit.several_ranks import on_ranks
from tests.unit.toy_server import FILLER, ToyServer

HANDOVERS = pytest.mark.parametrize("handover", ["memory", "disk"])


def test_opening_unloads_earlier_adapters_and_fills_the_slot(world: World) -> None:
    world.export()
    world.serve_earlier()
    running = world.opened("memory")
    server = world.server
    assert server.calls == [
        "POST lease", "GET models", "POST unload_lora_adapter", "POST adapter", "POST pause", "POST publish",
    ]  # fmt: skip
    assert list(server.adapters) == ["mine"]
    assert server.bodies["POST adapter"]["name"] == "bridge-adapter" == running.mode.endpoint.model
    assert (server.bodies["POST pause"]["writes"], server.bodies["POST pause"]["sleep"]) == ("adapter", False)
    assert running.mode.version == server.version == 5
    assert running.mode.endpoint.version is None  # the server reports it
    assert running.adapter_is_in_the_slot()


def test_base_is_shared_without_extra_memory(world: World) -> None:
    world.export()
    running = world.opened("memory")
    assert running.opened.weight_bytes == 0
    assert running.base_is_the_servers()
    assert world.notes == ["the base model is the server's own: this process holds 0 bytes of it"]


@HANDOVERS
def test_only_the_adapter_is_trained(world: World, handover: str) -> None:
    world.export()
    running = world.opened(handover)
    trained = {name for name, parameter in running.opened.model.named_parameters() if parameter.requires_grad}
    assert trained == running.opened.lr_factors.keys()
    assert all("lora_" in name for name in trained)


def test_other_slots_are_not_changed(world: World) -> None:
    world.export()
    world.opened("memory").publish()
    others = [side[0, 0] for pair in world.server.toy.slots.values() for side in pair]
    assert len(others) == 28
    assert all((side == FILLER).all() for side in others)


def test_step_writes_between_pause_and_publish(world: World, tmp_path: Path) -> None:
    world.export()
    running = world.opened("memory", in_flight="abort")
    last = tmp_path / "adapter_step_1"
    assert running.calls(lambda: running.publish(last_checkpoint=last)) == ["POST pause", "write", "POST publish"]
    assert running.mode.version == 6
    pause = world.server.bodies["POST pause"]
    assert (pause["in_flight"], pause["writes"], pause["takeover"]) == ("abort", "adapter", False)
    assert pause["last_checkpoint"] == str(last)
    assert running.adapter_is_in_the_slot()


def test_step_may_use_the_memory_of_a_sleeping_kv_cache(world: World) -> None:
    world.export()
    running = world.opened("memory")
    assert running.mode.can_sleep
    calls = running.calls(lambda: running.publish(prepare=lambda: world.server.calls.append("prepare"), sleep=True))
    assert calls == ["POST pause", "prepare", "write", "POST publish"]
    assert world.server.bodies["POST pause"]["sleep"] is True


def test_initial_adapter_repairs_a_torn_server(world: World) -> None:
    world.export()
    running = world.opened("memory")
    before = running.adapter()
    running.publish()
    named = Path(world.server.bodies["POST pause"]["last_checkpoint"])
    assert named == world.scratch / "bridge-adapter"
    stored = load_file(named / "adapter_model.safetensors")
    for name, a in before.items():
        if "lora_A" in name:
            assert torch.equal(stored[f"base_model.model.{name.replace('.default', '')}"], a)


@HANDOVERS
def test_adapter_checkpoint_is_restored_in_trainer_and_server(world: World, handover: str) -> None:
    world.export()
    running = world.opened(handover)
    running.publish()
    saved, folder = running.adapter(), world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    running.publish()
    running.mode.restore(folder, version=40)
    assert all(torch.equal(saved[name], value) for name, value in running.adapter().items())
    assert running.mode.version == 40
    if handover == "memory":
        assert running.adapter_is_in_the_slot()
    else:
        assert list(world.server.adapters) == world.scratch_folders() == ["bridge-adapter-40"]


def test_checkpoint_is_restored_on_a_torn_server(world: World) -> None:
    world.export()
    running = world.opened("memory")
    folder = world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    world.server.state = "torn"
    assert running.calls(lambda: running.mode.restore(folder, version=9)) == ["POST pause", "POST publish"]
    assert (running.mode.version, world.server.status().state) == (9, "serving")
    assert world.server.bodies["POST pause"]["last_checkpoint"] == str(folder)


def test_mismatched_adapter_is_refused_before_a_pause(world: World) -> None:
    world.export()
    running = world.opened("memory")
    folder = world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    (folder / "adapter_model.safetensors").unlink()
    world.server.calls.clear()
    with pytest.raises(UsageError):
        running.mode.restore(folder, version=1)
    assert world.server.calls == []


def test_torn_server_is_refused_with_the_fix(world: World) -> None:
    world.export()
    world.server.state = "torn"
    assert world.refused("memory", AttachError, "the adapter may be half-written").startswith("bridge restore ADAPTER")


def test_resuming_run_repairs_a_torn_adapter(world: World) -> None:
    world.export()
    world.server.state = "torn"
    world.opened("memory", resumes=True)
    assert world.server.status().state == "serving"
    assert world.server.bodies["POST pause"]["takeover"] is True


def test_resuming_run_does_not_repair_torn_weights(world: World) -> None:
    world.export()
    world.server.state, world.server.writes = "torn", "weights"
    world.refused("memory", AttachError, "the weights may be half-written", resumes=True)


def test_slots_with_a_different_rank_are_refused(world: World) -> None:
    world.export()
    hint = world.refused("memory", AttachError, f"slots have rank {RANK}, but the adapter has rank 2", lora_r=2)
    for way_out in (f"--lora-r {RANK};", "bridge serve-vllm --max-lora-rank 2", "--lora-handover disk"):
        assert way_out in hint
    assert world.server.calls == ["POST lease"]
    assert world.scratch_folders() == []


def test_slots_with_different_shapes_are_refused(world: World) -> None:
    slots = world.server.toy.manifest.shards[0].lora_slots
    first, other = (f"model.layers.0.self_attn.{name}" for name in ("k_proj", "q_proj"))
    world.export(lora_slots={**slots, first: slots[other]})
    world.refused(
        "memory", ManifestError, rf"1 modules do not match the shapes of the modules' weights, the first: {first}"
    )
    assert world.server.calls == ["POST lease"]


def test_module_without_a_slot_is_refused_by_name(world: World) -> None:
    world.server.toy = toy_server.with_slots(world.server.toy, RANK, without="down_proj")
    world.export()
    hint = world.refused("memory", AttachError, r"no slot .* 2 modules, the first: model\.layers\.0\.mlp\.down_proj")
    assert "--lora-target-modules" in hint
    assert world.server.calls == ["POST lease"]


def test_server_without_slots_is_refused(world: World) -> None:
    toy = world.server.toy
    world.server.toy = ToyServer(toy.edited(lora_slots={}), toy.tensors, toy.reference)
    world.export()
    hint = world.refused("memory", AttachError, "does not accept adapters, or its slots cannot be shared")
    assert hint == f"bridge serve-vllm --max-lora-rank {RANK}, without --fully-sharded-loras"


def test_adapter_refused_by_the_server_leaves_no_files(world: World) -> None:
    world.export()
    world.server.refuses["POST adapter"] = as_json({"error": "no room", "hint": "make some"}, 409)
    assert world.refused("memory", AttachError, "no room") == "make some"
    assert not world.scratch.exists()


def test_slot_with_unexpected_contents_is_refused(world: World) -> None:
    world.export()
    world.server.seats = lambda value: 2 * value
    world.refused("memory", AttachError, "does not hold the adapter")
    assert "POST pause" not in world.server.calls


def test_base_that_cannot_be_attached_is_refused(world: World) -> None:
    world.export(tp_degree=2)
    world.refused("memory", ManifestError, "tensor-parallel size 2")
    assert world.server.calls == ["POST lease"]


def test_missing_manifest_error_offers_both_fixes(world: World) -> None:
    hint = world.refused("memory", UsageError, "trains the adapter in vLLM's own memory, but no manifest")
    assert "bridge serve-vllm --max-lora-rank" in hint
    assert "--lora-handover disk" in hint


@HANDOVERS
def test_second_trainer_is_refused_before_loading(world: World, monkeypatch: pytest.MonkeyPatch, handover: str) -> None:
    world.export()
    world.server.refuses["POST lease"] = refusal("another trainer is updating this server", "wait")
    for way in ("shared_vllm.attach", "lora.attach", "lora.loaded.load"):
        monkeypatch.setattr(f"bridge.modes.{way}", lambda *_, **__: pytest.fail("the base is there"))
    with pytest.raises(AttachError, match="another trainer is updating this server"):
        world.opened(handover)
    assert world.server.calls == ["POST lease"]


@HANDOVERS
def test_lease_is_returned_even_if_nothing_was_opened(world: World, handover: str) -> None:
    world.export()
    mode = world.made(handover)
    assert world.server.bodies["POST lease"]["run"] == "runs/ours"
    mode.close()
    assert world.server.calls == ["POST lease", "DELETE lease"]


@HANDOVERS
def test_missing_manifest_named_by_the_user_is_an_error(world: World, handover: str) -> None:
    world.export()
    with pytest.raises(ManifestError, match="no manifest at"):
        world.made(handover, vllm_config_path=world.folder / "elsewhere.json")
    assert world.server.calls == []


@HANDOVERS
def test_model_that_is_not_served_is_refused(world: World, handover: str) -> None:
    exported = world.export()
    shutil.copytree(exported.model, world.folder / "other")
    with pytest.raises(ManifestError, match=f"the server serves {exported.model}"):
        world.made(handover, model_name=str(world.folder / "other"))
    assert world.server.calls == []


@HANDOVERS
def test_saved_adapter_names_its_base_by_an_absolute_path(world: World, handover: str) -> None:
    exported = world.export()
    running = world.opened(handover, model_name=os.path.relpath(exported.model))
    (world.folder / "saved").mkdir()
    running.mode.save(world.folder / "saved")
    assert peft.LoraConfig.from_pretrained(str(world.folder / "saved")).base_model_name_or_path == exported.model


@HANDOVERS
def test_parameters_survive_a_server_restart(world: World, handover: str) -> None:
    world.export()
    running = world.opened(handover)
    running.publish()
    before, parameters, version = running.adapter(), dict(running.opened.model.named_parameters()), running.mode.version
    running.mode.revive(None)
    assert dict(running.opened.model.named_parameters()).keys() == parameters.keys()
    assert all(running.opened.model.get_parameter(name) is old for name, old in parameters.items())
    assert all(torch.equal(before[name], value) for name, value in running.adapter().items())
    assert running.base_is_the_servers()
    assert running.mode.version == version + 1
    assert running.publish().version == running.mode.version == version + 2
    if handover == "memory":
        assert running.adapter_is_in_the_slot()
    else:
        assert list(world.server.adapters) == world.scratch_folders() == [f"bridge-adapter-{version + 2}"]


def revived(ranks: Ranks, folder: Path, handover: str) -> tuple[int, int]:
    """Kill the second rank's server before it publishes; return the versions then and after the next step."""
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.setattr(tiny, "write", lambda _, own: own)  # transformers would write on the first rank only
        patched.setattr(BridgeClient, "digests", lambda *_, **__: {})
        world = stack.enter_context(world_in(folder / str(ranks.rank), patched))
        world.ranks = ranks
        world.export()
        running = world.opened(handover)
        if ranks.rank == 1:
            world.server.refuses |= dict.fromkeys(("POST publish", "POST load_lora_adapter", "GET models"))
        with pytest.raises(ServerUnreachableError):
            running.publish()
        running.mode.revive(None)
        assert running.adapter_is_in_the_slot() or handover == "disk"
        return running.mode.version, running.publish().version


@pytest.mark.parametrize(("handover", "version"), [("memory", 7), ("disk", 2)])
def test_all_servers_agree_on_a_version_after_one_died(tmp_path: Path, handover: str, version: int) -> None:
    for rank in range(2):
        tiny.write(tiny.llama(), tmp_path / str(rank) / "model")
    assert on_ranks(2, revived, tmp_path, handover) == [(version, version + 1)] * 2
