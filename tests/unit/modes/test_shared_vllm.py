"""The mode `shared_vllm`: which server it uses, and which version it tracks."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.config import TrainConfig
from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError, ManifestError, ServerUnreachableError, UsageError
from bridge.modes.mode import Mode, RunContext
from bridge.modes.none import InPlace
from bridge.modes.shared_vllm import SharedVllm
from bridge.ranks.world import Ranks
from bridge.server import manifest as manifests
from bridge.server.fence import Update
from bridge.server.protocol import Status
from tests.fenced import publish
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.checks_sample import manifest
from tests.unit.http_server import Answer, HttpRequest, HttpServer, as_json, serving
from tests.unit.several_ranks import on_ranks
from tests.unit.toy_server import ToyServer

Digests = tuple[dict[str, str], dict[str, str]]
PLAIN: Digests = {"w": "1"}, {}
FP8, STALE = ({"w": "1"}, {"w": "f"}), ({"w": "1"}, {"w": "0"})
"""Digests of a server's weights and of their FP8 copies."""
RUN = RunContext(name="runs/ours", scratch=Path("/nonexistent"))


class FakeRoutes:
    """Counts versions as a server does."""

    def __init__(self, **status: Any) -> None:
        self.version = 7
        self.status = {"state": "serving", "can_sleep": True} | status

    def __call__(self, request: HttpRequest) -> Answer:
        self.version += request.path == "/bridge/publish"
        fixed = {"model": "tiny", "version": self.version, "server": ProcessIdentity.current()}
        return as_json(Status.model_validate(fixed | self.status).model_dump())


def config(server: HttpServer, folder: Path, **choices: object) -> TrainConfig:
    path = folder / manifests.MANIFEST_NAME
    manifests.write(manifest(url=server.url), path)
    return TrainConfig.model_validate({"model_name": "tiny", "vllm_config_path": path, **choices})


def paths(server: HttpServer) -> list[str]:
    return [request.path.removeprefix("/bridge/") for request in server.requests]


def test_version_is_tracked_from_start_to_end(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path, in_flight="abort"), RUN)
        assert (mode.version, mode.endpoint.url) == (7, server.url)
        assert publish(mode.publish(Update())).version == mode.version == 8
        mode.close()
    assert paths(server) == ["lease", "pause", "publish", "lease"]
    assert server.requests[1].body["in_flight"] == "abort"


@pytest.mark.parametrize(
    ("choice", "reported", "replayed"),
    [(None, (4, 2), (4, 2)), (True, (4, 2), (4, 2)), (False, (4, 2), None), (None, None, None)],
)
def test_experts_are_replayed_if_the_server_reports_them(
    tmp_path: Path, choice: bool | None, reported: tuple[int, int] | None, replayed: tuple[int, int] | None
) -> None:
    with serving(FakeRoutes(experts=reported)) as server:
        mode = SharedVllm(config(server, tmp_path, router_replay=choice), RUN)
        assert mode.replayed_experts == replayed
        assert mode.endpoint.reports_experts == (replayed is not None)
        mode.close()


def test_router_replay_without_reported_experts_is_refused(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server, pytest.raises(UsageError, match="does not report the experts of each token"):
        SharedVllm(config(server, tmp_path, router_replay=True), RUN)
    assert paths(server) == ["lease", "lease"], "it was given back"


def test_interrupt_in_the_fence_waits_for_the_version(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path), RUN)
        with pytest.raises(KeyboardInterrupt):
            publish(mode.publish(Update()), lambda: os.kill(os.getpid(), signal.SIGINT))
        assert mode.version == 8
        mode.close()


def test_preparing_may_use_the_kv_caches_memory(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path), RUN)
        requests_before: list[list[str]] = []
        with mode.publish(Update(sleep=True)) as window:
            with window.preparing():
                requests_before.append(paths(server))
            requests_before.append(paths(server))
        times = window.times
        assert mode.can_sleep
        assert times.version == mode.version == 8
        mode.close()
    assert requests_before == [["lease", "pause"]] * 2
    assert server.requests[1].body["sleep"] is True


def test_failure_before_writing_keeps_the_version(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path), RUN)
        fenced = mode.publish(Update())
        with pytest.raises(KeyboardInterrupt):
            publish(fenced, lambda: pytest.fail("written"), prepare=lambda: os.kill(os.getpid(), signal.SIGINT))
        assert mode.version == 7
        mode.close()
    assert paths(server) == ["lease", "pause", "resume", "lease"]


def test_server_reports_whether_its_kv_cache_can_sleep(tmp_path: Path) -> None:
    with serving(FakeRoutes(can_sleep=False)) as server:
        mode = SharedVllm(config(server, tmp_path), RUN)
        assert not mode.can_sleep
        mode.close()


@pytest.mark.parametrize(("resume", "writes"), [(False, "weights"), (False, "adapter"), (True, "adapter")])
def test_torn_server_is_refused_unless_the_run_resumes(tmp_path: Path, resume: bool, writes: str) -> None:
    torn = {"state": "torn", "writes": writes}
    with serving(FakeRoutes(**torn)) as server:
        with pytest.raises(AttachError, match=r"may be half-written.* after version 7"):
            SharedVllm(config(server, tmp_path), replace(RUN, resumes=resume))
        assert paths(server) == ["lease", "lease"]


def test_resuming_run_accepts_torn_weights(tmp_path: Path) -> None:
    with serving(FakeRoutes(state="torn")) as server:
        SharedVllm(config(server, tmp_path), replace(RUN, resumes=True)).close()


class FakeProcess:
    """Replaces the old server with a new one, which has its own memory and manifest."""

    def __init__(self, toy: ToyServer, url: str, path: Path) -> None:
        self._toy, self._url, self._path = toy, url, path
        self.started_with: list[str] = []

    def restart(self, model: str | Path) -> None:
        self.started_with.append(str(model))
        manifests.write(self._toy.edited(url=self._url, token="new"), self._path)


def test_parameters_follow_a_restarted_server(tmp_path: Path) -> None:
    old, new = (toy_server.serve(tiny.llama(), tmp_path / name) for name in ("model", "new"))
    path = tmp_path / manifests.MANIFEST_NAME
    with serving(FakeRoutes()) as server, serving(FakeRoutes(can_sleep=False)) as other:
        manifests.write(old.edited(url=server.url), path)
        choices = {"model_name": old.manifest.model, "vllm_config_path": path}
        process = FakeProcess(new, other.url, path)
        mode = SharedVllm(TrainConfig.model_validate(choices), replace(RUN, process=process))
        norm = mode.open().model.get_parameter("model.norm.weight")
        mode.revive(None)
        new.tensors["model.norm.weight"].fill_(5)
        assert (norm == 5).all()
        assert (mode.version, mode.endpoint.url, mode.can_sleep) == (8, other.url, False)
        mode.close()
    assert process.started_with == [old.manifest.model]
    assert paths(other) == ["lease", "pause", "publish", "lease"]
    assert other.requests[1].body["takeover"] is True
    assert other.requests[2].body["version"] == 8
    assert {request.headers["authorization"] for request in other.requests} == {"Bearer new"}


def test_different_model_is_refused_before_any_request(tmp_path: Path) -> None:
    with (
        serving(FakeRoutes()) as server,
        pytest.raises(ManifestError, match="serves tiny, expected big"),
    ):
        SharedVllm(config(server, tmp_path, model_name="big"), RUN)
    assert server.requests == []


@pytest.mark.parametrize("with_host", [True, False])
def test_given_port_overrides_the_manifests_url(tmp_path: Path, with_host: bool) -> None:
    with serving(FakeRoutes()) as server, serving(FakeRoutes()) as other:
        port = int(other.url.rpartition(":")[2])
        choices = {"vllm_port": port, **({"vllm_host": "127.0.0.1"} if with_host else {})}
        mode = SharedVllm(config(server, tmp_path, **choices), RUN)
        assert mode.endpoint.url == other.url
        mode.close()
    assert server.requests == []


def test_given_host_keeps_the_manifests_port(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path, vllm_host="localhost"), RUN)
        assert mode.endpoint.url == server.url.replace("127.0.0.1", "localhost")
        mode.close()


@pytest.mark.parametrize("mode", [SharedVllm, InPlace])
def test_second_trainer_on_a_server_does_not_start(tmp_path: Path, mode: Callable[..., Mode]) -> None:
    words = "another trainer (pid 4711, run runs/first) is updating this server"
    with serving(lambda _: as_json({"error": words, "hint": "wait"}, 409)) as server:
        choices = config(server, tmp_path, mode="none", reload="in-place") if mode is InPlace else None
        with pytest.raises(AttachError) as refused:
            mode(choices or config(server, tmp_path), RUN)
    assert (refused.value.message, paths(server)) == (words, ["lease"])


def test_each_update_sends_the_version_it_follows(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path), RUN)
        for _ in range(2):
            publish(mode.publish(Update()))
        mode.close()
    pauses, publications = ([a.body for a in server.requests if a.path.endswith(way)] for way in ("pause", "publish"))
    assert [body["version"] for body in pauses] == [7, 8]
    assert [body["after"] for body in publications] == [7, 8]


def test_unresponsive_server_is_reported_immediately(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        pass
    with pytest.raises(ServerUnreachableError):
        SharedVllm(config(server, tmp_path), RUN)


class Restarted(FakeRoutes):
    """A server that publishes the requested version, unless its own is already higher."""

    def __call__(self, request: HttpRequest) -> Answer:
        if request.path == "/bridge/publish":
            self.version = max(self.version, (request.body.get("version") or 0) - 1)
        return super().__call__(request)


def revived(ranks: Ranks, folder: Path) -> tuple[int, int]:
    """Kill the second rank's server before it publishes; return the final versions, as tracked and as served."""
    routes, own = Restarted(), folder / str(ranks.rank)
    own.mkdir()
    with serving(routes) as server:
        mode = SharedVllm(config(server, own), replace(RUN, ranks=ranks))
        answer = mode.client.publish

        def lost(*_: object) -> Status:
            raise ServerUnreachableError("gone", hint="")

        def restart(_: object) -> None:
            routes.version, mode.client.publish = 0, answer  # type: ignore[method-assign]

        mode.client.models = tuple  # type: ignore[method-assign]
        if ranks.rank == 1:
            mode.client.publish = mode.client.models = lost  # type: ignore[method-assign,assignment]
            mode.restart = restart  # type: ignore[method-assign,assignment]
        with pytest.raises(ServerUnreachableError):
            publish(mode.publish(Update()))
        mode.revive(None)
        mode.close()
        return mode.version, routes.version


def test_all_servers_agree_on_a_version_after_one_died(tmp_path: Path) -> None:
    assert on_ranks(2, revived, tmp_path) == [(9, 9)] * 2


@pytest.mark.parametrize("served", [(PLAIN, FP8), (FP8, PLAIN), (FP8, STALE)])
def test_replicas_with_different_fp8_are_refused(served: tuple[Any, Any]) -> None:
    def gathered(digests: Callable[[], object]) -> list[object]:
        answers = []
        for of_weights, of_fp8 in served:
            mode.client.digests = lambda _, *, quantized, own=(of_weights, of_fp8): own[quantized]
            answers.append(digests())
        return answers

    ranks = SimpleNamespace(
        dp_size=2, tp_size=1, is_tp_rank_zero=True, run_and_gather=gathered, one_per_replica=lambda answers: answers,
        all_gather_object=lambda _: [0, 0],
    )  # fmt: skip
    mode: Any = SimpleNamespace(_run=SimpleNamespace(ranks=ranks), client=SimpleNamespace(), version=0)
    with pytest.raises(AttachError, match="replicas 0 and 1 differ in 1 tensors, the first: w in FP8"):
        SharedVllm._compare_replicas(mode)
    served = (FP8, FP8)
    SharedVllm._compare_replicas(mode)
