"""How much host memory this process may still allocate, within the limits of its cgroups."""

import shutil
from pathlib import Path

import psutil

CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files with limit and usage, and the memory.stat key for immediately reclaimable memory: cgroup v2, then v1."""


def left_bytes() -> int:
    """Return the smaller of `available_bytes` and `cgroup_left_bytes`."""
    left = cgroup_left_bytes()
    return available_bytes() if left is None else min(available_bytes(), left)


def available_bytes() -> int:
    """Return the memory that the kernel can provide without swapping."""
    return int(psutil.virtual_memory().available)


def cgroup_left_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that the tightest cgroup limit of this process still allows; None without a limit."""
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


def shm_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:  # noqa: S108  only its size is read
    """Return the free space of /dev/shm; None if it does not exist."""
    return shutil.disk_usage(folder).free if folder.exists() else None
