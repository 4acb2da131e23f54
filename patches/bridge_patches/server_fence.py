"""The server's side of an update: who may update it (the lease), and pausing, writing and publishing (the fence).

A trainer takes the lease before it changes anything, and returns it when it finishes; if all of its processes exit, the
lease becomes free. While a trainer holds the lease, only it may pause to write; any process may pause to read.

Cached keys and values are dropped as soon as the scheduler has stopped: if vLLM refuses, no weight has changed yet. No
request needs the KV cache until the scheduler resumes, so the holder may use its memory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from enum import Enum
from typing import Any, Literal

from bridge.errors import AttachError, FenceBusyError
from bridge.server.manifest import Manifest
from bridge.server.protocol import Capabilities, FenceState, Holder, Lease, PauseRequest, Status, Written
from bridge_patches.engine_outputs import SERVE_VERSION

PINS = """
vllm.v1.engine.async_llm
    AsyncLLM: engine_core
    call async AsyncLLM.reset_prefix_cache(reset_running_requests, reset_connector)
    call async AsyncLLM.resume_generation()
# Not AsyncLLM.pause_generation, whose fixed sleep of 20 ms only makes the order of outputs look right to users.
vllm.v1.engine.core_client
    call async AsyncMPClient.pause_scheduler_async(mode, clear_cache)
    call async AsyncMPClient.resume_scheduler_async()  # which resume_generation calls
    call async AsyncMPClient.call_utility_async(method)
"""
POLL_S = 0.1
"""Seconds between checks that a process that waits for a pause, or reads during one, is alive."""


class Phase(Enum):
    """State of the fence."""

    SERVING = "serving"
    READING = "reading"
    """Paused without half-written weights: the holder reads, or it has published but the engine has not resumed yet."""
    WRITING = "writing"
    REWRITING = "rewriting"
    """Paused by a holder that took over torn weights: only a publication ends this phase."""
    TORN = "torn"
    """One of the holder's processes died while writing or rewriting, even if it had not written anything yet."""


Step = Literal["read", "write", "rewrite", "publish", "resume"]
"""The first three are pauses: to read, to write, and to rewrite everything that may be torn."""
PAUSES: tuple[Step, ...] = ("read", "write", "rewrite")
NEXT: dict[Phase, dict[Step, Phase]] = {
    Phase.SERVING: {"read": Phase.READING, "write": Phase.WRITING, "rewrite": Phase.WRITING},
    Phase.READING: {"read": Phase.READING, "write": Phase.WRITING, "rewrite": Phase.WRITING, "resume": Phase.SERVING},
    Phase.WRITING: {**dict.fromkeys(PAUSES, Phase.WRITING), "publish": Phase.READING, "resume": Phase.SERVING},
    Phase.REWRITING: {"rewrite": Phase.REWRITING, "publish": Phase.READING},
    Phase.TORN: {"rewrite": Phase.REWRITING},
}
"""Transitions that the holder may make, and any process once the holder has exited."""
STATES: dict[Phase, FenceState] = {Phase.SERVING: "serving", Phase.TORN: "torn"}
"""The phases that clients do not see as "paused"."""


class ServerFence:
    """Pauses and resumes one engine, counts versions, and tracks the lease, the holder and the last checkpoint."""

    def __init__(self, engine: Any, exported: Manifest, capabilities: Capabilities | None = None) -> None:
        self.version = 0
        self.holder: Holder | None = None
        self.writes: Written = "weights"
        """What the last writer wrote."""
        self.last_checkpoint: str | None = None
        self._lease: Lease | None = None
        self._takers = set[str]()
        """Clients of the lease's holder that have taken the lease and not returned it."""
        self._client = ""
        """Client of `holder` that paused last; empty once that client has closed."""
        self._engine = engine
        self._exported = exported
        self._makes_fp8 = any(shard.quantized for shard in exported.shards)
        self._capabilities = capabilities or Capabilities()
        self._lock = asyncio.Lock()
        self._phase = Phase.SERVING
        """The phase, ignoring whether the holder is alive, so that a publication sent before its death counts."""
        self._watcher: asyncio.Task[None] | None = None
        self._published: tuple[Holder, int] | None = None
        """Holder that published last, and the version before that."""
        self._is_asleep = False
        """Whether any rank's KV cache may have no memory, so that all ranks must wake up before the next token."""

    @property
    def lease(self) -> Lease | None:
        """The lease, or None if its holder has exited."""
        return self._lease if self._lease and not self._lease.holder.none_alive() else None

    @property
    def phase(self) -> Phase:
        """The current phase: torn if one of a writing holder's processes has died."""
        is_torn = self._phase in {Phase.WRITING, Phase.REWRITING} and self.holder and not self.holder.all_alive()
        return Phase.TORN if is_torn else self._phase

    @property
    def state(self) -> FenceState:
        return STATES.get(self.phase, "paused")

    def status(self) -> Status:
        return Status(
            **dict(self._capabilities),
            model=self._exported.model,
            version=self.version,
            state=self.state,
            holder=self.holder,
            server=self._exported.server,
            writes="nothing" if self._phase is Phase.READING else self.writes,
            last_checkpoint=self.last_checkpoint,
            lease=self.lease,
        )

    def take_lease(self, holder: Holder, run: str, client: str = "") -> None:
        """Let only `holder` write, until all of its clients that took the lease return it, or the holder dies."""
        self.refuse_without_lease(holder)
        self._refuse_busy(holder)
        _refuse_invisible_holder(holder)
        if self.lease is None:
            self._takers.clear()
        self._takers.add(client)
        self._lease = Lease(holder=holder, run=run)

    def release_lease(self, holder: Holder, client: str = "") -> None:
        """Return a client's lease; a client inside the fence leaves both fence and lease to the holder."""
        if not self._lease or self._lease.holder != holder:
            return
        self._takers.discard(client)
        if self.holder == holder:
            self._client = "" if self._client == client else self._client
        elif not self._takers:
            self._lease = None

    def refuse_without_lease(self, holder: Holder) -> None:
        lease = self.lease
        if lease and lease.holder != holder:
            raise lease.refusal()

    async def pause(self, request: PauseRequest, has_left: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Stop the scheduler, wait for every rank's device, drop the caches, and give the fence to the holder.

        With `sleep`, the KV cache frees its memory until the engine resumes, and loses its keys and values. A holder
        that dies or disconnects (`has_left`) before the response does not get the fence. FenceBusyError if another
        live process holds it; AttachError if the pause is refused for any other reason.
        """
        async with self._lock:
            self._after_pause(request)
            self._refuse_other_client(request)
            self._refuse_other_version(request.version)
            if request.sleep and not self._capabilities.can_sleep:
                raise AttachError(
                    "this vLLM cannot free its KV cache: it runs on a CPU, or was started without --enable-sleep-mode",
                    hint="bridge train --kv-sleep never; or restart the server on a GPU: bridge serve-vllm --model M",
                )
            try:
                await _unless_gone(self._stop_engine(request), request.holder, has_left)
                phase = self._after_pause(request)  # another process may have taken the lease
            except BaseException:
                if self.holder is None:
                    await self._resume(request.holder)
                raise
            self._published = None  # a late retry of a publication must not end this pause
            has_weights = self.writes == "weights" and self._phase in {Phase.WRITING, Phase.REWRITING}
            self.enter(phase, request.holder)
            self._client = request.client
            if request.writes == "weights" or (request.writes == "adapter" and not has_weights):
                kept = self.last_checkpoint if request.writes == self.writes else None
                self.last_checkpoint = request.last_checkpoint or kept
                self.writes = request.writes

    async def publish(self, holder: Holder, version: int | None = None, *, after: int | None = None) -> None:
        """Increment the version, or set it to `version` if that is higher, and resume; a repeated call has no effect.

        `after` is the version that was served before, which lets a caller that missed the response retry. After an
        AttachError, `holder` still holds the fence.
        """
        async with self._lock:
            if after is None or self._published != (holder, after):
                self.refuse_unless_writing(holder)
                self._refuse_other_version(after)
                if self._makes_fp8 and self.writes == "weights":
                    await self._engine.collective_rpc("bridge_requantize")
                await self._wake()
                self._published = (holder, self.version)
                self.version = max(self.version + 1, version or 0)
                self.enter(self._after("publish", self._phase), holder)  # if the holder dies now, nothing is torn
            if self.holder == holder:
                await self._resume()

    async def release(self, holder: Holder) -> None:
        """Resume without a new version, because nothing was written; a no-op if the server is not paused."""
        if self.holder is None:  # a pending pause of a disconnected caller will not be granted
            return
        async with self._lock:
            self._refuse_unless_held(holder)
            self._after("resume", self._phase)
            # The holder reports that nothing was written, but some weights may have been.
            if self._makes_fp8 and self._phase is Phase.WRITING and self.writes == "weights":
                await self._engine.collective_rpc("bridge_requantize")
            await self._resume()

    def refuse_unless_writing(self, holder: Holder) -> None:
        """Raise AttachError unless `holder` holds the fence for writing."""
        self._refuse_unless_held(holder)
        self._after("publish", self._phase)

    def enter(self, phase: Phase, holder: Holder | None) -> None:
        self._phase = phase
        self.holder = holder
        if phase is Phase.READING and holder is not None:
            self._watcher = asyncio.create_task(self._resume_after(holder))

    def _after(self, step: Step, phase: Phase) -> Phase:
        """Return the phase that follows `phase` after `step`; AttachError if the step is not allowed now."""
        if step in NEXT[phase]:
            return NEXT[phase][step]
        assert self.holder is not None, (step, phase)
        if phase is Phase.READING:
            message = f"process {self.holder.pid} paused the server to read, so it may not write"
            raise AttachError(message, hint="pause again with writes set to weights or adapter")
        self.status().refuse_torn()
        raise AttachError(
            "the weights were half-written when this process took over, and have not been rewritten since",
            hint=self.status().hint(),
        )

    def _after_pause(self, request: PauseRequest) -> Phase:
        """Return the phase after a pause; raises the same errors as `pause`."""
        _refuse_invisible_holder(request.holder)
        reads = request.writes == "nothing"
        if not reads:
            self.refuse_without_lease(request.holder)
        self._refuse_busy(request.holder)
        step: Step = "read" if reads else "write"
        if request.takeover and request.writes == self.writes:
            step = "rewrite"
        return self._after(step, self.phase)

    async def _stop_engine(self, request: PauseRequest) -> None:
        await self._engine.engine_core.pause_scheduler_async(mode=request.in_flight, clear_cache=False)
        recomputes = request.sleep or not (request.keep_kv and self._capabilities.can_keep_kv)
        ranks, is_dropped = await asyncio.gather(
            self._engine.collective_rpc("bridge_synchronize"),
            self._engine.reset_prefix_cache(reset_running_requests=recomputes, reset_connector=True),
        )
        if moved := sorted({name for names in ranks for name in names}):
            message = f"{len(moved)} weights have moved since the server loaded, the first: {', '.join(moved[:3])}"
            raise AttachError(message, hint="restart the server and attach again")
        if not is_dropped:
            raise AttachError(
                "vLLM refuses to drop its prefix cache, so stale keys and values would be served; nothing was written",
                hint="retry when no other request is running, or restart the server",
            )
        if request.sleep:
            self._is_asleep = True  # set first: if one rank fails, others may be asleep
            await self._engine.collective_rpc("bridge_sleep")

    async def _resume(self, holder: Holder | None = None) -> None:
        """Resume serving; if that fails, `holder` may retry as a reader."""
        try:
            await self._wake()
            await self._engine.engine_core.call_utility_async(SERVE_VERSION, self.version)
            await self._engine.resume_generation()
        except BaseException:
            if holder is not None:
                self.enter(Phase.READING, holder)
            raise
        self.enter(Phase.SERVING, None)

    async def _resume_after(self, reader: Holder) -> None:
        """Resume if `reader` dies before the engine has resumed."""
        while self._phase is Phase.READING and self.holder == reader:
            if reader.none_alive():
                with suppress(Exception):  # the engine stays paused, and the next round retries
                    await self.release(reader)
            await asyncio.sleep(POLL_S)

    async def _wake(self) -> None:
        """Let every rank that freed its KV cache allocate it again; may be retried."""
        reasons = await self._engine.collective_rpc("bridge_wake") if self._is_asleep else []
        if any(reasons):
            raise AttachError(
                f"vLLM cannot allocate its KV cache again, so it does not generate: {'; '.join(filter(None, reasons))}",
                hint=f"stop the trainer and whatever else fills the GPU (nvidia-smi); then {self.status().hint()}",
            )
        self._is_asleep = False

    def _refuse_unless_held(self, holder: Holder) -> None:
        if self.holder != holder:
            owner = "nobody" if self.holder is None else f"process {self.holder.pid}"
            raise AttachError(f"process {holder.pid} does not hold the fence; {owner} does", hint="pause first")
        if not holder.none_alive():  # one of the holder's processes may have died while writing
            self.status().refuse_torn()

    def _refuse_other_client(self, request: PauseRequest) -> None:
        """Refuse a second client of the process inside the fence; a client may repeat its own pause."""
        if self.holder == request.holder and self._client not in ("", request.client):
            raise AttachError(
                f"another policy of process {request.holder.pid} holds the fence, or failed inside it",
                hint="let only one policy update a server; after an error inside the fence, close that policy first",
            )

    def _refuse_other_version(self, expected: int | None) -> None:
        if expected not in (None, self.version):
            message = f"the server serves version {self.version}, expected version {expected}: another one published"
            raise AttachError(message, hint="resume from the newest checkpoint: bridge train --resume")

    def _refuse_busy(self, holder: Holder) -> None:
        owner = self.holder
        if owner and owner != holder and (self._phase is Phase.READING or not owner.none_alive()):
            message = f"process {owner.pid} holds the fence, and only one process can at a time"
            raise FenceBusyError(message, hint=f"wait for it to finish, or stop it: kill {owner.pid}")


async def _unless_gone(
    work: Coroutine[Any, Any, None], holder: Holder, has_left: Callable[[], Awaitable[bool]] | None
) -> None:
    """Run `work`, but cancel it and raise AttachError as soon as `holder` has died or disconnected."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            if not holder.all_alive() or (has_left and await has_left()):
                message = f"process {holder.pid} disconnected before the pause completed: nothing was written"
                raise AttachError(message, hint="pause again")
            if task.done():
                return task.result()
            await asyncio.wait({task}, timeout=POLL_S)
    finally:
        task.cancel()
        await asyncio.wait({task})


def _refuse_invisible_holder(holder: Holder) -> None:
    """Raise AttachError unless all processes of `holder` are running and the server would notice their exit."""
    if not (holder.is_visible() and holder.all_alive()):
        raise AttachError(
            f"process {holder.pid} is not visible to the server, which could not notice its exit",
            hint="run both in one PID namespace: docker run --pid=container:NAME",
        )
