"""The checks of a server: its manifest, port, leftovers and answers, with an HTTP server as a stand-in."""

import json
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bridge.checks import Check, server
from bridge.checks.server import Process
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


def status_with(played: PlayedServer, **changes: Any) -> Check:
    """Return the fence's check for a server whose status has these changes."""
    assert isinstance(played.status, Status)
    played.status = played.status.model_copy(update=changes)
    return server.answers(played.manifest())[1]


def test_serving_server_passes(played: PlayedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy setting must be ignored
    health, fence, numbers = server.answers(played.manifest())
    assert statuses([health, fence, numbers]) == ["PASS", "PASS", "PASS"]
    assert "version 3" in fence.found
    assert numbers.found == "every number in 26 tensors is finite"


def test_weights_that_are_not_finite_fail(played: PlayedServer, tmp_path: Path) -> None:
    played.finiteness = Finiteness(num_tensors=26, not_finite=("model.norm.weight",)).model_dump_json()
    status_with(played, last_checkpoint=str(tmp_path))
    numbers = server.answers(played.manifest())[2]
    assert (numbers.status, numbers.hint) == ("FAIL", f"bridge restore {tmp_path}")
    assert numbers.found == "NaN or infinity in 1 of 26 tensors, the first: model.norm.weight"


def test_server_of_an_older_bridge_skips_the_scan(played: PlayedServer) -> None:
    played.finiteness = ""
    assert statuses(server.answers(played.manifest())) == ["PASS", "PASS", "SKIP"]


def test_server_that_does_not_answer_fails(played: PlayedServer) -> None:
    (unreachable,) = server.answers(manifest(url="http://127.0.0.1:9"))
    assert (unreachable.status, "does not answer" in unreachable.found) == ("FAIL", True)
    played.health = 503
    (dead,) = server.answers(played.manifest())
    assert (dead.status, "503" in dead.found) == ("FAIL", True)


@pytest.mark.parametrize("answer", ["", "<html>", '{"state": "serving"}'])
def test_server_without_bridges_routes_fails(answer: str, played: PlayedServer) -> None:
    played.status = answer
    assert statuses(server.answers(played.manifest())) == ["PASS", "FAIL"]


def test_server_with_a_different_identity_fails(played: PlayedServer) -> None:
    health, fence = server.answers(played.manifest(token="old"))
    assert (health.status, fence.status, "old" in fence.found) == ("PASS", "FAIL", False)
    for changes in ({"model": "other"}, {"server": dead_server()}):
        fence = status_with(played, **changes)
        assert (fence.status, "another server" in fence.found) == ("FAIL", True)


def test_torn_fence_fails_with_the_checkpoint_to_restore(played: PlayedServer, tmp_path: Path) -> None:
    fence = status_with(played, state="torn", holder=dead_holder())
    assert fence.status == "FAIL"
    assert fence.found == (
        f"the weights may be half-written: process {os.getpid()} died inside the fence after version 3, and the server"
        " generates nothing until a checkpoint is restored"
    )
    assert str(fence.hint).startswith("bridge restore CHECKPOINT (any folder")
    assert str(fence.hint).endswith("bridge restore tiny)")
    saved = tmp_path / "my models" / "step_2"
    assert status_with(played, last_checkpoint=str(saved)).hint == (
        f"bridge restore CHECKPOINT ({saved} no longer exists; any folder with weights of this model works; "
        "for the initial weights: bridge restore tiny)"
    )
    saved.mkdir(parents=True)
    assert status_with(played).hint == f"bridge restore '{saved}'"


def test_paused_fence_causes_a_warning(played: PlayedServer) -> None:
    assert status_with(played, state="paused", holder=dead_holder()).status == "WARN"
    assert status_with(played, holder=None).status == "WARN"
    assert status_with(played, holder=Holder.current(), writes="nothing").found.endswith("which reads")


def test_trainer_of_the_server_is_named(played: PlayedServer) -> None:
    fence = status_with(played, lease=Lease(holder=Holder.current(), run="runs/first"))
    assert fence.status == "PASS"
    assert fence.found.endswith(f", updated by pid {os.getpid()} (run runs/first)")


def test_complete_shared_files_pass() -> None:
    descriptor = os.memfd_create("weights")
    os.truncate(descriptor, 64)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    whole, longer = (manifest(ipc_handles={"w": shared_memory_handle(path, size)}) for size in (64, 128))
    assert server.weights_open(whole).status == "PASS"
    short = server.weights_open(longer)
    assert (short.status, "64 bytes" in short.found) == ("FAIL", True)
    os.close(descriptor)
    assert server.weights_open(whole).status == "FAIL"
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


def test_missing_manifest_is_skipped_before_a_server_starts() -> None:
    examined = server.examine(None)
    assert (statuses(examined.checks), examined.path) == (["SKIP"], None)
    assert "no server yet" in examined.checks[0].found


def test_manifest_of_a_live_server_passes(only_this_folder: Path) -> None:
    path = written(only_this_folder)
    examined = server.examine(None)
    assert statuses(examined.checks) == ["PASS", "PASS"]
    assert (examined.path, examined.live) == (path, manifest())
    assert statuses(server.examine(only_this_folder / "other.json").checks) == ["FAIL"]


@pytest.mark.parametrize(
    "text", ['{"model": "ti', "[]", '{"ipc_handles": {}}', '{"schema_version": 9}', '{"model": "x"}']
)
def test_damaged_manifest_fails(text: str, only_this_folder: Path) -> None:
    (only_this_folder / manifests.MANIFEST_NAME).write_text(text)
    examined = server.examine(None)
    assert (statuses(examined.checks), examined.live) == (["FAIL"], None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server": dead_server()}, "has exited"),
        ({"boot_id": "another", "host": "elsewhere"}, "written on host elsewhere"),
        ({"server": dead_server().model_copy(update={"pid_namespace": "pid:[1]"})}, "PID namespace"),
    ],
)
def test_manifest_without_a_live_server_fails(changes: dict[str, object], words: str, only_this_folder: Path) -> None:
    written(only_this_folder, **changes)
    examined = server.examine(None)
    assert (statuses(examined.checks), examined.live) == (["PASS", "FAIL"], None)
    assert words in examined.checks[1].found


def test_unreadable_manifest_fails(only_this_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, _flags: int) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    written(only_this_folder)
    monkeypatch.setattr(os, "open", refuse)
    (check,) = server.examine(None).checks
    assert (check.status, "Permission denied" in check.found) == ("FAIL", True)


@pytest.mark.parametrize(("visible", "status"), [([UUID, "GPU-2"], "PASS"), (["GPU-2"], "FAIL"), ([], "FAIL")])
def test_gpu_of_the_server_must_be_visible(visible: list[str], status: str) -> None:
    on_gpu = manifest(backend="cuda_ipc", gpu_uuid=UUID, ipc_handles={"w": cuda_handle()})
    check = server.same_gpu(on_gpu, visible)
    assert check.status == status
    assert status == "PASS" or f"CUDA_VISIBLE_DEVICES={UUID}" in str(check.hint)
    assert server.same_gpu(manifest(), []).status == "PASS"


def test_versions_that_differ_from_the_servers_cause_a_warning() -> None:
    assert server.same_versions(manifest(), VERSIONS).status == "PASS"
    check = server.same_versions(manifest(), VERSIONS | {"torch": "2.11.0"})
    assert (check.status, "torch 2.11.0" in check.found) == ("WARN", True)


def test_other_manifests_cause_a_warning(tmp_path: Path, only_this_folder: Path) -> None:
    used, folder = written(only_this_folder), tmp_path / "default"
    assert list(server.others(used)) == []
    stale = written(folder, server=dead_server())
    (check,) = server.others(used)
    assert (check.status, check.hint) == ("WARN", f"rm {stale}")
    written(folder)
    (check,) = server.others(used)
    assert (check.status, "a different live server" in check.found) == ("WARN", True)
    stale.write_text(json.dumps({"ipc_handles": {}}))
    assert statuses(server.others(used)) == ["WARN"]


INIT = Process(1, "/sbin/init", (0,))
SERVER = Process(10, "python -m vllm.entrypoints.cli.main serve tiny", (1,))
ENGINE = Process(11, "VLLM::EngineCore", (10,))
WORKER = Process(12, "VLLM::Worker", (11,))


@pytest.mark.parametrize(
    ("processes", "status"),
    [
        ([INIT], "PASS"),
        ([INIT, SERVER, ENGINE, WORKER], "PASS"),
        ([Process(10, "vllm serve tiny", (0,)), ENGINE], "PASS"),
        ([INIT, ENGINE._replace(ancestors=(1,))], "WARN"),
        ([INIT, ENGINE, WORKER], "WARN"),
    ],
)
def test_engine_without_a_server_causes_a_warning(processes: list[Process], status: str) -> None:
    check = server.engines_have_servers(processes)
    assert check.status == status
    assert len(processes) != 3 or check.hint == "if they are yours: kill 11 12"


@pytest.mark.parametrize(
    ("pid", "ancestors", "server_pid", "status", "words"),
    [
        (7, (), 7, "PASS", "our server"),
        (8, (7, 1), 7, "PASS", "our server"),
        (7, (), None, "FAIL", "pid 7: python -m http.server"),
        (7, (), 9, "FAIL", "pid 7"),
        (None, (), 9, "FAIL", "another user's"),
    ],
)
def test_port_may_be_in_use_only_by_the_server(
    pid: int | None, ancestors: tuple[int, ...], server_pid: int | None, status: str, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(server, "listening", lambda: {9001: pid, 9002: 1})
    monkeypatch.setattr(server, "describe", lambda _: Process(pid, "python -m http.server", ancestors))
    check = server.port(9001, server_pid)
    assert (check.status, words in check.found) == (status, True)
    assert status == "PASS" or "--port 9003" in str(check.hint)


def test_real_listener_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_socket:
        number = open_socket.getsockname()[1]
        foreign = server.port(number, None)
        assert (foreign.status, f"pid {os.getpid()}" in foreign.found) == ("FAIL", True)
        assert server.port(number, os.getpid()).status == "PASS"
    assert server.port(number, None).status == "PASS"
    assert server.port(number, os.getpid()).status == "FAIL"


def test_processes_are_described() -> None:
    assert os.getpid() in {process.pid for process in server.running()}
    assert server.describe(2**22 + 1) == Process(2**22 + 1)
    assert len(server.describe(os.getpid()).command) <= 60
