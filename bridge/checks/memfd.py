"""Check that one process can open and write the shared memory of another, by doing it.

Not covered: the second process (`memfd_trial.py`), the weights of a live server (`server.py`).
"""

import fcntl
import mmap
import os
from collections.abc import Callable

from bridge.checks.child import Ended, run_module
from bridge.checks.result import Check, failed, passed

NAME = "Shared memory"
EXPECTED = "a second process writes into the first one's memfd"
MARK = b"bridge was here"
TRIAL_TIMEOUT_S = 20.0
REFUSED = (
    "run both as one user in one pid namespace, with /proc mounted without hidepid; docker run --pid=container:NAME"
)


def run_writer(path: str) -> Ended:
    """Let a second process write the mark into the memfd at `path`."""
    return run_module("bridge.checks.memfd_trial", path, timeout_s=TRIAL_TIMEOUT_S)


def two_processes_share(
    create: Callable[[str, int], int] = os.memfd_create, writer: Callable[[str], Ended] = run_writer
) -> Check:
    """Create a memfd as the server does, let a second process write into it, and look."""
    try:
        descriptor = create("bridge-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    except OSError as error:
        remedy = "sudo sysctl vm.memfd_noexec=0, or allow memfd_create in the container's seccomp profile"
        return failed(NAME, f"memfd_create: {error.strerror}", EXPECTED, remedy)
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            ended = writer(f"/proc/{os.getpid()}/fd/{descriptor}")
            return judge(ended, memory[: len(MARK)])
    except OSError as error:
        return failed(
            NAME, f"the memfd cannot be used: {error.strerror}", EXPECTED, "free memory; dmesg names the cause"
        )
    finally:
        os.close(descriptor)


def judge(ended: Ended, found: bytes) -> Check:
    """Tell from the writer's end and from what lies in the memory whether it was one."""
    if trouble := ended.trouble():
        return failed(NAME, f"the second process: {trouble}", EXPECTED, REFUSED)
    if found != MARK:
        return failed(NAME, f"the second process wrote {MARK!r}, the first one reads {found!r}", EXPECTED, REFUSED)
    return passed(NAME, "a second process wrote, the first one read it", EXPECTED)
