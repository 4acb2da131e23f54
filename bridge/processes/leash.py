"""Run a program that does not outlive its parent process. Usage, as a script: PARENT PROGRAM ARGS.

A guard stays in the program's session. Once the parent has ended, it sends SIGTERM to the program, and SIGKILL to the
whole session after GRACE_S: vLLM ignores SIGTERM while its engine starts, and its engine outlives a killed API server.

PR_SET_PDEATHSIG is not enough: a fork does not inherit it, so engines and workers would live on, and it fires when the
*thread* that started the program ends, which may be short-lived. A pidfd refers to the whole process.

Source: prctl(2); pidfd_open(2); setsid(2); proc(5), fields 6, 50 and 51 of `/proc/PID/stat`.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
GRACE_S = 8.0
"""Time for the program to end by itself after SIGTERM."""
POLL_S = 0.2


def become(parent: int, argv: list[str]) -> None:
    try:
        watched = [os.pidfd_open(parent), os.pidfd_open(os.getpid())]  # closed by the exec
    except OSError:  # an old kernel, or a container that forbids pidfds: rely on SIGTERM
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    else:
        _leave_guard(watched)
    if os.getppid() != parent:
        sys.exit("the process that started this one has exited")
    os.execv(argv[0], argv)  # noqa: S606


def _leave_guard(watched: list[int]) -> None:
    if os.fork() == 0:
        if os.fork() == 0:  # double fork: init reaps the guard
            _guard(watched, os.getsid(0))
        os._exit(0)
    os.wait()


def _guard(watched: list[int], session: int) -> None:
    """Wait until the session is empty. If the parent exits first, end the remaining processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the program, but sent to the whole process group
    _forget_environment()
    _ended(watched, None)
    deadline = math.inf
    while members := _members(session):
        if math.isinf(deadline) and _ended(watched[:1], POLL_S):
            deadline = time.monotonic() + GRACE_S
            _kill({session} & members, signal.SIGTERM)
        elif time.monotonic() > deadline:
            _kill(members, signal.SIGKILL)
        time.sleep(POLL_S)


def _forget_environment() -> None:
    """Overwrite this process's environment, where others could read the program's secrets."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start = int(fields[47])
    end = int(fields[48])
    ctypes.memset(start, 0, end - start)


def _ended(descriptors: list[int], limit_s: float | None) -> bool:
    """Wait until one of the processes has ended, and return whether one did."""
    return bool(select.select(descriptors, [], [], limit_s)[0])


def _members(session: int) -> set[int]:
    """Return the other living processes of `session`, except Python's resource trackers: they end after their users."""
    members = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            is_tracker = b"resource_tracker" in (entry / "cmdline").read_bytes()
            if int(of) == session and state not in "ZX" and not is_tracker:
                members.add(int(entry.name))
    return members - {os.getpid()}


def _kill(members: set[int], number: signal.Signals) -> None:
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
