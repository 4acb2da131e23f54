"""A server is started, watched, restarted and stopped, with a small stand-in for vLLM."""

import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bridge.core.address import free_port
from bridge.core.interrupt import deferred_interrupt
from bridge.core.process import ProcessIdentity
from bridge.errors import RankError, ServerUnreachableError, UnsupportedModelError, UsageError
from bridge.modes.mode import ServerProcess
from bridge.processes import children, server_process
from bridge.processes.server_command import ServerCommand
from bridge.processes.server_process import StartedServer
from tests.unit.processes.test_serve_command import written

HOST = "127.0.0.1"
FAKE_VLLM = Path(__file__).with_name("fake_vllm.py")
LIMIT_S = 60.0
HANG_LIMIT_S = 3.0
"""Hang limit in the tests of a hanging server."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "PERIOD_S", 0.05)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "serve.log"


def fake(folder: Path, *flags: str, shares_weights: bool = True, port: int | None = None) -> ServerCommand:
    """Return the command of the stand-in, as `ServerCommand.of` returns vLLM's."""
    folder.mkdir(exist_ok=True)
    port, manifest = port or free_port(HOST), folder / "manifest.json"
    argv = [sys.executable, "-I", "-S", str(FAKE_VLLM), "--model", "first", "--port", str(port)]
    if shares_weights:
        template = written(folder / "template.json", ProcessIdentity.current())
        argv += ["--template", str(template), "--manifest", str(manifest)]
    return ServerCommand(
        argv=(*argv, *flags),
        environment={**os.environ},
        model="first",
        host=HOST,
        port=port,
        manifest=manifest,
        shares_weights=shares_weights,
    )


def served(command: ServerCommand, log: Path, **changed: Any) -> StartedServer:
    return StartedServer(command, log, **{"limit_s": LIMIT_S, "hang_limit_s": LIMIT_S} | changed)


def pid_of(server: StartedServer) -> int | None:
    """Return the pid of the server's process, if there is one."""
    return server._server.process.pid if server._server else None


def answer(command: ServerCommand) -> str:
    with urllib.request.urlopen(f"http://{command.host}:{command.port}/v1/models", timeout=10) as response:
        text: str = response.read().decode()
        return text


def family(log: Path) -> list[psutil.Process]:
    """Return the running engines of every server that became ready, according to the log."""
    pids = map(int, re.findall(r"engine (\d+)", log.read_text()))
    return [psutil.Process(pid) for pid in pids if not is_dead(pid)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(pid: int | None, number: signal.Signals) -> None:
    assert pid is not None
    os.kill(pid, number)


def is_dead(pid: int | None) -> bool:
    try:
        return pid is None or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ask_in_vain() -> None:
    raise ServerUnreachableError("no answer", hint="check its log")


def ask_after_a_kill(server: StartedServer) -> None:
    kill(pid_of(server), signal.SIGKILL)
    until(lambda: is_dead(pid_of(server)))
    ask_in_vain()


def ask_after_its_end(server: StartedServer) -> None:
    until(lambda: is_dead(pid_of(server)))
    ask_in_vain()


def restart_twice_and_ask_after_a_kill(server: StartedServer) -> None:
    for _ in range(2):
        server.restart("again")
    ask_after_a_kill(server)


def test_aborted_start_stops_the_server(tmp_path: Path, log: Path) -> None:
    server, pids = served(fake(tmp_path, "--answer-after-s", "60"), log), list[int | None]()

    def check_abort() -> None:
        pids.append(pid_of(server))
        if len(pids) > 1:
            raise RankError("another rank failed", hint="it says why")

    with pytest.raises(RankError, match="another rank"), server.running(check_abort):
        pytest.fail("it answers after a minute")
    assert pids[0] is not None
    assert all(map(is_dead, pids))


def test_server_runs_for_the_duration_of_the_context(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path)
    with served(command, log).running() as server:
        assert answer(command) == "first as None"
        assert command.manifest.exists()
        pid = pid_of(server)
    assert (pid_of(server), is_dead(pid), family(log)) == (None, True, [])
    assert not command.manifest.exists()


def test_started_server_implements_the_server_protocol(tmp_path: Path, log: Path) -> None:
    accepted: ServerProcess = served(fake(tmp_path), log)
    assert callable(accepted.restart)


def test_restart_serves_new_weights_under_the_old_name(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path)
    with served(command, log).running() as server:
        before = pid_of(server)
        server.restart(tmp_path / "step_1")
        assert is_dead(before)
        assert answer(command) == f"{tmp_path / 'step_1'} as first"
        server.restart(tmp_path / "step_2")
        assert answer(command) == f"{tmp_path / 'step_2'} as first"
        assert len(family(log)) == 1
    lines = [line.split(", ")[0] for line in log.read_text().splitlines() if not line.startswith("ready")]
    assert lines == [
        "=== bridge: vLLM is started",
        f"=== bridge: vLLM is restarted with {tmp_path / 'step_1'}",
        f"=== bridge: vLLM is restarted with {tmp_path / 'step_2'}",
    ]
    assert log.read_text().count("ready") == 3
    assert not command.manifest.exists()


@pytest.mark.parametrize("victim", ["server", "engine", "both"])
def test_restart_stops_what_is_left_of_a_killed_server(tmp_path: Path, log: Path, victim: str) -> None:
    with served(fake(tmp_path), log).running() as server:
        (orphan,) = family(log)
        pids: dict[str, list[int | None]] = {
            "server": [pid_of(server)],
            "engine": [orphan.pid],
            "both": [pid_of(server), orphan.pid],
        }
        for pid in pids[victim]:
            kill(pid, signal.SIGKILL)
        server.restart("second")
        assert is_dead(orphan.pid)
        assert len([process for process in family(log) if not is_dead(process.pid)]) == 1
    assert all(is_dead(process.pid) for process in family(log))


def test_served_model_name_of_the_user_is_kept(tmp_path: Path) -> None:
    argv = fake(tmp_path, "--served-model-name", "mine").argv_for("second")
    names = [argv[index + 1] for index, part in enumerate(argv) if part == "--served-model-name"]
    assert names == ["first", "mine"], "the last one wins"


def test_failed_restart_reports_the_servers_own_error(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path, "--fail-with", "no room for the KV cache")
    with pytest.raises(ServerUnreachableError) as refused, served(command, log).running() as server:
        server.restart("second")
    assert "ended with exit code 1: MemoryError: no room for the KV cache" in refused.value.message
    assert refused.value.hint == f"bridge doctor, or read {log}"
    assert all(is_dead(process.pid) for process in family(log))


def test_error_of_an_earlier_server_is_not_reported(tmp_path: Path, log: Path) -> None:
    log.write_text("ValueError: long ago\n")
    with pytest.raises(ServerUnreachableError) as refused, served(fake(tmp_path), log).running() as server:
        ask_after_a_kill(server)
    assert "ended with SIGKILL: no error in its log, which ends with: ready first" in refused.value.message
    assert log.read_text().startswith("ValueError: long ago\n")


def test_dead_server_is_reported_with_its_restarts(tmp_path: Path, log: Path) -> None:
    with pytest.raises(ServerUnreachableError) as refused, served(fake(tmp_path), log).running() as server:
        restart_twice_and_ask_after_a_kill(server)
    assert ", restarted 2 times, ended with SIGKILL" in refused.value.message
    assert refused.value.hint == f"bridge doctor, or read {log}"


def test_request_error_of_a_live_server_names_its_log(tmp_path: Path, log: Path) -> None:
    with pytest.raises(ServerUnreachableError) as refused, served(fake(tmp_path), log).running():
        ask_in_vain()
    assert refused.value.message == "no answer"
    assert refused.value.hint == f"check its log (its log: {log})"


def test_server_that_is_never_healthy_is_stopped(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path, "--status", "503")
    with (
        pytest.raises(ServerUnreachableError, match="not ready within 6 s; last line of its log: ready first"),
        served(command, log, limit_s=6).running(),
    ):
        raise AssertionError("it was never ready")
    assert not command.manifest.exists()
    assert all(is_dead(process.pid) for process in family(log))


def test_refusal_inside_the_server_keeps_its_class(tmp_path: Path, log: Path) -> None:
    code = "from bridge.errors import UnsupportedModelError as E; raise E('w is repacked', hint='take bfloat16')"
    command = fake(tmp_path)
    bent = ServerCommand(**{**vars(command), "argv": (command.argv[0], "-c", code, "first")})
    with pytest.raises(UnsupportedModelError) as refused, served(bent, log).running():
        raise AssertionError("it was never ready")
    assert (refused.value.message, refused.value.hint) == ("w is repacked", "take bfloat16")


def test_port_in_use_is_refused_with_its_holder(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path)
    with served(command, log).running() as server:
        before = pid_of(server)
        with (
            pytest.raises(UsageError, match=f"port {command.port} is taken by pid {before}"),
            served(command, tmp_path / "other.log").running(),
        ):
            raise AssertionError("it was started")
        assert not (tmp_path / "other.log").exists()
        assert not is_dead(before)
        assert answer(command) == "first as None"


def test_port_of_a_starting_server_is_refused(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path, "--answer-after-s", "60")

    def start_another() -> None:
        with (
            pytest.raises(UsageError, match=f"port {command.port} is about to be taken: another run") as refused,
            served(command, tmp_path / "other.log").running(),
        ):
            raise AssertionError("it was started")
        assert refused.value.hint.startswith("choose another with --port;")
        raise RankError("another rank failed", hint="it says why")

    with pytest.raises(RankError, match="another rank"), served(command, log).running(start_another):
        pytest.fail("it answers after a minute")
    assert not (tmp_path / "other.log").exists()
    with served(fake(tmp_path / "next", port=command.port), log).running() as server:  # both can be used again
        assert not is_dead(pid_of(server))


def test_manifest_path_of_a_starting_server_is_refused(tmp_path: Path, log: Path) -> None:
    command, link = fake(tmp_path), tmp_path / "link"
    link.symlink_to(command.manifest.parent)

    def start_another() -> None:
        other = replace(command, port=free_port(HOST), manifest=link / command.manifest.name)
        with (
            pytest.raises(UsageError, match=f"manifest {other.manifest} is about to be taken: another") as refused,
            served(other, tmp_path / "other.log").running(),
        ):
            raise AssertionError("it was started")
        assert refused.value.hint.startswith("choose another with --vllm-config-path;")

    with served(command, log).running(start_another) as server:
        start_another()
        stock = fake(tmp_path, shares_weights=False)
        with served(stock, tmp_path / "other.log").running():
            assert not is_dead(pid_of(server))


def test_stock_server_is_ready_when_it_answers(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path, shares_weights=False)
    with served(command, log).running():
        assert answer(command) == "first as None"
        assert not command.manifest.exists()


def interrupted(action: Callable[[], object], when: Callable[[], bool], number: signal.Signals = signal.SIGINT) -> None:
    """Run `action`, and send the signal once `when` is true."""

    def press() -> None:
        until(when)
        os.kill(os.getpid(), number)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        action()
    finally:
        presser.join()


def test_interrupt_stops_the_server(tmp_path: Path, log: Path) -> None:
    with pytest.raises(KeyboardInterrupt), served(fake(tmp_path), log).running() as server:
        interrupted(lambda: time.sleep(LIMIT_S), lambda: not is_dead(pid_of(server)))
    assert pid_of(server) is None
    assert all(is_dead(process.pid) for process in family(log))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_ends_a_restart_immediately(tmp_path: Path, log: Path, number: signal.Signals) -> None:
    before, others = signal.getsignal(number), set(psutil.Process().children(recursive=True))
    command = fake(tmp_path, "--slow-start-s", "600")
    with pytest.raises(KeyboardInterrupt), deferred_interrupt(), served(command, log).running() as server:
        interrupted(lambda: server.restart("second"), lambda: "restarted with second" in log.read_text(), number)
    assert signal.getsignal(number) == before
    assert pid_of(server) is None
    ours = set(psutil.Process().children(recursive=True)) - others
    assert not [process for process in ours if not is_dead(process.pid)]


def test_second_interrupt_leaves_no_manifest(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = fake(tmp_path / "a")
    wait, presses = children._wait, iter([KeyboardInterrupt])

    def pressed(over: Callable[[], bool], limit_s: float) -> None:
        for press in presses:
            raise press
        wait(over, limit_s)

    server = served(command, log)
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(KeyboardInterrupt))
        stack.enter_context(server.running())
        assert command.manifest.exists()
        monkeypatch.setattr(children, "_wait", pressed)
    assert not command.manifest.exists()
    assert family(log) == []


def test_interrupt_at_the_start_leaves_no_server(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[children.Child] = []

    def start_and_press(*given: Any) -> children.Child:
        begun.append(start(*given))
        signal.raise_signal(signal.SIGINT)
        return begun[0]

    start = children.start
    monkeypatch.setattr(children, "start", start_and_press)
    with pytest.raises(KeyboardInterrupt), served(fake(tmp_path), log).running():
        raise AssertionError("it was interrupted before")
    assert len(begun) == 1
    assert not begun[0].is_alive()


def test_watchdog_ends_a_server_without_its_engine(
    tmp_path: Path, log: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = fake(tmp_path, "--status", "503")
    monkeypatch.setattr(StartedServer, "_answering", lambda *_: "/health")  # it was healthy at first
    with pytest.raises(ServerUnreachableError) as refused, served(command, log).running() as server:
        ask_after_its_end(server)
    assert "lost its engine" in refused.value.message
    assert f"lost its engine: it was stopped; its log is {log}" in caplog.messages[-1]


def test_watchdog_kills_a_hanging_server_but_not_the_next(
    tmp_path: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = fake(tmp_path)
    with served(command, log, hang_limit_s=HANG_LIMIT_S).running() as server:
        hanging = pid_of(server)
        kill(hanging, signal.SIGSTOP)
        until(lambda: is_dead(hanging))
        stopped = f"vLLM (pid {hanging}) gave no answer for {HANG_LIMIT_S:g} s: it was stopped; its log is {log}"
        assert stopped in caplog.messages
        server.restart("second")
        assert answer(command) == "second as first"
        time.sleep(2 * HANG_LIMIT_S)
        assert not is_dead(pid_of(server))
        assert answer(command) == "second as first"
    assert caplog.text.count("gave no answer") == 1


def test_busy_server_is_not_mistaken_for_a_hanging_one(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path, "--answer-after-s", "1")
    with served(command, log, hang_limit_s=5).running() as server:
        time.sleep(6)
        assert not is_dead(pid_of(server))


def test_watchdog_does_nothing_during_a_restart(tmp_path: Path, log: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = fake(tmp_path, "--slow-start-s", str(2 * HANG_LIMIT_S))
    with served(command, log, hang_limit_s=HANG_LIMIT_S).running() as server:
        server.restart("second")
        assert answer(command) == "second as first"
    assert "it was stopped" not in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def test_stop_does_not_wait_for_a_missing_health_answer(tmp_path: Path, log: Path) -> None:
    with served(fake(tmp_path), log, hang_limit_s=600).running() as server:
        kill(pid_of(server), signal.SIGSTOP)
        time.sleep(0.5)
        kill(pid_of(server), signal.SIGKILL)
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def test_stop_works_after_the_tree_was_killed(tmp_path: Path, log: Path) -> None:
    command = fake(tmp_path)
    child = children.start(command.argv, command.environment, log)
    assert children.wait_until(child, command.manifest.exists, limit_s=LIMIT_S, progress=lambda _: None)
    until(lambda: bool(family(log)))
    tree = family(log)
    children.kill(child)
    until(lambda: all(is_dead(process.pid) for process in tree) and not child.is_alive())
    assert child.exit_code() == -signal.SIGKILL
    children.stop(child)


@pytest.mark.parametrize(
    ("sleeps_s", "report"), [(1.0, "ended with exit code 3: "), (60.0, "some of its threads still run")]
)
def test_server_with_a_dead_main_thread_is_reported(
    sleeps_s: float, report: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "LAST_THREADS_S", 5.0)
    program = (
        "import ctypes, os, threading, time\n"
        f"threading.Thread(target=lambda: (time.sleep({sleeps_s}), os._exit(3))).start()\n"
        f"ctypes.CDLL(None).syscall({60 if os.uname().machine == 'x86_64' else 93}, 3)\n"  # exit(2): this thread only
    )
    command = replace(fake(tmp_path), argv=(sys.executable, "-c", program))
    with pytest.raises(ServerUnreachableError, match=report), served(command, log).running():
        pass
