"""Claim a folder for one process at a time. The kernel releases a claim when its process exits.

The lock is on the folder itself, so that `kill -9` leaves nothing to clean up. On file systems that cannot lock a
folder (NFS), every claim is granted.

Source: flock(2); proc(5) for the format of `/proc/locks`.
"""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bridge.errors import UsageError

_held: dict[tuple[int, int], int] = {}
"""(Device, inode) of each folder that this process has claimed -> the descriptor that holds the lock."""


def make(folder: Path, *, what: str, flag: str) -> tuple[Path, ...]:
    """Create `folder`, claim it until this process exits, and return the created folders, innermost first.

    `what` is the folder's name in error messages, `flag` the option that chooses a different one.

    Raises:
        UsageError: the folder cannot be created, or another process has claimed it.
    """
    try:
        missing = tuple(path for path in (folder, *folder.parents) if not path.exists())
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # child programs do not inherit it
    except OSError as error:
        raise UsageError(
            f"cannot create the {what} {folder}: {error.strerror}", hint=f"choose another with {flag}"
        ) from error
    if not _lock(descriptor):
        pid = holder(os.fstat(descriptor).st_ino)
        os.close(descriptor)
        user, stop = (f"process {pid}", f", stop it (kill -INT {pid})") if pid else ("another process", "")
        raise UsageError(
            f"the {what} {folder} is in use by {user}: two runs would overwrite each other",
            hint=f"wait for it to finish{stop}, or choose another {flag}",
        )
    return missing


def remove_unused(made: Sequence[Path]) -> None:
    """Remove the empty folders among those that `make` created."""
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def is_claimed(folder: Path) -> bool:
    """Return whether any process has claimed `folder`; True if the file system cannot lock folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder(inode: int) -> str | None:
    """Return the pid of the process that locked `inode`; None if the kernel does not report it."""
    with suppress(OSError):
        for fields in map(str.split, Path("/proc/locks").read_text().splitlines()):
            # A line of /proc/locks: 7: FLOCK ADVISORY WRITE 4711 fe:00:131074 0 EOF
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode) and int(fields[4]) > 0:
                return fields[4]
    return None


def _lock(descriptor: int) -> bool:
    """Lock a folder unless this process already has; return False if another process has locked it."""
    status = os.fstat(descriptor)
    key = status.st_dev, status.st_ino
    if key in _held:
        os.close(descriptor)
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system cannot lock a folder
        pass
    _held[key] = descriptor
    return True


def _forget() -> None:
    """Close the descriptors that a fork inherited: a claim must not outlive the process that made it."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
