"""Which process is which: identities that survive neither a reuse of the pid nor a reboot.

Not covered: starting and stopping processes (`cli/children.py`).
Source: proc(5): field 22 of `/proc/PID/stat` is the start time in clock ticks since boot.
"""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ProcessIdentity(BaseModel):
    """One process of one boot."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    pid: int
    """Process id, as its own namespace counts."""
    start_ticks: int
    """Clock ticks between boot and the process's start."""
    pid_namespace: str
    """The namespace in which `pid` means anything."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Identify the running process `pid`.

        Raises:
            ProcessLookupError: there is no such process.
        """
        ticks = _start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(pid)
        return cls(pid=pid, start_ticks=ticks, pid_namespace=_pid_namespace())

    @classmethod
    def current(cls) -> "ProcessIdentity":
        """Identify the calling process."""
        return cls.of(os.getpid())

    def is_visible(self) -> bool:
        """Tell whether the caller lives in the same pid namespace, so that `is_alive` means anything."""
        return self.pid_namespace == _pid_namespace()

    def is_alive(self) -> bool:
        """Tell whether this very process still runs (a zombie does not)."""
        return _start_ticks(self.pid) == self.start_ticks


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
