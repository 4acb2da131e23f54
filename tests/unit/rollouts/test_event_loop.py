"""The event loop of rollouts: an interrupt at any moment ends the waiting call, and leaves the loop usable."""

import asyncio
import itertools
import signal
import sys
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType
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


def test_interrupt_with_lost_wake_up_is_raised() -> None:
    loop = EventLoop()
    calls = Interrupted()
    loop._calls = calls

    async def end_once_waited_for() -> None:
        await asyncio.to_thread(calls.is_waited_for.wait)

    with pytest.raises(KeyboardInterrupt):
        loop.run(end_once_waited_for())
    assert loop.run(asyncio.sleep(0, "usable")) == "usable"
    loop.close(nothing())


def test_interrupt_with_lost_call_cancels_its_waiter() -> None:
    loop = EventLoop()
    loop._calls = Interrupted()
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        loop.run(loop.call_here(lambda: made.append("call")))
    assert made == []
    loop.close(nothing())


def test_interrupt_right_after_a_call_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Presses:
    """Presses Ctrl-C before one bytecode of the event loop's module, in this thread."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __enter__(self) -> None:
        sys.settrace(self._begin)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    @property
    def has_pressed(self) -> bool:
        return self._left < 0

    def _begin(self, frame: FrameType, _event: str, _given: Any) -> Any:
        frame.f_trace_opcodes = frame.f_code.co_filename == event_loop.__file__
        return self._step if frame.f_trace_opcodes else None

    def _step(self, _frame: FrameType, event: str, _given: Any) -> Any:
        self._left -= event == "opcode"
        if self._left == -1:
            self._left = -2
            signal.raise_signal(signal.SIGINT)
        return self._step


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # before the coroutine reaches the loop
@pytest.mark.timeout(60)
def test_interrupt_at_any_point_of_the_first_call_is_raised() -> None:
    for number in itertools.count():
        loop, presses = EventLoop(), Presses(number)
        try:
            with presses:
                loop.run(loop.call_here(lambda: "made"))
        except KeyboardInterrupt:
            assert presses.has_pressed
        else:
            assert not presses.has_pressed
        assert loop.run(asyncio.sleep(0, "usable")) == "usable"
        loop.close(nothing())
        if not presses.has_pressed:
            break
    assert number > 100


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # before anything is closed
@pytest.mark.timeout(60)
def test_interrupt_during_close_still_closes_everything() -> None:
    for number in itertools.count():
        loop, presses, ended = EventLoop(), Presses(number), list[str]()

        async def wait(ended: list[str] = ended) -> None:
            try:
                await asyncio.sleep(600)
            finally:
                ended.append("task")

        async def last(ended: list[str] = ended) -> None:
            ended.append("last")

        async def start() -> "asyncio.Task[None]":
            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            return task  # otherwise nothing references it

        task = loop.run(start())
        try:
            with presses:
                loop.close(last())
        except KeyboardInterrupt:
            assert presses.has_pressed
            if not ended:
                assert loop.run(asyncio.sleep(0, "usable")) == "usable"
                loop.close(last())
        assert task.cancelled()
        assert ended == ["task", "last"]
        if not presses.has_pressed:
            break
    assert number > 100
