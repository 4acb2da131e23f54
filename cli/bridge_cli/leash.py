"""Become a program that does not outlive the process that started it; run by its path, with PARENT PROGRAM ARGS.

The program keeps this process's pid and start time. Once the parent is gone, a guard kills the whole session: vLLM
ignores SIGTERM while its engine starts, and its processes outlive one of them that is killed.

Source: prctl(2) PR_SET_PDEATHSIG; pidfd_open(2); setsid(2); proc(5), fields 50 and 51 of `/proc/PID/stat`.
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
"""Time for the program to end by itself after the SIGTERM that it gets when the parent ends."""
POLL_S = 0.2


def become(parent: int, argv: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _leave_guard(parent)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
    os.execv(argv[0], argv)  # noqa: S606


def _leave_guard(parent: int) -> None:
    try:
        theirs, own = os.pidfd_open(parent), os.pidfd_open(os.getpid())  # both are closed by the exec
    except OSError:  # an old kernel, or a container that forbids it: the SIGTERM has to be enough
        return
    if os.fork() == 0:
        if os.fork() == 0:
            _guard(theirs, own, os.getsid(0))
        os._exit(0)
    os.wait()  # the guard is nobody's child: the program never meets it


def _guard(parent: int, program: int, session: int) -> None:
    """Wait until the session is empty; once the parent has ended, kill what is left of it after GRACE_S."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are the program's: a whole group may get them
    _forget_environment()
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


def _forget_environment() -> None:
    """Overwrite the environment of this process: others could read the program's secrets there, as long as it runs."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)


def _wait(descriptors: list[int], limit_s: float | None) -> bool:
    """Wait until one of the processes has ended, and return whether one did."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else limit_s * 1e3))


def _members(session: int) -> list[int]:
    """Return the other living processes of `session`, except Python's resource trackers: they end after their users."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            is_tracker = b"resource_tracker" in (entry / "cmdline").read_bytes()
            if int(of) == session and state not in "ZX" and not is_tracker and int(entry.name) != os.getpid():
                members.append(int(entry.name))
    return members


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
