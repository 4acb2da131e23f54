"""End a process of vLLM when the process that started it is gone.

Symptom: after kill -9 of the API server, EngineCore and the workers live on for minutes and hold their GPU memory, so
no other server fits.
Cause: they notice only when they next use their connection to it.
Why this is safe: a process whose parent is gone has nobody to serve. Nothing of vLLM is replaced.
Seen in vLLM 0.26 to 0.33; pidfd_open(2): the descriptor becomes readable when that very process ends.
"""

import errno
import multiprocessing
import multiprocessing.util
import os
import select
import signal
import sys
import threading
import time
from multiprocessing import connection

GRACE_S = 5
"""Whole seconds between SIGTERM, which vLLM's processes handle while they serve, and SIGKILL."""
UNSUPPORTED = {errno.ENOSYS, errno.EPERM}
"""Errors of a kernel or container without pidfd_open."""

_seen: set[int] = set()
"""Processes that are tied, or need not be; a fork inherits it under another pid."""


def tie() -> None:
    """End this process, and those forked from it, when their parents end; a second call changes nothing."""
    if not _seen:
        multiprocessing.util.register_after_fork(tie, lambda _: tie())  # vLLM calls no plugin again after a fork
    if os.getpid() in _seen:
        return
    _seen.add(os.getpid())
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.pid, parent.sentinel), name="tether", daemon=True).start()


def _end_after(pid: int | None, sentinel: int) -> None:
    _wait_for(pid, sentinel)
    sys.stderr.write(f"bridge: pid {pid}, which started this process, is gone: ending pid {os.getpid()}\n")
    # The kernel's alarm ends a process even while it hangs in its finalization, where this thread no longer runs.
    signal.alarm(GRACE_S + 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(pid: int | None, sentinel: int) -> None:
    """Wait for the end of the parent, without holding the GIL."""
    try:
        descriptor = os.pidfd_open(pid or 0)
    except ProcessLookupError:
        return
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        connection.wait([sentinel])  # second best: after a fork, siblings may hold its other end open
        return
    if not connection.wait([sentinel], timeout=0):  # else it ended before, and the descriptor may be of a later process
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
