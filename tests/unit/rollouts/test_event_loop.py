"""The loop of the rollouts: an interrupt at any moment ends the call that waits, and leaves the loop usable."""

import asyncio
from queue import SimpleQueue
from typing import Any

import pytest

from bridge.rollouts.event_loop import EventLoop


class Interrupted(SimpleQueue[Any]):
    """A queue from which an interrupt loses one item: it comes after the item was taken out."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        self.which -= 1
        if self.which == 0:
            raise KeyboardInterrupt
        return item


async def nothing() -> None:
    await asyncio.sleep(0)


@pytest.mark.timeout(20)
def test_an_interrupt_that_loses_the_wake_up_call_is_raised() -> None:
    loop = EventLoop()
    loop._calls = Interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        loop.run(nothing())
    assert loop.run(asyncio.sleep(0, "usable")) == "usable"
    loop.close(nothing())


@pytest.mark.timeout(20)
def test_an_interrupt_that_loses_a_call_cancels_its_waiter() -> None:
    loop = EventLoop()
    loop._calls = Interrupted(1)
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        loop.run(loop.call_here(lambda: made.append("call")))
    assert made == []
    loop.close(nothing())
