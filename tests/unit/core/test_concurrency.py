"""Waiting for a socket in a process with more open files than `select.select` supports; stopping a thread."""

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from bridge.core.concurrency import end_thread, is_readable

HIGH = 2000
"""`select.select` refuses descriptors from 1024 on."""


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


def test_connection_is_readable_once_data_arrives(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    assert near.fileno() >= HIGH
    assert not is_readable(near, 0.01)
    far.send(b"x")
    assert is_readable(near, 20.0)


def test_connection_closed_by_the_peer_is_readable(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.close()
    assert is_readable(near, 20.0)


def test_stopping_a_dead_thread_spares_the_next_one() -> None:
    """A new thread often gets the old one's id; here it always does."""
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
