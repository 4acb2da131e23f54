"""When a signal takes effect: at the end of a block that defers it, or immediately in a nested acting block."""

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
    """Install `handler` for the signal, so that it does not kill the test run."""
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
def test_deferred_signal_acts_once_in_an_acting_block(number: int) -> None:
    calls: list[str] = []
    with noting(number, calls), deferred_interrupt(), deferred_interrupt():
        with acting_interrupt():
            interrupt(number)
            calls.append("acted")
        interrupt(number)
        calls.append("held back")
    assert calls == [signal.Signals(number).name, "acted", "held back", signal.Signals(number).name]


def test_deferred_signal_acts_as_soon_as_allowed() -> None:
    calls: list[str] = []
    with noting(signal.SIGTERM, calls), deferred_interrupt():
        interrupt(signal.SIGTERM)
        with deferred_interrupt():
            interrupt(signal.SIGTERM)
            with acting_interrupt():
                calls.append("open")
    assert calls == ["SIGTERM", "open"]


def test_interrupted_block_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt(), acting_interrupt():
        interrupt()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", SIGNALS)
def test_unhandled_signal_raises_keyboard_interrupt_in_block(number: int) -> None:
    with handled(number, signal.SIG_DFL), pytest.raises(KeyboardInterrupt), acting_interrupt():
        interrupt(number)


def test_deferred_signal_acts_even_if_ctrl_c_is_ignored() -> None:
    calls: list[str] = []
    with handled(signal.SIGINT, signal.SIG_IGN), noting(signal.SIGHUP, calls), deferred_interrupt():
        interrupt(signal.SIGHUP)
        with acting_interrupt():
            calls.append("open")
    assert calls == ["SIGHUP", "open"]


@pytest.mark.parametrize("number", SIGNALS)
def test_ignored_signal_stays_ignored(number: int) -> None:
    with handled(number, signal.SIG_IGN), deferred_interrupt():
        interrupt(number)
        assert signal.getsignal(number) == signal.SIG_IGN, "a program started here must not ignore it"
        with acting_interrupt():
            interrupt(number)
            assert signal.getsignal(number) == signal.SIG_IGN


def test_signals_are_not_deferred_outside_the_main_thread() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[str]()

    def work() -> None:
        with deferred_interrupt(), acting_interrupt():
            done.append("done" if signal.getsignal(signal.SIGINT) is before else "handled")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["done"]


@pytest.mark.parametrize("number", [number for number in SIGNALS if number != signal.SIGINT])
def test_process_without_handlers_dies_from_the_signal(number: int) -> None:
    program = (
        "import os, resource\nfrom bridge.core.interrupt import deferred_interrupt\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        f"with deferred_interrupt():\n    os.kill(os.getpid(), {int(number)}); print('written', flush=True)\n"
        "print('after', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "written\n", done.stderr
    assert done.returncode == -number


def test_error_handled_inside_a_block_drops_no_signal() -> None:
    calls: list[str] = []
    with noting(signal.SIGINT, calls), deferred_interrupt():
        with suppress(ZeroDivisionError), deferred_interrupt():
            interrupt()
            raise ZeroDivisionError
        calls.append("handled")
    assert calls == ["handled", "SIGINT"]


def test_ctrl_c_during_restore_leaves_no_deferring_handler(monkeypatch: pytest.MonkeyPatch) -> None:
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
