"""Servers started in a different folder: found through their processes, never confused, and never killed."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bridge.checks import Check
from bridge.checks import server as checks
from bridge.core.process import ProcessIdentity
from bridge.errors import ManifestError
from bridge.server import discovery
from bridge.server import manifest as manifests
from bridge.server.discovery import running
from bridge_cli import verify
from tests.unit.checks_sample import dead_server, manifest

Serve = Callable[..., Path]


@contextmanager
def process(folder: Path, environment: Mapping[str, str]) -> Iterator[ProcessIdentity]:
    """Start a process in `folder` with its own environment."""
    code = "print(flush=True); import time; time.sleep(600)"
    started = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], cwd=folder, env=dict(environment), stdout=subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        started.stdout.readline()
        yield ProcessIdentity.of(started.pid)
    finally:
        started.kill()
        started.communicate()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty current folder, and hide this machine's other servers."""
    mine = lambda: {path: server for path, server in running().items() if path.is_relative_to(tmp_path)}  # noqa: E731
    monkeypatch.setattr(discovery, "running", mine)
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", tmp_path / "default")
    monkeypatch.delenv("LOGDIR", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@contextmanager
def server(folder: Path, *, by: str = "BRIDGE_MANIFEST_PATH") -> Iterator[Path]:
    """A live server with its manifest in `folder`, which its environment names in one of three ways."""
    folder.mkdir()
    path = folder / manifests.MANIFEST_NAME
    named = {"BRIDGE_MANIFEST_PATH": str(path), "LOGDIR": str(folder), "cwd": ""}[by]
    environment = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", by: named}
    with process(folder if by == "cwd" else Path("/"), environment) as identity:
        manifests.write(manifest(server=identity), path)
        yield path


@pytest.mark.parametrize("by", ["BRIDGE_MANIFEST_PATH", "LOGDIR", "cwd"])
def test_only_running_server_is_found_in_any_folder(tmp_path: Path, by: str) -> None:
    with server(tmp_path / "there", by=by) as path:
        assert discovery.find() == path
        examined = checks.examine(None)
        assert (examined.path, [check.status for check in examined.checks]) == (path, ["PASS", "PASS"])
    with pytest.raises(ManifestError, match="no manifest"):
        discovery.find()


def test_manifest_on_the_search_path_comes_first(tmp_path: Path, here: Path) -> None:
    manifests.write(manifest(), here / manifests.MANIFEST_NAME)
    with server(tmp_path / "there"):
        assert discovery.find() == here / manifests.MANIFEST_NAME


def test_given_path_disables_the_search(tmp_path: Path) -> None:
    with server(tmp_path / "there"), pytest.raises(ManifestError, match="no manifest at /nowhere"):
        discovery.find(Path("/nowhere/m.json"))


def test_several_servers_are_all_listed_in_the_error(tmp_path: Path) -> None:
    with server(tmp_path / "one") as one, server(tmp_path / "two") as two:
        with pytest.raises(ManifestError, match="2 servers were started elsewhere") as refused:
            discovery.find()
        for path in (one, two):
            assert f"--vllm-config-path {path} (tiny, pid " in refused.value.hint
        assert [check.status for check in checks.examine(None).checks] == ["SKIP"]


def test_process_without_its_own_manifest_is_not_a_server(tmp_path: Path) -> None:
    switched = {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}
    path = tmp_path / "other.json"
    manifests.write(manifest(server=dead_server()), path)
    for environment in (switched, {**switched, "BRIDGE_MANIFEST_PATH": str(path)}, {"BRIDGE_MANIFEST_PATH": str(path)}):
        with process(tmp_path, environment):
            assert discovery.running() == {}


def test_verify_uses_the_found_server_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proved: list[Path] = []

    def proof(path: Path, *, as_json: bool) -> list[Check]:
        proved.append(path)
        return []

    monkeypatch.setattr(verify, "proof", proof)
    with server(tmp_path / "there") as path:
        verify.verify()
    assert proved == [path]
    assert capsys.readouterr().err == f"the only running server was started elsewhere: {path}\n"


@pytest.mark.parametrize("ancestors", [(), (11,)])
def test_doctor_does_not_propose_to_kill_other_servers(
    tmp_path: Path, ancestors: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = discovery.choice(tmp_path / "m.json", manifest())
    listener = checks.Process(pid=12 if ancestors else 11, command="python", ancestors=ancestors)
    monkeypatch.setattr(checks, "listening", lambda: {9001: listener.pid})
    monkeypatch.setattr(checks, "describe", lambda _: listener)
    check = checks.port(9001, None, {11: name})
    assert check.status == "WARN"
    assert f"--vllm-config-path {tmp_path / 'm.json'}" in str(check.hint)
    assert "kill " not in f"{check.found} {check.hint}"


def test_process_with_unreadable_environment_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden:
        pid = 1

        def uids(self) -> Any:
            return SimpleNamespace(effective=os.geteuid())

        def environ(self) -> dict[str, str]:
            raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "process_iter", lambda: [Hidden()])
    assert running() == {}


ODD_CONTENTS = {
    "empty": b"", "list": b"[1]", "number": b'{"VLLM_ENABLE_SHARED_WEIGHTS": 1}', "text": b'"1"', "cut": b'{"VLLM',
    "bytes": b"\xff\xfe", "deep": b"[" * 50_000, "NUL": b'{"VLLM_ENABLE_SHARED_WEIGHTS": "1", "LOGDIR": "a\\u0000b"}',
    "long": b'{"VLLM_ENABLE_SHARED_WEIGHTS": "1", "BRIDGE_MANIFEST_PATH": "' + b"x" * 60_000 + b'"}',
}  # fmt: skip


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("content", [*ODD_CONTENTS, "huge"])
def test_unrelated_memfd_is_not_taken_for_a_server(tmp_path: Path, content: str, is_sealed: bool) -> None:
    """Any process may have a memfd with that name, and write to it while it is read."""
    with server(tmp_path / "there") as path:
        file = os.memfd_create(discovery.MEMORY_FILE, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if content == "huge":
                os.ftruncate(file, 2**40)
            else:
                os.write(file, ODD_CONTENTS[content])
            if is_sealed:
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, discovery.SEALS)
            assert running().keys() & {path} == {path}
            assert discovery._variables(psutil.Process()) == psutil.Process().environ() or content in {"NUL", "long"}
        finally:
            os.close(file)


def test_published_variables_are_complete_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may read it between any two steps."""
    seen, variables = list[object](), {discovery.SWITCH: "1", discovery.FOLDER: "folder"}
    made, create, write = list[int](), os.memfd_create, os.write

    def look() -> None:
        seen.append(discovery._variables(psutil.Process()).get(discovery.FOLDER))

    def make(*given: Any) -> int:
        made.append(create(*given))
        return made[-1]

    def look_and_write(*given: Any) -> int:
        look()
        num_written = write(*given)
        look()
        return num_written

    monkeypatch.setattr(os, "memfd_create", make)
    monkeypatch.setattr(os, "write", look_and_write)
    try:
        discovery.publish_variables(variables)
        look()
    finally:
        os.close(made[0])
    assert seen == [None, None, "folder"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees another user's processes")
def test_processes_of_other_users_are_ignored(tmp_path: Path) -> None:
    code = (
        "import os; os.setuid(65534);"
        f"os.write(os.memfd_create({discovery.MEMORY_FILE!r}), b'[1]'); print(flush=True); import time; time.sleep(600)"
    )
    stranger = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        looked = list[int]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(discovery, "_manifest_path", lambda process: looked.append(process.pid))
            running()
        assert os.getpid() in looked
        assert stranger.pid not in looked
    finally:
        stranger.kill()
        stranger.communicate()
