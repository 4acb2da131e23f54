"""Runs of `lora_only` with both handovers, on a fake server that accepts adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from bridge.config import TrainConfig
from bridge.errors import BridgeError
from bridge.modes import WAYS
from bridge.modes.lora import LoraDisk, LoraMemory
from bridge.modes.mode import RunContext
from bridge.ranks.world import ALONE, Ranks
from bridge.server import manifest as manifests
from bridge.server.fence import FenceTimes, Update
from bridge.server.manifest import Manifest
from bridge.weights.attach import OpenedModel
from tests.fenced import publish
from tests.logged import logged
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import HttpServer, serving
from tests.unit.modes.lora_server import SLOT, LoraServer
from tests.unit.toy_server import ToyServer

RANK = 4
EARLIER = ["bridge-adapter-3", "mine"]
"""Adapters left by an earlier run, and one served by a different user."""


@dataclass
class FakeProcess:
    """Starts a new server with new memory, no adapters, version 0, and a new manifest in the same file."""

    world: "World"
    started: list[str | Path] = field(default_factory=list)

    def restart(self, model: str | Path) -> None:
        self.started.append(model)
        server = self.world.server
        server.toy = toy_server.with_slots(toy_server.serve(tiny.llama(), Path(model)), RANK)
        server.adapters.clear()
        server.refuses.clear()
        server.version = 0
        self.world.export(token="new")


@dataclass
class Running:
    mode: LoraMemory | LoraDisk
    opened: OpenedModel
    world: "World"

    def adapter(self) -> dict[str, Tensor]:
        return {name: self.opened.model.get_parameter(name).detach().clone() for name in self.opened.lr_factors}

    def write(self) -> None:
        """Change the adapter, and record the write."""
        self.world.server.calls.append("write")
        with torch.no_grad():
            for name in self.opened.lr_factors:
                self.opened.model.get_parameter(name).add_(0.25)

    def publish(self, prepare: Callable[[], object] | None = None, **choices: Any) -> FenceTimes:
        return publish(self.mode.publish(Update(**choices)), self.write, prepare)

    def calls(self, action: Callable[[], object]) -> list[str]:
        """Return the requests that `action` sent."""
        self.world.server.calls.clear()
        action()
        return self.world.server.calls

    def base_is_the_servers(self) -> bool:
        """Return whether the base model shares the server's memory."""
        base = self.opened.model.get_submodule("model.layers.0.mlp.down_proj").base_layer.weight
        return _sees(self.world.server.toy.tensors["model.layers.0.mlp.down_proj.weight"], base)

    def adapter_is_in_the_slot(self) -> bool:
        """Return whether every matrix is in the server's slot."""
        matches = []
        for name, (a, b) in self.world.server.toy.slots.items():
            module: Any = self.opened.model.get_submodule(name)
            pairs = (a, module.lora_A["default"].weight), (b, module.lora_B["default"].weight)
            views = [(there[SLOT].view_as(here), here) for there, here in pairs]
            matches += [torch.equal(there, here) and _sees(there.flatten(), here.flatten()) for there, here in views]
        return all(matches)


def _sees(whole: Tensor, part: Tensor) -> bool:
    """Return whether a write to `whole` is visible in `part`; the old value is restored."""
    with torch.no_grad():
        before = whole[..., -1].clone()
        whole[..., -1] = before + 1
        shows_up = torch.equal(part[..., -1], whole[..., -1])
        whole[..., -1] = before
    return shows_up and torch.equal(part[..., -1], before)


@dataclass
class World:
    """A folder with the manifest of a live server, as a trainer sees it."""

    server: LoraServer
    http: HttpServer
    folder: Path
    notes: list[str] = field(default_factory=list)
    ranks: Ranks = ALONE

    @property
    def port(self) -> int:
        return int(self.http.url.rpartition(":")[2])

    @property
    def scratch(self) -> Path:
        return self.folder / "run" / "served"

    def export(self, **changes: Any) -> Manifest:
        exported = self.server.toy.edited(url=self.http.url, **changes)
        manifests.write(exported, self.folder / manifests.MANIFEST_NAME)
        return exported

    def made(self, handover: str, *, resumes: bool = False, **choices: Any) -> LoraMemory | LoraDisk:
        fixed = {"model_name": self.server.toy.manifest.model, "mode": "lora_only", "lora_r": RANK}
        config = TrainConfig.of(**fixed | {"lora_handover": handover} | choices)
        context = RunContext(
            name="runs/ours", scratch=self.scratch, resumes=resumes, process=FakeProcess(self),
            ranks=self.ranks,
        )  # fmt: skip
        mode = WAYS[config.way](config, context)
        assert isinstance(mode, LoraMemory | LoraDisk)
        return mode

    def opened(self, handover: str, *, resumes: bool = False, **choices: Any) -> Running:
        mode = self.made(handover, resumes=resumes, **choices)
        return Running(mode, mode.open(), self)

    def refused(self, handover: str, kind: type[BridgeError], words: str, **choices: Any) -> str:
        """Check that opening is refused with `words`, and return the hint."""
        with pytest.raises(kind, match=words) as caught:
            self.opened(handover, **choices)
        return caught.value.hint

    def scratch_folders(self) -> list[str]:
        return sorted(path.name for path in self.scratch.iterdir()) if self.scratch.exists() else []

    def serve_earlier(self) -> None:
        self.server.adapters.update({name: {} for name in EARLIER})


def weight_bytes(toy: ToyServer) -> int:
    return sum(parameter.nbytes for parameter in toy.reference.parameters())


@contextmanager
def world_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, config: PretrainedConfig | None = None, rank: int = RANK
) -> Iterator[World]:
    """Run a fake server; once exported, its manifest is found from the current folder."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", folder / "default")
    toy = toy_server.with_slots(toy_server.serve(config or tiny.llama(), folder / "model"), rank)
    server = LoraServer(toy)
    with serving(server) as http, logged() as notes:
        yield World(server, http, folder, notes)
