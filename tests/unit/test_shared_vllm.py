"""The mode `shared_vllm`: which server it takes, and which version it knows of."""

import os
import signal
from pathlib import Path

import pytest

from bridge.config import TrainConfig
from bridge.errors import ManifestError, ServerUnreachableError
from bridge.modes.shared_vllm import SharedVllm
from bridge.process import ProcessIdentity
from bridge.protocol import Status
from bridge.run_directory import RunDirectory
from bridge.weights import manifest as manifests
from tests.unit.checks_sample import manifest
from tests.unit.http_server import Answer, Asked, HttpServer, as_json, serving

RUN = RunDirectory(Path("/nonexistent"))
"""The mode leaves nothing behind between two checkpoints."""


class FakeRoutes:
    """Counts versions as a server does."""

    def __init__(self) -> None:
        self.version = 7

    def __call__(self, asked: Asked) -> Answer:
        self.version += asked.path == "/bridge/publish"
        server = ProcessIdentity.current()
        return as_json(Status(model="tiny", version=self.version, state="serving", server=server).model_dump())


def config(server: HttpServer, folder: Path, **choices: object) -> TrainConfig:
    path = folder / manifests.MANIFEST_NAME
    manifests.write(manifest(url=server.url), path)
    return TrainConfig.model_validate({"model_name": "tiny", "vllm_config_path": path, **choices})


def paths(server: HttpServer) -> list[str]:
    return [asked.path.removeprefix("/bridge/") for asked in server.asked]


def test_it_knows_the_servers_version_from_the_start_and_after_each_update(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path, in_flight="abort"), RUN)
        assert (mode.version, mode.endpoint.url) == (7, server.url)
        assert mode.publish(lambda: None, last_checkpoint=None).version == mode.version == 8
        mode.close()
    assert paths(server) == ["status", "pause", "publish"]
    assert server.asked[1].body["in_flight"] == "abort"


def test_an_interrupt_in_the_fence_comes_after_the_new_version_is_known(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path), RUN)
        with pytest.raises(KeyboardInterrupt):
            mode.publish(lambda: os.kill(os.getpid(), signal.SIGINT), last_checkpoint=None)
        assert mode.version == 8
        mode.close()


def test_another_model_than_the_one_served_is_refused_before_the_server_is_asked(tmp_path: Path) -> None:
    with (
        serving(FakeRoutes()) as server,
        pytest.raises(ManifestError, match="serves tiny, and --model-name asks for big"),
    ):
        SharedVllm(config(server, tmp_path, model_name="big"), RUN)
    assert server.asked == []


@pytest.mark.parametrize("with_host", [True, False])
def test_a_given_port_overrules_the_manifests_address(tmp_path: Path, with_host: bool) -> None:
    with serving(FakeRoutes()) as server, serving(FakeRoutes()) as other:
        port = int(other.url.rpartition(":")[2])
        choices = {"vllm_port": port, **({"vllm_host": "127.0.0.1"} if with_host else {})}
        mode = SharedVllm(config(server, tmp_path, **choices), RUN)
        assert mode.endpoint.url == other.url
        mode.close()
    assert server.asked == []


def test_a_given_host_keeps_the_manifests_port(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        mode = SharedVllm(config(server, tmp_path, vllm_host="localhost"), RUN)
        assert mode.endpoint.url == server.url.replace("127.0.0.1", "localhost")
        mode.close()


def test_a_server_that_does_not_answer_is_told_at_once(tmp_path: Path) -> None:
    with serving(FakeRoutes()) as server:
        pass
    with pytest.raises(ServerUnreachableError):
        SharedVllm(config(server, tmp_path), RUN)
