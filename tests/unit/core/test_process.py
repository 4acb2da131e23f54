"""Identities of processes: alive, gone, a zombie, a reused pid, another namespace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.core.process import ProcessIdentity, boot_id


def test_the_current_process_is_alive_visible_and_itself() -> None:
    identity = ProcessIdentity.current()
    assert identity.pid == os.getpid()
    assert identity.is_alive()
    assert identity.is_visible()
    assert identity == ProcessIdentity.of(os.getpid())


def test_an_identity_survives_json() -> None:
    identity = ProcessIdentity.current()
    assert ProcessIdentity.model_validate_json(identity.model_dump_json()) == identity


def test_a_process_is_alive_until_it_ends_and_a_zombie_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and has not been reaped yet
    assert Path(f"/proc/{child.pid}").exists()
    assert not identity.is_alive()
    assert ProcessIdentity.of(child.pid) == identity  # a child that ends at once can still be identified
    child.wait()
    assert not identity.is_alive()
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(child.pid)


def test_a_reused_pid_is_another_process() -> None:
    identity = ProcessIdentity.current()
    earlier = identity.model_copy(update={"start_ticks": identity.start_ticks - 1})
    assert not earlier.is_alive()


def test_another_pid_namespace_is_not_visible() -> None:
    identity = ProcessIdentity.current().model_copy(update={"pid_namespace": "pid:[1]"})
    assert not identity.is_visible()


def test_odd_characters_in_a_name_do_not_shift_the_start_time() -> None:
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


def test_the_boot_has_one_id() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


@pytest.mark.parametrize("pid", [-1, 0, 2**31])
def test_a_pid_that_cannot_be_is_nobody(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(pid)
    assert not ProcessIdentity.current().model_copy(update={"pid": pid}).is_alive()
