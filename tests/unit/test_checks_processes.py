"""Which process listens on the server's port (here this one), and engines that outlived their server."""

import os
import socket
from pathlib import Path

import pytest

from bridge.checks import processes
from bridge.checks.processes import Listener, Running, engines_have_servers, running

INIT = Running(pid=1, parent=0, command="/sbin/init")


SERVER = Running(pid=10, parent=1, command="python -m vllm.entrypoints.cli.main serve tiny")


ENGINE = Running(pid=11, parent=10, command="VLLM::EngineCore")


WORKER = Running(pid=12, parent=11, command="VLLM::Worker")


@pytest.mark.parametrize(
    ("processes", "status"),
    [
        ([INIT], "PASS"),
        ([INIT, SERVER, ENGINE, WORKER], "PASS"),
        (
            [Running(pid=1, parent=0, command="vllm serve tiny"), Running(pid=2, parent=1, command="VLLM::EngineCore")],
            "PASS",
        ),
        ([INIT, Running(pid=11, parent=1, command="VLLM::EngineCore")], "WARN"),
        ([INIT, ENGINE, WORKER], "WARN"),
    ],
)
def test_an_engine_without_a_server_is_warned_of(processes: list[Running], status: str) -> None:
    assert engines_have_servers(processes).status == status


def test_every_lost_process_is_named_for_its_owner_to_end() -> None:
    check = engines_have_servers([INIT, ENGINE, WORKER])
    assert check.remedy == "if they are yours: kill 11 12"


def test_mailboxes_that_no_process_has_mapped_are_named_for_their_owner_to_remove(tmp_path: Path) -> None:
    names = [f"vllm_dist_{number}-tp:0-[0-1]-cpushm_0" for number in range(2)]
    for name in (*names, "psm_1"):
        (tmp_path / name).write_bytes(bytes(2**20))
    processes_ = tmp_path / "proc"
    (processes_ / "17").mkdir(parents=True)
    (processes_ / "17" / "maps").write_text(
        f"7f00-7f01 rw-s 00000000 00:19 5  {tmp_path}/{names[0]}\n7f01-7f02 r--p 0\n"
    )
    (lost,) = processes.leftover_mailboxes(tmp_path, processes_)
    assert lost.name == names[1]
    check = processes.mailboxes_have_ranks([lost])
    assert (check.status, check.remedy) == ("WARN", f"if they are yours: rm '{lost}'")
    assert check.found.startswith("1, 1 MiB together")
    assert processes.mailboxes_have_ranks([]).status == "PASS"


def test_this_process_is_among_the_running() -> None:
    assert os.getpid() in {process.pid for process in running()}


def listen(monkeypatch: pytest.MonkeyPatch, pid: int | None = 7, ancestors: tuple[int, ...] = ()) -> None:
    """Pretend that a process listens on ports 9001 and 9002."""
    monkeypatch.setattr(processes, "listening", lambda: {9001: pid, 9002: 1})
    found = Listener(pid=pid, command="python -m http.server", ancestors=ancestors)
    monkeypatch.setattr(processes, "describe", lambda _: found)


@pytest.mark.parametrize(
    ("pid", "ancestors", "server_pid", "status"),
    [
        (7, (), 7, "PASS"),
        (8, (7, 1), 7, "PASS"),
        (7, (), None, "FAIL"),
        (7, (), 9, "FAIL"),
        (None, (), 9, "FAIL"),
    ],
)
def test_a_taken_port_is_the_servers(
    pid: int | None, ancestors: tuple[int, ...], server_pid: int | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen(monkeypatch, pid, ancestors)
    assert processes.port(9001, server_pid).status == status


def test_a_free_port_is_right_before_a_server_starts_and_wrong_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "listening", dict)
    assert processes.port(9001, None).status == "PASS"
    assert processes.port(9001, 7).status == "FAIL"


def test_a_taken_port_names_who_takes_it_and_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    listen(monkeypatch)
    check = processes.port(9001, None)
    assert "pid 7: python -m http.server" in check.found
    assert "--port 9003" in str(check.remedy)
    listen(monkeypatch, None)
    assert "another user's" in processes.port(9001, None).found


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
