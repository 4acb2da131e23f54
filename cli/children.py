"""Start, watch and stop our own processes, and no others.

Not covered: the server's log (`server_log.py`), and its end if we are killed (`leash.py`).
Source: setsid(2): a session's id is not reused while one of its processes lives.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bridge.core.process import ProcessIdentity

POLL_S = 0.2
TRACKER_S = 5.0
"""Time for a resource tracker to remove what its killed users left in /dev/shm: hundreds of MiB for vLLM."""

LEASH = Path(__file__).with_name("leash.py")
"""Run before the child's own program and replaced by it: the pid and the start time stay the same."""


@dataclass(frozen=True)
class Child:
    """A process that we started, at the head of its own session."""

    process: subprocess.Popen[bytes]
    """Reaped only by `stop`: until then its pid stays its own."""
    identity: ProcessIdentity
    """Tells it from any later process with its pid."""
    log: Path
    """Its stdout and stderr."""

    def is_alive(self) -> bool:
        """Tell whether it runs; never reaps it."""
        return self.identity.is_alive()

    def exit_code(self) -> int | None:
        """Return its exit code without reaping it: negative for a signal, None while it runs."""
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def start(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
    """Start `argv` (a full path first) in its own session, which ends when this process does, however that ends.

    Its output is appended to `log`.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *argv],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(process, ProcessIdentity.of(process.pid), log)


def wait_until(child: Child, is_ready: Callable[[], bool], *, limit_s: float, tell: Callable[[float], None]) -> bool:
    """Wait until `is_ready`; return False if `child` ended first or `limit_s` seconds passed.

    `tell` is called with the elapsed seconds.
    """
    began = time.monotonic()
    while child.is_alive() and (elapsed := time.monotonic() - began) < limit_s:
        if is_ready():
            return True
        tell(elapsed)
        time.sleep(POLL_S)
    return False


def stop(child: Child, *, grace_s: float = 15.0) -> None:
    """Ask `child` to end, and make sure after `grace_s` that nothing of its tree is left.

    A second Ctrl-C ends the grace at once.
    """
    tree = _tree(child)
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process.pid, signal.SIGTERM)  # not reaped yet: the pid is its own
        _wait(child.is_alive, grace_s)
        _wait(lambda: any(_is_running(process) for process in tree), grace_s / 3)
    finally:
        tree |= _tree(child)
        trackers = {process for process in tree if _is_tracker(process)}
        _kill(tree - trackers)
        child.process.wait()
        _wait(lambda: any(_is_running(process) for process in trackers), TRACKER_S)
        _kill(trackers)
        _wait(lambda: any(_is_running(process) for process in tree), 5)  # init reaps the orphans, when it likes
        left = [process for process in tree if _is_running(process)]
        assert not left, f"processes that we started cannot be killed: {left}"


def kill(child: Child) -> None:
    """Kill the whole tree of `child` at once; `stop` reaps it and waits for the rest."""
    _kill({process for process in _tree(child) if not _is_tracker(process)})


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil checks the start time first: a reused pid is left alone


def _is_tracker(process: psutil.Process) -> bool:
    """Tell whether it is Python's resource tracker, which removes its users' shared memory and ends after them."""
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _wait(busy: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while busy() and time.monotonic() < deadline:
        time.sleep(0.05)


def _tree(child: Child) -> set[psutil.Process]:
    """Return every process of the child's session, and the descendants that left it."""
    members = {process for process in psutil.process_iter() if _session(process.pid) == child.process.pid}
    for process in tuple(members):
        with contextlib.suppress(psutil.NoSuchProcess):
            members.update(process.children(recursive=True))
    return members


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
