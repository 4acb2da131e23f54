"""What a fork of the API server keeps and closes, and when vLLM spawns instead."""

import multiprocessing.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from bridge.core.address import free_port
from bridge_patches import startup
from tests.unit.patches.test_plugin import LIMIT_S, find, start

FAMILY = """
import asyncio, multiprocessing, os, signal, socket, sys, time
from multiprocessing import util
from pathlib import Path
from bridge_patches import startup

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
    while not (Path(sys.argv[1]) / "signal").exists():
        await asyncio.sleep(0.02)
    for _ in range(5):  # the loop looks at what woke it, and calls its handlers
        await asyncio.sleep(0.02)
    note("settled", "")
    await asyncio.sleep(60)

if sys.argv[3] == "patched":
    util.register_after_fork(startup.leave_parent, lambda leave: leave())
asyncio.run(main())
"""


@pytest.fixture
def port() -> int:
    return free_port("127.0.0.1")


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
def test_port_is_free_once_the_server_is_dead(
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
def test_signal_to_the_engine_does_not_reach_the_server(
    family: tuple[subprocess.Popen[bytes], psutil.Process], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    _, engine = family
    engine.send_signal(signal.SIGTERM)
    assert int(find_text(tmp_path / "signal")) == engine.pid
    find_text(tmp_path / "settled")
    assert (tmp_path / "parent").exists() is ("patched" not in request.node.name)


class ModelConfig:
    """vLLM's model configuration, with three of its fields."""

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        self.model = model
        self.dtype = "bfloat16"
        self.trust_remote_code = trust_remote_code


class Vllm:
    """vLLM's patched functions, with stand-ins for its modules."""

    def __init__(self) -> None:
        self.start_method = "fork"
        self.registry = ModuleType("registry")
        self.utils = ModuleType("utils")
        vars(self.registry)["_run_in_subprocess"] = lambda fn: f"subprocess: {fn()}"
        vars(self.utils)["get_hash_factors"] = lambda config, ignored: {
            name: value for name, value in vars(config).items() if name not in ignored
        }

    def modules(self) -> dict[str, ModuleType]:
        contents: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.config": {"utils": self.utils},
            "vllm.config.model": {"ModelConfig": ModelConfig},
            "vllm.model_executor": {},
            "vllm.model_executor.models": {"registry": self.registry},
            "vllm.utils": {"system_utils": SimpleNamespace(get_mp_context=self._context)},
        }
        modules = {name: ModuleType(name) for name in contents}
        for name, module in modules.items():
            vars(module).update(contents[name])
        return modules

    def _context(self) -> SimpleNamespace:
        return SimpleNamespace(get_start_method=lambda: self.start_method)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    patched = Vllm()
    for name, module in patched.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(multiprocessing.util, "register_after_fork", lambda *_: None)
    startup.patch()
    return patched


def test_model_is_inspected_in_process_only_when_forking(vllm: Vllm) -> None:
    inspect = vars(vllm.registry)["_run_in_subprocess"]
    assert inspect(lambda: "inspected") == "inspected"
    vllm.start_method = "spawn"  # CUDA is initialized, or the caller chose it
    assert inspect(lambda: "inspected") == "subprocess: inspected"


def test_compiled_graphs_are_reused_from_another_folder(vllm: Vllm) -> None:
    factors = vars(vllm.utils)["get_hash_factors"]
    kept = {"dtype": "bfloat16", "trust_remote_code": False}
    assert factors(ModelConfig("a"), set()) == factors(ModelConfig("b"), set()) == kept
    assert factors(ModelConfig("a"), {"dtype"}) == {"trust_remote_code": False}
    assert factors(ModelConfig("a", trust_remote_code=True), set())["model"] == "a"
    assert factors(SimpleNamespace(model="a"), set()) == {"model": "a"}


@pytest.mark.xdist_group("contract")  # its worker has imported vLLM
@pytest.mark.parametrize("is_initialized", [False, True])
def test_vllm_spawns_if_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch, is_initialized: bool) -> None:
    system_utils = pytest.importorskip("vllm.utils.system_utils")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(system_utils, "cuda_is_initialized", lambda: is_initialized)
    assert system_utils.get_mp_context().get_start_method() == ("spawn" if is_initialized else "fork")
