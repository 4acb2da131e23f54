"""Start, watch and stop child processes; `leash.py` ends them if this process is killed.

A process forked from this one never stops this process's children, even if it leaves a `with` block of its parent.

Source: setsid(2): a session's id is not reused while one of its processes lives.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bridge.core.process import ProcessIdentity
from bridge.types import Result

POLL_S = 0.2
TRACKER_S = 5.0
"""Time for a resource tracker to remove what its killed users left in /dev/shm: hundreds of MiB for vLLM."""
LEASH = Path(__file__).with_name("leash.py")
"""Script that execs the child's program, so that the pid and the start time stay the same."""


@dataclass(frozen=True)
class Child:
    """A process that we started, at the head of its own session."""

    process: subprocess.Popen[bytes]
    """Reaped only by `stop`: until then its pid is not reused."""
    identity: ProcessIdentity
    """Distinguishes it from a later process with the same pid."""
    log: Path
    """Log file of its stdout and stderr."""
    starter: int = field(default_factory=os.getpid)
    """The pid of the process that started it."""

    def is_own(self) -> bool:
        """Return whether this process started the child; False in a fork of the process that did."""
        return self.starter == os.getpid()

    def is_alive(self) -> bool:
        """Return whether the child is running, without reaping it."""
        return self.identity.is_alive()

    def exit_code(self) -> int | None:
        """Return its exit code without reaping it: negative for a signal, None while it runs."""
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def start(
    argv: Sequence[str], environment: Mapping[str, str], log: Path, *, inherits: Sequence[int] | None = None
) -> Child:
    """Start `argv` (a full path first) in its own session, which ends with this process; append its output to `log`.

    With `inherits`, the child gets these descriptors, and a pipe as its stdin.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *argv],
            env=dict(environment),
            stdin=subprocess.DEVNULL if inherits is None else subprocess.PIPE,
            pass_fds=inherits or (),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(process, ProcessIdentity.of(process.pid), log)


def wait_until(
    child: Child, ready: Callable[[], Result], *, limit_s: float, progress: Callable[[float], None]
) -> Result | None:
    """Wait until `ready` returns a true value, and return it; None if `child` ends first or `limit_s` seconds pass.

    `progress` is called with the elapsed seconds.
    """
    began = time.monotonic()
    while child.is_alive() and (elapsed := time.monotonic() - began) < limit_s:
        if result := ready():
            return result
        progress(elapsed)
        time.sleep(POLL_S)
    return None


def stop(*stopped: Child, grace_s: float = 15.0) -> None:
    """Send SIGTERM to children; kill their remaining process trees after `grace_s`, or on a second Ctrl-C."""
    stopped = tuple(child for child in stopped if child.is_own())
    tree = set[psutil.Process]()
    try:
        tree.update(*map(_tree, stopped))
        for child in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGTERM)  # not reaped yet, so the pid is not reused
        _wait(lambda: any(child.is_alive() for child in stopped), grace_s)
        _wait(lambda: _running(tree), grace_s / 3)
    finally:
        tree.update(*map(_tree, stopped))
        trackers = _trackers(tree)
        _kill(tree - trackers)
        for child in stopped:
            child.process.wait()
        _wait(lambda: _running(trackers), TRACKER_S)
        _kill(trackers)
        _wait(lambda: _running(tree), 5)  # init may reap orphans late
        assert not _running(tree), f"processes that we started cannot be killed: {_running(tree)}"


def kill(child: Child) -> None:
    """Kill the process tree of `child` immediately; `stop` reaps the child and waits for the others."""
    if not child.is_own():
        return
    tree = _tree(child)
    _kill(tree - _trackers(tree))


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil checks the start time first, so a reused pid is safe


def _trackers(tree: set[psutil.Process]) -> set[psutil.Process]:
    """Return Python's resource trackers, which remove their users' shared memory and end after them."""
    trackers = set()
    for process in tree:
        with contextlib.suppress(psutil.Error):
            if any("multiprocessing.resource_tracker" in part for part in process.cmdline()):
                trackers.add(process)
    return trackers


def _wait(busy: Callable[[], object], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while busy() and time.monotonic() < deadline:
        time.sleep(0.05)


def _tree(child: Child) -> set[psutil.Process]:
    """Return every process of the child's session, and the descendants that left it."""
    members = set()
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == child.process.pid:
                members |= {process, *process.children(recursive=True)}
    return members


def _running(processes: set[psutil.Process]) -> list[psutil.Process]:
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running
