"""Engines that outlived their server, told from those that have one."""

import os

import pytest

from bridge.checks.processes import Running, engines_have_servers, running

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


def test_this_process_is_among_the_running() -> None:
    assert os.getpid() in {process.pid for process in running()}
