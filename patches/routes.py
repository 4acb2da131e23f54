"""The endpoint plugin: `/bridge/*` for the trainer, a version on every generation, and the manifest.

The manifest is written when the server answers, and removed when it stops: a manifest's existence
means that the server can be attached to.

Not covered: what the routes do to the engine (`server_fence.py`) and to its weights (`worker.py`).
"""

import asyncio
import atexit
import hmac
import json
import logging
import math
import os
import secrets
import signal
import socket
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
import transformers
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import bridge
from bridge.errors import AttachError, BridgeError, UnsupportedModelError
from bridge.process import ProcessIdentity, boot_id
from bridge.protocol import (
    VERSION_HEADER,
    Digests,
    PauseRequest,
    ReadRequest,
    Refusal,
    ReleaseRequest,
    Status,
    Values,
    WriteRequest,
)
from bridge.weights import manifest as manifests
from bridge.weights import skeleton
from bridge.weights.manifest import Manifest, Shard
from patches.compatibility import installed_version
from patches.server_fence import ServerFence

MANIFEST_PATH = "BRIDGE_MANIFEST_PATH"
"""Environment variable: where the manifest is written; absent: where one is looked for first."""

logger = logging.getLogger("vllm.bridge")


class BridgeRoutes:
    """vLLM's `EndpointPlugin` of Bridge."""

    name = "bridge_routes"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the version to every answer."""
        app.include_router(router)
        app.add_exception_handler(BridgeError, _refusal)  # type: ignore[arg-type]
        app.add_middleware(VersionMiddleware, app=app)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Export the weights, and write the manifest as soon as the server answers."""
        try:
            exported = await _export(engine_client, args)
        except BridgeError as error:
            _tell(error)
            raise SystemExit(error.exit_code) from error
        state.bridge_manifest = exported
        state.bridge_fence = ServerFence(engine_client)
        state.bridge_engine = engine_client
        path = manifests.resolve_path(Path(os.environ[MANIFEST_PATH]) if MANIFEST_PATH in os.environ else None)
        state.bridge_writer = asyncio.create_task(_write_when_listening(exported, path))


class VersionMiddleware:
    """Put the version of the weights on every answer: `3`, or `3-4` if they changed while it was made."""

    def __init__(self, inner: ASGIApp, app: FastAPI) -> None:
        self._inner = inner
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add the header when its answer starts."""
        fence: ServerFence | None = getattr(self._app.state, "bridge_fence", None)
        if scope["type"] != "http" or fence is None:
            await self._inner(scope, receive, send)
            return
        first = fence.version

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                spread = str(first) if first == fence.version else f"{first}-{fence.version}"
                message["headers"] = [*message["headers"], (VERSION_HEADER.encode(), spread.encode())]
            await send(message)

        await self._inner(scope, receive, send_with_version)


def _authorise(request: Request) -> None:
    exported: Manifest = request.app.state.bridge_manifest
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {exported.token}".encode()):
        raise HTTPException(401, "the bearer token is not the one in this server's manifest")


def _fence(request: Request) -> ServerFence:
    fence: ServerFence = request.app.state.bridge_fence
    return fence


Fence = Annotated[ServerFence, Depends(_fence)]
router = APIRouter(prefix="/bridge", dependencies=[Depends(_authorise)], include_in_schema=False)


@router.get("/status")
async def status(request: Request, fence: Fence) -> Status:
    """Tell the version and where the fence stands."""
    exported: Manifest = request.app.state.bridge_manifest
    return Status(
        model=exported.model, version=fence.version, state=fence.state, holder=fence.holder, server=exported.server
    )


@router.post("/pause")
async def pause(body: PauseRequest, request: Request, fence: Fence) -> Status:
    """Stop generating and hand the fence to the caller."""
    await fence.pause(body.holder, body.in_flight)
    return await status(request, fence)


@router.post("/publish")
async def publish(body: ReleaseRequest, request: Request, fence: Fence) -> Status:
    """Make what was written the next version, and resume."""
    await fence.publish(body.holder)
    return await status(request, fence)


@router.post("/resume")
async def resume(body: ReleaseRequest, request: Request, fence: Fence) -> Status:
    """Resume with the same version: nothing was written."""
    await fence.release(body.holder)
    return await status(request, fence)


@router.get("/tensors/digest")
async def digests(request: Request) -> Digests:
    """Digest every parameter of rank 0 where it lies."""
    ranks = await request.app.state.bridge_engine.collective_rpc("bridge_digests")
    return Digests(digests=ranks[0])


@router.post("/tensors/read")
async def read(body: ReadRequest, request: Request) -> Values:
    """Return the server's own view of single elements of rank 0."""
    elements = [element.model_dump() for element in body.elements]
    ranks = await request.app.state.bridge_engine.collective_rpc("bridge_read", args=(elements,))
    return Values(values=tuple(ranks[0]))


@router.post("/tensors/write")
async def write(body: WriteRequest, request: Request, fence: Fence) -> Status:
    """Set single elements, for the fence's holder alone."""
    fence.refuse_unless_held(body.holder)
    elements = [element.model_dump() for element in body.elements]
    await request.app.state.bridge_engine.collective_rpc("bridge_write", args=(elements, list(body.values)))
    return await status(request, fence)


async def _refusal(_request: Request, error: BridgeError) -> JSONResponse:
    return JSONResponse(Refusal(error=error.message, remedy=error.remedy).model_dump(), status_code=409)


async def _export(engine_client: Any, args: Namespace) -> Manifest:
    if engine_client is None:
        raise AttachError("this server has no engine whose weights could be shared", remedy="use bridge serve-vllm")
    shards = []
    for text in await engine_client.collective_rpc("bridge_export"):
        answer = json.loads(text)
        if "error" in answer:
            raise UnsupportedModelError(answer["error"], remedy=answer["remedy"])
        shards.append(Shard.model_validate(answer))
    first, *others = sorted(shards, key=lambda shard: shard.rank)
    config = engine_client.model_config
    views = [view for shard in shards for view in shard.param_mappings.values()]
    return Manifest(
        **first.model_dump(),
        other_shards=tuple(others),
        model=skeleton.absolute(config.model),
        dtype=str(config.dtype).removeprefix("torch."),
        backend="shared_memory" if first.gpu_uuid is None else "cuda_ipc",
        tp_degree=len(shards),
        dp_shard_degree=1,
        num_params=sum(math.prod(view.shape) for view in views),
        param_names=tuple(sorted(first.param_mappings)),
        shared_weights_enabled=True,
        single_copy_enabled=True,
        host=socket.gethostname(),
        boot_id=boot_id(),
        server=ProcessIdentity.current(),
        url=_own_url(args),
        token=secrets.token_urlsafe(32),
        versions=_versions(),
    )


def _own_url(args: Namespace) -> str:
    scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
    host = "127.0.0.1" if args.host in {None, "", "0.0.0.0"} else args.host  # noqa: S104  compared, not bound
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}"


def _versions() -> dict[str, str]:
    return {
        "bridge": bridge.__version__,
        "vllm": installed_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": sys.version.partition(" ")[0],
        "fastapi": version("fastapi"),
    }


async def _write_when_listening(exported: Manifest, path: Path) -> None:
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:  # noqa: S501  this very server's own
        while not await _is_well(client, f"{exported.url}/health"):  # noqa: ASYNC110  another task, not ours, is awaited
            await asyncio.sleep(0.02)
    try:
        manifests.write(exported, path)
    except BridgeError as error:
        _tell(error)
        signal.raise_signal(signal.SIGTERM)  # a server that nobody can attach to is of no use
        return
    atexit.register(manifests.remove_own, path, exported.server)
    logger.info("Bridge: %d parameters can be attached; manifest: %s", len(exported.param_names), path)


async def _is_well(client: httpx.AsyncClient, health: str) -> bool:
    try:
        return (await client.get(health)).is_success
    except httpx.TransportError:
        return False


def _tell(error: BridgeError) -> None:
    print(f"error: {error.message}\n\nhint: {error.remedy}", file=sys.stderr)  # noqa: T201  the log's last word
