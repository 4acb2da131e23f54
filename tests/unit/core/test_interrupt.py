"""When a signal acts: at the end of a block that defers it, or at once inside a nested one."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from bridge.core.interrupt import SIGNALS, acting_interrupt, deferred_interrupt


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def handled(number: int, handler: object) -> Iterator[None]:
    """Let `handler` handle the signal instead of ending the test run."""
    previous = signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(number, previous)


@contextmanager
def noting(number: int, calls: list[str]) -> Iterator[None]:
    """Record the signal instead of ending the test run."""
    with handled(number, lambda *_: calls.append(signal.Signals(number).name)):
        yield


def test_nested_blocks_defer_to_the_end_of_the_outermost() -> None:
    calls: list[str] = []
    with noting(signal.SIGINT, calls), deferred_interrupt():
        with deferred_interrupt():
            interrupt()
            calls.append("inner")
        calls.append("outer")
    assert calls == ["inner", "outer", "SIGINT"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_deferred_signal_can_act_at_once_inside_and_only_once(number: int) -> None:
    calls: list[str] = []
    with noting(number, calls), deferred_interrupt(), deferred_interrupt():
        with acting_interrupt():
            interrupt(number)
            calls.append("acted")
        interrupt(number)
        calls.append("held back")
    assert calls == [signal.Signals(number).name, "acted", "held back", signal.Signals(number).name]


def test_a_signal_that_waits_acts_as_soon_as_one_may() -> None:
    calls: list[str] = []
    with noting(signal.SIGTERM, calls), deferred_interrupt():
        interrupt(signal.SIGTERM)
        with deferred_interrupt():
            interrupt(signal.SIGTERM)
            with acting_interrupt():
                calls.append("open")
    assert calls == ["SIGTERM", "open"]


def test_an_interrupted_block_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt(), acting_interrupt():
        interrupt()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_nobody_handles_can_be_undone_inside(number: int) -> None:
    with handled(number, signal.SIG_DFL), pytest.raises(KeyboardInterrupt), acting_interrupt():
        interrupt(number)


def test_a_signal_that_waits_is_found_where_ctrl_c_is_ignored() -> None:
    calls: list[str] = []
    with handled(signal.SIGINT, signal.SIG_IGN), noting(signal.SIGHUP, calls), deferred_interrupt():
        interrupt(signal.SIGHUP)
        with acting_interrupt():
            calls.append("open")
    assert calls == ["SIGHUP", "open"]


@pytest.mark.parametrize("number", SIGNALS)
def test_an_ignored_signal_stays_ignored_everywhere(number: int) -> None:
    with handled(number, signal.SIG_IGN), deferred_interrupt():
        interrupt(number)
        assert signal.getsignal(number) == signal.SIG_IGN, "a program started here must not ignore it"
        with acting_interrupt():
            interrupt(number)
            assert signal.getsignal(number) == signal.SIG_IGN


def test_outside_of_the_main_thread_nothing_is_handled() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[str]()

    def work() -> None:
        with deferred_interrupt(), acting_interrupt():
            done.append("done" if signal.getsignal(signal.SIGINT) is before else "handled")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["done"]


@pytest.mark.parametrize("number", [number for number in SIGNALS if number != signal.SIGINT])
def test_a_process_that_handles_none_still_ends_by_that_signal(number: int) -> None:
    program = (
        "import os, resource\nfrom bridge.core.interrupt import deferred_interrupt\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        f"with deferred_interrupt():\n    os.kill(os.getpid(), {int(number)}); print('written', flush=True)\n"
        "print('after', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "written\n", done.stderr
    assert done.returncode == -number


def test_an_error_that_is_handled_inside_a_block_costs_no_signal() -> None:
    calls: list[str] = []
    with noting(signal.SIGINT, calls), deferred_interrupt():
        with suppress(ZeroDivisionError), deferred_interrupt():
            interrupt()
            raise ZeroDivisionError
        calls.append("handled")
    assert calls == ["handled", "SIGINT"]


def test_ctrl_c_while_handlers_are_restored_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, restore = [signal.getsignal(number) for number in SIGNALS], signal.signal

    def pressed(number: int, handler: Any) -> Any:
        replaced = restore(number, handler)
        if handler in before:
            interrupt()
        return replaced

    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        monkeypatch.setattr(signal, "signal", pressed)
    monkeypatch.undo()
    assert [signal.getsignal(number) for number in SIGNALS] == before
