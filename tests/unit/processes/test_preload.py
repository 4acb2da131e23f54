"""A process that imports while its command is not known yet, with quick imports in place of vLLM's."""

import gc
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from bridge.processes import children, preload, server_command
from bridge.processes.children import Child
from bridge.processes.preload import Preloaded, preloading
from bridge.processes.server_command import PYTHON
from bridge.server import discovery

MODULE = "tests.unit.processes.quick_preload"
LIMIT_S = 30.0
SHOW = """
import os, sys
print(os.getpid(), *map(os.environ.get, ("NEW", "OLD", "OF_VLLM")), "json" in sys.modules)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "plugin_module", lambda _: MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("OLD", "old")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "serve.log"
    path.write_text("before\n")
    return path


def ended(child: Child) -> int | None:
    deadline = time.monotonic() + LIMIT_S
    while child.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return child.exit_code()


def command(code: str) -> tuple[str, ...]:
    return *PYTHON, "-m", "timeit", "-n1", "-r1", code


def test_process_becomes_the_server_with_its_environment(log: Path) -> None:
    outer = {name: value for name, value in os.environ.items() if name != "OLD"}
    with preloading() as preloaded:
        child = preloaded.become(command(SHOW), outer | {"NEW": "new"}, log)
        assert child is not None
        assert child.log == log
        assert ended(child) == 0
        assert preloaded.become(command(SHOW), outer, log) is None
    before, early, shown = log.read_text().splitlines()[:3]
    assert (before, early) == ("before", "imported")
    assert shown == f"{child.process.pid} new None vllm True"
    children.stop(child)


def test_process_that_ended_early_is_reported(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preload, "plugin_module", lambda _: "tests.unit.processes.there_is_no_such_module")
    with preloading() as preloaded:
        assert preloaded._child is not None
        ended(preloaded._child)
        assert preloaded.become(command(SHOW), os.environ, log) is None
    assert caplog.messages == ["vLLM was not imported early, so it starts later: that process ended with exit code 1"]


def test_named_modules_are_next_to_the_plugin() -> None:
    for name in (preload.MODULE, server_command.COMPATIBILITY):
        module = server_command.plugin_module(name)
        assert module is not None
        assert importlib.util.find_spec(module) is not None, module


def test_failed_imports_are_repeated_by_the_command(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    with preloading() as preloaded:
        child = preloaded.become(command(SHOW), os.environ | {"NEW": "new"}, log)
        assert child is not None
        assert ended(child) == 0
    assert log.read_text().splitlines()[1] == f"{child.process.pid} new old None False"
    children.stop(child)


@pytest.mark.timeout(60)
def test_large_environment_is_passed_without_blocking(log: Path) -> None:
    """Kubernetes sets such an environment for many services; the process may hang while it imports."""
    services = {f"SERVICE_{number}_HOST": "x" * 1000 for number in range(1000)}
    with preloading() as preloaded:
        assert preloaded._child is not None
        os.kill(preloaded._child.process.pid, signal.SIGSTOP)
        child = preloaded.become(command(SHOW), os.environ | services | {"NEW": "new"}, log)
        assert child is not None
        os.kill(child.process.pid, signal.SIGCONT)
        assert ended(child) == 0
    assert f"{child.process.pid} new old vllm True" in log.read_text()
    children.stop(child)


def test_unused_preloaded_process_exits() -> None:
    with preloading() as preloaded:
        assert preloaded._child is not None
        process = psutil.Process(preloaded._child.process.pid)
        assert not gc.isenabled()
    assert not process.is_running()
    assert gc.isenabled()


def test_garbage_collection_resumes_once_the_server_starts(log: Path) -> None:
    with preloading() as preloaded:
        assert not gc.isenabled()
        child = preloaded.become(command(SHOW), os.environ, log)
        assert gc.isenabled()
    assert child is not None
    children.stop(child)


@pytest.mark.parametrize("argv", [("/bin/true",), (sys.executable, "-c", "pass")])
def test_other_programs_do_not_run_in_the_preloaded_process(log: Path, argv: tuple[str, ...]) -> None:
    with preloading() as preloaded:
        assert preloaded._child is not None
        process = psutil.Process(preloaded._child.process.pid)
        assert preloaded.become(argv, {}, log) is None
        assert not process.is_running()


def test_killed_preloaded_process_is_replaced(log: Path) -> None:
    with preloading() as preloaded:
        child = preloaded._child
        assert child is not None
        os.kill(child.process.pid, signal.SIGKILL)
        ended(child)
        assert preloaded.become(command(SHOW), {}, log) is None


def test_garbage_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with preloading() as preloaded:
            assert preloaded._child is not None
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_copied_bridge_preloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "plugin_module", lambda _: None)
    with preloading() as preloaded:
        assert preloaded._child is None
        assert gc.isenabled()
    assert Preloaded(None).become(command(SHOW), {}, Path(os.devnull)) is None


def test_manifest_of_a_preloaded_server_is_found(log: Path, tmp_path: Path) -> None:
    variables = {discovery.SWITCH: "1", discovery.MANIFEST_PATH: str(tmp_path / "manifest.json")}
    with preloading() as preloaded:
        child = preloaded.become(command("import time; time.sleep(600)"), {**os.environ, **variables}, log)
        assert child is not None
        server = psutil.Process(child.process.pid)
        deadline = time.monotonic() + LIMIT_S
        while discovery._manifest_path(server) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert discovery._manifest_path(server) == tmp_path / "manifest.json"
        children.stop(child, grace_s=0)
