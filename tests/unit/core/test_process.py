"""Process identities: alive, exited, a zombie, a reused pid, a different namespace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.core.process import ProcessIdentity, boot_id


def test_current_process_is_alive_and_visible() -> None:
    identity = ProcessIdentity.current()
    assert identity.pid == os.getpid()
    assert identity.is_alive()
    assert identity.is_visible()
    assert identity == ProcessIdentity.of(os.getpid())


def test_process_identity_round_trips_through_json() -> None:
    identity = ProcessIdentity.current()
    assert ProcessIdentity.model_validate_json(identity.model_dump_json()) == identity


def test_process_is_alive_until_it_exits() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has exited, but not been reaped yet
    assert Path(f"/proc/{child.pid}").exists()
    assert not identity.is_alive()
    assert ProcessIdentity.of(child.pid) == identity  # a child that has already exited can still be identified
    child.wait()
    assert not identity.is_alive()
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(child.pid)


def test_reused_pid_is_a_different_process() -> None:
    identity = ProcessIdentity.current()
    earlier = identity.model_copy(update={"start_ticks": identity.start_ticks - 1})
    assert not earlier.is_alive()


def test_another_pid_namespace_is_not_visible() -> None:
    identity = ProcessIdentity.current().model_copy(update={"pid_namespace": "pid:[1]"})
    assert not identity.is_visible()


def test_start_time_is_read_despite_odd_process_names() -> None:
    program = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) R 1 (b'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        before = ProcessIdentity.of(child.pid)
        assert child.stdout is not None
        child.stdout.readline()
        assert "(a) R 1 (b)" in Path(f"/proc/{child.pid}/stat").read_text()
        assert before.is_alive()
        assert before == ProcessIdentity.of(child.pid)
        child.kill()


def test_boot_id_is_stable() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


@pytest.mark.parametrize("pid", [-1, 0, 2**31])
def test_impossible_pid_is_not_a_process(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(pid)
    assert not ProcessIdentity.current().model_copy(update={"pid": pid}).is_alive()
