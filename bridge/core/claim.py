"""Claims: one process at a time works in a folder; the kernel sees to it, and ends a claim with its process.

A claim is a lock on the folder itself: it leaves no file behind, and nothing is to be cleaned up after `kill -9`.

Not covered: file systems that lock no folder (NFS): there every claim is granted.
Source: flock(2); proc(5) for the lines of `/proc/locks`.
"""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bridge.errors import UsageError

_held: dict[tuple[int, int], int] = {}
"""Device and inode of each folder that this process has claimed -> the descriptor that holds the lock."""


def make(folder: Path, *, what: str, flag: str) -> tuple[Path, ...]:
    """Make `folder`, claim it until this process ends, and return the folders that were made, the innermost first.

    `what` it is called in an error; `flag` names another.

    Raises:
        UsageError: it cannot be made, or another process has claimed it.
    """
    try:
        missing = tuple(path for path in (folder, *folder.parents) if not path.exists())
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # which no program that is started inherits
    except OSError as error:
        raise UsageError(
            f"the {what} {folder} cannot be made: {error.strerror}", remedy=f"name another with {flag}"
        ) from error
    if not _lock(descriptor):
        pid = holder(os.fstat(descriptor).st_ino)
        os.close(descriptor)
        raise UsageError(
            f"the {what} {folder} is in use by {f'process {pid}' if pid else 'another process'}: "
            "two runs would overwrite each other",
            remedy=f"wait for its end{f', or end it with: kill -INT {pid}' if pid else ''}; "
            f"a run of its own needs another {flag}",
        )
    return missing


def remove_unused(made: Sequence[Path]) -> None:
    """Remove those of the folders `made`, the innermost first, that nothing was put into."""
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _lock(descriptor: int) -> bool:
    """Lock a folder and keep `descriptor` open, unless this process has locked it already; tell whether it is ours."""
    status = os.fstat(descriptor)
    key = status.st_dev, status.st_ino
    if key in _held:
        os.close(descriptor)
        return True
    with suppress(OSError):  # of a file system that locks no folder; one that is taken is an OSError too
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    _held[key] = descriptor
    return True


def holder(inode: int) -> str | None:
    """Return the pid of the process that has locked `inode`, where the kernel tells."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for fields in map(str.split, lines):  # 7: FLOCK ADVISORY WRITE 4711 fe:00:131074 0 EOF
        if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode) and int(fields[4]) > 0:
            return fields[4]
    return None


def _forget() -> None:
    """Close what a fork inherited: a claim shall not outlive the process that made it."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
