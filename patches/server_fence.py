"""The server's side of the fence: paused -> written -> published, one holder at a time.

Cached keys and values are dropped as soon as the scheduler stands still: nothing is computed until it resumes, and a
cache that vLLM refuses to drop is then known before a weight has changed. Once they are dropped no request needs the KV
cache, and its memory is the holder's until the fence is left, if it asked for that.

Whoever has the lease is the only one that may pause for writing; while nobody has it, anybody may. A process that only
reads may always pause.

Not covered: HTTP (`routes.py`), the lease itself (`server_lease.py`), the memory (`memory_pool.py`), writing, which the
trainer does in its own process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError, FenceBusyError
from bridge.server.manifest import Manifest
from bridge.server.protocol import FenceState, InFlight, Status, Written
from patches.server_lease import ServerLease, refuse_unseen

LOOK_S = 0.1
"""Time between two looks whether a process still lives that waits for a pause, or reads inside one."""


async def _never() -> bool:
    return False


class ServerFence:
    """Pauses and resumes one engine, counts versions, and knows who paused it and what would mend it."""

    def __init__(self, engine: Any, exported: Manifest, *, can_sleep: bool = False) -> None:
        self.version = 0
        self.can_sleep = can_sleep
        self.lease = ServerLease()
        self.holder: ProcessIdentity | None = None
        self.writes: Written = "weights"
        """What the last writer wrote."""
        self.last_checkpoint: str | None = None
        self._engine = engine
        self._exported = exported
        self._lock = asyncio.Lock()
        self._reads = False
        """The holder writes nothing: if it dies, everything is as it was."""
        self._look_after: asyncio.Task[None] | None = None
        self._published: tuple[ProcessIdentity, int] | None = None
        """Who published last, and which version was served before."""
        self._mending = False
        """The weights are torn still: the living holder took the fence over to write all of them."""
        self._asleep = False
        """A rank's KV cache may have no memory: nothing can be computed until all of them have taken it back."""

    @property
    def state(self) -> FenceState:
        """Where the fence stands now; a writer that died left something torn, had it begun to write or not."""
        if self.holder is None:
            return "serving"
        return "paused" if self._reads or self.holder.is_alive() else "torn"

    def status(self) -> Status:
        """Tell the version, where the fence stands, who updates the server, and what would mend it."""
        return Status(
            model=self._exported.model,
            version=self.version,
            state=self.state,
            holder=self.holder,
            server=self._exported.server,
            writes="nothing" if self._reads else self.writes,
            last_checkpoint=self.last_checkpoint,
            can_sleep=self.can_sleep,
            lease=self.lease.held,
        )

    def take_lease(self, holder: ProcessIdentity, run: str) -> None:
        """Let `holder` alone write from now on, until it gives the lease back or dies.

        Raises:
            FenceBusyError: another living process is inside the fence.
            AttachError: another living process has the lease.
        """
        self.lease.refuse_others(holder)
        self._refuse_busy(holder)
        self.lease.take(holder, run)

    def give_lease_back(self, holder: ProcessIdentity) -> None:
        """Free the lease of `holder`, unless it leaves the server paused: then the lease ends with that process."""
        if self.holder != holder:
            self.lease.give_back(holder)

    async def pause(
        self,
        holder: ProcessIdentity,
        in_flight: InFlight,
        *,
        version: int | None = None,
        last_checkpoint: str | None = None,
        writes: Written = "weights",
        takeover: bool = False,
        sleep: bool = False,
        has_left: Callable[[], Awaitable[bool]] = _never,
    ) -> None:
        """Stop the scheduler, wait for every rank's device, drop the caches, and give the fence to `holder`.

        Requests that were frozen compute their keys and values again, under the new weights: with `sleep` the KV cache
        gives its memory up until the fence is left. A `holder` that dies before it has the fence, or `has_left` without
        waiting for the answer, does not get it. The scheduler is paused without `AsyncLLM.pause_generation`, whose
        fixed sleep of 20 ms only orders outputs for a human eye (vLLM 0.26 to 0.33 say so beside it).

        Raises:
            FenceBusyError: another living process holds the fence.
            AttachError: somebody else has the lease, another `version` is served, the weights are torn and this is no
                `takeover`, a weight has moved since the load, vLLM keeps its cache, or cannot `sleep`.
        """
        async with self._lock:
            self._refuse_unless_free(holder, writes, takeover=takeover)
            self._refuse_other_version(version)
            self._refuse_sleepless(asked=sleep)
            try:
                await _unless_gone(self._stand_still(in_flight, sleep=sleep), holder, has_left)
                self._refuse_unless_free(holder, writes, takeover=takeover)  # the lease may be another's by now
            except BaseException:
                if self.holder is None:
                    await self._resume_for(holder)
                raise
            self._published = None  # no late repetition of a publication ends this pause
            self._mending = self._mending or self.state == "torn"
            reads = writes == "nothing" and (self._reads or self.holder is None)  # or it paused to write before
            if reads:
                self._hold_to_read(holder)
            else:
                self.holder, self._reads = holder, False
            if writes != "nothing":
                kept = self.last_checkpoint if writes == self.writes else None
                self.writes, self.last_checkpoint = writes, last_checkpoint or kept

    async def publish(self, holder: ProcessIdentity, version: int | None = None, *, after: int | None = None) -> None:
        """Count one version more, or up to `version` if that is later, and resume; nothing if that is done already.

        `after` is the version that was served before: a caller that missed the answer may ask again.

        Raises:
            AttachError: `holder` does not hold the fence to write, another version than `after` was served, or the KV
                cache finds no memory; it is held still then.
        """
        async with self._lock:
            if after is None or self._published != (holder, after):
                self.refuse_unless_writing(holder)
                self._refuse_other_version(after)
                await self._wake()
                self._published = holder, self.version
                self.version = max(self.version + 1, version or 0)
                self._mending = False
                self._hold_to_read(holder)  # all is written: if the holder dies from now on, nothing is torn
            if self.holder == holder:
                await self._resume()

    async def release(self, holder: ProcessIdentity) -> None:
        """Resume without a new version, because nothing was written; nothing if the server is not paused.

        Raises:
            AttachError: another holds the fence, `holder` took over torn weights, or the KV cache finds no memory.
        """
        if self.holder is None:  # a pause that is pending, of a caller that has left, is not granted
            return
        async with self._lock:
            self._refuse_unless_held(holder)
            self._refuse_while_mending()
            await self._resume()

    def refuse_unless_writing(self, holder: ProcessIdentity) -> None:
        """Raise AttachError unless `holder` holds the fence, and paused to write."""
        self._refuse_unless_held(holder)
        if self._reads:
            raise AttachError(
                f"process {holder.pid} paused the server to read, and may not write", remedy="pause again, to write"
            )

    def _refuse_unless_held(self, holder: ProcessIdentity) -> None:
        if self.holder != holder:
            owner = "nobody" if self.holder is None else f"process {self.holder.pid}"
            raise AttachError(f"process {holder.pid} does not hold the fence; {owner} does", remedy="pause first")

    async def _stand_still(self, in_flight: InFlight, *, sleep: bool) -> None:
        await self._engine.engine_core.pause_scheduler_async(mode=in_flight, clear_cache=False)
        moved, dropped = await asyncio.gather(self._moved_weights(), self._drop_caches())
        _refuse(moved, dropped)
        if sleep:
            await self._sleep()

    async def _resume_after(self, reader: ProcessIdentity) -> None:
        """Resume if `reader` dies inside the fence."""
        while self._reads and self.holder == reader:
            if not reader.is_alive():
                with suppress(Exception):  # it stands still all the same: the next look tries again
                    await self.release(reader)
            await asyncio.sleep(LOOK_S)

    async def _resume_for(self, holder: ProcessIdentity) -> None:
        """Resume after a pause that failed; where that fails too, `holder` has paused to read, and may try again."""
        try:
            await self._resume()
        except BaseException:
            self._hold_to_read(holder)
            raise

    def _hold_to_read(self, holder: ProcessIdentity) -> None:
        self.holder, self._reads = holder, True
        self._look_after = asyncio.create_task(self._resume_after(holder))

    async def _resume(self) -> None:
        await self._wake()
        await self._engine.resume_generation()
        self.holder, self._reads = None, False

    async def _sleep(self) -> None:
        self._asleep = True  # as far as it gets
        await self._engine.collective_rpc("bridge_sleep")

    async def _wake(self) -> None:
        """Let every rank take its KV cache back, where it has given it up; may be tried again."""
        if not self._asleep:
            return
        reasons = [reason for reason in await self._engine.collective_rpc("bridge_wake") if reason]
        if reasons:
            raise AttachError(
                f"vLLM cannot take back the memory of its KV cache, and stands still: {reasons[0]}",
                remedy=f"end the trainer, and what else fills the GPU (nvidia-smi); then {self.status().mending()}",
            )
        self._asleep = False

    async def _moved_weights(self) -> list[str]:
        return sorted({name for rank in await self._engine.collective_rpc("bridge_settle") for name in rank})

    async def _drop_caches(self) -> bool:
        dropped: bool = await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        return dropped

    def _refuse_while_mending(self) -> None:
        if self._mending:
            raise AttachError(
                "the weights were torn when this process took them over, and have not been written anew",
                remedy=self.status().mending(),
            )

    def _refuse_sleepless(self, *, asked: bool) -> None:
        if asked and not self.can_sleep:
            raise AttachError(
                "this vLLM cannot free its KV cache: it runs on a CPU, or was started without --enable-sleep-mode",
                remedy="bridge train --kv-sleep never; or start the server anew on a GPU: bridge serve-vllm --model M",
            )

    def _refuse_other_version(self, believed: int | None) -> None:
        if believed not in (None, self.version):
            raise AttachError(
                f"the server serves version {self.version}, and this process expected version {believed}: another one"
                " has published in between",
                remedy="resume from the newest checkpoint: bridge train --resume",
            )

    def _refuse_busy(self, holder: ProcessIdentity) -> None:
        if self.state == "paused" and self.holder != holder:
            assert self.holder is not None
            raise FenceBusyError(
                f"process {self.holder.pid} holds the fence, and only one process at a time may",
                remedy=f"wait for it to finish, or stop it: kill {self.holder.pid}",
            )

    def _refuse_unless_free(self, holder: ProcessIdentity, writes: Written, *, takeover: bool) -> None:
        refuse_unseen(holder)
        if writes != "nothing":
            self.lease.refuse_others(holder)
        self._refuse_busy(holder)
        if not takeover or self.writes != writes:
            self.status().refuse_torn()
            self._refuse_while_mending()


async def _unless_gone(
    work: Coroutine[Any, Any, None], holder: ProcessIdentity, has_left: Callable[[], Awaitable[bool]]
) -> None:
    """Run `work`, but cancel it as soon as `holder`, for whom it is, has died or left.

    Raises:
        AttachError: it has.
    """
    task = asyncio.ensure_future(work)
    try:
        while True:
            if not holder.is_alive() or await has_left():
                raise AttachError(
                    f"process {holder.pid} did not wait for its pause, and did not get it: nothing was written",
                    remedy="pause again",
                )
            if task.done():
                return task.result()
            await asyncio.wait({task}, timeout=LOOK_S)
    finally:
        task.cancel()
        await asyncio.wait({task})


def _refuse(moved: list[str], dropped: bool) -> None:
    if moved:
        raise AttachError(
            f"{len(moved)} weights have moved since the server loaded, the first: {', '.join(moved[:3])}",
            remedy="restart the server and attach again",
        )
    if not dropped:
        raise AttachError(
            "vLLM refuses to drop its prefix cache: stale keys and values would be served; nothing was written",
            remedy="try again when no other request runs, or restart the server",
        )
