"""The server's side of the fence: paused -> written -> published, one holder at a time.

Cached keys and values are dropped as soon as the scheduler stands still: nothing is computed until it resumes, and a
cache that vLLM refuses to drop is then known before a weight has changed. Once they are dropped no request needs the KV
cache, and its memory is the holder's until the fence is left, if it asked for that.

Not covered: HTTP (`routes.py`), the memory itself (`memory_pool.py`), writing, which the trainer does in its own
process.
"""

import asyncio
from typing import Any

from bridge.errors import AttachError
from bridge.process import ProcessIdentity
from bridge.protocol import FenceState, InFlight, Status, Written
from bridge.weights.manifest import Manifest


class ServerFence:
    """Pauses and resumes one engine, counts versions, and knows who paused it and what would mend it."""

    def __init__(self, engine: Any, exported: Manifest, *, can_sleep: bool = False) -> None:
        self.version = 0
        self.can_sleep = can_sleep
        self.holder: ProcessIdentity | None = None
        self.writes: Written = "weights"
        self.last_checkpoint: str | None = None
        self._engine = engine
        self._exported = exported
        self._lock = asyncio.Lock()
        self._mending = False
        """The weights are torn still: the living holder took the fence over to write all of them."""
        self._asleep = False
        """A rank's KV cache may have no memory: nothing can be computed until all of them have taken it back."""

    @property
    def state(self) -> FenceState:
        """Where the fence stands now; a holder that died left the weights torn, had it begun to write or not."""
        if self.holder is None:
            return "serving"
        return "paused" if self.holder.is_alive() else "torn"

    def status(self) -> Status:
        """Tell the version, where the fence stands, and what would mend it."""
        return Status(
            model=self._exported.model,
            version=self.version,
            state=self.state,
            holder=self.holder,
            server=self._exported.server,
            writes=self.writes,
            last_checkpoint=self.last_checkpoint,
            can_sleep=self.can_sleep,
        )

    async def pause(
        self,
        holder: ProcessIdentity,
        in_flight: InFlight,
        *,
        last_checkpoint: str | None = None,
        writes: Written = "weights",
        takeover: bool = False,
        sleep: bool = False,
    ) -> None:
        """Stop the scheduler, wait for every rank's device, drop the caches, and give the fence to `holder`.

        Requests that were frozen compute their keys and values again, under the new weights: with `sleep` the KV cache
        gives its memory up until the fence is left. The scheduler is paused without `AsyncLLM.pause_generation`, whose
        fixed sleep of 20 ms only orders outputs for a human eye (vLLM 0.26 to 0.33 say so beside it).

        Raises:
            AttachError: somebody else holds the fence, the weights are torn and this is no `takeover`, a weight has
                moved since the load, vLLM keeps its cache, or cannot `sleep`.
        """
        async with self._lock:
            self._refuse_unless_free(holder, writes, takeover=takeover)
            self._refuse_sleepless(asked=sleep)
            before, self._mending = self.holder, self._mending or self.state == "torn"
            self.holder = holder
            try:
                await self._engine.engine_core.pause_scheduler_async(mode=in_flight, clear_cache=False)
                moved, dropped = await asyncio.gather(self._moved_weights(), self._drop_caches())
                _refuse(moved, dropped)
                if sleep:
                    await self._sleep()
            except BaseException:
                await self._give_back(before)
                raise
            kept = self.last_checkpoint if writes == self.writes else None
            self.writes, self.last_checkpoint = writes, last_checkpoint or kept

    async def publish(self, holder: ProcessIdentity, version: int | None = None) -> None:
        """Count one version more, or up to `version` if that is later, and resume.

        Raises:
            AttachError: `holder` does not hold the fence, or the KV cache finds no memory; it is held still then.
        """
        async with self._lock:
            self.refuse_unless_held(holder)
            await self._wake()
            self.version = max(self.version + 1, version or 0)
            self._mending = False
            await self._resume()

    async def release(self, holder: ProcessIdentity) -> None:
        """Resume without a new version, because nothing was written.

        Raises:
            AttachError: `holder` does not hold the fence, or took over torn weights, or the KV cache finds no memory.
        """
        async with self._lock:
            self.refuse_unless_held(holder)
            self._refuse_while_mending()
            await self._resume()

    def refuse_unless_held(self, holder: ProcessIdentity) -> None:
        """Raise AttachError unless `holder` holds the fence."""
        if self.holder != holder:
            owner = "nobody" if self.holder is None else f"process {self.holder.pid}"
            raise AttachError(f"process {holder.pid} does not hold the fence; {owner} does", remedy="pause first")

    async def _resume(self) -> None:
        await self._wake()
        await self._engine.resume_generation()
        self.holder = None

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

    async def _give_back(self, before: ProcessIdentity | None) -> None:
        """Undo a pause that failed: serve again only what was served before it."""
        if before is None:
            await self._resume()
        self.holder = before

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

    def _refuse_unless_free(self, holder: ProcessIdentity, writes: Written, *, takeover: bool) -> None:
        if not (holder.is_visible() and holder.is_alive()):
            raise AttachError(
                f"process {holder.pid} is none that the server can see, and whose end it would notice",
                remedy="run both in one pid namespace: docker run --pid=container:NAME",
            )
        if self.state == "paused" and self.holder != holder:
            assert self.holder is not None
            raise AttachError(
                f"process {self.holder.pid} holds the fence, and one process alone may write",
                remedy=f"wait for its end, or end it: kill {self.holder.pid}",
            )
        if not takeover or self.writes != writes:
            self.status().refuse_torn()
            self._refuse_while_mending()


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
