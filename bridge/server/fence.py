"""The trainer's side of the fence: the only window in which served weights change.

    pause      the scheduler stops, every rank's device is idle, the prefix cache is dropped
    prepare    optional: the caller computes, in the KV cache's memory if the cache sleeps
    write      the caller writes; the fence waits for its device
    publish    the version is incremented, generation resumes

As code:

    with fence.publish(client, Update()) as window:     # pause
        with window.preparing():                        # optional
            compute()
        write()
    window.times                                        # published

Only the process that holds the server's lease may write. A process that only reads, such as `bridge verify` during
training, may hold the fence too; the next process waits for it.

Ctrl-C takes effect immediately while the caller prepares: nothing has been written, and the server resumes unchanged.
Anywhere else in the window it is deferred, so an interrupt never leaves half-written weights. An error during the
write leaves the server paused, and torn once this process has exited: half-written weights are never served.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from bridge.core.interrupt import acting_interrupt, deferred_interrupt
from bridge.errors import AttachError, BridgeError, FenceBusyError
from bridge.ranks.world import ALONE, Ranks
from bridge.server.client import BridgeClient
from bridge.server.protocol import InFlight, Status, Written

BUSY_LIMIT_S = 120.0
"""Longest wait for another process to leave the fence: `bridge verify` computes a digest of every weight inside it."""
BUSY_POLL_S = 0.1
LET_GO_LIMIT_S = 10.0
"""Longest wait for the other ranks of a replica to free the KV cache's memory after a failed update."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update of the served weights."""

    sleep: bool = False
    """Lend the caller the KV cache's memory, which must be free again at the end."""
    last_checkpoint: Path | None = None
    """Checkpoint that repairs the server if this process dies while it writes."""
    is_last: bool = False
    """Whether no more requests follow, so that a mode that restarts its server need not do so."""
    version: int | None = None
    """Publish as this version, or as the next one if that is higher; None: as the next one."""
    takeover: bool = False
    """Whether all weights are rewritten, which allows the update to repair a torn server."""
    in_flight: InFlight | None = None
    """Keep, drain or abort in-flight requests; None: the run's own setting."""


@dataclass(frozen=True, kw_only=True)
class FenceTimes:
    """Durations of one update."""

    version: int
    """The published version."""
    pause_s: float
    """Seconds until the server was paused."""
    prepare_s: float = 0.0
    write_s: float
    publish_s: float
    """Seconds until the server generated again."""


class Pausable(Protocol):
    """One server, or all servers that get the same weights, as paused by an update."""

    def pause(self) -> None: ...

    def resume(self, error: BaseException | None = None) -> None:
        """Resume serving the same weights; `error` ended the update before anything was written."""


class Window:
    """An open fence: the block may write, and an error in it leaves the server torn."""

    times: FenceTimes
    """Set once the update is published."""

    def __init__(self, paused: float, server: Pausable | None, ranks: Ranks) -> None:
        self.paused = paused
        self.prepared = paused
        self.is_resumed = False
        """Whether an error occurred before anything was written, and the server has resumed with the same weights."""
        self._server = server
        self._ranks = ranks

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Compute before anything is written: after an error the server resumes unchanged; Ctrl-C is not deferred."""
        try:
            with acting_interrupt():
                yield
            self._ranks.run_on_all(lambda: None)
        except BaseException as error:
            self.is_resumed = True
            if self._server is not None:
                self._server.resume(error)
            raise
        self.prepared = time.perf_counter()


def publish(
    client: BridgeClient | None,
    update: Update,
    *,
    in_flight: InFlight = "keep",
    keep_kv: bool = False,
    served: int | None = None,
    writes: Written = "weights",
    ranks: Ranks = ALONE,
) -> AbstractContextManager[Window]:
    """Pause the server, let the block write, and publish; with `keep_kv`, in-flight requests keep their KV cache.

    The server refuses if it does not serve version `served`; None: any. All ranks enter the fence together: none writes
    before all servers are paused, and none publishes before all have written. Only the first rank of each replica has a
    `client`.

    AttachError if the server refuses the fence, or has no memory for its KV cache afterward; ServerUnreachableError if
    it does not answer.
    """

    def pause(client: BridgeClient) -> Status:
        return client.pause(
            in_flight,
            version=served,
            last_checkpoint=update.last_checkpoint,
            writes=writes,
            takeover=update.takeover,
            sleep=update.sleep,
            keep_kv=keep_kv,
        )

    others_sleep = update.sleep and ranks.tp_size > 1
    server = _Server(client, pause, update, resume_limit_s=LET_GO_LIMIT_S if others_sleep else 0)
    return run(update, server.publish, server=server, ranks=ranks)


@dataclass(frozen=True)
class _Server:
    """The server of one update; `client` is None on ranks that do not call it."""

    client: BridgeClient | None
    send_pause: Callable[[BridgeClient], Status]
    update: Update
    resume_limit_s: float
    """Seconds for which other ranks' memory may delay the KV cache's allocation at resume."""

    def pause(self) -> None:
        if self.client is not None:
            pause_when_free(self.client, self.send_pause)

    def publish(self) -> int:
        return 0 if self.client is None else self.client.publish(self.update.version).version

    def resume(self, error: BaseException | None = None) -> None:
        """Resume with the same version, after freeing the memory that the KV cache needs."""
        if self.update.sleep:
            while error is not None:  # local variables of the traceback's frames hold the memory to free
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
        _free_memory(self.update)
        if self.client is not None:
            _retry(self.client.resume, AttachError, limit_s=self.resume_limit_s)


@contextmanager
def run(
    update: Update, publish: Callable[[], int], *, server: Pausable | None = None, ranks: Ranks = ALONE
) -> Iterator[Window]:
    """Run and time the block between the pause of `server` and `publish`, which returns the new version.

    Without `server`, nothing is paused, since only this process holds the weights. Within a replica, the version that
    the first rank's `publish` returns is used.
    """
    with deferred_interrupt(), ranks.in_fence():
        start = paused = time.perf_counter()
        if server is not None:
            ranks.run_on_all(server.pause, undo=server.resume)
            paused = time.perf_counter()
        window = Window(paused, server, ranks)
        with ranks.raise_on_all():
            yield window
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            _free_memory(update)  # before any server wakes its KV cache, which is on several ranks' GPUs
        written = time.perf_counter()
        versions = ranks.one_per_replica(ranks.run_and_gather(publish))
        version = versions[ranks.dp_rank]
        assert len(set(versions)) == 1, versions
        published = time.perf_counter()
    window.times = FenceTimes(
        version=version,
        pause_s=window.paused - start,
        prepare_s=window.prepared - window.paused,
        write_s=written - window.prepared,
        publish_s=published - written,
    )


def _free_memory(update: Update) -> None:
    if update.sleep:
        torch.cuda.empty_cache()  # the KV cache needs the memory that the allocator would keep


@contextmanager
def frozen(client: BridgeClient) -> Iterator[bool]:
    """Pause the server without publishing; yield whether the block may write, provided that it undoes its changes.

    While another process holds the lease, the block may only read: that process may use the weights at any time.
    """

    def pause(client: BridgeClient) -> Status:
        try:
            return client.pause("keep")
        except FenceBusyError:
            raise
        except AttachError:  # another process holds the lease; any other reason is raised again
            return client.pause("keep", writes="nothing")

    with deferred_interrupt():
        paused = pause_when_free(client, pause)
        try:
            yield paused.writes != "nothing"
        finally:
            client.resume()


def when_free(call: Callable[[], Status]) -> Status:
    """Retry `call` while another process holds the fence, up to `BUSY_LIMIT_S`; Ctrl-C is not deferred meanwhile."""
    return _retry(call, FenceBusyError, limit_s=BUSY_LIMIT_S, wait=acting_interrupt)


def _retry(
    call: Callable[[], Status],
    refusal: type[AttachError],
    *,
    limit_s: float,
    wait: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Status:
    """Retry `call` while the server refuses it with `refusal`, up to `limit_s`; wait within the context `wait`."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except refusal:
            if time.monotonic() > deadline:
                raise
        with wait():
            time.sleep(BUSY_POLL_S)


def pause_when_free(client: BridgeClient, pause: Callable[[BridgeClient], Status]) -> Status:
    """Call `pause` as soon as no other process holds the fence; if the call fails, the server keeps serving."""
    try:
        return when_free(partial(pause, client))
    except AttachError:  # refused
        raise
    except Exception:  # a lost answer: the server may have paused, and nothing is written yet
        with suppress(BridgeError):
            client.resume()
        raise
