"""The mode `none` on several ranks: each has its own copy and server, and all stay equal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from bridge.checkpoints import checkpoint
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.errors import BridgeError, ServerUnreachableError
from bridge.modes.mode import RunContext
from bridge.modes.none import InPlace, Restart
from bridge.ranks.world import ALONE, Ranks
from bridge.run.reporting import Reporter
from bridge.run.trainer import Run
from bridge.server import manifest as manifests
from bridge.weights import skeleton
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import Answer, HttpRequest, serving
from tests.unit.modes.test_none import NORM, Attached, FakeProcess, FakeRoutes, Letters, Running, equal, stored, weights
from tests.unit.openai_server import plain
from tests.unit.several_ranks import on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tiny.llama(), tmp_path / "model")


class Server:
    """A server process that may be dead."""

    def __init__(self, folder: Path) -> None:
        tokenizer = skeleton.tokenizer(str(folder))
        self.answers, self.is_dead = plain(lambda token_id: str(tokenizer.decode([token_id]))), False

    def __call__(self, request: HttpRequest) -> Answer | None:
        return None if self.is_dead else self.answers(request)


def config(folder: Path, url: str, **choices: Any) -> TrainConfig:
    host, port = url.removeprefix("http://").split(":")
    fixed = {"model_name": str(folder), "mode": "none", "vllm_host": host, "vllm_port": int(port)}
    return TrainConfig.model_validate(fixed | choices)


def context(ranks: Ranks, folder: Path, process: FakeProcess | None = None) -> RunContext:
    scratch = folder.parent / str(ranks.rank) / "served"
    return RunContext(name="runs/ours", scratch=scratch, process=process, ranks=ranks)


@contextmanager
def restarting(ranks: Ranks, folder: Path, **choices: Any) -> Iterator[tuple[Running, Server]]:
    process, server = FakeProcess(), Server(folder)
    with serving(server) as http:
        run = context(ranks, folder, process)
        mode = Restart(config(folder, http.url, **choices), run)
        yield Running(mode, mode.open().model, process, run.scratch), server


def published(ranks: Ranks, folder: Path) -> tuple[list[int], list[str], dict[str, Tensor]]:
    with restarting(ranks, folder, vllm_restart_interval=2) as (running, _):
        versions = [running.publish() for _ in range(4)]
        assert equal(running.process.weights, weights(running.model))
        assert running.scratch_folders() == ["version_2"]
        return versions, running.process.started, running.process.weights


def test_every_server_gets_each_version_from_its_own_rank(folder: Path) -> None:
    first, second = on_ranks(2, published, folder)
    assert equal(first[2], second[2])
    for rank, (versions, started, _) in enumerate((first, second)):
        assert versions == [0, 1, 1, 2]
        scratch = folder.parent / str(rank) / "served"
        assert started == [str(scratch / "version_1"), str(scratch / "version_2")]


def revived(ranks: Ranks, folder: Path, num_behind: int) -> tuple[int, int, int]:
    """Kill the second rank's server `num_behind` steps after a reload; return the restarts and the new version."""
    with restarting(ranks, folder, vllm_restart_interval=2) as (running, server):
        for _ in range(2 + num_behind):
            running.publish()
        newest = folder.parent / f"checkpoint_{ranks.rank}"
        newest.mkdir()
        running.mode.save(newest)
        server.is_dead = ranks.rank == 1
        before = len(running.process.started)
        running.mode.revive(newest)
        server.is_dead = False
        assert equal(running.process.weights, weights(running.model))
        restarts, version = len(running.process.started) - before, running.mode.version
        assert [running.publish(), running.publish()] == [version, version + 1]
        assert len(running.scratch_folders()) == 1
        return restarts, version, running.mode.endpoint.starts


@pytest.mark.parametrize(("num_behind", "restarts"), [(0, [0, 1]), (1, [1, 1])])
def test_only_the_dead_server_restarts_if_all_are_current(folder: Path, num_behind: int, restarts: list[int]) -> None:
    results = on_ranks(2, revived, folder, num_behind)
    assert results == [(count, 2, 2 + count) for count in restarts]


def failed(ranks: Ranks, folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """Make the restart of the second rank's server fail."""
    with restarting(ranks, folder) as (running, _):
        running.publish()
        running.process.fails = ranks.rank == 1
        with pytest.raises(ServerUnreachableError) as caught:
            running.publish()
        outcome = [caught.value.message, running.mode.version]
        running.process.fails = False
        newest = folder.parent / f"checkpoint_{ranks.rank}"
        newest.mkdir()
        running.mode.save(newest)
        running.mode.revive(newest)
        return [*outcome, running.mode.version], running.process.weights


def test_failed_restart_publishes_no_version_on_any_rank(folder: Path) -> None:
    first, second = on_ranks(2, failed, folder)
    assert first[0] == second[0] == ["it does not come up", 1, 2]
    assert equal(first[1], second[1])


@contextmanager
def in_place(ranks: Ranks, folder: Path, **choices: Any) -> Iterator[Attached]:
    own = folder.parent / str(ranks.rank)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiny, "write", lambda *_: folder)  # both ranks serve the same model
        toy = toy_server.serve(tiny.llama(), folder)
    routes = FakeRoutes(toy, version=0)
    with serving(routes) as http:
        own.mkdir()
        path = own / manifests.MANIFEST_NAME
        manifests.write(toy.edited(url=http.url), path)
        fixed = {"model_name": toy.manifest.model, "mode": "none", "reload": "in-place", "vllm_config_path": path}
        run = context(ranks, folder)
        mode = InPlace(TrainConfig.model_validate(fixed | choices), run)
        mode._server._compare_replicas = lambda: None  # type: ignore[method-assign]  # the toy has no digests
        yield Attached(mode, mode.open().model, FakeProcess(), run.scratch, toy, routes)


def reloaded(ranks: Ranks, folder: Path) -> list[int]:
    """Kill the second rank's server one step after a reload; return the versions."""
    with in_place(ranks, folder, vllm_restart_interval=2) as running:
        versions = [running.publish() for _ in range(3)]
        client = running.mode._server.client  # type: ignore[union-attr]
        client.models = tuple  # type: ignore[method-assign]

        def lost() -> None:
            raise ServerUnreachableError("gone", hint="")

        def restart(_: object) -> None:
            running.routes.version = 0
            running.mode._server.version = 0  # type: ignore[union-attr]

        if ranks.rank == 1:
            client.models = lost  # type: ignore[method-assign]
            running.mode._server.restart = restart  # type: ignore[union-attr,method-assign]
        running.mode.revive(None)
        assert equal(running.live(), weights(running.model))
        assert running.live()[NORM][0].item() == 4
        assert running.mode.version == running.routes.version
        return [*versions, running.mode.version, running.publish(), running.publish()]


def test_all_servers_catch_up_in_place_after_one_died(folder: Path) -> None:
    assert on_ranks(2, reloaded, folder) == [[0, 1, 1, 3, 3, 4]] * 2


def ran(ranks: Ranks, folder: Path, last: int, dies: bool = False) -> tuple[int, list[str], dict[str, Tensor]]:
    """Train up to step `last`, from the newest checkpoint; return the version, and the models that the server served.

    The second rank's server may die before the second step.
    """
    process, server, saved = FakeProcess(), Server(folder), folder.parent / "saved"
    newest, _ = checkpoint.newest(saved, "step_")
    with serving(server) as http:
        settled = config(
            folder, http.url, training_steps=last, batch_size=16, group_size=4, lr=1e-3, max_new_tokens=8,
            max_retries=0, save_path=saved,
        )  # fmt: skip

        def restarted() -> None:
            server.is_dead = dies and ranks.rank == 1 and not process.started

        process.note = restarted
        run_folder = folder.parent / f"run_{last}"
        made = RunDirectory.create(run_folder, environment="letters") if ranks.is_rank_zero else None
        ranks.all_gather_object(None)
        run = made or RunDirectory.join(run_folder)
        summary = Run(settled, Letters(), run, Reporter(), process=process, resume=newest, ranks=ranks).train()
    return summary.weight_version, process.started, process.weights


def test_copies_train_in_lockstep_and_resume_on_any_size(folder: Path) -> None:
    saved = folder.parent / "saved"
    (version, _, one), (_, _, other) = on_ranks(2, ran, folder, 3)
    assert version == 2  # no server is restarted after the last step
    assert equal(one, other)
    assert not equal(one, stored(folder))
    assert ran(ALONE, folder, 4)[:2] == (2, [str(saved / "step_3")])
    (version, begun, one), (_, begun_too, other) = on_ranks(2, ran, folder, 6)
    assert version == 3
    assert begun[0] == begun_too[0] == str(saved / "step_4")
    assert equal(one, other)
    assert not equal(one, stored(saved / "step_4"))
    assert checkpoint.read(saved / "step_6").progress.step == 6


def test_server_death_between_steps_loses_no_step(folder: Path) -> None:
    (version, begun, one), (_, begun_too, other) = on_ranks(2, ran, folder, 3, True)
    assert version == 3
    assert equal(one, other)
    assert [Path(path).name for path in begun] == ["version_1", "version_3"]
    assert [Path(path).name for path in begun_too] == ["version_1", "step_1", "version_3"]


def test_full_disk_on_one_rank_stops_all_ranks(folder: Path) -> None:
    for error in on_ranks(2, without_room, folder):
        assert isinstance(error, BridgeError)
        assert "no room" in str(error)


def without_room(ranks: Ranks, folder: Path) -> None:
    with restarting(ranks, folder) as (running, _):
        if ranks.rank == 1:

            def save(_: Path) -> None:
                raise BridgeError("no room", hint="make some")

            running.mode.save = save  # type: ignore[method-assign,assignment]
        running.publish()
