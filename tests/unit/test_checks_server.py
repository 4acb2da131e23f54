"""The checks of a server: its manifest, and its answers from a real HTTP server that stands in for a patched vLLM."""

import json
import os
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bridge.checks import server
from bridge.checks.result import Check
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest
from bridge.server.protocol import Finiteness, Holder, Lease, Status
from tests.unit.checks_sample import UUID, cuda_handle, dead_holder, dead_server, manifest, shared_memory_handle

VERSIONS: dict[str, str | None] = {"bridge": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


class PlayedServer(ThreadingHTTPServer):
    """Answers /health and, with the token, /bridge/status and whether its weights are finite."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.health = 200
        self.token = "secret"
        self.finiteness = Finiteness(num_tensors=26, not_finite=()).model_dump_json()
        self.status: Status | str = Status(model="tiny", version=3, state="serving", server=manifest().server)

    def manifest(self, **changes: Any) -> Manifest:
        return manifest(url=f"http://127.0.0.1:{self.server_port}", **changes)


class Answers(BaseHTTPRequestHandler):
    server: PlayedServer

    def do_GET(self) -> None:
        played = self.server
        status = played.status if isinstance(played.status, str) else played.status.model_dump_json()
        if self.path == "/health":
            self.answer(played.health, "")
        elif self.headers["authorization"] != f"Bearer {played.token}":
            self.answer(401, "")
        elif self.path == "/bridge/tensors/finite":
            self.answer(200 if played.finiteness else 404, played.finiteness)
        else:
            self.answer(200 if status else 404, status)

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def played() -> Iterator[PlayedServer]:
    with PlayedServer() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def statuses(checks: Iterable[Check]) -> list[str]:
    return [check.status for check in checks]


def test_a_serving_server_passes_with_its_version(played: PlayedServer) -> None:
    health, fence, numbers = server.answers(played.manifest())
    assert (health.status, fence.status, numbers.status) == ("PASS", "PASS", "PASS")
    assert "version 3" in fence.found
    assert numbers.found == "every number in 26 tensors is finite"


def test_weights_that_are_no_numbers_fail_with_what_loads_others(played: PlayedServer, tmp_path: Path) -> None:
    played.finiteness = Finiteness(num_tensors=26, not_finite=("model.norm.weight",)).model_dump_json()
    assert isinstance(played.status, Status)
    played.status = played.status.model_copy(update={"last_checkpoint": str(tmp_path)})
    numbers = server.answers(played.manifest())[2]
    assert (numbers.status, numbers.remedy) == ("FAIL", f"bridge restore {tmp_path}")
    assert numbers.found == "NaN or infinity in 1 of 26 tensors, the first: model.norm.weight"


def test_a_server_of_an_older_bridge_is_not_asked_for_numbers(played: PlayedServer) -> None:
    played.finiteness = ""
    assert statuses(server.answers(played.manifest())) == ["PASS", "PASS", "SKIP"]


def test_a_proxy_is_not_asked(played: PlayedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert statuses(server.answers(played.manifest())) == ["PASS", "PASS", "PASS"]


def test_a_server_that_is_gone_fails() -> None:
    (check,) = server.answers(manifest(url="http://127.0.0.1:9"))
    assert check.status == "FAIL"
    assert "no answer" in check.found


def test_a_dead_engine_fails(played: PlayedServer) -> None:
    played.health = 503
    (check,) = server.answers(played.manifest())
    assert check.status == "FAIL"
    assert "503" in check.found


def test_another_token_means_another_server(played: PlayedServer) -> None:
    health, fence = server.answers(played.manifest(token="old"))
    assert (health.status, fence.status) == ("PASS", "FAIL")
    assert "another server" in fence.found
    assert "old" not in fence.found


@pytest.mark.parametrize("answer", ["", "<html>", '{"state": "serving"}'])
def test_a_server_without_our_routes_is_another_one(answer: str, played: PlayedServer) -> None:
    played.status = answer
    assert statuses(server.answers(played.manifest())) == ["PASS", "FAIL"]


@pytest.mark.parametrize("changes", [{"model": "other"}, {"server": dead_server()}])
def test_a_later_server_at_the_same_port_is_another_one(changes: dict[str, Any], played: PlayedServer) -> None:
    assert isinstance(played.status, Status)
    played.status = played.status.model_copy(update=changes)
    fence = server.answers(played.manifest())[1]
    assert fence.status == "FAIL"
    assert "another server" in fence.found


def torn(played: PlayedServer, last_checkpoint: str | None) -> Check:
    assert isinstance(played.status, Status)
    changes = {"state": "torn", "holder": dead_holder(), "last_checkpoint": last_checkpoint}
    played.status = played.status.model_copy(update=changes)
    return server.answers(played.manifest())[1]


def test_a_torn_fence_fails_and_says_who_died_and_what_follows(played: PlayedServer) -> None:
    fence = torn(played, None)
    assert fence.status == "FAIL"
    assert fence.found == (
        f"the weights may be half-written: process {os.getpid()} died inside the fence after version 3, and the server"
        " generates nothing until a checkpoint is restored"
    )


def test_a_torn_fence_is_mended_with_the_last_checkpoint(played: PlayedServer, tmp_path: Path) -> None:
    saved = tmp_path / "my models" / "step_2"
    saved.mkdir(parents=True)
    assert torn(played, str(saved)).remedy == f"bridge restore '{saved}'"


def test_a_checkpoint_that_is_gone_is_no_remedy_but_named(played: PlayedServer, tmp_path: Path) -> None:
    remedy = torn(played, str(tmp_path / "step_1")).remedy
    assert remedy == (
        f"bridge restore CHECKPOINT ({tmp_path / 'step_1'} is gone; any folder with weights of this model works; "
        "for the first weights: bridge restore tiny)"
    )


def test_without_a_checkpoint_the_first_weights_mend(played: PlayedServer) -> None:
    remedy = torn(played, None).remedy
    assert str(remedy).startswith("bridge restore CHECKPOINT (any folder")
    assert str(remedy).endswith("bridge restore tiny)")


@pytest.mark.parametrize("holder", [dead_holder(), None])
def test_a_paused_fence_is_warned_of(holder: Any, played: PlayedServer) -> None:
    assert isinstance(played.status, Status)
    played.status = played.status.model_copy(update={"state": "paused", "holder": holder})
    assert statuses(server.answers(played.manifest())) == ["PASS", "WARN"]


def test_a_fence_that_is_held_to_read_writes_no_version(played: PlayedServer) -> None:
    assert isinstance(played.status, Status)
    held = {"state": "paused", "holder": Holder.current(), "writes": "nothing"}
    played.status = played.status.model_copy(update=held)
    assert server.answers(played.manifest())[1].found.endswith("which reads")


def test_the_trainer_that_updates_the_server_is_named(played: PlayedServer) -> None:
    assert isinstance(played.status, Status)
    lease = Lease(holder=Holder.current(), run="runs/first", since=0.0)
    played.status = played.status.model_copy(update={"lease": lease})
    fence = server.answers(played.manifest())[1]
    assert fence.status == "PASS"
    assert fence.found.endswith(f", updated by pid {os.getpid()} (run runs/first)")


def test_shared_files_that_open_whole_pass() -> None:
    descriptor = os.memfd_create("weights")
    os.truncate(descriptor, 64)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    whole, longer = (manifest(ipc_handles={"w": shared_memory_handle(path, size)}) for size in (64, 128))
    assert server.weights_open(whole).status == "PASS"
    short = server.weights_open(longer)
    assert short.status == "FAIL"
    assert "64 bytes" in short.found
    os.close(descriptor)
    assert server.weights_open(whole).status == "FAIL"


def test_gpu_memory_is_left_to_verify() -> None:
    on_gpu = manifest(backend="cuda_ipc", ipc_handles={"w": cuda_handle()})
    assert server.weights_open(on_gpu).status == "SKIP"


@pytest.fixture(autouse=True)
def only_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Limit the search path to the current folder and one empty default folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", tmp_path / "default")
    return here


def written(folder: Path, **changes: object) -> Path:
    path = folder / manifests.MANIFEST_NAME
    manifests.write(manifest(**changes), path)
    return path


def test_no_manifest_is_no_fault_before_a_server_starts() -> None:
    examined = server.examine(None)
    assert statuses(examined.checks) == ["SKIP"]
    assert "no server yet" in examined.checks[0].found
    assert examined.path is None


def test_a_given_manifest_that_is_missing_fails(only_this_folder: Path) -> None:
    written(only_this_folder)
    assert statuses(server.examine(only_this_folder / "other.json").checks) == ["FAIL"]


def test_a_live_servers_manifest_passes(only_this_folder: Path) -> None:
    path = written(only_this_folder)
    examined = server.examine(None)
    assert statuses(examined.checks) == ["PASS", "PASS"]
    assert examined.path == path
    assert examined.live == manifest()


@pytest.mark.parametrize(
    "text", ['{"model": "ti', "[]", '{"ipc_handles": {}}', '{"schema_version": 9}', '{"model": "x"}']
)
def test_a_manifest_that_is_cut_short_or_edited_fails(text: str, only_this_folder: Path) -> None:
    (only_this_folder / manifests.MANIFEST_NAME).write_text(text)
    examined = server.examine(None)
    assert statuses(examined.checks) == ["FAIL"]
    assert examined.live is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server": dead_server()}, "is gone"),
        ({"boot_id": "another", "host": "elsewhere"}, "written on host elsewhere"),
        ({"server": dead_server().model_copy(update={"pid_namespace": "pid:[1]"})}, "PID namespace"),
    ],
)
def test_a_manifest_of_no_live_server_here_fails(
    changes: dict[str, object], words: str, only_this_folder: Path
) -> None:
    written(only_this_folder, **changes)
    examined = server.examine(None)
    assert statuses(examined.checks) == ["PASS", "FAIL"]
    assert words in examined.checks[1].found
    assert examined.live is None


def test_a_manifest_that_may_not_be_read_fails_in_one_line(
    only_this_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, _flags: int) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    written(only_this_folder)
    monkeypatch.setattr(os, "open", refuse)
    examined = server.examine(None)
    assert statuses(examined.checks) == ["FAIL"]
    assert "Permission denied" in examined.checks[0].found


@pytest.mark.parametrize(("visible", "status"), [([UUID, "GPU-2"], "PASS"), (["GPU-2"], "FAIL"), ([], "FAIL")])
def test_the_servers_gpu_has_to_be_visible(visible: list[str], status: str) -> None:
    on_gpu = manifest(backend="cuda_ipc", gpu_uuid=UUID, ipc_handles={"w": cuda_handle()})
    check = server.same_gpu(on_gpu, visible)
    assert check.status == status
    assert status == "PASS" or f"CUDA_VISIBLE_DEVICES={UUID}" in str(check.remedy)


def test_weights_in_main_memory_need_no_gpu() -> None:
    assert server.same_gpu(manifest(), []).status == "PASS"


def test_another_torch_than_the_servers_is_warned_of() -> None:
    assert server.same_versions(manifest(), VERSIONS).status == "PASS"
    check = server.same_versions(manifest(), VERSIONS | {"torch": "2.11.0"})
    assert check.status == "WARN"
    assert "torch 2.11.0" in check.found


def test_a_stale_manifest_elsewhere_is_warned_of(tmp_path: Path, only_this_folder: Path) -> None:
    used = written(only_this_folder)
    assert list(server.others(used)) == []
    stale = written(tmp_path / "default", server=dead_server())
    (check,) = server.others(used)
    assert check.status == "WARN"
    assert check.remedy == f"rm {stale}"


def test_a_second_live_server_is_warned_of(tmp_path: Path, only_this_folder: Path) -> None:
    used = written(only_this_folder)
    written(tmp_path / "default")
    (check,) = server.others(used)
    assert check.status == "WARN"
    assert "another live server" in check.found


def test_a_foreign_file_elsewhere_is_warned_of(tmp_path: Path, only_this_folder: Path) -> None:
    used = written(only_this_folder)
    folder = tmp_path / "default"
    folder.mkdir()
    (folder / manifests.MANIFEST_NAME).write_text(json.dumps({"ipc_handles": {}}))
    assert [check.status for check in server.others(used)] == ["WARN"]
