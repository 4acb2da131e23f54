"""The general plugin: when it patches this process, and in which order."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bridge.errors import IncompatibleVersionError
from bridge.server.discovery import SWITCH
from bridge_patches import (
    compatibility,
    engine_outputs,
    loading,
    placement,
    plugin,
    prefix_cache,
    startup,
)


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    plugin.register.cache_clear()
    yield
    plugin.register.cache_clear()


@pytest.mark.xdist_group("contract")  # its worker has imported vLLM
@pytest.mark.parametrize(("value", "patched"), [(None, False), ("0", False), ("", False), ("1", True), ("True", True)])
def test_vllm_is_patched_once_and_only_on_request(
    monkeypatch: pytest.MonkeyPatch, value: str | None, patched: bool
) -> None:
    order: list[str] = []
    monkeypatch.setattr(compatibility, "check_installed", lambda: order.append("check"))
    monkeypatch.setattr(plugin, "end_with_parent", lambda: order.append("tie"))
    for module in (startup, loading, placement, prefix_cache, engine_outputs):
        monkeypatch.setattr(module, "patch", lambda name=module.__name__: order.append(name.rpartition(".")[2]))
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    envs = pytest.importorskip("vllm.envs")
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    for _ in range(3):
        plugin.register()
    for name in ("VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_SKIP_WEIGHT_DAEMON"):
        assert (name in envs.environment_variables) is patched
    everything = ["check", "tie", "startup", "loading", "placement", "prefix_cache", "engine_outputs"]
    assert order == (everything if patched else [])


def test_unsupported_vllm_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise IncompatibleVersionError("0.1", hint="another")

    monkeypatch.setattr(compatibility, "check_installed", refuse)
    monkeypatch.setattr(loading, "patch", lambda: pytest.fail("patched"))
    monkeypatch.setattr(placement, "patch", lambda: pytest.fail("patched"))
    monkeypatch.setenv(SWITCH, "1")
    for _ in range(2):
        with pytest.raises(IncompatibleVersionError):
            plugin.register()


LIMIT_S = 60.0
FAMILY = """
import multiprocessing, signal, sys, time
from pathlib import Path
from bridge_patches import plugin

def note(name):
    import os
    path = Path(sys.argv[1]) / name
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)

def worker(stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    plugin.GRACE_S = 1
    plugin.end_with_parent()
    plugin.end_with_parent()
    note("worker")
    time.sleep(60)

def engine(context, stubborn):
    plugin.end_with_parent()
    context.Process(target=worker, args=(stubborn,)).start()
    note("engine")
    time.sleep(60)

if __name__ == "__main__":
    method, stubborn = sys.argv[2], sys.argv[3] == "stubborn"
    plugin.end_with_parent()  # does nothing in the eldest, whom multiprocessing did not start
    context = multiprocessing.get_context(method)
    context.Process(target=engine, args=(context, stubborn)).start()
    note("eldest")
    time.sleep(60)
"""
FORGETFUL = """
import multiprocessing, sys, time
from pathlib import Path
from bridge_patches import plugin

def child():
    import os
    path = Path(sys.argv[1]) / "child"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(60)

plugin.end_with_parent()
multiprocessing.get_context("fork").Process(target=child).start()
time.sleep(60)
"""


def start(code: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    program = folder / "family.py"
    program.write_text(code)
    return subprocess.Popen([sys.executable, str(program), str(folder), *arguments], stderr=subprocess.DEVNULL)


def find(folder: Path, name: str) -> psutil.Process:
    """Wait until one of the processes has written its pid."""
    deadline = time.monotonic() + LIMIT_S
    while not (folder / name).exists():
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.02)
    return psutil.Process(int((folder / name).read_text()))


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are still alive after a while."""
    alive = psutil.wait_procs(processes, timeout=LIMIT_S)[1]
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("temper", ["meek", "stubborn"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children_die_with_a_killed_parent(tmp_path: Path, method: str, temper: str) -> None:
    eldest = start(FAMILY, tmp_path, method, temper)
    family = [find(tmp_path, name) for name in ("engine", "worker")]
    assert all(process.is_running() for process in family)
    eldest.kill()
    eldest.wait()
    assert left(family) == []


def test_child_forked_later_exits_with_its_parent(tmp_path: Path) -> None:
    eldest = start(FORGETFUL, tmp_path)
    child = find(tmp_path, "child")
    eldest.kill()
    eldest.wait()
    assert left([child]) == []


def test_normal_exit_of_the_parent_does_not_kill_children(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, sys, time; from bridge_patches import plugin\n"
        "def child(): plugin.end_with_parent(); time.sleep(0.5); sys.exit(7)\n"
        "if __name__ == '__main__':\n"
        "    one = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    one.start(); one.join(); sys.exit(one.exitcode)"
    )
    assert start(code, tmp_path).wait(LIMIT_S) == 7


def test_repeated_calls_start_only_one_thread(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, sys, threading; from bridge_patches import plugin\n"
        "def child():\n"
        "    plugin.end_with_parent(); plugin.end_with_parent()\n"
        "    sys.exit(sum(thread.name == 'end_with_parent' for thread in threading.enumerate()))\n"
        "if __name__ == '__main__':\n"
        "    plugin.end_with_parent()\n"
        "    one = multiprocessing.get_context(sys.argv[2]).Process(target=child)\n"
        "    one.start(); one.join()\n"
        "    own = sum(thread.name == 'end_with_parent' for thread in threading.enumerate())\n"
        "    sys.exit(10 * own + one.exitcode)"
    )
    assert [start(code, tmp_path, method).wait(LIMIT_S) for method in ("spawn", "fork")] == [1, 1]


def test_terminated_process_may_exit_on_its_own(tmp_path: Path) -> None:
    code = FAMILY.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.signal(signal.SIGTERM, last_words)")
    code = code.replace("def worker", "def last_words(number, frame):\n    note('told')\n    sys.exit(0)\n\ndef worker")
    code = code.replace("plugin.GRACE_S = 1", "plugin.GRACE_S = 60")  # longer than the test
    eldest = start(code, tmp_path, "spawn", "stubborn")
    worker = find(tmp_path, "worker")
    engine = find(tmp_path, "engine")
    eldest.send_signal(signal.SIGKILL)
    eldest.wait()
    assert left([engine, worker]) == []
    assert int((tmp_path / "told").read_text()) == worker.pid


def test_fork_never_sees_a_half_imported_module() -> None:
    """A fork during an import in the thread would leave a half-imported module in the child, and kill its thread."""
    code = "import sys; from bridge_patches import plugin; print('multiprocessing.connection' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True\n"
