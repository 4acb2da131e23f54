"""Ctrl-C delivered to another thread: the kernel may pick any thread, and nothing wakes the main one."""

import asyncio
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.agents import tools
from bridge.checkpoints import checkpoint
from bridge.checks import one_copy_proof
from bridge.config import ComputeConfig, OptimizerConfig
from bridge.core import hub, python_child
from bridge.core.concurrency import result_of
from bridge.core.interrupt import next_item, taken, wait_until
from bridge.engine.compile_ahead import compiling_ahead
from bridge.modes import transfer
from bridge.rollouts.event_loop import EventLoop

BEFORE_S = 0.5
"""Time for the main thread to start waiting."""


@contextmanager
def another_thread_takes_ctrl_c(done: threading.Event) -> Iterator[None]:
    """Deliver SIGINT to a thread other than the main one; finally set `done`, which the main thread waits for."""

    def take() -> None:
        time.sleep(BEFORE_S)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_in_event_loop(done: threading.Event) -> None:
    async def nothing() -> None: ...

    loop = EventLoop()
    try:
        loop.run(asyncio.sleep(600))
    finally:
        loop.close(nothing())


def wait_for_another_caller_of_an_event_loop(done: threading.Event) -> None:
    async def nothing() -> None: ...

    loop, is_taken = EventLoop(), threading.Event()

    def hold() -> None:
        with taken(loop._turn):
            is_taken.set()
            done.wait()

    threading.Thread(target=hold).start()
    is_taken.wait()
    loop.run(nothing())


def run_processes(done: threading.Event) -> None:
    def run(_: int, began: python_child.Began) -> str:
        return python_child.run_child("timeit", "import time; time.sleep(600)", timeout_s=600, began=began).stdout

    python_child.run_children(run, 2)


def compare_replicas(done: threading.Event) -> None:
    def look(_: Path) -> Any:
        done.wait()
        raise ValueError

    one_copy_proof.replicas([Path("a"), Path("b")], look)


def compile_ahead(done: threading.Event) -> None:
    def stand_in() -> None:
        while not done.wait(0.01):
            pass

    with compiling_ahead(stand_in, ComputeConfig(), OptimizerConfig(), lora=None, temperature=1.0):
        pass


def await_a_tool(done: threading.Event) -> None:
    async def tool() -> None:
        done.wait()

    tools.awaited(tool())


def hash_files(done: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashlib.file_digest", lambda *_: done.wait())
    list(checkpoint._checksums([Path(__file__)]))


def ask_the_hub(done: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LIMIT_S", 600.0)
    monkeypatch.setattr(hub, "_download", lambda _: done.wait())
    hub.fetch_config("organization/model")


def call_all_servers(done: threading.Event) -> None:
    receivers = transfer.Receivers.__new__(transfer.Receivers)
    receivers._servers = [SimpleNamespace()]  # type: ignore[list-item]
    receivers._all(lambda _: done.wait())


def plain_wait(done: threading.Event) -> None:
    wait_until(done.wait)


def get_an_item(done: threading.Event) -> None:
    next_item(queue.SimpleQueue[None]())


def get_a_result(done: threading.Event) -> None:
    result_of(Future[None]())


WAITS: list[Callable[..., object]] = [
    plain_wait, get_an_item, get_a_result,
    run_in_event_loop, wait_for_another_caller_of_an_event_loop, run_processes, compare_replicas, compile_ahead,
    await_a_tool, hash_files, ask_the_hub, call_all_servers,
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the compiler's end
@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_interrupt_taken_by_another_thread_ends_the_wait(
    wait: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    given = (done, monkeypatch) if wait in (hash_files, ask_the_hub) else (done,)
    with pytest.raises(KeyboardInterrupt), another_thread_takes_ctrl_c(done):
        wait(*given)
