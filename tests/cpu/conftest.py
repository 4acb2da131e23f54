"""Servers shared between tests: one of each kind is started, and every test gets it with its initial weights.

Within a kind, tests marked `kills_the_server` run last. In `make test` at most two vLLMs run at a time: the one of
`llama`, and in parallel first those of tests that start their own, then the one of `lora_llama`. Slow tests run in
parallel.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx
import pytest
import torch

from bridge.server import api_key, fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.weights.attach import attach
from tests import scenarios
from tests.models import tiny
from tests.scenarios import LiveServer

HERE = Path(__file__).parent
KEY = "the key"


def plain(folder: Path) -> AbstractContextManager[LiveServer]:
    return scenarios.served(tiny.write(tiny.llama(), folder / "model", std=0.06), folder / "server")


def with_lora(folder: Path) -> AbstractContextManager[LiveServer]:
    """Serve a model with sampling defaults that must not affect any request, with LoRA and an API key."""
    model = scenarios.with_defaults_of_its_own(tiny.write(tiny.llama(), folder / "model", std=0.06))
    return scenarios.served(model, folder / "server", "--api-key", KEY, max_lora_rank=scenarios.LORA_RANK)


KINDS: dict[str, Callable[[Path], AbstractContextManager[LiveServer]]] = {"llama": plain, "lora_llama": with_lora}
"""How to start the server of each fixture."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and (_kind(item) or item.get_closest_marker("slow") is None):
            item.add_marker(pytest.mark.xdist_group("first vllm" if _kind(item) == "llama" else "second vllm"))
    items.sort(key=_sort_key)


def _sort_key(item: pytest.Item) -> tuple[str, bool]:
    """Return the sort key of a test; tests without a shared server come first."""
    return _kind(item), item.get_closest_marker("kills_the_server") is not None


def _kind(item: pytest.Item) -> str:
    return next((kind for kind in KINDS if kind in getattr(item, "fixturenames", ())), "")


class Servers:
    """Runs one server at a time, of the most recently requested kind."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._kind = ""

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, kind: str) -> LiveServer:
        """Return a server of this kind with its initial weights and no adapters; start one if needed."""
        if kind != self._kind or not self._is_restored():
            self._start(kind)
        return self._server

    def _start(self, kind: str) -> None:
        self._kind = ""
        self._stack.close()
        self._server = self._stack.enter_context(KINDS[kind](self._folder(kind)))
        self._kind, self._attached = kind, attach(self._server.manifest)
        self._first = {name: tensor.clone() for name, tensor in self._attached.server_tensors.items()}

    def _is_restored(self) -> bool:
        """Restore the initial weights. Return False if the server is dead or torn."""
        if not self._server.child.is_alive():
            return False
        with BridgeClient(self._server.manifest, timeout_s=60) as client:
            if client.status().state != "serving":
                return False
            client.release_adapter()
            self._unload_adapters()
            with fence.publish(client, Update(), in_flight="abort"):
                self._write_first()
        return True

    def _unload_adapters(self) -> None:
        with httpx.Client(base_url=self._server.manifest.url, headers=api_key.headers(), trust_env=False) as http:
            for model in http.get("/v1/models").raise_for_status().json()["data"]:
                if model["parent"]:
                    http.post("/v1/unload_lora_adapter", json={"lora_name": model["id"]}).raise_for_status()

    @torch.no_grad()
    def _write_first(self) -> None:
        for name, tensor in self._attached.server_tensors.items():
            tensor.copy_(self._first[name])


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp) as servers:
        yield servers


@pytest.fixture
def llama(servers: Servers) -> LiveServer:
    """A Llama with tied embeddings and a padded vocabulary."""
    return servers.of("llama")


@pytest.fixture
def lora_llama(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """The same model with LoRA and an API key, which is in the environment of the test's commands and clients."""
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    return servers.of("lora_llama")
