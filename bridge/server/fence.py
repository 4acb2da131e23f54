"""The trainer's side of the fence: the only window in which weights change.

    pause      the scheduler stops, every rank's device is idle, cached keys and values are dropped
    prepare    where asked for: the caller computes, in the memory of the KV cache if that sleeps meanwhile
    write      the caller writes, then this process's device is idle
    publish    the version goes up by one, generation resumes

Only the process that has the server's lease may write. One that reads, such as `bridge verify` beside training, may
hold the fence as well: whoever comes meanwhile waits for it.

A Ctrl-C acts at once while the caller prepares: nothing is written yet, and the server goes on as it was. Anywhere else
in the window it waits for the end: weights are never left half written by an interrupt. An error while writing leaves
the server paused, and torn once this process is gone: half-written weights are never served.

Not covered: what is written.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from bridge.core.interrupt import acting_interrupt, deferred_interrupt
from bridge.errors import AttachError, BridgeError, FenceBusyError
from bridge.server.client import BridgeClient
from bridge.server.protocol import Holder, InFlight, Status, Written

BUSY_LIMIT_S = 120.0
"""Longest wait for another process to leave the fence: `bridge verify` digests every weight in it."""
BUSY_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class FenceTimes:
    """One passage through the fence."""

    version: int
    """The version that it published."""
    pause_s: float
    """Seconds until the server had stopped."""
    prepare_s: float = 0.0
    """Seconds of preparing, before the first write; 0 where nothing was to be prepared."""
    write_s: float
    """Seconds of writing."""
    publish_s: float
    """Seconds until the server generated again."""


def update(
    client: BridgeClient,
    write: Callable[[], None],
    *,
    in_flight: InFlight,
    prepare: Callable[[], None] | None = None,
    sleep: bool = False,
    version: int | None = None,
    last_checkpoint: Path | None = None,
    writes: Written = "weights",
) -> FenceTimes:
    """Run `prepare`, then `write`, inside the fence and publish what was written.

    `prepare` changes nothing that is served, and drops what it computed if it raises: the server then goes on with the
    same version. With `sleep` both have the KV cache's memory, and give it back. `version` is the one that the caller
    takes for the served one; None: any. `last_checkpoint` would mend what is left torn.

    Raises:
        AttachError: the server refuses the fence, or finds no memory for its KV cache at the end.
        ServerUnreachableError: the server is gone.
    """

    def abandon(error: BaseException) -> None:
        with deferred_interrupt():
            if sleep:
                _forget(error)
                torch.cuda.empty_cache()
            client.resume()

    def publish() -> Status:
        if sleep:
            torch.cuda.empty_cache()  # or what this process keeps for later is missing there
        return client.publish()

    return _passage(
        client,
        lambda: client.pause(in_flight, version=version, last_checkpoint=last_checkpoint, writes=writes, sleep=sleep),
        write,
        publish,
        prepare=lambda: interruptible(prepare, abandon),
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
        client,
        lambda: client.pause("keep", last_checkpoint=last_checkpoint, writes=writes, takeover=True),
        write,
        lambda: client.publish(version),
    )


def _passage(
    client: BridgeClient,
    pause: Callable[[], Status],
    write: Callable[[], None],
    publish: Callable[[], Status],
    *,
    prepare: Callable[[], None] = lambda: None,
) -> FenceTimes:
    with deferred_interrupt():
        start = time.perf_counter()
        _paused(client, pause)
        paused = time.perf_counter()
        prepare()
        prepared = time.perf_counter()
        write()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        written = time.perf_counter()
        version = publish().version
        published = time.perf_counter()
    return FenceTimes(
        version=version,
        pause_s=paused - start,
        prepare_s=prepared - paused,
        write_s=written - prepared,
        publish_s=published - written,
    )


@contextmanager
def frozen(client: BridgeClient) -> Iterator[bool]:
    """Hold the server still without publishing, and yield whether the block may write what it puts back.

    It may only read where another process has the lease: that one computes with the weights at any time.
    """
    with deferred_interrupt():
        lease = client.status().lease
        may_write = lease is None or lease.holder == Holder.current()
        _paused(client, lambda: client.pause("keep", writes="weights" if may_write else "nothing"))
        try:
            yield may_write
        finally:
            client.resume()


def when_free(call: Callable[[], Status]) -> Status:
    """Return what `call` returns, once no other process holds the fence; an interrupt acts at once meanwhile.

    Raises:
        FenceBusyError: another process has held it for `BUSY_LIMIT_S`.
    """
    deadline = time.monotonic() + BUSY_LIMIT_S
    while True:
        try:
            return call()
        except FenceBusyError:
            if time.monotonic() > deadline:
                raise
        with acting_interrupt():
            time.sleep(BUSY_POLL_S)


def _paused(client: BridgeClient, pause: Callable[[], Status]) -> None:
    try:
        when_free(pause)
    except AttachError:  # it was refused
        raise
    except Exception:  # the server may stand still all the same, and nothing is written yet
        with suppress(BridgeError):
            client.resume()
        raise


def interruptible(
    prepare: Callable[[], None] | None, abandon: Callable[[BaseException], None] = lambda _: None
) -> None:
    """Run `prepare`, where there is one, so that an interrupt acts at once; after an error, `abandon` first."""
    if prepare is None:
        return
    try:
        with acting_interrupt():
            prepare()
    except BaseException as error:
        abandon(error)
        raise


def _forget(error: BaseException | None) -> None:
    """Drop the local variables of whatever `error` came through: they hold the memory of what was computed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
