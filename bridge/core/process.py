"""Process identities that stay unique when a pid is reused or the machine reboots, and this process's sockets.

Source: proc(5): field 22 of `/proc/PID/stat` is the start time in clock ticks since boot.
"""

import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

ENDED = "ZX"
"""States of a process that has exited: a zombie, or dead."""


class ProcessIdentity(BaseModel):
    """One process during one boot."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    pid: int
    """Process id in its own namespace."""
    start_ticks: int
    """Clock ticks from boot to the start of the process."""
    pid_namespace: str
    """The namespace in which `pid` is valid."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Identify the process `pid`, which may be a zombie.

        Raises:
            ProcessLookupError: there is no such process.
        """
        stat = _state_and_start(pid)
        if stat is None:
            raise ProcessLookupError(pid)
        return cls(pid=pid, start_ticks=stat[1], pid_namespace=_pid_namespace())

    @classmethod
    def current(cls) -> "ProcessIdentity":
        return cls.of(os.getpid())

    def is_visible(self) -> bool:
        """Return whether the caller is in the same pid namespace; otherwise `is_alive` is meaningless."""
        return self.pid_namespace == _pid_namespace()

    def is_alive(self) -> bool:
        """Return whether this same process still runs; a zombie does not."""
        stat = _state_and_start(self.pid)
        return stat is not None and stat[0] not in ENDED and stat[1] == self.start_ticks


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return state, int(fields[18])


def sockets() -> set[int]:
    """Return this process's descriptors that are sockets."""
    descriptors = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself, closed by now
            if str(descriptor.readlink()).startswith("socket:"):
                descriptors.add(int(descriptor.name))
    return descriptors
