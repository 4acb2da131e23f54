"""The mode `none`: which weights are trained, when the server gets them, and in which order."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.core.process import ProcessIdentity
from bridge.errors import ManifestError, ServerUnreachableError, UsageError
from bridge.modes.mode import RunContext
from bridge.modes.none import InPlace, Restart
from bridge.rollouts.openai_api import ids_by_text
from bridge.run.trainer import Run
from bridge.server import manifest as manifests
from bridge.server.fence import FenceTimes, Update
from bridge.server.manifest import View
from bridge.server.protocol import Status
from bridge.types import Problem
from bridge.weights import skeleton
from tests.fenced import publish
from tests.listener import Listener
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import Answer, HttpRequest, as_json, serving
from tests.unit.openai_server import plain
from tests.unit.toy_server import ToyServer

NORM = "model.norm.weight"


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def stored(folder: str | Path) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@dataclass
class FakeProcess:
    """Records the model with which it is started, and the folders on disk at that moment."""

    started: list[str] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    fails: bool = False
    note: Callable[[], None] = lambda: None

    def restart(self, model: str | Path) -> None:
        self.beside = sorted(folder.name for folder in Path(model).parent.iterdir())
        if self.fails:
            raise ServerUnreachableError("it does not come up", hint="read its log")
        assert (Path(model) / "tokenizer.json").is_file()
        self.note()
        self.started.append(str(model))
        self.weights = stored(model)


@dataclass
class Running:
    mode: Restart | InPlace
    model: PreTrainedModel
    process: FakeProcess
    scratch: Path

    def write(self) -> None:
        with torch.no_grad():
            self.model.get_parameter(NORM).add_(1)

    def publish(self) -> int:
        return self.timed().version

    def timed(self, prepare: Callable[[], object] | None = None, **choices: Any) -> FenceTimes:
        return publish(self.mode.publish(Update(**choices)), self.write, prepare)

    def scratch_folders(self) -> list[str]:
        return sorted(folder.name for folder in self.scratch.iterdir()) if self.scratch.is_dir() else []


def context(folder: Path, process: FakeProcess | None = None) -> RunContext:
    return RunContext(name="runs/ours", scratch=folder / "served", process=process)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tiny.llama(), tmp_path / "model")


@pytest.fixture
def restarting(folder: Path, tmp_path: Path) -> Callable[..., Running]:
    def start(**choices: Any) -> Running:
        config = TrainConfig.model_validate({"model_name": str(folder), "mode": "none", **choices})
        process = FakeProcess()
        mode = Restart(config, context(tmp_path, process))
        return Running(mode, mode.open().model, process, tmp_path / "served")

    return start


def test_server_not_started_by_bridge_is_not_restarted(folder: Path, tmp_path: Path) -> None:
    config = TrainConfig.of(model_name=str(folder), mode="none")
    with pytest.raises(UsageError, match="did not start this server") as caught:
        Restart(config, context(tmp_path))
    for way_out in ("bridge run", "--start-command 'vllm serve {model} --port N'", "--reload in-place"):
        assert way_out in caught.value.hint


def test_trainers_own_copy_is_counted(folder: Path, tmp_path: Path) -> None:
    mode = Restart(TrainConfig.of(model_name=str(folder), mode="none"), context(tmp_path, FakeProcess()))
    opened = mode.open()
    assert equal(weights(opened.model), stored(folder))
    assert opened.weight_bytes == sum(tensor.nbytes for tensor in stored(folder).values())
    assert opened.lr_factors == dict.fromkeys(stored(folder), 1.0)
    assert opened.open_s > 0


def test_copy_follows_the_servers_max_length(folder: Path, tmp_path: Path) -> None:
    frequencies = tiny.with_longrope(folder, 64)
    listed = as_json({"object": "list", "data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 65}]})
    with serving(lambda _: listed) as server:
        port = int(server.url.rpartition(":")[2])
        config = TrainConfig.of(model_name=str(folder), mode="none", vllm_port=port)
        opened = Restart(config, context(tmp_path, FakeProcess())).open()
    torch.testing.assert_close(opened.model.model.rotary_emb.inv_freq, frequencies)


def test_model_without_a_tokenizer_is_refused_early(folder: Path, tmp_path: Path) -> None:
    for file in (*folder.glob("tokenizer*"), folder / "model.safetensors"):
        file.unlink()
    with pytest.raises(UsageError, match="tokenizer"):
        Restart(TrainConfig.of(model_name=str(folder), mode="none"), context(tmp_path, FakeProcess())).open()


def test_each_step_restarts_the_server_with_new_weights(restarting: Callable[..., Running]) -> None:
    running = restarting()
    for version in (1, 2, 3):
        assert running.publish() == running.mode.version == running.mode.endpoint.version == version
        assert len(running.process.started) == version
        assert equal(running.process.weights, weights(running.model))
        assert Path(running.process.started[-1]).is_absolute()
        older = [f"version_{version - 1}"] if version > 1 else []
        assert running.process.beside == [
            *older,
            f"version_{version}",
        ]  # the old version is removed once the new one is served
        assert running.scratch_folders() == [f"version_{version}"]


def test_server_restarts_at_the_configured_interval(
    restarting: Callable[..., Running],
) -> None:
    running = restarting(vllm_restart_interval=2)
    served = []
    for _ in range(5):
        running.publish()
        served.append((running.mode.version, len(running.process.started)))
    assert served == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]
    assert not equal(running.process.weights, weights(running.model))
    running.mode.catch_up()
    assert (running.mode.version, len(running.process.started)) == (3, 3)
    assert equal(running.process.weights, weights(running.model))
    running.mode.catch_up()
    assert len(running.process.started) == 3


def test_times_separate_writing_from_saving_and_restart(restarting: Callable[..., Running]) -> None:
    running = restarting()
    times = running.timed()
    assert times.pause_s == 0
    assert times.publish_s > times.write_s > 0


def test_preparing_precedes_writing_and_is_interruptible(
    restarting: Callable[..., Running],
) -> None:
    running = restarting()
    before = weights(running.model)

    def prepare() -> None:
        assert equal(weights(running.model), before)

    times = running.timed(prepare=prepare)
    assert times.prepare_s > 0
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        running.timed(prepare=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert (running.mode.version, len(running.process.started)) == (1, 1)
    assert not running.mode.can_sleep


def test_failed_restart_publishes_no_version(restarting: Callable[..., Running], tmp_path: Path) -> None:
    running = restarting()
    running.publish()
    running.process.fails = True
    with pytest.raises(ServerUnreachableError):
        running.publish()
    assert running.mode.version == 1
    running.process.fails = False
    (tmp_path / "checkpoint").mkdir()
    running.mode.save(tmp_path / "checkpoint")
    running.mode.revive(tmp_path / "checkpoint")
    assert running.mode.version == 2
    assert running.process.started[-1] == str(tmp_path / "checkpoint")
    assert equal(running.process.weights, weights(running.model))
    assert running.scratch_folders() == []
    assert running.publish() == 3


def test_server_dead_before_any_step_restarts_with_the_model(restarting: Callable[..., Running], folder: Path) -> None:
    running = restarting(vllm_restart_interval=2)
    running.mode.revive(None)
    assert (running.process.started, running.mode.version) == ([str(folder)], 1)
    running.publish()
    assert len(running.process.started) == 1  # the interval restarts here


@pytest.mark.parametrize(("version", "expected"), [(7, 7), (0, 2)])
def test_checkpoint_is_restored_in_trainer_and_server(
    restarting: Callable[..., Running], folder: Path, version: int, expected: int
) -> None:
    running = restarting()
    running.publish()
    parameters = list(running.model.parameters())
    running.mode.restore(folder, version=version)
    assert all(before is after for before, after in zip(parameters, running.model.parameters(), strict=True))
    assert equal(weights(running.model), stored(folder))
    assert running.process.started[-1] == str(folder)
    assert running.mode.version == expected


def test_checkpoint_of_a_different_model_is_refused(restarting: Callable[..., Running], tmp_path: Path) -> None:
    running = restarting()
    before = weights(running.model)
    with pytest.raises(UsageError):
        running.mode.restore(tiny.write(tiny.llama(200), tmp_path / "other"), version=1)
    assert equal(weights(running.model), before)
    assert running.process.started == []


def test_only_checkpoints_are_left_at_the_end(restarting: Callable[..., Running]) -> None:
    running = restarting()
    running.publish()
    running.mode.close()
    assert not running.scratch.exists()


class FakeRoutes:
    """The fence of a server; records the order of weights and calls."""

    def __init__(self, toy: ToyServer, version: int) -> None:
        self.toy, self.version = toy, version
        self.calls: list[tuple[str, float]] = []
        self.bodies: list[Any] = []

    def __call__(self, request: HttpRequest) -> Answer:
        name = request.path.removeprefix("/bridge/")
        self.calls.append((name, self.toy.tensors[NORM][0].item()))
        self.bodies.append(request.body)
        if name == "publish":
            wanted = request.body.get("version")
            self.version = max(self.version + 1, wanted or 0)
        status = Status(model="tiny", version=self.version, state="serving", server=ProcessIdentity.current())
        return as_json(status.model_dump(mode="json"))


@dataclass
class Attached(Running):
    toy: ToyServer
    routes: FakeRoutes

    def live(self) -> dict[str, Tensor]:
        """The server's weights."""
        return {name: self._view(view).clone() for name, view in self.toy.manifest.shards[0].param_mappings.items()}

    def _view(self, view: View) -> Tensor:
        whole = self.toy.tensors[view.parameter]
        return whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset)


@pytest.fixture
def in_place(tmp_path: Path) -> Iterator[Callable[..., Attached]]:
    """Run the mode against a server in this process that shares its weights."""
    toy = toy_server.serve(tiny.llama(), tmp_path / "model")
    routes = FakeRoutes(toy, version=0)
    with serving(routes) as server:

        def start(*, version: int = 0, **choices: Any) -> Attached:
            routes.version = version
            path = tmp_path / manifests.MANIFEST_NAME
            manifests.write(toy.edited(url=server.url), path)
            fixed = {"model_name": toy.manifest.model, "mode": "none", "reload": "in-place", "vllm_config_path": path}
            mode = InPlace(TrainConfig.model_validate(fixed | choices), context(tmp_path))
            return Attached(mode, mode.open().model, FakeProcess(), tmp_path / "served", toy, routes)

        yield start


def test_in_place_reload_loads_between_pause_and_publish(in_place: Callable[..., Attached]) -> None:
    running = in_place(in_flight="abort")
    assert running.mode.endpoint.version is None  # the server reports it with each answer
    assert running.publish() == running.mode.version == 1
    assert running.routes.calls == [("lease", 1.0), ("pause", 1.0), ("publish", 2.0)]
    assert running.routes.bodies[1]["in_flight"] == "abort"
    assert equal(running.live(), weights(running.model))
    assert running.scratch_folders() == []
    running.mode.close()
    assert not running.scratch.exists()


def test_in_place_reload_removes_leftovers_of_a_failed_one(in_place: Callable[..., Attached]) -> None:
    running = in_place()
    (running.scratch / "version_7").mkdir(parents=True)
    running.publish()
    assert running.scratch_folders() == []


def test_in_place_trainer_writes_into_its_own_copy(in_place: Callable[..., Attached]) -> None:
    running = in_place(vllm_restart_interval=2)
    before = running.live()
    assert running.publish() == 0
    assert equal(running.live(), before)
    assert running.publish() == 1
    assert running.live()[NORM][0] == 3
    assert all((rows == toy_server.FILLER).all() for rows in running.toy.padding_rows())


def test_in_place_reload_overwrites_an_earlier_runs_weights(in_place: Callable[..., Attached]) -> None:
    earlier = in_place()
    earlier.publish()
    earlier.mode.close()
    restarted = in_place(version=1)
    assert restarted.mode.version == 2
    assert equal(restarted.live(), weights(restarted.model))
    assert equal(restarted.live(), stored(restarted.toy.manifest.model))


def test_failed_in_place_reload_keeps_the_saved_weights(
    in_place: Callable[..., Attached], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = in_place()

    def broken(*_: Any) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr("bridge.weights.model_folder.load_into", broken)
    with pytest.raises(OSError, match="input/output"):
        running.publish()
    assert [name for name, _ in running.routes.calls] == ["lease", "pause"]
    assert running.routes.bodies[1]["last_checkpoint"] == str(running.scratch / "version_1")
    running.mode.close()
    assert equal(stored(running.scratch / "version_1"), weights(running.model))


def test_in_place_restores_a_checkpoint_on_a_torn_server(
    in_place: Callable[..., Attached],
) -> None:
    running = in_place()
    running.publish()
    running.mode.restore(Path(running.toy.manifest.model), version=9)
    assert running.mode.version == 9
    assert running.routes.bodies[-2]["takeover"] is True
    assert equal(running.live(), stored(running.toy.manifest.model))
    assert equal(weights(running.model), stored(running.toy.manifest.model))


def test_in_place_requires_the_servers_model(in_place: Callable[..., Attached], folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("other"))
    with pytest.raises(ManifestError, match="the server serves"):
        in_place(model_name=str(folder.with_name("other")))


class Letters:
    """Rewards that differ within every group."""

    def __iter__(self) -> Iterator[Problem]:
        for number in range(6):
            yield {"prompt": f"say {number}"}

    def score(self, problem: Problem, completion: str) -> float:
        return float(ord(completion[0]) % 7)


def test_server_with_only_openais_protocol_can_be_trained(folder: Path, tmp_path: Path) -> None:
    tokenizer = skeleton.tokenizer(str(folder))
    assert ids_by_text(tokenizer)("A") == (36,)
    process, asked_before = FakeProcess(), []
    with serving(plain(lambda token_id: tokenizer.decode([token_id]))) as server:
        process.note = lambda: asked_before.append(sum(request.method == "POST" for request in server.requests))
        host, port = server.url.removeprefix("http://").split(":")
        config = TrainConfig.of(
            model_name=str(folder), mode="none", training_steps=2, batch_size=8, group_size=4, lr=1e-3,
            max_new_tokens=8, vllm_host=host, vllm_port=int(port), save_path=tmp_path / "saved",
        )  # fmt: skip
        run = RunDirectory.create(tmp_path / "run", environment="letters")
        summary = Run(config, Letters(), run, Listener(), process=process).train()
    assert (summary.steps, summary.weight_version) == (2, 1)
    assert summary.weight_bytes > 0
    assert asked_before == [2]  # two groups per step, then the restart; no restart after the last step
    assert not equal(process.weights, stored(tmp_path / "saved" / "step_2"))
    assert not equal(process.weights, stored(folder))
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [row["weight_version"] for row in rows] == [1, 1]
    published, not_published = (row["fence_publish_s"] for row in rows)
    assert published > not_published == 0
    assert summary.fence_p50_ms >= 1e3 * published
    assert all(row["changed_weight_share"] > 0 for row in rows)
