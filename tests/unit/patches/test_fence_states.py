"""What each call does in each state of the fence: one table, tested in the fence, over HTTP and through a client."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bridge.errors import AttachError, FenceBusyError
from bridge.server.client import BridgeClient
from bridge.server.protocol import Element, Holder, PauseRequest, Refusal
from bridge_patches import routes
from bridge_patches.server_fence import Phase, ServerFence
from tests.unit.checks_sample import dead_holder, holder_of, manifest

ME, OTHER, DEAD = Holder.current(), holder_of(os.getppid()), dead_holder()
REFUSED, BUSY = AttachError, FenceBusyError
CALLS = ("read", "write", "rewrite", "publish", "resume", "touch")
"""Three pauses (to read, to write, and to rewrite torn weights), the two ways to end them, and writing one element."""
Next = str | type[AttachError]
TABLE: dict[str, tuple[Next, ...]] = {
    #                  read       write      rewrite      publish      resume     touch
    "serving":        ("reading", "writing", "writing",   REFUSED,     "serving", REFUSED),
    "reading":        ("reading", "writing", "writing",   REFUSED,     "serving", REFUSED),
    "writing":        ("writing", "writing", "writing",   "published", "serving", "writing"),
    "torn":           (REFUSED,   REFUSED,   "rewriting", REFUSED,     REFUSED,   REFUSED),
    "rewriting":      (REFUSED,   REFUSED,   "rewriting", "published", REFUSED,   "rewriting"),
    "torn again":     (REFUSED,   REFUSED,   "rewriting", REFUSED,     REFUSED,   REFUSED),
    "another leases": ("reading", REFUSED,   REFUSED,     REFUSED,     "serving", REFUSED),
    "another reads":  (BUSY,      BUSY,      BUSY,        REFUSED,     REFUSED,   REFUSED),
    "another writes": (BUSY,      BUSY,      BUSY,        REFUSED,     REFUSED,   REFUSED),
    "another trains": (BUSY,      REFUSED,   REFUSED,     REFUSED,     REFUSED,   REFUSED),
}  # fmt: skip
"""State -> the next state after each call by this process, or the error, which leaves the state unchanged."""
OBSERVED: dict[str, tuple[Phase, Holder | None, int]] = {
    "serving": (Phase.SERVING, None, 0),
    "published": (Phase.SERVING, None, 1),
    "reading": (Phase.READING, ME, 0),
    "writing": (Phase.WRITING, ME, 0),
    "torn": (Phase.TORN, DEAD, 0),
    "rewriting": (Phase.REWRITING, ME, 0),
    "torn again": (Phase.TORN, DEAD, 0),
    "another leases": (Phase.SERVING, None, 0),
    "another reads": (Phase.READING, OTHER, 0),
    "another writes": (Phase.WRITING, OTHER, 0),
    "another trains": (Phase.WRITING, OTHER, 0),
}
"""State -> phase, holder and version."""
DIED_IN = {"torn": Phase.WRITING, "torn again": Phase.REWRITING}
LEASED = ("another leases", "another trains")
PAUSES: dict[str, dict[str, Any]] = {"read": {"writes": "nothing"}, "write": {}, "rewrite": {"takeover": True}}
TOUCHED = Element(parameter="w", index=3)


class Engine:
    """An engine that tracks whether it is paused, and what was written."""

    def __init__(self) -> None:
        self.engine_core = self
        self.paused = False
        self.written = list[float]()

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True

    async def call_utility_async(self, method: str, version: int) -> None:
        """Do nothing."""

    async def resume_generation(self) -> None:
        self.paused = False

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        return True

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[list[str]]:
        if method == "bridge_write":
            self.written += args[1]
        return [[]]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """Bridge's routes, and one that puts a new fence into a given state."""
    app = FastAPI()
    routes.BridgeRoutes().attach_router(app)
    app.state.bridge_manifest = manifest()
    app.get("/enter/{state}")(entering(app))
    return app


def entering(app: FastAPI) -> Callable[[str], Awaitable[None]]:
    async def enter(state: str) -> None:
        phase, holder, _ = OBSERVED[state]
        engine = app.state.bridge_engine = Engine()
        fence = app.state.bridge_fence = ServerFence(engine, app.state.bridge_manifest)
        if state in LEASED:
            fence.take_lease(OTHER, "runs/first")
        if holder is not None:
            fence.enter(DIED_IN.get(state, phase), holder)
            engine.paused = True

    return enter


Level = Callable[[str, str], None]
"""Puts a fence into a state and makes one call, which may be refused."""


@pytest.fixture
def in_the_fence(app: FastAPI) -> Level:
    async def drive(state: str, call: str) -> None:
        await entering(app)(state)
        fence: ServerFence = app.state.bridge_fence
        if call in PAUSES:
            await fence.pause(PauseRequest(holder=ME, in_flight="keep", **PAUSES[call]))
        elif call == "touch":
            fence.refuse_unless_writing(ME)
        else:
            await (fence.publish(ME) if call == "publish" else fence.release(ME))

    return lambda state, call: asyncio.run(drive(state, call))


@pytest.fixture(scope="module")
def over_http(app: FastAPI) -> Iterator[Level]:
    with TestClient(app, headers={"authorization": "Bearer secret"}) as http:

        def drive(state: str, call: str) -> None:
            http.get(f"/enter/{state}").raise_for_status()
            route = {**dict.fromkeys(PAUSES, "pause"), "touch": "tensors/write"}.get(call, call)
            body = {**PAUSES.get(call, {}), "holder": ME.model_dump(mode="json")}
            if call == "touch":
                body |= {"elements": [TOUCHED.model_dump()], "values": [2.5]}
            answer = http.post(f"/bridge/{route}", json=body)
            if answer.status_code == httpx.codes.CONFLICT:
                refusal = Refusal.model_validate_json(answer.content)
                raise (FenceBusyError if refusal.busy else AttachError)(refusal.error, hint=refusal.hint)
            answer.raise_for_status()

        yield drive


@pytest.fixture(scope="module")
def through_a_client(app: FastAPI) -> Iterator[Level]:
    calls: dict[str, Callable[[BridgeClient], object]] = {
        "read": lambda client: client.pause("keep", writes="nothing"),
        "write": lambda client: client.pause("keep"),
        "rewrite": lambda client: client.pause("keep", takeover=True),
        "publish": lambda client: client.publish(),
        "resume": lambda client: client.resume(),
        "touch": lambda client: client.write((TOUCHED,), (2.5,)),
    }
    with listening(app) as url:

        def drive(state: str, call: str) -> None:
            httpx.get(f"{url}/enter/{state}", trust_env=False).raise_for_status()
            with BridgeClient(manifest(url=url), timeout_s=20) as client:
                calls[call](client)

        yield drive


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve `app` as vLLM does, so that a client can disconnect."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("state", TABLE)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("level", ["in_the_fence", "over_http", "through_a_client"])
def test_call_leads_to_the_next_state(
    app: FastAPI, request: pytest.FixtureRequest, level: str, call: str, state: str
) -> None:
    drive: Level = request.getfixturevalue(level)
    following = TABLE[state][CALLS.index(call)]
    if isinstance(following, str):
        drive(state, call)
    else:
        with pytest.raises(AttachError) as refused:
            drive(state, call)
        assert type(refused.value) is following
        assert refused.value.hint
        owner = OBSERVED[state][1]
        assert owner in (None, ME) or str(owner.pid) in refused.value.message
        following = state
    fence, engine = app.state.bridge_fence, app.state.bridge_engine
    assert (fence.phase, fence.holder, fence.version) == OBSERVED[following]
    assert engine.paused == (fence.phase is not Phase.SERVING), "it generates exactly while the fence serves"
    is_written = call == "touch" and following == TABLE[state][-1] and level != "in_the_fence"
    assert engine.written == ([2.5] if is_written else [])
