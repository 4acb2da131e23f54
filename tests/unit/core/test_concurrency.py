"""Waiting for a socket, in a process that has more files open than `select.select` can watch; ending a thread."""

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from bridge.core.concurrency import end_thread, is_readable

HIGH = 2000
"""`select.select` refuses descriptors of 1024 and more."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection, the first with a high descriptor."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2 * HIGH), before[1]))
    near, far = socket.socketpair()
    try:
        with near, far, socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, HIGH)) as high:
            yield high, far
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_connection_is_readable_once_something_arrives(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    assert near.fileno() >= HIGH
    assert not is_readable(near, 0.01)
    far.send(b"x")
    assert is_readable(near, 20.0)


def test_a_connection_that_the_other_end_closed_is_readable(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.close()
    assert is_readable(near, 20.0)


def test_ending_a_thread_that_has_ended_leaves_the_next_one_alone() -> None:
    """The next one often gets its number; here it always does."""
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    results, may_end = list[str](), threading.Event()

    def work() -> None:
        while not may_end.wait(0.01):
            pass
        results.append("whole")

    thread = threading.Thread(target=work)
    thread.start()
    ended._ident = thread.ident  # type: ignore[attr-defined]
    assert ended.ident == thread.ident
    end_thread(ended)
    may_end.set()
    thread.join()
    assert results == ["whole"]
