"""A patched server without vLLM, in its own process: real routes, fence and shared memory, and made-up completions.

    python -m tests.unit.patched_server MODEL MANIFEST PORT SLOTS

Real `bridge train` processes train on it. Its engine takes PENDING_S for a pause and for a resume, so that there is
time to inject faults into both. Without slots, it loads adapters as vLLM's own routes do.
"""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypedDict

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse

from bridge.core.address import free_port
from bridge.core.process import ProcessIdentity
from bridge.processes import children
from bridge.server import manifest as manifests
from bridge.server.protocol import COMPLETIONS, CompletionsRequest, InFlight
from bridge.weights.rank_parts import digest
from bridge_patches import routes
from bridge_patches.adapter_slots import Adapters
from bridge_patches.admission import Rules
from bridge_patches.server_fence import ServerFence
from tests.models import tiny
from tests.scenarios import LiveServer
from tests.unit import toy_server
from tests.unit.openai_server import choice
from tests.unit.toy_server import ToyServer

PENDING_S = 0.1
SLOT_RANK = 8
"""Highest rank of an adapter in a slot."""
START_LIMIT_S = 120


class Engine:
    """Stands in for vLLM's engine: pauses and resumes, and holds adapters in slots."""

    def __init__(self, toy: ToyServer, num_slots: int = 0) -> None:
        self.engine_core = self
        self._toy = toy
        self.sampled: list[Sampled] = []
        """What requests have sampled from, in order."""
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_loras=num_slots) if num_slots else None)
        self.output_processor = SimpleNamespace(request_states=dict[str, Any]())
        self._slots: list[int | None] = [None] * num_slots
        """vLLM's id of the adapter in each slot."""
        self._running = asyncio.Event()
        self._running.set()

    async def pause_scheduler_async(self, *, mode: InFlight, clear_cache: bool) -> None:
        assert not clear_cache, mode
        self._running.clear()
        await asyncio.sleep(PENDING_S)

    async def call_utility_async(self, method: str, version: int) -> None:
        """Do nothing: the toy's completions do not report versions."""

    async def resume_generation(self) -> None:
        await asyncio.sleep(PENDING_S)
        self._running.set()

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        return reset_connector

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "bridge_synchronize":
            return [[]]
        if method == "bridge_quantized_digests":
            return [{}]
        if method == "bridge_adapter_slot":
            return [self._slots.index(args[0])]
        if method == "bridge_digests":
            return [{name: digest(tensor) for name, tensor in self._toy.tensors.items()}]
        elements = [self._toy.tensors[element["parameter"]].view(-1)[element["index"]] for element in args[0]]
        if method == "bridge_write":
            for element, value in zip(elements, args[1], strict=True):
                element.fill_(value)
        return [[element.item() for element in elements]]

    async def add_lora(self, lora_request: Any) -> bool:
        if self._slots:
            slot = self._slots.index(None)
            toy_server.fill_slot(self._toy, slot, Path(lora_request.lora_path))
            self._slots[slot] = lora_request.lora_int_id
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self._slots = [None if number == lora_id else number for number in self._slots]
        return True

    async def pin_lora(self, lora_id: int) -> bool:
        return lora_id in self._slots

    async def abort(self, request_id: list[str], internal: bool = False) -> None:
        """Do nothing: no request is in flight when a test replaces adapters."""

    async def add_request(self, request: str, *, lora_request: Any = None) -> None:
        self.output_processor.request_states[request] = SimpleNamespace(lora_request=lora_request)

    async def sample(self, model: str, models: "Models", duration_s: float) -> None:
        """Sample from a model for a while, and only while not paused."""
        adapter = models.lora_requests.get(model)
        if adapter is None and model != self._toy.manifest.model:
            raise HTTPException(404, f"there is no model {model}")
        request = secrets.token_hex()
        try:
            await self.add_request(request, lora_request=adapter)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        try:
            before = self._held(adapter)
            await asyncio.sleep(duration_s)
            await self._running.wait()
            self.sampled.append(Sampled(model=model, held=before, is_same=before == self._held(adapter)))
        finally:
            del self.output_processor.request_states[request]

    def _held(self, adapter: Any) -> str:
        """Return a digest of what an adapter's slot holds."""
        if adapter is None or adapter.lora_int_id not in self._slots:
            return ""
        slot = self._slots.index(adapter.lora_int_id)
        return "".join(digest(side[slot]) for pair in self._toy.slots.values() for side in pair)

    async def complete(self, body: CompletionsRequest, models: "Models") -> dict[str, Any]:
        """Answer like vLLM after a short delay."""
        await self.sample(body.model, models, 0.01 * (1 + body.prompt[-1] % 3))
        choices = [choice(index, *_tokens(index, body.prompt)) for index in range(body.n)]
        if body.prompt_logprobs:
            choices = [{**one, "prompt_logprobs": [None, *(-1.0 for _ in body.prompt[1:])]} for one in choices]
        return {"choices": choices}

    async def generate(self, body: dict[str, Any], models: "Models") -> dict[str, Any]:
        """Answer `POST /generate` with the tokens of `complete`, or with as many as it asks for."""
        await self.sample(body["model"], models, 0.01)
        prompt = body["prompt"]["prompt_token_ids"]
        sequences = [_tokens(index, prompt) for index in range(body["n"])]
        if body.get("ignore_eos"):
            sequences = [[50 + index % 9 for index in range(body["max_tokens"])]] * body["n"]
        likely = {str(token): -1.0 for token in range(50, 59)}
        return {
            "token_ids": sequences, "finish_reasons": ["length" if body.get("ignore_eos") else "stop"] * body["n"],
            "logprobs": [[[{**likely, str(token): -1.0}] for token in tokens] for tokens in sequences],
            "prompt_logprobs": [None, *({str(token): -1.0, "1": -2.0, "2": -3.0} for token in prompt[1:])],
        }  # fmt: skip


def _tokens(index: int, prompt: Sequence[int]) -> list[int]:
    word = 50 + len(prompt) % (tiny.VOCABULARY - 50)  # longer prompts stay within the vocabulary
    return [40 + index, word, 2]


class Sampled(TypedDict):
    """What one request has sampled from."""

    model: str
    held: str
    """A digest of its slot when the request began."""
    is_same: bool
    """Whether the slot held the same until the request had ended."""


class Models:
    """Stands in for vLLM's serving models."""

    def __init__(self, engine: Engine) -> None:
        self.lora_requests: dict[str, Any] = {}
        self._engine = engine
        self._last = 0

    async def load_lora_adapter(self, request: Any) -> Any:
        if not (Path(request.lora_path) / "adapter_model.safetensors").is_file():
            return SimpleNamespace(error=SimpleNamespace(message="no such adapter"))
        self._last += 1
        loaded = SimpleNamespace(
            lora_name=request.lora_name, lora_int_id=self._last, lora_path=request.lora_path
        )  # fmt: skip
        try:
            await self._engine.add_lora(loaded)
        except ValueError as error:
            return SimpleNamespace(error=SimpleNamespace(message=str(error)))
        self.lora_requests[request.lora_name] = loaded
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> Any:
        if self.lora_requests.pop(request.lora_name, None) is None:
            return SimpleNamespace(error=SimpleNamespace(message="no such adapter"))
        return "Success"


@contextmanager
def served(model: Path, folder: Path, *, port: int, num_slots: int = 0) -> Iterator[LiveServer]:
    """Run a patched server for a small random Llama, which it writes to `model`; `scenarios.served` runs vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / manifests.MANIFEST_NAME
    argv = [sys.executable, "-m", "tests.unit.patched_server", str(model), str(path), str(port), str(num_slots)]
    child = children.start(argv, os.environ, folder / "serve.log")
    try:
        ready = children.wait_until(child, path.exists, limit_s=START_LIMIT_S, progress=lambda _: None)
        assert ready, child.log.read_text()[-4000:]
        yield LiveServer(manifests.load(path), path, child)
    finally:
        children.stop(child, grace_s=1.0)


@contextmanager
def tiny_llama(folder: Path, *, num_slots: int = 0) -> Iterator[LiveServer]:
    """Run one for a small random Llama, whose files are also in `folder`."""
    tiny.write(tiny.llama(), folder / "model")
    with served(folder / "model", folder, port=free_port("127.0.0.1"), num_slots=num_slots) as server:
        yield server


def app_of(toy: ToyServer, num_slots: int = 0) -> FastAPI:
    """Return the patched server's application over `toy`."""
    app, engine = FastAPI(), Engine(toy, num_slots)
    models = Models(engine)

    # ahead of the routes that call vLLM
    @app.post(COMPLETIONS)
    async def complete(body: CompletionsRequest) -> dict[str, Any]:
        return await engine.complete(body, models)

    @app.post("/generate")
    async def generate(body: dict[str, Any]) -> dict[str, Any]:
        return await engine.generate(body, models)

    async def load(body: dict[str, Any]) -> PlainTextResponse:
        return _answered(await models.load_lora_adapter(SimpleNamespace(**body)))

    async def unload(body: dict[str, Any]) -> PlainTextResponse:
        return _answered(await models.unload_lora_adapter(SimpleNamespace(**body)))

    app.post("/v1/load_lora_adapter")(load)
    app.post("/v1/unload_lora_adapter")(unload)
    app.get("/v1/models")(
        lambda: {
            "object": "list",
            "data": [{"id": name, "owned_by": "vllm"} for name in (toy.manifest.model, *models.lora_requests)],
        }
    )
    app.get("/sampled")(lambda: engine.sampled)
    app.get("/health")(lambda: None)
    routes.BridgeRoutes().attach_router(app)
    app.state.bridge_rules, app.state.bridge_manifest, app.state.bridge_engine = Rules(), toy.manifest, engine
    app.state.bridge_fence = ServerFence(engine, toy.manifest)
    app.state.bridge_adapters = Adapters(engine, models, app.state.bridge_fence)
    return app


def _answered(answer: Any) -> PlainTextResponse:
    """Return what vLLM's route answers."""
    return PlainTextResponse(answer) if isinstance(answer, str) else PlainTextResponse(answer.error.message, 404)


def stand_in_for_requests() -> None:
    """Let the request to load an adapter be created without importing vLLM."""
    parts = ["vllm", "entrypoints", "serve", "lora", "protocol"]
    modules = {name: ModuleType(name) for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1))}
    vars(modules[".".join(parts)]).update(LoadLoRAAdapterRequest=SimpleNamespace)
    sys.modules.update(modules)


def main(model: str, path: str, port: str, num_slots: str) -> None:
    """Serve until the process ends."""
    torch.set_num_threads(1)
    toy = toy_server.serve(tiny.llama(), Path(model))
    if int(num_slots):
        stand_in_for_requests()
        toy = toy_server.with_slots(toy, SLOT_RANK, num_slots=int(num_slots))
    url, identity = f"http://127.0.0.1:{port}", ProcessIdentity.current()
    toy = replace(toy, manifest=toy.edited(url=url, server=identity, token=secrets.token_hex()))
    app = app_of(toy, int(num_slots))
    with socket.create_server(("127.0.0.1", int(port))) as listening:
        manifests.write(toy.manifest, Path(path))  # requests wait from now on
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
