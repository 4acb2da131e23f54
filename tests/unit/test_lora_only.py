"""The mode `lora_only`: whose base it trains on, what it says of it, and what stays the same when the server dies.

Not covered: what each hand-over asks of the server (`test_handover.py`), the adapter itself (`test_lora_adapter.py`).
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.config import TrainConfig
from bridge.errors import AttachError, ManifestError, UnsupportedModelError, UsageError
from bridge.modes.lora_only import LoraOnly
from bridge.run.run_directory import RunDirectory
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest
from bridge.weights.opened_model import OpenedModel
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.checks_sample import dead_server
from tests.unit.http_server import HttpServer, as_json, serving
from tests.unit.lora_server import SLOT, LoraServer, refusal
from tests.unit.toy_server import ToyServer

RANK = 4


@dataclass
class FakeEngine:
    """Starts a new server: other memory, no adapters, version 0, and another manifest in the old place."""

    server: LoraServer
    url: str
    path: Path
    started: list[str | Path] = field(default_factory=list)

    def restart(self, model: str | Path) -> None:
        self.started.append(model)
        self.server.toy = toy_server.with_slots(toy_server.serve(tiny.llama(), Path(model)), RANK)
        self.server.adapters.clear()
        self.server.version = 0
        manifests.write(self.server.toy.edited(url=self.url, token="new"), self.path)


@dataclass
class Running:
    mode: LoraOnly
    opened: OpenedModel
    server: LoraServer
    run: RunDirectory

    def adapter(self) -> dict[str, Tensor]:
        return {name: self.opened.model.get_parameter(name).detach().clone() for name in self.opened.lr_factors}

    def write(self) -> None:
        with torch.no_grad():
            for name in self.opened.lr_factors:
                self.opened.model.get_parameter(name).add_(0.25)

    def publish(self) -> int:
        return self.mode.publish(self.write, last_checkpoint=None).version

    def base_is_the_servers(self) -> bool:
        """Tell whether the server's memory is what the base computes with."""
        whole = self.server.toy.tensors["model.layers.0.mlp.down_proj.weight"]
        base = self.opened.model.get_submodule("model.layers.0.mlp.down_proj").base_layer.weight
        return bool(base.data_ptr() != 0 and _sees(whole, base))

    def adapter_is_in_the_slot(self) -> bool:
        a, b = self.server.toy.slots["model.layers.0.mlp.down_proj"]
        module: Any = self.opened.model.get_submodule("model.layers.0.mlp.down_proj")
        pairs = (a, module.lora_A["default"].weight), (b, module.lora_B["default"].weight)
        return all(_sees(there[SLOT, 0], here) for there, here in pairs)


def _sees(whole: Tensor, part: Tensor) -> bool:
    """Tell whether what is written into the one is read in the other, and put it back."""
    with torch.no_grad():
        before = whole[0, 0].item()
        whole[0, 0] = before + 1
        seen = part[0, 0].item() == whole[0, 0].item()
        whole[0, 0] = before
    return seen and bool(part[0, 0].item() == before)


@dataclass
class World:
    """A folder with a live server's manifest in it, as far as a trainer can tell."""

    server: LoraServer
    http: HttpServer
    folder: Path

    @property
    def manifest(self) -> Path:
        return self.folder / manifests.MANIFEST_NAME

    def export(self, **changes: Any) -> Manifest:
        exported = self.server.toy.edited(url=self.http.url, **changes)
        manifests.write(exported, self.manifest)
        return exported

    def made(self, **choices: Any) -> tuple[LoraOnly, RunDirectory]:
        fixed = {"model_name": self.server.toy.manifest.model, "mode": "lora_only", "lora_r": RANK}
        run = RunDirectory.create(self.folder / "run", environment="letters")
        return LoraOnly(TrainConfig.model_validate(fixed | choices), run), run

    def opened(self, **choices: Any) -> Running:
        mode, run = self.made(**choices)
        return Running(mode, mode.open(), self.server, run)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", tmp_path / "default")
    toy = toy_server.with_slots(toy_server.serve(tiny.llama(), tmp_path / "model"), RANK)
    server = LoraServer(toy)
    with serving(server) as http:
        yield World(server, http, tmp_path)


def weight_bytes(toy: ToyServer) -> int:
    return sum(parameter.nbytes for parameter in toy.reference.parameters())


def test_by_memory_the_base_is_the_servers_and_nothing_lies_here(world: World) -> None:
    world.export()
    running = world.opened()
    assert running.opened.weight_bytes == 0
    assert running.base_is_the_servers()
    assert running.adapter_is_in_the_slot()
    assert "the base is the server's own, 0 bytes of it here" in running.run.events.read_text()
    assert running.mode.version == running.mode.publish(lambda: None, last_checkpoint=None).version - 1 == 5
    assert running.mode.endpoint.model == "bridge-adapter"
    assert running.mode.can_sleep
    prepared: list[str] = []
    running.mode.publish(
        running.write, prepare=lambda: prepared.append(world.server.calls[-1]), sleep=True, last_checkpoint=None
    )
    assert prepared == ["POST pause"]
    assert world.server.bodies["POST pause"]["sleep"] is True


def test_by_disk_beside_a_manifest_the_adapter_alone_lies_here(world: World) -> None:
    world.export()
    running = world.opened(lora_handover="disk")
    adapter_bytes = sum(tensor.nbytes for tensor in running.adapter().values())
    assert running.opened.weight_bytes == adapter_bytes > 0
    assert running.base_is_the_servers()
    assert not running.adapter_is_in_the_slot()
    assert (running.mode.version, running.mode.endpoint.model) == (0, "bridge-adapter-0")
    assert not running.mode.can_sleep


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_the_adapter_alone_is_trained_and_the_base_is_frozen(world: World, handover: str) -> None:
    world.export()
    running = world.opened(lora_handover=handover)
    trained = {name for name, parameter in running.opened.model.named_parameters() if parameter.requires_grad}
    assert trained == running.opened.lr_factors.keys()
    assert all("lora_" in name for name in trained)


def test_without_a_manifest_the_base_is_a_second_copy_and_the_note_says_why(world: World) -> None:
    port = int(world.http.url.rpartition(":")[2])
    running = world.opened(lora_handover="disk", vllm_port=port)
    adapter_bytes = sum(tensor.nbytes for tensor in running.adapter().values())
    assert running.opened.weight_bytes == weight_bytes(world.server.toy) + adapter_bytes
    assert not running.base_is_the_servers()
    noted = running.run.events.read_text()
    assert "the base is a second copy, 0.00 GiB on cpu: no manifest" in noted
    assert list(world.server.adapters) == ["bridge-adapter-0"]


def test_a_second_copy_computes_positions_as_the_server_reports_its_length(world: World) -> None:
    port = int(world.http.url.rpartition(":")[2])
    frequencies = tiny.with_longrope(Path(world.server.toy.manifest.model), 64)
    with pytest.raises(UsageError, match="the server reports none"):
        world.opened(lora_handover="disk", vllm_port=port)
    world.server.refuses["GET models"] = as_json({"data": [{"id": "tiny", "max_model_len": 65}]})
    running = world.opened(lora_handover="disk", vllm_port=port)
    torch.testing.assert_close(running.opened.model.model.rotary_emb.inv_freq, frequencies)


def test_a_second_copy_is_refused_where_the_server_computes_positions_in_another_way(world: World) -> None:
    tiny.with_longrope(Path(world.server.toy.manifest.model), 64)
    world.export(max_model_len=65, model_class="TransformersForCausalLM")
    with pytest.raises(UnsupportedModelError, match="vLLM runs it as TransformersForCausalLM"):
        world.opened(lora_handover="disk")


def test_a_base_that_cannot_be_attached_is_loaded_and_the_note_says_why(world: World) -> None:
    world.export(tp_degree=2)
    running = world.opened(lora_handover="disk")
    assert running.opened.weight_bytes > weight_bytes(world.server.toy)
    assert "second copy" in running.run.events.read_text()
    assert "tensor-parallel size 2" in running.run.events.read_text()


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_beside_another_trainer_no_base_is_even_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch, handover: str
) -> None:
    world.export()
    world.server.refuses["POST lease"] = refusal("another trainer is updating this server", "wait")
    for way in ("attach", "loaded.load"):
        monkeypatch.setattr(f"bridge.modes.lora_only.{way}", lambda *_, **__: pytest.fail("the base is there"))
    with pytest.raises(AttachError, match="another trainer is updating this server"):
        world.opened(lora_handover=handover)
    assert world.server.calls == ["POST lease"]


def test_by_memory_a_base_that_cannot_be_attached_is_refused(world: World) -> None:
    world.export(tp_degree=2)
    with pytest.raises(ManifestError, match="tensor-parallel size 2"):
        world.opened()
    assert world.server.calls == ["POST lease"]


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_a_given_manifest_that_is_missing_is_an_error_and_no_reason_to_look_elsewhere(
    world: World, handover: str
) -> None:
    world.export()
    with pytest.raises(ManifestError, match="no manifest at"):
        world.made(lora_handover=handover, vllm_config_path=world.folder / "elsewhere.json")
    assert world.server.calls == []


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_another_model_than_the_one_served_is_refused(world: World, handover: str) -> None:
    exported = world.export()
    shutil.copytree(exported.model, world.folder / "other")
    with pytest.raises(ManifestError, match=f"the server serves {exported.model}"):
        world.made(lora_handover=handover, model_name=str(world.folder / "other"))
    assert world.server.calls == []


def test_by_memory_no_manifest_is_refused_with_both_ways_out(world: World) -> None:
    with pytest.raises(UsageError, match="trains the adapter in vLLM's own memory, and no manifest") as caught:
        world.made()
    assert "bridge serve-vllm --max-lora-rank" in caught.value.remedy
    assert "--lora-handover disk" in caught.value.remedy


def test_a_stale_manifest_that_was_found_is_no_obstacle_for_a_stock_server(world: World) -> None:
    world.export(server=dead_server())
    running = world.opened(lora_handover="disk", vllm_port=int(world.http.url.rpartition(":")[2]))
    assert "is stale" in running.run.events.read_text()
    assert "GET status" not in world.server.calls


def test_a_manifest_of_another_server_that_was_found_gives_no_base_to_train_on(world: World) -> None:
    world.export()
    with serving(LoraServer(replace(world.server.toy))) as other:
        running = world.opened(lora_handover="disk", vllm_port=int(other.url.rpartition(":")[2]))
        assert not running.base_is_the_servers()
        assert running.mode.endpoint.url == other.url
        assert f"the manifest found here is of the server at {world.http.url}" in running.run.events.read_text()
    assert world.server.calls == []


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_a_checkpoint_comes_back_here_and_in_the_server(world: World, handover: str) -> None:
    world.export()
    running = world.opened(lora_handover=handover)
    running.publish()
    saved, folder = running.adapter(), world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    running.publish()
    running.mode.restore(folder, version=40)
    assert all(torch.equal(saved[name], value) for name, value in running.adapter().items())
    assert running.mode.version == 40
    if handover == "memory":
        assert running.adapter_is_in_the_slot()
    else:
        assert list(world.server.adapters) == ["bridge-adapter-40"]


def test_an_adapter_that_does_not_fit_is_refused_before_the_server_stands_still(world: World) -> None:
    world.export()
    running = world.opened()
    folder = world.folder / "adapter_step_1"
    folder.mkdir()
    running.mode.save(folder)
    (folder / "adapter_model.safetensors").unlink()
    world.server.calls.clear()
    with pytest.raises(UsageError):
        running.mode.restore(folder, version=1)
    assert world.server.calls == []


def revive(world: World, running: Running) -> FakeEngine:
    engine = FakeEngine(world.server, world.http.url, world.manifest)
    running.mode.revive(engine, None)
    return engine


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_after_a_restart_the_parameters_are_the_same_objects_with_the_values_of_before(
    world: World, handover: str
) -> None:
    world.export()
    running = world.opened(lora_handover=handover)
    running.publish()
    before, parameters, version = running.adapter(), dict(running.opened.model.named_parameters()), running.mode.version
    engine = revive(world, running)
    assert engine.started == [world.server.toy.manifest.model]
    assert dict(running.opened.model.named_parameters()).keys() == parameters.keys()
    assert all(running.opened.model.get_parameter(name) is old for name, old in parameters.items())
    assert all(torch.equal(before[name], value) for name, value in running.adapter().items())
    assert running.base_is_the_servers()
    assert running.mode.version > version
    assert running.publish() == running.mode.version
    if handover == "memory":
        assert running.adapter_is_in_the_slot()
    else:
        assert list(world.server.adapters) == [f"bridge-adapter-{running.mode.version}"]
        assert [path.name for path in running.run.served.iterdir()] == list(world.server.adapters)


def test_after_a_restart_a_base_of_ones_own_stays_and_the_new_servers_token_is_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.export(tp_degree=2)
    running = world.opened(lora_handover="disk")
    before = running.adapter()
    revive(world, running)
    statuses = [asked for asked in world.http.asked if asked.path == "/bridge/status"]
    assert [asked.headers["authorization"] for asked in statuses] == ["Bearer secret", "Bearer new"]
    assert not running.base_is_the_servers()
    assert all(torch.equal(before[name], value) for name, value in running.adapter().items())


def test_closing_leaves_the_adapter_served_and_may_come_before_opening(world: World) -> None:
    world.export()
    running = world.opened(lora_handover="disk")
    running.mode.close()
    assert list(world.server.adapters) == ["bridge-adapter-0"]
    unopened: Callable[[], None] = LoraOnly(
        TrainConfig.model_validate({"model_name": world.server.toy.manifest.model, "mode": "lora_only"}), running.run
    ).close
    unopened()
