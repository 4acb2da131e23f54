"""`bridge restore` on a server without vLLM: real routes, fence and shared memory, and an engine that records calls.

Not covered: the real vLLM and a trainer that is really killed (`tests/cpu/test_restore.py`).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from huggingface_hub import constants
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import Progress
from bridge.config import TrainConfig
from bridge.errors import AttachError
from bridge.server import fence
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest
from bridge.weights import model_folder
from bridge.weights.adapter import Adapter
from bridge_cli.main import answer
from bridge_patches import routes
from bridge_patches.server_fence import Phase, ServerFence
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.checks_sample import dead_holder, holder_of
from tests.unit.http_server import Answer, HttpRequest, HttpServer, serving
from tests.unit.toy_server import ToyServer

DEAD = dead_holder()


class FakeEngine:
    """Pauses and resumes, and records both."""

    def __init__(self) -> None:
        self.engine_core = self
        self.paused = False
        self.in_flight: list[str] = []

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.in_flight.append(mode)

    async def call_utility_async(self, method: str, version: int) -> None:
        assert self.paused

    async def resume_generation(self) -> None:
        self.paused = False

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        return True

    async def collective_rpc(self, method: str) -> list[list[str]]:
        assert method == "bridge_synchronize"
        return [[]]


@dataclass(frozen=True)
class Server:
    """The server, with the actions that tests need."""

    toy: ToyServer
    engine: FakeEngine
    fence: ServerFence
    http: HttpServer
    app: FastAPI

    def tear(self, last_checkpoint: Path | None = None) -> None:
        """Leave the server as a trainer does when it dies halfway through a write."""
        for tensor in list(self.toy.tensors.values())[::2]:
            tensor.fill_(9.0)
        self.engine.paused = True
        self.fence.enter(Phase.WRITING, DEAD)
        self.fence.last_checkpoint = None if last_checkpoint is None else str(last_checkpoint)

    def routes(self) -> list[str]:
        """Return the requested routes, except for the lease."""
        routes = [request.path.removeprefix("/bridge/") for request in self.http.requests]
        return [route for route in routes if route != "lease"]


@dataclass(frozen=True)
class Bridge:
    """The command line, in the folder of that server's manifest."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def restores(self, *arguments: str | Path) -> tuple[dict[str, Any], str]:
        """Run a restore that succeeds; return its JSON, and the last line on stderr."""
        exit_code = answer(["restore", "--json", *map(str, arguments)])
        out, err = self.capsys.readouterr()
        assert exit_code == 0, err
        (line,) = out.splitlines()
        document: dict[str, Any] = json.loads(line)
        return document, err.splitlines()[-1]

    def refused(self, code: int, *arguments: str | Path) -> tuple[str, str]:
        """Run a restore that is refused, and return its error and its hint."""
        exit_code = answer(["restore", *map(str, arguments)])
        out, err = self.capsys.readouterr()
        assert (exit_code, out) == (code, ""), err
        *_, error, gap, hint = err.splitlines()
        assert (error[:7], gap, hint[:6]) == ("error: ", "", "hint: "), err
        return error.removeprefix("error: "), hint.removeprefix("hint: ")


def over_http(app: FastAPI) -> Callable[[HttpRequest], Answer]:
    client = TestClient(app)

    def ask(request: HttpRequest) -> Answer:
        headers = {"authorization": request.headers.get("authorization", "")}
        response = client.request(request.method, request.path, headers=headers, json=request.body)
        return Answer(response.text, response.status_code)

    return ask


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    toy = toy_server.serve(tiny.llama(), tmp_path / "model")
    app, engine = FastAPI(), FakeEngine()
    routes.BridgeRoutes().attach_router(app)
    app.state.bridge_manifest, app.state.bridge_engine = toy.manifest, engine
    app.state.bridge_fence = ServerFence(engine, toy.manifest)
    with serving(over_http(app)) as http:
        manifests.write(toy.edited(url=http.url), tmp_path / manifests.MANIFEST_NAME)
        yield Server(toy, engine, app.state.bridge_fence, http, app)


@pytest.fixture
def bridge(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bridge:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("LOGDIR", raising=False)
    return Bridge(tmp_path, capsys)


def other_weights(server: Server, folder: Path) -> PreTrainedModel:
    """Write a plain folder with different weights for the served model, and return them."""
    tiny.write(tiny.llama(), folder, seed=1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def saved(server: Server, folder: Path, *, step: int, version: int) -> PreTrainedModel:
    """Write a Bridge checkpoint with different weights, and return them."""
    model = other_weights(server, folder.with_name(f"{folder.name}_source"))
    progress = Progress(step=step, weight_version=version, problems_drawn=0, run_dir=folder.parent)
    checkpoint.save(folder, lambda scratch: model_folder.save(model, server.toy.manifest.model, scratch), progress)
    return model


def served(manifest: Manifest, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each parameter in the server's memory."""
    return {
        name: tensors[view.parameter].flatten()[view.offset :][: torch.Size(view.shape).numel()].view(view.shape)
        for name, view in manifest.shards[0].param_mappings.items()
    }


def serves(server: Server, model: PreTrainedModel) -> bool:
    tensors = served(server.toy.manifest, server.toy.tensors)
    same = [torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters()]
    assert len(same) == len(tensors)
    return all(same)


def test_any_model_folder_is_restored_as_the_next_version(bridge: Bridge, server: Server) -> None:
    server.fence.version = 4
    model = other_weights(server, bridge.folder / "other")
    document, line = bridge.restores("other")
    assert serves(server, model)
    assert (server.fence.state, server.fence.version, server.engine.paused) == ("serving", 5, False)
    assert server.routes() == ["pause", "publish"]
    assert server.engine.in_flight == ["keep"]
    assert document.pop("seconds") > 0
    assert document == {"checkpoint": str(bridge.folder / "other"), "step": None, "version": 5}
    assert line.startswith(f"restored {bridge.folder / 'other'} into {server.toy.manifest.model}: version 5, ")


def test_embedding_rows_without_a_token_are_left_unchanged(bridge: Bridge, server: Server) -> None:
    other_weights(server, bridge.folder / "other")
    bridge.restores("other")
    assert server.toy.padding_rows()
    assert all((rows == toy_server.FILLER).all() for rows in server.toy.padding_rows())


@pytest.mark.parametrize(("own", "published"), [(0, 7), (6, 7), (9, 10)])
def test_checkpoint_restores_its_version_unless_it_is_older(
    bridge: Bridge, server: Server, own: int, published: int
) -> None:
    server.fence.version = own
    model = saved(server, bridge.folder / "step_3", step=3, version=7)
    document, line = bridge.restores("step_3")
    assert serves(server, model)
    assert (document["step"], document["version"], server.fence.version) == (3, published, published)
    assert f"{bridge.folder / 'step_3'} (step 3) into" in line


def test_torn_server_is_repaired_and_serves_again(bridge: Bridge, server: Server) -> None:
    model = saved(server, bridge.folder / "step_3", step=3, version=3)
    server.fence.version = 3
    server.tear(bridge.folder / "step_2")
    bridge.restores("step_3")
    assert serves(server, model)
    assert (server.fence.state, server.fence.version, server.engine.paused) == ("serving", 4, False)
    assert server.fence.status().last_checkpoint == str(bridge.folder / "step_3")


def test_original_model_also_repairs_a_torn_server(bridge: Bridge, server: Server) -> None:
    server.tear()
    command, restore, model = server.fence.status().hint().removesuffix(")").rpartition("bridge restore ")
    assert restore
    assert command.startswith("bridge restore CHECKPOINT")
    bridge.restores(model)
    assert serves(server, server.toy.reference)


def test_hub_model_is_found_in_the_cache(bridge: Bridge, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = bridge.folder / "hub" / "models--some--model"
    model = other_weights(server, cache / "snapshots" / "0a1b")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0a1b")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(bridge.folder / "hub"))
    bridge.restores("some/model")
    assert serves(server, model)


def test_fence_is_not_taken_from_a_live_writer(bridge: Bridge, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "BUSY_LIMIT_S", 0.2)
    other_weights(server, bridge.folder / "other")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        server.fence.enter(Phase.WRITING, holder_of(child.pid))
        error, hint = bridge.refused(4, "other")
    finally:
        child.kill()
        child.communicate()
    assert f"process {child.pid} holds the fence" in error
    assert hint.endswith(f"kill {child.pid}")
    assert serves(server, server.toy.reference)
    assert server.engine.in_flight == []


def test_server_under_training_is_refused_before_any_check(bridge: Bridge, server: Server) -> None:
    other_weights(server, bridge.folder / "other")
    cut_short(bridge.folder / "other")
    server.fence.take_lease(holder_of(os.getppid()), "runs/first")
    error, hint = bridge.refused(4, "other")
    assert error == f"another trainer (pid {os.getppid()}, run runs/first) is updating this server"
    assert f"kill -INT {os.getppid()}" in hint
    assert server.routes() == []


def test_lease_is_held_while_weights_are_loaded(bridge: Bridge, server: Server) -> None:
    runs = []
    pausing = server.engine.pause_scheduler_async

    async def pause(*, mode: str, clear_cache: bool) -> None:
        lease = server.fence.lease
        runs.append(lease and lease.run)
        await pausing(mode=mode, clear_cache=clear_cache)

    server.engine.pause_scheduler_async = pause  # type: ignore[method-assign]
    other_weights(server, bridge.folder / "other")
    bridge.restores("other")
    assert runs == [f"bridge restore {bridge.folder / 'other'}"]
    assert server.fence.lease is None


def cut_short(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 10)


def changed(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_short, changed])
def test_damaged_checkpoint_leaves_a_torn_server_torn(
    bridge: Bridge, server: Server, damage: Callable[[Path], None]
) -> None:
    saved(server, bridge.folder / "step_3", step=3, version=3)
    server.tear()
    damage(bridge.folder / "step_3")
    assert str(bridge.folder / "step_3") in bridge.refused(2, "step_3")[0]
    assert (server.fence.state, server.engine.paused, server.routes()) == ("torn", True, [])


def truncated(folder: Path) -> None:
    tiny.write(tiny.llama(), folder, seed=1)
    cut_short(folder)


def of_another_family(folder: Path) -> None:
    tiny.write(tiny.qwen2(), folder)


def of_the_same_shapes(folder: Path) -> None:
    config = tiny.llama()
    config.rope_parameters["rope_theta"] = 500_000.0
    tiny.write(config, folder)


def without_a_weight(folder: Path) -> None:
    tiny.write(tiny.llama(), folder, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    state = {name: weight for name, weight in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(folder, state_dict=state)


FOLDERS: tuple[tuple[Callable[[Path], object], str, str], ...] = (
    (truncated, "other", "model.safetensors"),
    (of_another_family, "other", "model_type qwen2, expected llama"),
    (of_the_same_shapes, "other", "rope_parameters"),
    (without_a_weight, "other", "model.norm.weight"),
    (Path.mkdir, "other", "other"),
    (Path.touch, "other", "there is no folder other, and no model of that name"),
    *((Path.mkdir, name, f"there is no folder {name}, ") for name in ("nowhere", "some/model", "/no/such")),
    (Path.mkdir, "", "no usable model at"),
)


@pytest.mark.parametrize(("make", "name", "words"), FOLDERS)
def test_mismatched_folder_is_refused_before_the_pause(
    bridge: Bridge, server: Server, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], name: str,
    words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(bridge.folder / "hub"))
    make(bridge.folder / "other")
    assert words in bridge.refused(2, name)[0]
    assert server.routes() == []
    assert serves(server, server.toy.reference)


class Slots:
    """vLLM's adapters: which one is in a slot, which are served by name, and whether vLLM accepts a new one."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.names = ["tiny", "bridge-adapter-3", "mine"]
        self.seated: list[tuple[str, str]] = []
        self.refuses = False
        server.app.state.bridge_adapters = self
        server.app.get("/v1/models")(self.models)
        server.app.post("/v1/unload_lora_adapter")(self.unload)

    async def serve(self, name: str, path: str) -> int:
        assert self._server.engine.paused
        if self.refuses:
            raise AttachError("vLLM does not load it", hint="ask vLLM")
        self.seated.append((name, path))
        return 0

    async def models(self) -> dict[str, Any]:
        return {"data": [{"id": name} for name in self.names]}

    async def unload(self, body: dict[str, str]) -> str:
        self.names.remove(body["lora_name"])
        return "Success"


@pytest.fixture
def slots(server: Server, bridge: Bridge) -> Slots:
    """Let the server take adapters up to rank 4."""
    toy = toy_server.with_slots(server.toy, 4, without="down_proj")
    manifests.write(toy.edited(url=server.http.url), bridge.folder / manifests.MANIFEST_NAME)
    return Slots(server)


def adapter(server: Server, folder: Path, **choices: Any) -> Path:
    """Write a new adapter with every module that has a slot."""
    fixed = {"lora_r": 4, "lora_target_modules": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj"}
    config = {"model_name": server.toy.manifest.model, "mode": "lora_only", **fixed, **choices}
    model = AutoModelForCausalLM.from_pretrained(server.toy.manifest.model).requires_grad_(False)
    folder.mkdir()
    made = TrainConfig.model_validate(config)
    Adapter(model, made.lora, seed=made.seed, base_name=made.model_name).save(folder)
    return folder


def rewrite(folder: Path, **changes: Any) -> None:
    """Edit an adapter's settings."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("rank", [4, 2])
def test_restored_adapter_replaces_earlier_ones(bridge: Bridge, server: Server, slots: Slots, rank: int) -> None:
    folder = adapter(server, bridge.folder / "adapter_step_3", lora_r=rank)
    document, line = bridge.restores("adapter_step_3")
    assert server.routes() == ["pause", "/v1/models", "/v1/unload_lora_adapter", "adapter", "publish"]
    assert slots.seated == [("bridge-adapter", str(folder))]
    assert slots.names == ["tiny", "mine"]
    assert (server.fence.state, server.fence.version, server.engine.paused) == ("serving", 1, False)
    assert (document["version"], document["checkpoint"]) == (1, str(folder))
    assert "adapter_step_3 into" in line
    assert serves(server, server.toy.reference)


def test_torn_adapter_is_repaired_without_changing_weights(bridge: Bridge, server: Server, slots: Slots) -> None:
    folder = adapter(server, bridge.folder / "adapter_step_3")
    server.fence.enter(Phase.WRITING, DEAD)
    server.engine.paused, server.fence.writes = True, "adapter"
    assert server.fence.state == "torn"
    bridge.restores("adapter_step_3")
    assert (server.fence.state, server.engine.paused) == ("serving", False)
    assert server.fence.status().last_checkpoint == str(folder)
    assert serves(server, server.toy.reference)


def test_adapter_cannot_repair_torn_weights(bridge: Bridge, server: Server, slots: Slots) -> None:
    adapter(server, bridge.folder / "adapter_step_3")
    server.tear(bridge.folder / "step_2")
    assert "the weights may be half-written" in bridge.refused(4, "adapter_step_3")[0]
    assert (server.fence.state, server.engine.paused, slots.seated) == ("torn", True, [])


def use_dora(folder: Path) -> None:
    rewrite(folder, use_dora=True)


def change_the_rank_of_one(folder: Path) -> None:
    rewrite(folder, rank_pattern={"q_proj": 2})


def forget_the_settings(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")


def bend_the_settings(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": ')


def remove_the_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (use_dora, "use_dora True"),
        (change_the_rank_of_one, "rank_pattern"),
        (forget_the_settings, "adapter_config.json cannot be read"),
        (bend_the_settings, "adapter_config.json cannot be read"),
        (remove_the_weights, "adapter_model.safetensors cannot be read"),
        (cut_short, "adapter_model.safetensors cannot be read"),
    ],
)
def test_damaged_adapter_is_refused_before_the_pause(
    bridge: Bridge, server: Server, slots: Slots, damage: Callable[[Path], None], words: str
) -> None:
    damage(adapter(server, bridge.folder / "adapter_step_3"))
    assert words in bridge.refused(2, "adapter_step_3")[0]
    assert (server.routes(), slots.seated) == ([], [])


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"lora_r": 8}, "model.layers.0.mlp.gate_proj.lora_A.weight has shape (8, 128), its slot (4, 128)"),
        ({"lora_target_modules": "down_proj"}, "no slot for base_model.model.model.layers.0.mlp.down_proj"),
    ],
)
def test_adapter_that_fits_no_slot_is_refused(
    bridge: Bridge, server: Server, slots: Slots, choices: dict[str, Any], words: str
) -> None:
    adapter(server, bridge.folder / "adapter_step_3", **choices)
    error, hint = bridge.refused(2, "adapter_step_3")
    assert words in error
    assert "SAVE_PATH/adapter_step_N" in hint
    assert (server.routes(), slots.seated) == ([], [])


def test_adapter_of_a_larger_model_is_refused(bridge: Bridge, server: Server, slots: Slots) -> None:
    larger = tiny.llama()
    larger.hidden_size = 256
    model = AutoModelForCausalLM.from_config(larger).requires_grad_(False)
    config = TrainConfig.of(model_name="larger", mode="lora_only", lora_r=4, lora_target_modules="q_proj")
    (bridge.folder / "adapter_step_3").mkdir()
    Adapter(model, config.lora, seed=config.seed, base_name=config.model_name).save(bridge.folder / "adapter_step_3")
    assert "lora_A.weight has shape (4, 256), its slot (4, 128)" in bridge.refused(2, "adapter_step_3")[0]
    assert (server.routes(), slots.seated) == ([], [])


def test_healthy_server_resumes_if_vllm_refuses_an_adapter(bridge: Bridge, server: Server, slots: Slots) -> None:
    adapter(server, bridge.folder / "adapter_step_3")
    slots.refuses = True
    assert bridge.refused(4, "adapter_step_3") == ("vLLM does not load it", "ask vLLM")
    assert (server.fence.state, server.fence.version, server.engine.paused) == ("serving", 0, False)


def test_torn_server_stays_torn_if_vllm_refuses_an_adapter(bridge: Bridge, server: Server, slots: Slots) -> None:
    adapter(server, bridge.folder / "adapter_step_3")
    slots.refuses = True
    server.fence.enter(Phase.WRITING, DEAD)
    server.engine.paused, server.fence.writes = True, "adapter"
    assert bridge.refused(4, "adapter_step_3")[0] == "vLLM does not load it"
    assert (server.fence.version, server.engine.paused) == (0, True)
    server.fence.holder = DEAD  # as the server finds it once this process is gone
    assert server.fence.state == "torn"


def test_server_without_slots_refuses_an_adapter(bridge: Bridge, server: Server) -> None:
    adapter(server, bridge.folder / "adapter_step_3")
    error, hint = bridge.refused(4, "adapter_step_3")
    assert "holds an adapter, but the server does not accept adapters" in error
    assert "bridge serve-vllm --max-lora-rank" in hint
    assert server.routes() == []


def test_missing_server_is_reported_before_a_missing_folder(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", bridge.folder / "default")
    (bridge.folder / manifests.MANIFEST_NAME).unlink()
    assert bridge.refused(4, "nowhere")[0].startswith("no manifest")


def failing_halfway(error: BaseException) -> Callable[[PreTrainedModel, Path], None]:
    def load_into(model: PreTrainedModel, *_: object) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(9.0)
        raise error

    return load_into


def test_failed_write_is_never_served(
    bridge: Bridge, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other_weights(server, bridge.folder / "other")
    monkeypatch.setattr(model_folder, "load_into", failing_halfway(OSError("read error")))
    with pytest.raises(OSError, match="read error"):
        answer(["restore", "other"])
    assert "half-written" in capsys.readouterr().err
    assert server.routes() == ["pause"]
    assert server.engine.paused
    assert server.fence.status().last_checkpoint == str(bridge.folder / "other")
    server.fence.holder = DEAD  # as the server finds it once this process is gone
    assert server.fence.state == "torn"
    assert server.fence.status().hint() == f"bridge restore {bridge.folder / 'other'}"


def test_ctrl_c_waits_for_the_restore_and_reports_it(
    bridge: Bridge, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = other_weights(server, bridge.folder / "other")
    whole = model_folder.load_into

    def interrupted(attached: PreTrainedModel, folder: Path, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        whole(attached, folder)

    monkeypatch.setattr(model_folder, "load_into", interrupted)
    with suppress(KeyboardInterrupt):
        assert answer(["restore", "other"]) == 130
    assert "version 1" in capsys.readouterr().err
    assert serves(server, model)
    assert (server.fence.state, server.routes()) == ("serving", ["pause", "publish"])
