"""A patched server without vLLM, in its own process: real routes, fence and shared memory, and made-up completions.

    python -m tests.unit.patched_server MODEL MANIFEST PORT

Real `bridge train` processes train on it. Its engine takes PENDING_S for a pause and for a resume, so that there is
time to inject faults into both.
"""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from bridge_patches.server_fence import ServerFence
from tests.models import tiny
from tests.scenarios import LiveServer
from tests.unit import toy_server
from tests.unit.openai_server import choice
from tests.unit.toy_server import ToyServer

PENDING_S = 0.1
START_LIMIT_S = 120


class Engine:
    """Stands in for vLLM's engine: pauses and resumes."""

    def __init__(self, toy: ToyServer) -> None:
        self.engine_core = self
        self._toy = toy
        self.adapters: dict[str, str] = {}
        """Adapter that is served -> its folder."""
        self.sampled_from: list[str] = []
        """Models of `generate`, in order."""
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
        if method == "bridge_digests":
            return [{name: digest(tensor) for name, tensor in self._toy.tensors.items()}]
        elements = [self._toy.tensors[element["parameter"]].view(-1)[element["index"]] for element in args[0]]
        if method == "bridge_write":
            for element, value in zip(elements, args[1], strict=True):
                element.fill_(value)
        return [[element.item() for element in elements]]

    async def complete(self, body: CompletionsRequest) -> dict[str, Any]:
        """Answer like vLLM after a short delay, and only while not paused."""
        await asyncio.sleep(0.01 * (1 + body.prompt[-1] % 3))
        await self._running.wait()
        word = 50 + len(body.prompt) % (tiny.VOCABULARY - 50)  # longer prompts stay within the vocabulary
        choices = [choice(index, 40 + index, word, 2) for index in range(body.n)]
        if body.prompt_logprobs:
            choices = [{**one, "prompt_logprobs": [None, *(-1.0 for _ in body.prompt[1:])]} for one in choices]
        return {"choices": choices}

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer `POST /generate` as `complete` does, with as many tokens as it asks for, of a served model."""
        if body["model"] not in (self._toy.manifest.model, *self.adapters):
            raise HTTPException(404, f"there is no model {body['model']}")
        self.sampled_from.append(body["model"])
        await asyncio.sleep(0.01)
        await self._running.wait()
        tokens, prompt = [50 + index % 9 for index in range(body["max_tokens"])], body["prompt"]["prompt_token_ids"]
        likely = {str(token): -1.0 for token in range(50, 59)}
        return {
            "token_ids": [tokens] * body["n"], "finish_reasons": ["length"] * body["n"],
            "logprobs": [[[likely] for _ in tokens]] * body["n"],
            "prompt_logprobs": [None, *({str(token): -1.0, "1": -2.0, "2": -3.0} for token in prompt[1:])],
        }  # fmt: skip


@contextmanager
def served(model: Path, folder: Path, *, port: int) -> Iterator[LiveServer]:
    """Run a patched server for a small random Llama, which it writes to `model`; `scenarios.served` runs vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / manifests.MANIFEST_NAME
    argv = [sys.executable, "-m", "tests.unit.patched_server", str(model), str(path), str(port)]
    child = children.start(argv, os.environ, folder / "serve.log")
    try:
        ready = children.wait_until(child, path.exists, limit_s=START_LIMIT_S, progress=lambda _: None)
        assert ready, child.log.read_text()[-4000:]
        yield LiveServer(manifests.load(path), path, child)
    finally:
        children.stop(child, grace_s=1.0)


@contextmanager
def tiny_llama(folder: Path) -> Iterator[LiveServer]:
    """Run one for a small random Llama, whose files are also in `folder`."""
    tiny.write(tiny.llama(), folder / "model")
    with served(folder / "model", folder, port=free_port("127.0.0.1")) as server:
        yield server


def app_of(toy: ToyServer) -> FastAPI:
    """Return the patched server's application over `toy`."""
    app, engine = FastAPI(), Engine(toy)
    app.post(COMPLETIONS)(engine.complete)  # ahead of the routes that call vLLM
    app.post("/generate")(engine.generate)
    adapters: dict[str, str] = engine.adapters

    def load(body: dict[str, Any]) -> PlainTextResponse:
        if not (Path(body["lora_path"]) / "adapter_model.safetensors").is_file():
            return PlainTextResponse("no such adapter", 404)
        adapters[body["lora_name"]] = body["lora_path"]
        return PlainTextResponse("Success")

    def unload(body: dict[str, Any]) -> PlainTextResponse:
        found = adapters.pop(body["lora_name"], None)
        return PlainTextResponse("Success" if found else "no such adapter", 200 if found else 404)

    app.post("/v1/load_lora_adapter")(load)
    app.post("/v1/unload_lora_adapter")(unload)
    app.get("/v1/models")(
        lambda: {
            "object": "list",
            "data": [{"id": name, "owned_by": "vllm"} for name in (toy.manifest.model, *adapters)],
        }
    )
    app.get("/sampled_from")(lambda: engine.sampled_from)
    app.get("/health")(lambda: None)
    routes.BridgeRoutes().attach_router(app)
    app.state.bridge_manifest, app.state.bridge_engine = toy.manifest, engine
    app.state.bridge_fence = ServerFence(engine, toy.manifest)
    return app


def main(model: str, path: str, port: str) -> None:
    """Serve until the process ends."""
    torch.set_num_threads(1)
    toy = toy_server.serve(tiny.llama(), Path(model))
    url, identity = f"http://127.0.0.1:{port}", ProcessIdentity.current()
    toy = ToyServer(toy.edited(url=url, server=identity, token=secrets.token_hex()), toy.tensors, toy.reference)
    app = app_of(toy)
    with socket.create_server(("127.0.0.1", int(port))) as listening:
        manifests.write(toy.manifest, Path(path))  # requests wait from now on
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
