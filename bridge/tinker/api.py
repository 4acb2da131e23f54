"""The HTTP side of Tinker's API: routes, the key, limits of bodies, and errors as answers."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bridge.core.http_limits import BODY_LIMIT_BYTES, Refusal, read_body
from bridge.errors import BridgeError
from bridge.tinker import wire
from bridge.tinker.paths import SavedPath
from bridge.tinker.service import Service

PREFIX = "tml-"
"""Prefix of every API key: the SDK refuses keys without it."""
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False, "sample_join_sampling_session": False, "parallel_fwdbwd_chunks": True,
}  # fmt: skip
"""Reply to the SDK's first request: the parts of the API that this server supports."""
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
Handler = Callable[[Request], Awaitable[Response]]
NOT_HERE = (
    "create_custom_loss", "copy_weights", "save_weights_external", "retrieve_futures", "join_sampling_session",
    "auth/token",
)  # fmt: skip
"""Routes that the SDK may call but that this server does not support."""


def app(service: Service, key: str | None) -> Starlette:
    """Return the application. Without a `key`, any key that the SDK accepts is valid."""
    routes = list[Route]()

    def add(path: str, handler: Handler, *methods: str) -> None:
        routes.append(Route(f"/api/v1/{path}", _checked(handler, key), methods=[*methods] or ["POST"]))

    def fixed(path: str, answer: dict[str, Any], *methods: str) -> None:
        async def reply(_: Request) -> Response:
            return JSONResponse(answer)

        add(path, reply, *methods)

    def document(path: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Add a route that replies to a JSON document with `answer(document)`."""

        async def reply(request: Request) -> Response:
            return JSONResponse(answer(await _document(request)))

        add(path, reply)

    fixed("client/config", CLIENT_CONFIG)
    fixed("client/dynamic_config", DYNAMIC_CONFIG, "POST", "GET")
    fixed("healthz", {"status": "ok"}, "GET")
    fixed("telemetry", {"status": "accepted"})
    document("create_session", lambda _: {"type": "create_session", "session_id": service.create_session()})
    document("session_heartbeat", lambda body: _heartbeat(service, body["session_id"]))
    document("create_model", service.create_model)
    document("get_info", lambda body: service.info(body["model_id"]))
    document("optim_step", service.step)
    document("save_weights", service.save)
    document("load_weights", service.load_weights)
    document("save_weights_for_sampler", service.save_for_sampler)
    document(
        "create_sampling_session",
        lambda body: {
            "type": "create_sampling_session", "sampling_session_id": service.create_sampling_session(body),
        },
    )  # fmt: skip
    document("asample", service.sample)
    document("cancel_future", lambda body: service.cancel(body["request_id"]))
    document("weights_info", lambda body: service.weights_info(body["tinker_path"]))
    for missing in NOT_HERE:
        document(missing, partial(_refuse_route, missing))

    async def finish(request: Request) -> Response:
        await request.body()
        service.end_session(request.path_params["session"], "its client has ended")
        return JSONResponse({})

    async def capabilities(_: Request) -> Response:
        return JSONResponse(service.capabilities())

    async def forward_backward(request: Request) -> Response:
        body = await request.body()
        return JSONResponse(service.passes(await asyncio.to_thread(wire.pass_request, body)))

    async def retrieve_future(request: Request) -> Response:
        result = await service.result((await _document(request))["request_id"])
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    async def sampler(request: Request) -> Response:
        name = request.path_params["sampler"]
        client = service.samplers.get(name)
        if client is None:
            raise Refusal(f"there is no sampling session {name}", status=404)
        return JSONResponse({"sampler_id": name, "base_model": service.trainer.base_name, "model_path": client.path})

    async def runs(request: Request) -> Response:
        every = service.trainer.checkpoints.runs()
        shown, cursor = _page(request, every)
        return JSONResponse({"training_runs": [service.run(run) for run in shown], "cursor": cursor})

    async def run(request: Request) -> Response:
        return JSONResponse(service.run(request.path_params["run"]))

    async def of_run(request: Request) -> Response:
        return JSONResponse({"checkpoints": [*service.trainer.checkpoints.of_run(request.path_params["run"])]})

    async def checkpoints(request: Request) -> Response:
        known = service.trainer.checkpoints
        shown, cursor = _page(request, [one for run in known.runs() for one in known.of_run(run)])
        return JSONResponse({"checkpoints": shown, "cursor": cursor})

    async def delete(request: Request) -> Response:
        taken = request.path_params
        service.trainer.checkpoints.delete(SavedPath(taken["run"], taken["kind"], taken["name"]).checked())
        return JSONResponse({})

    add("sessions/{session}/finish", finish)
    add("get_server_capabilities", capabilities, "GET")
    add("forward_backward", forward_backward)
    add("forward", forward_backward)
    add("retrieve_future", retrieve_future)
    add("samplers/{sampler}", sampler, "GET")
    add("training_runs", runs, "GET")
    add("training_runs/{run}", run, "GET")
    add("training_runs/{run}/checkpoints", of_run, "GET")
    add("training_runs/{run}/checkpoints/{kind}/{name}", delete, "DELETE")
    add("checkpoints", checkpoints, "GET")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watching = asyncio.ensure_future(service.free_silent_sessions())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await service.close()

    return Starlette(routes=routes, lifespan=lifespan)


def _checked(handler: Handler, key: str | None) -> Handler:
    """Check the key and the size of the body before `handler` is called, and turn errors into responses."""

    async def checked(request: Request) -> Response:
        try:
            given = request.headers.get("x-api-key", "")
            # a web page cannot send this header to loopback, so any key will do if the server has none
            if not (secrets.compare_digest(given.encode(), key.encode()) if key else given.startswith(PREFIX)):
                raise Refusal("wrong API key" if given else "no API key", status=401)
            messages = await read_body(request.scope["headers"], request.receive, limit_bytes=BODY_LIMIT_BYTES)
            request._body = b"".join(message.get("body", b"") for message in messages)
            return await handler(request)
        except Refusal as refusal:
            return _error(refusal.message, refusal.status)
        except BridgeError as error:
            return _error(f"{error.message} ({error.hint})", 400)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return _error(f"the request is not as expected: {type(error).__name__}: {error}"[:300], 422)
        except ClientDisconnect:
            return Response(status_code=499)

    return checked


def _error(message: str, status: int) -> Response:
    headers = {"connection": "close"} if status in (401, 408, 413) else None  # the rest of the body may still arrive
    return JSONResponse({"detail": message}, status, headers)


async def _document(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refusal("the body is not JSON", status=422) from error
    if not isinstance(body, dict):
        raise Refusal("the body is no JSON object", status=422)
    return body


def _heartbeat(service: Service, session_id: str) -> dict[str, Any]:
    service.heartbeat(session_id)
    return {"type": "session_heartbeat"}


def _refuse_route(route: str, _: dict[str, Any]) -> dict[str, Any]:
    raise Refusal(f"{route} is not supported by this server", status=501)


def _page(request: Request, every: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the page of a list that a request asks for, and the SDK's cursor."""
    limit, offset = (
        max(0, int(request.query_params.get(name, default))) for name, default in (("limit", 20), ("offset", 0))
    )
    return every[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(every)}
