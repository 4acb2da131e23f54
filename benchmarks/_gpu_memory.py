"""GPU memory in use by all processes, read without creating a CUDA context.

Source: `nvml.h`, NVIDIA's management library (`nvmlDeviceGetMemoryInfo`), as used by nvidia-smi.
"""

import ctypes
import os
import time
from collections.abc import Callable


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def reader() -> Callable[[], int] | None:
    """Return a function that reads the bytes in use on the first visible GPU; None without a GPU or driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    if library.nvmlInit_v2() or _find(library, device):
        return None

    def used_bytes() -> int:
        memory = _Memory()
        failed = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        assert not failed, f"nvmlDeviceGetMemoryInfo: {failed}"
        return int(memory.used)

    return used_bytes


def settle(used_bytes: Callable[[], int], at_most: int, *, limit_s: float) -> int:
    """Wait until at most `at_most` bytes are in use, since the driver frees memory only after a process has ended."""
    deadline = time.monotonic() + limit_s
    while (used := used_bytes()) > at_most and time.monotonic() < deadline:
        time.sleep(0.2)
    return used


def _find(library: ctypes.CDLL, device: ctypes.c_void_p) -> int:
    """Look up CUDA's device 0 by index or UUID, and return NVML's error code."""
    name = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
    if name.isdecimal():
        return int(library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device)))
    return int(library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)))
