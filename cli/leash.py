"""Become another program that does not outlive the process that started it: run by its path, with PARENT PROGRAM ARGS.

The program keeps this process's pid and start time. A guard beside it ends its whole session once the parent is gone,
however that ended: vLLM ignores SIGTERM while its engine starts, and its processes live on if one of them is killed.

Source: prctl(2) PR_SET_PDEATHSIG; pidfd_open(2); setsid(2).
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
GRACE_S = 8.0
"""Time for the program to end by itself after the SIGTERM that the parent's end sends to it."""
POLL_S = 0.2


def become(parent: int, argv: list[str]) -> None:
    """Leave a guard behind, and turn into the program `argv`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _leave_guard(parent)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
    os.execv(argv[0], argv)  # noqa: S606


def _leave_guard(parent: int) -> None:
    try:
        theirs, own = os.pidfd_open(parent), os.pidfd_open(os.getpid())  # both are closed by the exec
    except OSError:  # an old kernel, or a container that forbids it: the SIGTERM must do
        return
    if os.fork() == 0:
        if os.fork() == 0:
            _guard(theirs, own, os.getsid(0))
        os._exit(0)
    os.wait()  # the guard is nobody's child: the program never meets it


def _guard(parent: int, program: int, session: int) -> None:
    """Wait until the session is empty; once the parent has ended, make sure of it."""
    _wait([parent, program], None)
    deadline = None
    while members := _members(session):
        if _wait([parent], POLL_S):
            deadline = deadline or time.monotonic() + GRACE_S
            time.sleep(POLL_S)
        if deadline and time.monotonic() > deadline:
            for pid in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _wait(descriptors: list[int], limit_s: float | None) -> bool:
    """Wait until one of the processes has ended; tell whether one did."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else limit_s * 1e3))


def _members(session: int) -> list[int]:
    """Return the other living processes of `session`, but no resource tracker of Python's: it ends after its users."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [pid for pid in pids if pid != os.getpid() and _is_member(pid, session)]


def _is_member(pid: int, session: int) -> bool:
    try:
        state, _, _, of = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return int(of) == session and state not in "ZX" and b"resource_tracker" not in command
    except OSError:
        return False


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
