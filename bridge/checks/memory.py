"""Check that main memory and /dev/shm suffice.

Not covered: sharing memory between two processes (`memfd.py`), GPU memory (`gpu.py`).
"""

import os
from pathlib import Path

from bridge.checks.result import Check, passed, warned

GIB, MIB = 2**30, 2**20
NEEDED_GIB = 4.0
"""What vLLM and a trainer need beside the weights, with the smallest KV cache."""
NEEDED_SHM_MIB = 64.0
"""What torch's and vLLM's message queues between processes take at most; the weights never lie there."""
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


def main_memory(available: int, cgroup_left: int | None) -> Check:
    """Check that the machine and the container leave enough memory."""
    name, expected = "Main memory", f"at least {NEEDED_GIB:.0f} GiB available beside the weights"
    left = available if cgroup_left is None else min(available, cgroup_left)
    limited = cgroup_left is not None and cgroup_left < available
    found = f"{left / GIB:.1f} GiB available" + (" within the container's limit" if limited else "")
    if left >= NEEDED_GIB * GIB:
        return passed(name, found, expected)
    remedy = (
        "docker run --memory=8g ..., or a smaller model" if limited else "stop other programs, or take a smaller model"
    )
    return warned(name, found, expected, remedy)


def shm_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:  # noqa: S108  asked for its size alone
    """Return the free space of /dev/shm; None: there is none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def shm_space(free: int | None) -> Check:
    """Check that message queues fit into /dev/shm."""
    name, expected = "/dev/shm", f"at least {NEEDED_SHM_MIB:.0f} MiB free for message queues"  # noqa: S108  a name
    remedy = "docker run --shm-size=1g ..., or: sudo mount -o remount,size=1g /dev/shm"
    if free is None:
        return warned(name, "missing", expected, remedy)
    found = f"{free / GIB:.1f} GiB free" if free >= GIB else f"{free / MIB:.0f} MiB free"
    return passed(name, found, expected) if free >= NEEDED_SHM_MIB * MIB else warned(name, found, expected, remedy)
