"""`lora_only --lora-handover disk`: the base it trains on, and how the server gets each version.

Not covered: what both handovers have in common (`test_lora_memory.py`).
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.core.interrupt import deferred_interrupt
from bridge.errors import AttachError, ServerUnreachableError, UnsupportedModelError, UsageError
from tests.models import tiny
from tests.unit.checks_sample import dead_server
from tests.unit.http_server import Answer, as_json, serving
from tests.unit.modes.lora_runs import World, weight_bytes
from tests.unit.modes.lora_server import LoraServer


@pytest.mark.parametrize("stock", [False, True])
def test_each_adapter_version_replaces_the_previous_one(world: World, stock: bool) -> None:
    if not stock:
        world.export()
    world.serve_earlier()
    choices: dict[str, Any] = {"vllm_port": world.port} if stock else {}
    running = world.opened("disk", **choices)
    server, mode = world.server, running.mode
    connects, checks = (["GET models"], []) if stock else (["POST lease"], ["GET status", "DELETE adapter"])
    serves = ["GET models", "POST load_lora_adapter", "POST unload_lora_adapter"]
    assert server.calls == [*connects, "GET models", *checks, *serves]
    assert list(server.adapters) == ["mine", "bridge-adapter-4"]
    assert (mode.version, mode.can_sleep) == (4, False)
    assert running.calls(running.publish) == ["write", "POST load_lora_adapter", "POST unload_lora_adapter"]
    assert (mode.version, mode.endpoint.model, mode.endpoint.version) == (5, "bridge-adapter-5", 5)
    assert list(server.adapters) == ["mine", "bridge-adapter-5"]
    assert world.scratch_folders() == ["bridge-adapter-5"]
    stored = server.adapters["bridge-adapter-5"]
    for name, matrix in running.adapter().items():
        scaling = 8 if "lora_B" in name else 1
        assert torch.equal(stored[f"base_model.model.{name.replace('.default', '')}"] * scaling, matrix)


@pytest.mark.parametrize("stock", [False, True])
def test_adapter_names_are_never_reused_across_runs(world: World, stock: bool) -> None:
    """A server that keeps running caches prefixes of earlier adapters, which vLLM looks up by the adapter's name."""
    if not stock:
        world.export()
    choices: dict[str, Any] = {"vllm_port": world.port} if stock else {}
    names = list[str]()
    folder = world.folder / "adapter_step_1"
    folder.mkdir()
    for resumes in (False, False, True):
        running = world.opened("disk", resumes=resumes, **choices)
        names += world.server.adapters
        running.publish()
        names += world.server.adapters
        running.mode.save(folder)
        running.mode.restore(folder, version=1)
        names += world.server.adapters
        running.mode.close()
        assert running.mode.version == int(names[-1].rpartition("-")[2])
    assert len(names) == len(set(names)) == 9


def test_unrelated_adapter_name_is_not_read_as_a_version(world: World) -> None:
    world.export()
    world.server.adapters |= {"bridge-adapter-mine": {}, "bridge-adapter-": {}}
    assert world.opened("disk").mode.version == 0


def test_base_is_shared_if_a_manifest_exists(world: World) -> None:
    world.export()
    running = world.opened("disk")
    assert running.opened.weight_bytes == sum(tensor.nbytes for tensor in running.adapter().values()) > 0
    assert running.base_is_the_servers()
    assert not running.adapter_is_in_the_slot()
    assert world.notes == ["the base model is the server's own: this process holds 0 bytes of it"]


def test_base_is_a_second_copy_without_a_manifest(world: World) -> None:
    running = world.opened("disk", vllm_port=world.port)
    adapter_bytes = sum(tensor.nbytes for tensor in running.adapter().values())
    assert running.opened.weight_bytes == weight_bytes(world.server.toy) + adapter_bytes
    assert not running.base_is_the_servers()
    assert world.notes[0].startswith("the base model is a second copy, 0.00 GiB on cpu: no manifest")
    assert list(world.server.adapters) == ["bridge-adapter-0"]


def test_second_copy_follows_the_servers_max_length(world: World) -> None:
    frequencies = tiny.with_longrope(Path(world.server.toy.manifest.model), 64)
    world.refused("disk", UsageError, "the server does not report it", vllm_port=world.port)
    world.server.refuses["GET models"] = as_json({"data": [{"id": "tiny", "max_model_len": 65}]})
    running = world.opened("disk", vllm_port=world.port)
    torch.testing.assert_close(running.opened.model.model.rotary_emb.inv_freq, frequencies)


def test_second_copy_with_unsupported_rope_is_refused(world: World) -> None:
    tiny.with_longrope(Path(world.server.toy.manifest.model), 64)
    world.export(max_model_len=65, model_class="TransformersForCausalLM")
    world.refused("disk", UnsupportedModelError, "vLLM runs it as TransformersForCausalLM")


def test_base_that_cannot_be_attached_is_loaded(world: World) -> None:
    world.export(tp_degree=2)
    running = world.opened("disk")
    assert running.opened.weight_bytes > weight_bytes(world.server.toy)
    assert "second copy" in world.notes[0]
    assert "tensor-parallel size 2" in world.notes[0]


def test_stale_manifest_does_not_prevent_a_stock_server_run(world: World) -> None:
    world.export(server=dead_server())
    world.opened("disk", vllm_port=world.port)
    assert "is stale" in world.notes[0]
    assert "GET status" not in world.server.calls


def test_manifest_of_another_server_is_not_used(world: World) -> None:
    world.export()
    with serving(LoraServer(replace(world.server.toy))) as other:
        running = world.opened("disk", vllm_port=int(other.url.rpartition(":")[2]))
        assert not running.base_is_the_servers()
        assert running.mode.endpoint.url == other.url
    assert f"the manifest found here belongs to the server at {world.http.url}" in world.notes[0]
    assert world.server.calls == []


def test_step_computes_while_the_server_generates(world: World) -> None:
    world.export()
    running = world.opened("disk")
    world.server.calls.clear()
    times = running.publish(prepare=lambda: world.server.calls.append("prepare"))
    assert world.server.calls[:3] == ["prepare", "write", "POST load_lora_adapter"]
    assert times.pause_s == 0 < times.prepare_s


def test_interrupt_acts_immediately_while_preparing(world: World) -> None:
    world.export()
    running = world.opened("disk")
    world.server.calls.clear()
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        running.publish(prepare=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert world.server.calls == []


def test_checkpoint_is_served_as_its_or_the_next_version(world: World) -> None:
    world.export()
    running = world.opened("disk")
    folder = world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    for version, expected in ((7, 7), (3, 8)):
        running.mode.restore(folder, version=version)
        assert running.mode.version == expected
        assert list(world.server.adapters) == world.scratch_folders() == [f"bridge-adapter-{expected}"]


@pytest.mark.parametrize("resumes", [False, True])
def test_torn_server_is_refused_before_anything_changes(world: World, resumes: bool) -> None:
    world.export()
    world.server.state = "torn"
    hint = world.refused("disk", AttachError, "the adapter may be half-written", resumes=resumes)
    assert hint.startswith("bridge restore ADAPTER")
    assert world.server.calls == ["POST lease", "GET models", "GET status"]
    assert world.scratch_folders() == []


def test_server_without_adapters_is_refused(world: World) -> None:
    world.export()
    world.server.refuses["POST load_lora_adapter"] = Answer('{"detail":"Not SavedCheckpoint"}', 404)
    hint = world.refused("disk", UsageError, "does not accept the adapter: 404")
    assert "bridge serve-vllm --max-lora-rank" in hint
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in hint
    assert not world.scratch.exists()


@pytest.mark.parametrize("answer", [Answer("engine dead", 500), None])
@pytest.mark.parametrize("call", ["GET models", "POST load_lora_adapter"])
def test_server_error_is_not_reported_as_a_usage_error(world: World, call: str, answer: Answer | None) -> None:
    world.export()
    mode = world.made("disk")
    world.server.refuses[call] = answer
    with pytest.raises(ServerUnreachableError, match="does not answer as expected"):
        mode.open()
    assert mode.version == -1


def test_failed_publication_is_retried_without_a_rewrite(world: World) -> None:
    world.export()
    running = world.opened("disk")
    world.server.refuses["POST load_lora_adapter"] = None
    with pytest.raises(ServerUnreachableError):
        running.publish()
    assert running.mode.version == 0
    assert list(world.server.adapters) == ["bridge-adapter-0"]
    del world.server.refuses["POST load_lora_adapter"]
    running.publish()
    assert (running.mode.version, world.scratch_folders()) == (1, ["bridge-adapter-1"])


def test_second_copy_survives_a_server_restart(world: World) -> None:
    world.export(tp_degree=2)
    running = world.opened("disk")
    before = running.adapter()
    running.mode.revive(None)
    statuses = [request for request in world.http.requests if request.path == "/bridge/status"]
    assert [request.headers["authorization"] for request in statuses] == ["Bearer secret", "Bearer new"]
    assert not running.base_is_the_servers()
    assert all(torch.equal(before[name], value) for name, value in running.adapter().items())


def test_closing_leaves_the_adapter_served(world: World) -> None:
    world.export()
    world.opened("disk").mode.close()
    assert list(world.server.adapters) == ["bridge-adapter-0"]
