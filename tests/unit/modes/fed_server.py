"""A server that receives weights, without vLLM. It records its calls in order, and fails at a chosen call.

`FakeSender` stands in for vLLM's sender. It makes the same calls in the same order; like NCCL's, its broadcast hangs
until every worker has joined.
"""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.unit.http_server import Answer, HttpRequest, as_json, serving

DEVICE = "cpu"
VLLM = "0.32.0"
SLOW_S = 0.3
LATE_S = 20.0
"""A test fails if a broadcast hangs for this long."""


@dataclass
class FedServer:
    """One stock server."""

    model: str
    num_workers: int = 1
    """Workers per engine."""
    num_engines: int = 1
    vllm: str = VLLM
    engine: str | None = "nccl"
    is_paused: bool = False
    has_dev_routes: bool = True
    dies_at: str = ""
    """The server stops answering when this route is called."""
    is_dead: bool = False
    fails_at: str = ""
    """Route that responds with status 500."""
    slow_at: str = ""
    """Route that takes `SLOW_S`, or until it `answers`."""
    answers: threading.Event = field(default_factory=threading.Event)
    drops_prefixes: bool = True
    weight_version: str | None = "default"
    """Name of the served weights; None: this vLLM version does not name them."""
    key: str = ""
    """Key that each request must send; empty if none is required."""
    calls: list[str] = field(default_factory=list)
    """Calls of routes that change the server's state, in order."""
    infos: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of the handshake."""
    url: str = ""

    def answer(self, request: HttpRequest) -> Answer | None:
        route = request.path.partition("?")[0].lstrip("/")
        self.is_dead = self.is_dead or route == self.dies_at
        if self.is_dead:
            return None
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return as_json({"error": {"message": "no key"}}, 401)
        if route == self.slow_at:
            self.answers.wait(SLOW_S)
        if request.method == "POST":
            self.calls.append(request.path.lstrip("/"))
        if route == self.fails_at:
            fault = "size mismatch for q_proj"  # vLLM reports errors on these two routes in a different format
            return as_json({"error": fault if route in ("pause", "resume") else {"message": fault}}, 500)
        if route == "v1/models":
            return as_json({"data": [{"id": self.model, "owned_by": "vllm", "max_model_len": 2048}]})
        return self._dev(route, request) if self.has_dev_routes else Answer("Not Found", 404)

    def _dev(self, route: str, request: HttpRequest) -> Answer:
        if route == "init_weight_transfer_engine":
            self.infos.append(request.body["init_info"])
        if route in ("update_weight_version", "weight_info") and self.weight_version is None:
            return Answer("Not Found", 404)
        if route == "update_weight_version":
            self.weight_version = request.body["new_version"]
        self.is_paused = {"pause": True, "resume": False}.get(route, self.is_paused)
        transfer = None if self.engine is None else {"backend": self.engine}
        config = {
            "model_config": {"model": self.model},
            "parallel_config": {"world_size": self.num_workers, "data_parallel_size": self.num_engines},
            "weight_transfer_config": transfer,
        }
        documents = {
            "is_paused": {"is_paused": self.is_paused},
            "version": {"version": f"{self.vllm}+cpu"},
            "server_info": {"vllm_config": config},
            "weight_info": {"weight_version": self.weight_version},
            "reset_prefix_cache": {"success": self.drops_prefixes},
        }
        return as_json(documents.get(route, {}))


@contextmanager
def running(*servers: FedServer) -> Iterator[None]:
    """Run all of these servers."""
    if not servers:
        yield
        return
    first, *others = servers
    with serving(first.answer) as http, running(*others):
        first.url = http.url
        yield


class FakeSender:
    """Calls like vLLM's sender; `sent` holds a copy of the tensors of each transfer."""

    def __init__(self, tensors: Mapping[str, Tensor], client: Any) -> None:
        self.model_update_group = self
        self.sent: list[dict[str, Tensor]] = []
        self._tensors = tensors
        self._client = client
        self._ended = threading.Event()
        """All workers have received, or the group is destroyed."""

    def send_weights(self) -> None:
        self._client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self._receive)
            assert self._ended.wait(LATE_S), "the broadcast hangs"
            received.result()
        self._ended.clear()
        self._client.finish_weight_update()
        self.sent.append({name: tensor.clone() for name, tensor in self._tensors.items()})

    def _receive(self) -> None:
        self._client.update_weights({"names": [*self._tensors]})
        self._ended.set()

    def destroy(self) -> None:
        self._ended.set()


SENDERS: list[FakeSender] = []
"""All opened senders."""


def version() -> str:
    return VLLM


def open_sender(tensors: Mapping[str, Tensor], client: Any, address: str, port: int, workers: int) -> FakeSender:
    """Connect like vLLM's sender, which waits for a worker that does not join."""
    info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": workers + 1}
    with ThreadPoolExecutor(1) as pool:
        if pool.submit(client.init_weight_transfer_engine, info).exception() is not None:
            threading.Event().wait(LATE_S)
    SENDERS.append(FakeSender(tensors, client))
    return SENDERS[-1]
