"""The trainer's side of the fence: the order of its calls, errors in them, and deferred interrupts."""

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    def __init__(self, failing: dict[str, Exception] | None = None) -> None:
        self.calls: list[str] = []
        self.version = 4
        self.named: Path | None = None
        self.writes: Written = "weights"
        self.believed: int | None = None
        self.lease: Lease | None = None
        self._failing = failing or {}

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
        if name in self._failing:
            raise self._failing[name]
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


def test_an_update_pauses_writes_and_publishes() -> None:
    fake = FakeClient()
    times = update(fake, lambda: fake.calls.append("write"), "wait")
    assert fake.calls == ["pause wait", "write", "publish"]
    assert times.version == 5
    assert min(times.pause_s, times.write_s, times.publish_s) >= 0


def test_each_part_is_timed_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 19.0, 21.0, 25.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = update(FakeClient(), lambda: None, prepare=lambda: None)
    assert (times.pause_s, times.prepare_s, times.write_s, times.publish_s) == (1.0, 8.0, 2.0, 4.0)


def test_an_error_while_writing_publishes_nothing() -> None:
    fake = FakeClient()

    def write() -> None:
        fake.calls.append("write")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        update(fake, write)
    assert fake.calls == ["pause keep", "write"]
    assert fake.version == 4


def test_nothing_is_written_when_the_fence_is_refused() -> None:
    fake = FakeClient({"pause keep": AttachError("held", hint="wait")})
    with pytest.raises(AttachError):
        update(fake, lambda: fake.calls.append("write"))
    assert fake.calls == ["pause keep"]


@pytest.mark.parametrize("error", [MemoryError(), ServerUnreachableError("lost", hint="look")])
def test_a_lost_answer_to_a_pause_resumes_the_server(error: Exception) -> None:
    fake = FakeClient({"pause keep": error})
    with pytest.raises(type(error)):
        update(fake, lambda: fake.calls.append("write"))
    assert fake.calls == ["pause keep", "resume"]


def test_prepare_runs_inside_the_pause_before_the_write() -> None:
    fake = FakeClient()
    update(fake, lambda: fake.calls.append("write"), prepare=lambda: fake.calls.append("prepare"))
    assert fake.calls == ["pause keep", "prepare", "write", "publish"]


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


def test_memory_stays_cached_where_the_kv_cache_stays(emptied: list[str]) -> None:
    update(FakeClient(), lambda: None, prepare=lambda: None)
    assert emptied == []


class Computed:
    """Something large."""


def test_an_error_in_prepare_resumes_the_server_unchanged() -> None:
    fake = FakeClient()

    def prepare() -> None:
        fake.calls.append("prepare")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        update(fake, lambda: fake.calls.append("write"), prepare=prepare)
    assert fake.calls == ["pause keep", "prepare", "resume"]
    assert fake.version == 4


def test_an_error_in_prepare_frees_what_was_computed(emptied: list[str]) -> None:
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


def test_a_server_that_cannot_go_on_after_an_error_is_told() -> None:
    fake = FakeClient({"resume": AttachError("no memory", hint="restore")})

    def prepare() -> None:
        raise ZeroDivisionError

    with pytest.raises(AttachError, match="no memory") as caught:
        update(fake, lambda: None, prepare=prepare)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_prepare_resumes_the_server(number: int) -> None:
    fake = FakeClient()

    def prepare() -> None:
        fake.calls.append("first half")
        interrupt(number)
        fake.calls.append("second half")

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # as the training loop defers it too
        update(fake, lambda: fake.calls.append("write"), prepare=prepare)
    assert fake.calls == ["pause keep", "first half", "resume"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_interrupt_while_pausing_acts_before_prepare() -> None:
    fake = FakeClient()

    def pause(*_: Any, **__: Any) -> Status:
        interrupt()
        return fake._call("pause")

    fake.pause = pause  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        update(fake, lambda: fake.calls.append("write"), prepare=lambda: fake.calls.append("prepare"))
    assert fake.calls == ["pause", "resume"]


def test_a_second_interrupt_does_not_stop_the_resume() -> None:
    fake = FakeClient()

    def resume() -> Status:
        interrupt()
        return fake._call("resume")

    fake.resume = resume  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        update(fake, lambda: None, prepare=interrupt)
    assert fake.calls == ["pause keep", "resume"]


def test_an_interrupt_while_writing_waits_after_prepare() -> None:
    fake = FakeClient()
    with pytest.raises(KeyboardInterrupt):
        update(fake, interrupt, prepare=lambda: fake.calls.append("prepare"))
    assert fake.calls == ["pause keep", "prepare", "publish"]


def test_an_interrupt_while_writing_acts_after_the_publication() -> None:
    fake = FakeClient()

    def write() -> None:
        fake.calls.append("first half")
        interrupt()
        fake.calls.append("second half")

    with noting(signal.SIGINT, fake.calls):
        update(fake, write)
    assert fake.calls == ["pause keep", "first half", "second half", "publish", "SIGINT"]


def test_an_interrupt_is_a_keyboard_interrupt_after_the_block() -> None:
    fake = FakeClient()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        update(fake, interrupt)
    assert fake.calls == ["pause keep", "publish"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", SIGNALS)
def test_whatever_ends_a_process_waits_too(number: signal.Signals) -> None:
    fake = FakeClient()
    with noting(number, fake.calls):
        update(fake, lambda: interrupt(number))
    assert fake.calls == ["pause keep", "publish", number.name]


def test_an_interrupt_hides_no_error() -> None:
    before = signal.getsignal(signal.SIGINT)

    def write() -> None:
        interrupt()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        update(FakeClient(), write)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_interrupt_stays_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        update(FakeClient(), interrupt)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_the_fence_works_outside_the_main_thread() -> None:
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


def test_an_update_names_its_checkpoint_and_takes_nothing_over() -> None:
    fake = FakeClient()
    update(fake, lambda: None, last_checkpoint=Path("saved/step_2"))
    assert (fake.calls, fake.named) == (["pause keep", "publish"], Path("saved/step_2"))


def test_a_restore_takes_over_and_names_its_own_checkpoint() -> None:
    fake = FakeClient()
    restore(fake, lambda: fake.calls.append("write"))
    assert fake.calls == ["pause keep takeover", "write", "publish"]
    assert fake.named == Path("saved/step_3")


@pytest.mark.parametrize(("version", "published"), [(0, 5), (4, 5), (5, 5), (9, 9)])
def test_a_restore_publishes_the_later_version(version: int, published: int) -> None:
    assert restore(FakeClient(), lambda: None, version).version == published


def test_a_failed_restore_neither_publishes_nor_resumes() -> None:
    fake = FakeClient()

    def write() -> None:
        raise OSError("read error")

    with pytest.raises(OSError, match="read error"):
        restore(fake, write)
    assert fake.calls == ["pause keep takeover"]


def test_an_interrupt_of_a_restore_waits_for_its_end() -> None:
    fake = FakeClient()

    def write() -> None:
        interrupt()
        fake.calls.append("rest")

    with noting(signal.SIGINT, fake.calls):
        restore(fake, write)
    assert fake.calls == ["pause keep takeover", "rest", "publish", "SIGINT"]


def test_frozen_resumes_without_a_new_version() -> None:
    fake = FakeClient()
    with fence.frozen(cast(Any, fake)):
        fake.calls.append("read")
    assert fake.calls == ["pause keep", "read", "resume"]
    assert fake.version == 4


def test_frozen_may_write_unless_another_process_has_the_lease() -> None:
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
        except FenceBusyError:  # and then it trains
            fake.lease = Lease(holder=holder_of(os.getppid()), run="runs/first")
            raise

    fake.pause = pause  # type: ignore[method-assign]
    with fence.frozen(cast(Any, fake)) as may_write:
        assert (may_write, fake.writes) == (False, "nothing")


def test_frozen_raises_the_servers_own_refusal() -> None:
    fake = FakeClient({"pause keep": AttachError("torn", hint="restore")})
    with pytest.raises(AttachError, match="torn"), fence.frozen(cast(Any, fake)):
        pytest.fail("the block ran")


def test_an_update_without_a_server_runs_in_the_same_order() -> None:
    calls: list[str] = []

    def published() -> int:
        calls.append("publish")
        return 7

    fenced = fence.run(Update(), published)
    times = publish(fenced, lambda: calls.append("write"), lambda: calls.append("prepare"))
    assert (calls, times.version) == (["prepare", "write", "publish"], 7)


def busy_until(fake: FakeClient, attempt: int) -> None:
    """Let another process hold the fence until the `attempt`th pause."""
    pausing = fake.pause

    def pause(*arguments: Any, **choices: Any) -> Status:
        status = pausing(*arguments, **choices)
        if len(fake.calls) < attempt:
            raise FenceBusyError("held", hint="wait")
        return status

    fake.pause = pause  # type: ignore[method-assign]


def test_an_update_waits_while_another_process_has_the_fence() -> None:
    fake = FakeClient()
    busy_until(fake, 3)
    update(fake, lambda: fake.calls.append("write"))
    assert fake.calls == ["pause keep", "pause keep", "pause keep", "write", "publish"]


def test_a_fence_held_too_long_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fence, "BUSY_LIMIT_S", 0.0)
    fake = FakeClient()
    busy_until(fake, 100)
    with pytest.raises(FenceBusyError, match="held"):
        update(fake, lambda: fake.calls.append("write"))
    assert set(fake.calls) == {"pause keep"}


def test_an_interrupt_acts_while_waiting_for_the_fence() -> None:
    fake = FakeClient()
    busy_until(fake, 100)
    threading.Timer(0.3, interrupt).start()
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        update(fake, lambda: fake.calls.append("write"))
    assert set(fake.calls) == {"pause keep"}


def test_an_update_names_the_version_that_it_believes_in() -> None:
    fake = FakeClient()
    update(fake, lambda: None, served=4)
    assert fake.believed == 4


def test_frozen_resumes_after_an_error_too() -> None:
    fake = FakeClient()
    with pytest.raises(ZeroDivisionError), fence.frozen(cast(Any, fake)):
        raise ZeroDivisionError
    assert fake.calls == ["pause keep", "resume"]


def test_frozen_resumes_after_a_lost_answer() -> None:
    fake = FakeClient({"pause keep": ServerUnreachableError("gone", hint="restart")})
    with pytest.raises(ServerUnreachableError), fence.frozen(cast(Any, fake)):
        pytest.fail("the block ran")
    assert fake.calls == ["pause keep", "resume"]


@pytest.mark.parametrize("writes", ["weights", "adapter"])
def test_both_ways_say_what_they_write(writes: Written) -> None:
    updated, restored = FakeClient(), FakeClient()
    publish(fence.publish(cast(BridgeClient, updated), Update(), writes=writes))
    publish(fence.publish(cast(BridgeClient, restored), Update(takeover=True), writes=writes))
    assert (updated.writes, restored.writes) == (writes, writes)
