"""The trainer's side of the fence: the only window in which weights change.

    pause      the scheduler stops, every rank's device is idle, cached keys and values are dropped
    write      the caller writes, then this process's device is idle
    publish    the version goes up by one, generation resumes

A Ctrl-C inside the window waits for its end: weights are never left half written by an interrupt. An
error in it leaves the server paused, and torn once this process is gone: half-written weights are never served.

Not covered: what is written.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from bridge.client import BridgeClient
from bridge.protocol import InFlight, Status, Written


@dataclass(frozen=True, kw_only=True)
class FenceTimes:
    """One passage through the fence."""

    version: int
    """The version that it published."""
    pause_s: float
    """Seconds until the server had stopped."""
    write_s: float
    """Seconds of writing."""
    publish_s: float
    """Seconds until the server generated again."""


def update(
    client: BridgeClient,
    write: Callable[[], None],
    *,
    in_flight: InFlight,
    last_checkpoint: Path | None = None,
    writes: Written = "weights",
) -> FenceTimes:
    """Run `write` inside the fence and publish what it wrote; `last_checkpoint` would mend what is left torn.

    Raises:
        AttachError: the server refuses the fence.
        ServerUnreachableError: the server is gone.
    """
    return _passage(
        lambda: client.pause(in_flight, last_checkpoint=last_checkpoint, writes=writes), write, client.publish
    )


def restore(
    client: BridgeClient,
    write: Callable[[], None],
    *,
    version: int,
    last_checkpoint: Path | None = None,
    writes: Written = "weights",
) -> FenceTimes:
    """Run `write`, which sets all that it `writes`, inside the fence, torn or not; publish as `version` or a later one.

    Raises:
        AttachError: a living process holds the fence, or more is torn than is written.
        ServerUnreachableError: the server is gone.
    """
    return _passage(
        lambda: client.pause("keep", last_checkpoint=last_checkpoint, writes=writes, takeover=True),
        write,
        lambda: client.publish(version),
    )


def _passage(pause: Callable[[], Status], write: Callable[[], None], publish: Callable[[], Status]) -> FenceTimes:
    with deferred_interrupt():
        start = time.perf_counter()
        pause()
        paused = time.perf_counter()
        write()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        written = time.perf_counter()
        version = publish().version
        published = time.perf_counter()
    return FenceTimes(version=version, pause_s=paused - start, write_s=written - paused, publish_s=published - written)


@contextmanager
def frozen(client: BridgeClient) -> Iterator[None]:
    """Hold the server still without publishing: for reading, and for writes that the block puts back."""
    with deferred_interrupt():
        client.pause("keep")
        try:
            yield
        finally:
            client.resume()


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the end of the block, then let the last of them act."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        waiting.append(number)

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if waiting:
        signal.raise_signal(waiting[-1])
