"""How much main memory this process may still take, within the limits of its cgroups."""

import os
from pathlib import Path

CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and the key in memory.stat of what the kernel gives back at once: cgroup v2, then v1."""


def available_bytes(root: Path = Path("/")) -> int:
    """Return what the kernel would hand out without swapping."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def cgroup_left_bytes(root: Path = Path("/")) -> int | None:
    """Return what the tightest cgroup of this process still allows; None: no limit is set."""
    left = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        folder = top / inside.lstrip("/")
        for level in (folder, *folder.parents):
            if level == top.parent:
                break
            left.extend(_left_at(level))
    return min(left, default=None)


def left_bytes() -> int:
    """Return what this process may still take: what is available, within the limits of its cgroups."""
    left = cgroup_left_bytes()
    return available_bytes() if left is None else min(available_bytes(), left)


def _left_at(folder: Path) -> list[int]:
    for limit_file, use_file, reclaimable in CGROUP_FILES:
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / use_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.isdigit() and int(limit) < 2**60:  # v1 writes "no limit" as almost 2**63
            return [max(int(limit) - used + int(stat.get(reclaimable, 0)), 0)]
    return []


def shm_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:  # noqa: S108  asked for its size alone
    """Return the free space of /dev/shm; None: there is none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
