"""The loop of the rollouts: an interrupt at any moment ends the call that waits, and leaves the loop usable."""

import asyncio
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest

from bridge.rollouts import event_loop
from bridge.rollouts.event_loop import EventLoop


class Interrupted(SimpleQueue[Any]):
    """A queue from which an interrupt loses the first item: it comes after the item was taken out."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()
        self.has_interrupted = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.is_waited_for.set()
        item = super().get(block, timeout)
        if not self.has_interrupted:
            self.has_interrupted = True
            raise KeyboardInterrupt
        return item


async def nothing() -> None:
    await asyncio.sleep(0)


def test_an_interrupt_that_loses_the_wake_up_call_is_raised() -> None:
    loop = EventLoop()
    calls = Interrupted()
    loop._calls = calls

    async def end_once_waited_for() -> None:
        await asyncio.to_thread(calls.is_waited_for.wait)

    with pytest.raises(KeyboardInterrupt):
        loop.run(end_once_waited_for())
    assert loop.run(asyncio.sleep(0, "usable")) == "usable"
    loop.close(nothing())


def test_an_interrupt_that_loses_a_call_cancels_its_waiter() -> None:
    loop = EventLoop()
    loop._calls = Interrupted()
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        loop.run(loop.call_here(lambda: made.append("call")))
    assert made == []
    loop.close(nothing())


def test_an_interrupt_just_after_a_call_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressed(Future[Any]):
        def set_result(self, result: Any) -> None:
            super().set_result(result)
            if result == "made":
                raise KeyboardInterrupt

    monkeypatch.setattr(event_loop, "Future", Pressed)
    loop = EventLoop()
    with pytest.raises(KeyboardInterrupt):
        loop.run(loop.call_here(lambda: "made"))
    assert loop.run(asyncio.sleep(0, "usable")) == "usable"
    loop.close(nothing())
