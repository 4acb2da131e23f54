"""The trainer's side of the fence: the order of its calls, errors in them, and deferred interrupts."""

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bridge.core.interrupt import SIGNALS, deferred_interrupt
from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError, FenceBusyError, ServerUnreachableError
from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.server.protocol import Holder, InFlight, Lease, Status, Written
from tests.fenced import publish
from tests.unit.checks_sample import holder_of


class FakeClient:
    """Records every call in order, and fails at a chosen one."""

    def __init__(self, events: "dict[str, Event] | None" = None) -> None:
        self.calls: list[str] = []
        self.version = 4
        self.named: Path | None = None
        self.writes: Written = "weights"
        self.believed: int | None = None
        self.lease: Lease | None = None
        self.events = dict(events or {})

    def pause(
        self,
        in_flight: InFlight,
        *,
        version: int | None = None,
        last_checkpoint: Path | None = None,
        writes: Written = "weights",
        takeover: bool = False,
        sleep: bool = False,
        keep_kv: bool = False,
    ) -> Status:
        self.believed, self.named = version, last_checkpoint
        others = self.lease is not None and self.lease.holder != Holder.current()
        if others and writes != "nothing":
            raise AttachError("another trainer", hint="wait")
        self.writes = writes
        return self._call(f"pause {in_flight}{' takeover' * takeover}{' sleep' * sleep}")

    def publish(self, version: int | None = None) -> Status:
        self.version = max(self.version + 1, version or 0)
        return self._call("publish")

    def resume(self) -> Status:
        return self._call("resume")

    def status(self) -> Status:
        me = ProcessIdentity.current()
        return Status(model="m", version=self.version, state="serving", server=me, lease=self.lease, writes=self.writes)

    def _call(self, name: str) -> Status:
        self.calls.append(name)
        happen(self.events.get(name.split(maxsplit=1)[0]))
        return self.status()


def update(
    fake: FakeClient,
    write: Callable[[], None],
    in_flight: InFlight = "keep",
    served: int | None = None,
    prepare: Callable[[], None] | None = None,
    **choices: Any,
) -> fence.FenceTimes:
    fenced = fence.publish(cast(BridgeClient, fake), Update(**choices), in_flight=in_flight, served=served)
    return publish(fenced, write, prepare)


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def noting(number: int, calls: list[str]) -> Iterator[None]:
    """Record the signal instead of ending the test run."""
    previous = signal.signal(number, lambda *_: calls.append(signal.Signals(number).name))
    try:
        yield
    finally:
        signal.signal(number, previous)


ERROR = ZeroDivisionError()
REFUSAL = AttachError("held", hint="wait")
LOST = ServerUnreachableError("lost", hint="look")
ALL = "pause prepare prepared write written publish"
Event = Exception | signal.Signals | None


def happen(event: Event) -> None:
    """Raise an error, or send this process a signal."""
    if isinstance(event, signal.Signals):
        interrupt(event)
    elif event is not None:
        raise event


@pytest.mark.parametrize("is_deferred", [False, True], ids=["not deferred", "deferred by the caller"])
@pytest.mark.parametrize("takeover", [False, True], ids=["update", "restore"])
@pytest.mark.parametrize(
    ("where", "event", "calls", "error"),
    [
        ("nowhere", None, ALL, None),
        ("pause", REFUSAL, "pause", AttachError),
        ("pause", LOST, "pause resume", ServerUnreachableError),
        ("pause", MemoryError(), "pause resume", MemoryError),
        ("pause", signal.SIGINT, "pause resume", KeyboardInterrupt),
        ("prepare", ERROR, "pause prepare resume", ZeroDivisionError),
        ("prepare", signal.SIGINT, "pause prepare resume", KeyboardInterrupt),
        ("prepare", signal.SIGTERM, "pause prepare resume", KeyboardInterrupt),
        ("write", ERROR, "pause prepare prepared write", ZeroDivisionError),
        ("write", signal.SIGINT, ALL, KeyboardInterrupt),
        ("publish", signal.SIGINT, ALL, KeyboardInterrupt),
        ("publish", LOST, ALL, ServerUnreachableError),
    ],
)  # fmt: skip
def test_update_outcome_depends_on_where_it_fails(
    where: str, event: Event, calls: str, error: type[BaseException] | None, takeover: bool, is_deferred: bool
) -> None:
    fake = FakeClient()
    if where in ("pause", "publish"):
        fake.events[where] = event
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def work(name: str) -> None:
        fake.calls.append(name)
        happen(event if where == name else None)
        fake.calls.append({"prepare": "prepared", "write": "written"}[name])

    with pytest.raises(error) if error else nullcontext(), deferred_interrupt() if is_deferred else nullcontext():
        update(fake, lambda: work("write"), prepare=lambda: work("prepare"), takeover=takeover)
    assert [call.split()[0] for call in fake.calls] == calls.split()
    assert fake.calls[0] == f"pause keep{' takeover' * takeover}"
    assert fake.version == (5 if "publish" in calls else 4)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_error_takes_precedence_over_a_deferred_interrupt() -> None:
    def write() -> None:
        interrupt()
        raise ERROR

    with pytest.raises(ZeroDivisionError):
        update(FakeClient(), write)


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize("writes", ["weights", "adapter"])
def test_pause_sends_version_checkpoint_and_kind(writes: Written, takeover: bool) -> None:
    fake = FakeClient()
    change = Update(last_checkpoint=Path("saved/step_2"), takeover=takeover)
    publish(fence.publish(cast(BridgeClient, fake), change, served=4, writes=writes))
    assert (fake.believed, fake.named, fake.writes) == (4, Path("saved/step_2"), writes)


def test_each_phase_is_timed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 19.0, 21.0, 25.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = update(FakeClient(), lambda: None, prepare=lambda: None)
    assert (times.pause_s, times.prepare_s, times.write_s, times.publish_s) == (1.0, 8.0, 2.0, 4.0)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record when the caching allocator is emptied, in the list that the test gives to its fake client."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty cache"))
    return calls


def test_cached_memory_is_freed_before_the_kv_cache_wakes(emptied: list[str]) -> None:
    fake = FakeClient()
    fake.calls = emptied
    update(fake, lambda: fake.calls.append("write"), prepare=lambda: fake.calls.append("prepare"), sleep=True)
    assert fake.calls == ["pause keep sleep", "prepare", "write", "empty cache", "publish"]


def test_memory_stays_cached_if_the_kv_cache_stays(emptied: list[str]) -> None:
    update(FakeClient(), lambda: None, prepare=lambda: None)
    assert emptied == []


class Computed:
    """A large computed object."""


def test_error_while_preparing_frees_computed_tensors(emptied: list[str]) -> None:
    fake = FakeClient()
    fake.calls = emptied
    left: list[weakref.ref[Computed]] = []

    def compute() -> None:
        activations = Computed()
        left.append(weakref.ref(activations))
        raise ZeroDivisionError

    def prepare() -> None:
        gradients = Computed()
        left.append(weakref.ref(gradients))
        try:
            compute()
        finally:
            int("no number")

    fake.resume = lambda: fake._call(f"resume beside {sum(reference() is not None for reference in left)}")  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no number"):
        update(fake, lambda: None, prepare=prepare, sleep=True)
    assert len(left) == 2
    assert fake.calls == ["pause keep sleep", "empty cache", "resume beside 0"]


def test_failure_to_resume_after_an_error_is_raised() -> None:
    fake = FakeClient({"resume": AttachError("no memory", hint="restore")})

    def prepare() -> None:
        raise ZeroDivisionError

    with pytest.raises(AttachError, match="no memory") as caught:
        update(fake, lambda: None, prepare=prepare)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_second_interrupt_does_not_stop_the_resume() -> None:
    fake = FakeClient()

    def resume() -> Status:
        interrupt()
        return fake._call("resume")

    fake.resume = resume  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        update(fake, lambda: None, prepare=interrupt)
    assert fake.calls == ["pause keep", "resume"]


@pytest.mark.parametrize("number", SIGNALS)
def test_other_terminating_signals_are_also_deferred(number: signal.Signals) -> None:
    fake = FakeClient()
    with noting(number, fake.calls):
        update(fake, lambda: interrupt(number))
    assert fake.calls == ["pause keep", "publish", number.name]


def test_ignored_interrupt_stays_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        update(FakeClient(), interrupt)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_fence_works_outside_the_main_thread() -> None:
    fake, errors = FakeClient(), list[BaseException]()

    def work() -> None:
        try:
            update(fake, lambda: fake.calls.append("write"))
        except BaseException as error:  # noqa: BLE001  carried to the main thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert fake.calls == ["pause keep", "write", "publish"]


def restore(fake: FakeClient, write: Callable[[], None], version: int = 0) -> fence.FenceTimes:
    return update(fake, write, version=version, takeover=True, last_checkpoint=Path("saved/step_3"))


@pytest.mark.parametrize(("version", "published"), [(0, 5), (4, 5), (5, 5), (9, 9)])
def test_restore_publishes_the_higher_version(version: int, published: int) -> None:
    assert restore(FakeClient(), lambda: None, version).version == published


@pytest.mark.parametrize(
    ("in_pause", "in_block", "calls"),
    [(None, None, "pause block resume"), (None, ERROR, "pause block resume"), (LOST, None, "pause resume")],
)
def test_frozen_always_resumes_without_a_version(in_pause: Event, in_block: Event, calls: str) -> None:
    fake = FakeClient({"pause": in_pause})
    error = next((type(event) for event in (in_pause, in_block) if isinstance(event, Exception)), None)
    with pytest.raises(error) if error else nullcontext(), fence.frozen(cast(Any, fake)):
        fake.calls.append("block")
        happen(in_block)
    assert [call.split()[0] for call in fake.calls] == calls.split()
    assert fake.version == 4


def test_frozen_may_write_unless_another_process_is_leased() -> None:
    fake, other = FakeClient(), holder_of(os.getppid())
    outcomes = {}
    for name, holder in {"free": None, "ours": Holder.current(), "another's": other}.items():
        fake.lease = Lease(holder=holder, run="runs/first") if holder else None
        with fence.frozen(cast(Any, fake)) as may_write:
            outcomes[name] = may_write, fake.writes
    assert outcomes == {"free": (True, "weights"), "ours": (True, "weights"), "another's": (False, "nothing")}


def test_frozen_only_reads_once_another_process_has_the_lease() -> None:
    fake = FakeClient()
    busy_until(fake, 2)
    pausing = fake.pause

    def pause(*arguments: Any, **choices: Any) -> Status:
        try:
            return pausing(*arguments, **choices)
        except FenceBusyError:  # then the other process takes the lease
            fake.lease = Lease(holder=holder_of(os.getppid()), run="runs/first")
            raise

    fake.pause = pause  # type: ignore[method-assign]
    with fence.frozen(cast(Any, fake)) as may_write:
        assert (may_write, fake.writes) == (False, "nothing")


def test_frozen_fence_raises_the_servers_refusal() -> None:
    fake = FakeClient({"pause": AttachError("torn", hint="restore")})
    with pytest.raises(AttachError, match="torn"), fence.frozen(cast(Any, fake)):
        pytest.fail("the block ran")


def test_update_without_a_server_runs_in_the_same_order() -> None:
    calls: list[str] = []

    def published() -> int:
        calls.append("publish")
        return 7

    fenced = fence.run(Update(), published)
    times = publish(fenced, lambda: calls.append("write"), lambda: calls.append("prepare"))
    assert (calls, times.version) == (["prepare", "write", "publish"], 7)


def busy_until(fake: FakeClient, attempt: int) -> None:
    """Let another process hold the fence until pause number `attempt`."""
    pausing = fake.pause

    def pause(*arguments: Any, **choices: Any) -> Status:
        status = pausing(*arguments, **choices)
        if len(fake.calls) < attempt:
            raise FenceBusyError("held", hint="wait")
        return status

    fake.pause = pause  # type: ignore[method-assign]


def test_update_waits_while_another_process_has_the_fence() -> None:
    fake = FakeClient()
    busy_until(fake, 3)
    update(fake, lambda: fake.calls.append("write"))
    assert fake.calls == ["pause keep", "pause keep", "pause keep", "write", "publish"]


def test_waiting_too_long_for_the_fence_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fence, "BUSY_LIMIT_S", 0.0)
    fake = FakeClient()
    busy_until(fake, 100)
    with pytest.raises(FenceBusyError, match="held"):
        update(fake, lambda: fake.calls.append("write"))
    assert set(fake.calls) == {"pause keep"}


def test_interrupt_ends_the_wait_for_the_fence() -> None:
    fake = FakeClient()
    busy_until(fake, 100)
    threading.Timer(0.3, interrupt).start()
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        update(fake, lambda: fake.calls.append("write"))
    assert set(fake.calls) == {"pause keep"}
