"""Who listens on the server's port; the listener is this very process."""

import os
import socket

import pytest

from bridge.checks import processes
from bridge.checks.processes import Listener, port_free_or_ours


def listener(pid: int | None = 7, ancestors: tuple[int, ...] = ()) -> Listener:
    return Listener(pid=pid, command="python -m http.server", ancestors=ancestors)


@pytest.mark.parametrize(
    ("found", "server_pid", "status"),
    [
        (None, None, "PASS"),
        (None, 7, "FAIL"),
        (listener(), 7, "PASS"),
        (listener(8, (7, 1)), 7, "PASS"),
        (listener(), None, "FAIL"),
        (listener(), 9, "FAIL"),
        (listener(None), 9, "FAIL"),
    ],
)
def test_the_port_is_free_or_the_servers(found: Listener | None, server_pid: int | None, status: str) -> None:
    assert port_free_or_ours(9001, found, server_pid).status == status


def test_a_taken_port_names_who_takes_it_and_a_free_one() -> None:
    check = port_free_or_ours(9001, listener(), None, taken=[9001, 9002])
    assert "pid 7: python -m http.server" in check.found
    assert "--port 9003" in str(check.remedy)
    assert "another user's" in port_free_or_ours(9001, listener(None), None).found


def test_a_real_listener_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_socket:
        number = open_socket.getsockname()[1]
        foreign = processes.port(number, None)
        assert foreign.status == "FAIL"
        assert f"pid {os.getpid()}" in foreign.found
        assert processes.port(number, os.getpid()).status == "PASS"
    assert processes.port(number, None).status == "PASS"


def test_a_process_that_ended_meanwhile_is_described_by_its_pid() -> None:
    gone = processes.describe(2**22 + 1)
    assert gone == Listener(pid=2**22 + 1, command="", ancestors=())


def test_a_long_command_line_is_cut() -> None:
    assert len(processes.describe(os.getpid()).command) <= processes.SHOWN_COMMAND
