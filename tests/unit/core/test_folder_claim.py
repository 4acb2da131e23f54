"""One process per folder: who is refused, with which message, and what remains when the holder is killed."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.core import folder_claim
from bridge.errors import UsageError

HOLD = """
import os, sys, time
from pathlib import Path
from bridge.core import folder_claim
folder_claim.make(Path(sys.argv[1]), what="run directory", flag="--run-dir")
if "fork" in sys.argv and os.fork():
    time.sleep(600)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@contextmanager
def held(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Let another process claim `folder`; yield the process, and with `fork` the pid of its child."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process, child
    finally:
        if child != process.pid:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


def make(folder: Path) -> tuple[Path, ...]:
    return folder_claim.make(folder, what="run directory", flag="--run-dir")


def test_claimed_folder_is_refused_with_the_pid(tmp_path: Path) -> None:
    with held(tmp_path / "run") as (holder, _), pytest.raises(UsageError) as refused:
        make(tmp_path / "run")
    assert refused.value.message == (
        f"the run directory {tmp_path / 'run'} is in use by process {holder.pid}: two runs would overwrite each other"
    )
    assert refused.value.hint == (
        f"wait for it to finish, stop it (kill -INT {holder.pid}), or choose another --run-dir"
    )


def test_killing_the_holder_frees_the_folder(tmp_path: Path) -> None:
    with held(tmp_path) as (holder, _):
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert make(tmp_path) == ()
        assert list(tmp_path.iterdir()) == []
        refused = subprocess.run(
            [sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
        )
    assert f"is in use by process {os.getpid()}" in refused.stderr


def test_surviving_fork_does_not_hold_the_claim(tmp_path: Path) -> None:
    with held(tmp_path, "fork") as (holder, child):
        with pytest.raises(UsageError, match=f"in use by process {holder.pid}"):
            make(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)
        assert make(tmp_path) == ()


def test_process_may_claim_twice_and_remove_empty_folders(tmp_path: Path) -> None:
    made = make(tmp_path / "a" / "b")
    assert made == (tmp_path / "a" / "b", tmp_path / "a")
    assert make(tmp_path / "a" / "b") == ()
    (tmp_path / "a" / "mine").touch()
    folder_claim.remove_unused(made)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]


def test_checking_a_claim_does_not_claim_the_folder(tmp_path: Path) -> None:
    assert not folder_claim.is_claimed(tmp_path)
    with held(tmp_path) as (holder, _):
        assert folder_claim.is_claimed(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert not folder_claim.is_claimed(tmp_path)
    make(tmp_path)
    assert folder_claim.is_claimed(tmp_path)


def test_claims_are_granted_if_folders_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(9, "Bad file descriptor")

    with held(tmp_path):
        monkeypatch.setattr(fcntl, "flock", refuse)
        assert make(tmp_path) == ()
        assert folder_claim.is_claimed(tmp_path)


def test_holder_pid_is_unknown_without_proc_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path):
        monkeypatch.setattr(folder_claim, "holder", lambda _: None)
        with pytest.raises(UsageError, match="in use by another process: two runs") as refused:
            make(tmp_path)
    assert refused.value.hint == "wait for it to finish, or choose another --run-dir"
