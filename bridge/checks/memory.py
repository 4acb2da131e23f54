"""Check that main memory and /dev/shm suffice.

Not covered: sharing memory between two processes (`memfd.py`), GPU memory (`gpu.py`).
"""

from bridge.checks.result import Check, passed, warned

GIB, MIB = 2**30, 2**20
NEEDED_GIB = 4.0
"""What vLLM and a trainer need beside the weights, with the smallest KV cache."""
NEEDED_SHM_MIB = 64.0
"""What torch's and vLLM's message queues between processes take at most; the weights never lie there."""


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


def shm_space(free: int | None) -> Check:
    """Check that message queues fit into /dev/shm."""
    name, expected = "/dev/shm", f"at least {NEEDED_SHM_MIB:.0f} MiB free for message queues"  # noqa: S108  a name
    remedy = "docker run --shm-size=1g ..., or: sudo mount -o remount,size=1g /dev/shm"
    if free is None:
        return warned(name, "missing", expected, remedy)
    found = f"{free / GIB:.1f} GiB free" if free >= GIB else f"{free / MIB:.0f} MiB free"
    return passed(name, found, expected) if free >= NEEDED_SHM_MIB * MIB else warned(name, found, expected, remedy)
