"""The endpoint plugin: `/bridge/*` for the trainer.

It also adds the completion routes (`completions.py`, and `generate.py` for Atropos) and the middleware for all routes
(`admission.py`), and writes the manifest (`exporter.py`).
"""

import asyncio
import hmac
import os
from argparse import Namespace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import State

from bridge.core.http_limits import limit_connections
from bridge.errors import BridgeError, FenceBusyError
from bridge.server import discovery, protocol, receiver
from bridge.server import manifest as manifests
from bridge.server.protocol import BRIDGE_ROUTES, HolderRequest, Status
from bridge_patches import completions, exporter, generate
from bridge_patches.adapter_slots import Adapters
from bridge_patches.admission import NOT_IN_MANIFEST, Admission, Rules, refuse_dev_mode
from bridge_patches.server_fence import ServerFence

PINS = """
vllm.plugins
    ENDPOINT_PLUGINS_GROUP = 'vllm.endpoint_plugins'  # the group of Bridge's entry point
    call load_endpoint_plugins(supported_tasks)  # in the API server
vllm.plugins.endpoint_plugins.interface
    EndpointPlugin: name, required_tasks
    replace EndpointPlugin.attach_router(app)
    replace async EndpointPlugin.init_state(engine_client, state, args)
vllm.v1.engine.async_llm: AsyncLLM: model_config, vllm_config
vllm.config.vllm: VllmConfig: kv_transfer_config, cache_config, weight_transfer_config
vllm.config.model: ModelConfig: enable_sleep_mode, sleep_mode_backend
vllm.config.cache: CacheConfig: num_gpu_blocks, block_size
vllm.config.weight_transfer: WeightTransferConfig: backend
# What `/bridge/transfer` calls.
vllm.v1.worker.gpu_worker
    call Worker.init_weight_transfer_engine(init_info)
    call Worker.start_weight_update()
    call Worker.update_weights(update_info)
    call Worker.finish_weight_update()
"""


class BridgeRoutes:
    """Bridge's `EndpointPlugin` for vLLM."""

    name = "bridge_routes"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        for added in (router, completions.router, generate.router):
            app.include_router(added)
        app.add_exception_handler(BridgeError, _refusal)  # type: ignore[arg-type]
        app.add_middleware(Admission)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Export the weights, and write the manifest as soon as the server answers requests."""
        try:
            refuse_dev_mode()
            exported = await exporter.export(engine_client, args)
        except BridgeError as error:
            exporter.report(error)
            raise SystemExit(error.exit_code) from error
        state.bridge_rules = Rules.of(args)
        state.bridge_limits = asyncio.create_task(limit_connections(lambda: getattr(state, "server", None)))
        state.bridge_manifest = exported
        first, *_ = await engine_client.collective_rpc("bridge_experts")
        state.bridge_fence = ServerFence(engine_client, exported, capabilities(engine_client, first))
        state.bridge_engine = engine_client
        generate.watch_sampling(engine_client)
        state.bridge_adapters = Adapters(engine_client, state.openai_serving_models, state.bridge_fence)
        given = os.environ.get(discovery.MANIFEST_PATH)
        path = manifests.resolve_path(None if given is None else Path(given))
        state.bridge_writer = asyncio.create_task(exporter.write_when_listening(exported, path))


def capabilities(engine_client: Any, experts: tuple[int, int] | None = None) -> protocol.Capabilities:
    """Return the server's capabilities; `experts` is what its first rank reports about them."""
    model_config = engine_client.model_config
    cache_config = engine_client.vllm_config.cache_config
    num_kv_tokens = (cache_config.num_gpu_blocks or 0) * cache_config.block_size
    transfer_backend = getattr(engine_client.vllm_config.weight_transfer_config, "backend", None)
    return protocol.Capabilities(
        # Backends other than vLLM's own pool would also free the weights.
        can_sleep=bool(model_config.enable_sleep_mode) and model_config.sleep_mode_backend == "cumem",
        # A connector looks up blocks by their tokens only.
        can_keep_kv=engine_client.vllm_config.kv_transfer_config is None,
        kv_tokens=num_kv_tokens or None,
        experts=experts,
        can_receive_weights=transfer_backend == receiver.ENGINE,
    )


def _authorize(request: Request) -> None:
    expected = f"Bearer {request.app.state.bridge_manifest.token}"
    if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected.encode()):
        raise HTTPException(401, NOT_IN_MANIFEST)


def _state(request: Request) -> Any:
    return request.app.state


def _fence(request: Request) -> Any:
    return request.app.state.bridge_fence


AppState = Annotated[State, Depends(_state)]
Fence = Annotated[ServerFence, Depends(_fence)]
router = APIRouter(prefix=BRIDGE_ROUTES.rstrip("/"), dependencies=[Depends(_authorize)], include_in_schema=False)


@router.get("/status")
async def _status(fence: Fence) -> Status:
    return fence.status()


@router.post("/lease")
async def _take_lease(body: protocol.LeaseRequest, fence: Fence) -> Status:
    fence.take_lease(body.holder, body.run, body.client)
    return fence.status()


@router.delete("/lease")
async def _release_lease(body: HolderRequest, fence: Fence) -> Status:
    fence.release_lease(body.holder, body.client)
    return fence.status()


@router.post("/pause")
async def _pause(body: protocol.PauseRequest, request: Request, fence: Fence) -> Status:
    await fence.pause(body, request.is_disconnected)
    return fence.status()


@router.post("/publish")
async def _publish(body: protocol.PublishRequest, fence: Fence) -> Status:
    await fence.publish(body.holder, body.version, after=body.after)
    return fence.status()


@router.post("/resume")
async def _resume(body: HolderRequest, fence: Fence) -> Status:
    await fence.release(body.holder)
    return fence.status()


@router.get("/tensors/digest")
async def _digest(state: AppState, part: int = 0, *, quantized: bool = False) -> protocol.Digests:
    return protocol.Digests(digests=await exporter.digests(state.bridge_engine, part, quantized=quantized))


@router.get("/tensors/finite")
async def _finite(state: AppState) -> protocol.Finiteness:
    return await exporter.finiteness(state.bridge_engine)


@router.post("/tensors/read")
async def _read(body: protocol.ReadRequest, state: AppState) -> Response:
    values = await exporter.read(state.bridge_engine, body.elements, state.bridge_manifest)
    return Response(protocol.Values(values=values).model_dump_json(), media_type="application/json")  # NaN as a string


@router.post("/tensors/write")
async def _write(body: protocol.WriteRequest, state: AppState, fence: Fence) -> Status:
    fence.refuse_unless_writing(body.holder)
    await exporter.write(state.bridge_engine, body.elements, body.values, state.bridge_manifest)
    return fence.status()


@router.post("/transfer")
async def _transfer(body: receiver.TransferRequest, state: AppState, fence: Fence) -> Status:
    fence.refuse_unless_writing(body.holder)
    await state.bridge_engine.collective_rpc(body.call, kwargs=body.arguments)
    return fence.status()


@router.post("/adapter")
async def _serve_adapter(body: protocol.AdapterRequest, state: AppState, fence: Fence) -> protocol.AdapterSlot:
    fence.refuse_without_lease(body.holder)
    return protocol.AdapterSlot(slot=await state.bridge_adapters.serve(body.name, body.path))


@router.post("/adapter/slots")
async def _open_slots(body: protocol.SlotsRequest, state: AppState, fence: Fence) -> protocol.AdapterSlots:
    fence.refuse_without_lease(body.holder)
    return protocol.AdapterSlots(slots=tuple(await state.bridge_adapters.open_slots(body.path)))


@router.post("/adapter/reserve")
async def _reserve_slot(
    body: protocol.SlotRequest, request: Request, state: AppState, fence: Fence
) -> protocol.AdapterSlot:
    fence.refuse_without_lease(body.holder)
    slot = await state.bridge_adapters.reserve(body.name, request.is_disconnected, keep=body.keep)
    return protocol.AdapterSlot(slot=slot)


@router.post("/adapter/serve")
async def _serve_slot(body: protocol.SlotRequest, state: AppState, fence: Fence) -> Status:
    fence.refuse_without_lease(body.holder)
    state.bridge_adapters.serve_reserved(body.name)
    return fence.status()


@router.delete("/adapter")
async def _release_adapter(body: HolderRequest, state: AppState, fence: Fence) -> Status:
    fence.refuse_without_lease(body.holder)
    await state.bridge_adapters.release()
    return fence.status()


async def _refusal(_request: Request, error: BridgeError) -> JSONResponse:
    busy = isinstance(error, FenceBusyError)
    return JSONResponse(protocol.Refusal(error=error.message, hint=error.hint, busy=busy).model_dump(), 409)
