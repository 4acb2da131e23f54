"""What a fork of the API server keeps and gives up, and when vLLM spawns instead."""

import multiprocessing.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from bridge_patches import forking
from tests.unit.patches.test_plugin import LIMIT_S, find, start

FAMILY = """
import asyncio, multiprocessing, os, signal, socket, sys, time
from multiprocessing import util
from pathlib import Path
from bridge_patches import forking

def note(name, text):
    place = Path(sys.argv[1]) / name
    place.with_suffix(".new").write_text(str(text))
    place.with_suffix(".new").rename(place)

def engine(own, pipe):
    own.send("the pipe still works")
    signal.signal(signal.SIGTERM, lambda *_: note("signal", os.getpid()))
    note("engine", os.getpid())
    while True:
        time.sleep(0.05)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: note("parent", "signalled"))
    server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
    ours, theirs = socket.socketpair()
    connected = socket.create_connection(server.getsockname())
    reader, writer = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    context.Process(target=engine, args=(writer, connected)).start()
    note("pipe", reader.recv())
    server.listen()
    await asyncio.sleep(60)

if sys.argv[3] == "patched":
    util.register_after_fork(forking.leave_parent, lambda leave: leave())
asyncio.run(main())
"""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return one.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def family(tmp_path: Path, port: int, request: pytest.FixtureRequest) -> Iterator[tuple[Any, psutil.Process]]:
    parent = start(FAMILY, tmp_path, str(port), request.param)
    engine = find(tmp_path, "engine")
    assert (tmp_path / "pipe").exists() or find_text(tmp_path / "pipe") == "the pipe still works"
    yield parent, engine
    parent.kill()
    parent.wait()
    engine.kill()


def find_text(path: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize("family", ["patched", "plain"], indirect=True)
def test_the_port_is_free_once_the_server_is_dead(
    family: tuple[subprocess.Popen[bytes], psutil.Process], port: int, request: pytest.FixtureRequest
) -> None:
    parent, engine = family
    parent.kill()
    parent.wait()
    assert engine.is_running()
    is_patched = "patched" in request.node.name
    assert is_free(port) is is_patched
    others = [item for item in engine.net_connections("tcp") if item.status == psutil.CONN_LISTEN]
    assert bool(others) is not is_patched


@pytest.mark.parametrize("family", ["patched", "plain"], indirect=True)
def test_a_signal_to_the_engine_is_its_own(
    family: tuple[subprocess.Popen[bytes], psutil.Process], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    _, engine = family
    engine.send_signal(signal.SIGTERM)
    assert int(find_text(tmp_path / "signal")) == engine.pid
    time.sleep(0.5)
    assert (tmp_path / "parent").exists() is ("patched" not in request.node.name)


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return vLLM's inspection of a model's class, patched, with the start method it would get."""
    method = SimpleNamespace(name="fork")
    registry, system_utils = ModuleType("registry"), ModuleType("system_utils")
    vars(registry)["_run_in_subprocess"] = lambda fn: f"subprocess: {fn()}"
    vars(system_utils)["get_mp_context"] = lambda: SimpleNamespace(get_start_method=lambda: method.name)
    for name, module in (("vllm.model_executor.models", registry), ("vllm.utils", system_utils)):
        package = ModuleType(name)
        setattr(package, module.__name__, module)
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(multiprocessing.util, "register_after_fork", lambda *_: None)
    forking.patch()

    def run(name: str) -> str:
        method.name = name
        text: str = vars(registry)["_run_in_subprocess"](lambda: "inspected")
        return text

    return run


def test_the_model_is_inspected_here_only_if_the_engine_is_forked(inspect: Callable[..., str]) -> None:
    assert inspect("fork") == "inspected"
    assert inspect("spawn") == "subprocess: inspected"  # CUDA is initialized, or the caller chose it


@pytest.mark.parametrize("is_initialized", [False, True])
def test_vllm_spawns_where_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch, is_initialized: bool) -> None:
    system_utils = pytest.importorskip("vllm.utils.system_utils")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(system_utils, "cuda_is_initialized", lambda: is_initialized)
    assert system_utils.get_mp_context().get_start_method() == ("spawn" if is_initialized else "fork")
