"""An engine for tests of the server's side of the fence, which records its calls in order."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bridge.server.protocol import Holder, InFlight, PauseRequest
from bridge_patches.engine_outputs import SERVE_VERSION

ME = Holder.current()
PAUSED = ["pause keep", "synchronize", "reset"]
ASLEEP = [*PAUSED, "sleep"]


class FakeEngine:
    """The parts of vLLM's `AsyncLLM` that the fence uses; `failing` names the call that raises."""

    def __init__(self, *, moved: list[list[str]] | None = None, dropped: bool = True, failing: str = "") -> None:
        self.calls: list[str] = []
        self.paused = False
        self.awake = True
        self.missing: list[str | None] = [None, None]
        """Why each rank cannot wake up, or None."""
        self.version = 0
        self.engine_core = self
        self._moved = moved or [[]]
        self._dropped = dropped
        self.failing = failing

    def repair(self) -> None:
        self._moved, self._dropped, self.failing = [[]], True, ""

    async def pause_scheduler_async(self, *, mode: InFlight, clear_cache: bool) -> None:
        await self._note(f"pause {mode}")
        assert not clear_cache
        self.paused = True

    async def collective_rpc(self, method: str) -> Any:
        await self._note(method.removeprefix("bridge_"))
        answers: dict[str, Callable[[], Any]] = {
            "bridge_synchronize": lambda: self._moved,
            "bridge_sleep": self._sleep,
            "bridge_wake": self._wake,
            "bridge_requantize": lambda: [None, None],
        }
        return answers[method]()

    def _sleep(self) -> list[None]:
        assert self.calls[-2] == "reset", "the KV cache was freed while requests still had blocks of it"
        self.awake = False
        return [None, None]

    def _wake(self) -> list[str | None]:
        self.awake = self.awake or not any(self.missing)
        return self.missing

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        await self._note("reset")
        assert self.paused, "the cache was dropped while the scheduler could still fill it"
        assert reset_connector
        self.kept_kv = not reset_running_requests
        return self._dropped

    async def call_utility_async(self, method: str, version: int) -> None:
        assert method == SERVE_VERSION
        self.version = version

    async def resume_generation(self) -> None:
        await self._note("resume")
        assert self.awake, "tokens would be generated without a KV cache"
        self.paused = False

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)
        if self.failing and call.startswith(self.failing):
            raise RuntimeError(f"{call} failed")


def asking(holder: Holder, in_flight: InFlight, **more: Any) -> PauseRequest:
    return PauseRequest(holder=holder, in_flight=in_flight, **more)


def living() -> subprocess.Popen[bytes]:
    """Start a process that runs until its standard input is closed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
