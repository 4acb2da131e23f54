"""Choose the device of vLLM, without importing torch or vLLM.

Not covered: whether the GPU fits the installed vLLM (`bridge doctor`).
Source: `cuda.h`, the CUDA driver's API (`cuInit`, `cuDeviceGetCount`, `cuDeviceTotalMem_v2`), which honors
CUDA_VISIBLE_DEVICES.
"""

import ctypes
from typing import Literal

from bridge.checks import software
from bridge.checks.software import INSTALL, Device
from bridge.errors import IncompatibleVersionError, UsageError


def choose(asked: Literal["auto", "cpu", "cuda"]) -> tuple[Device, str]:
    """Return where vLLM will run, and why.

    Raises:
        IncompatibleVersionError: vLLM is not installed, or is built for the other kind of device.
        UsageError: a GPU is requested, but there is none.
    """
    installed, gpus = software.installed_vllm(), gpu_memory_bytes()
    built_for = software.built_for(installed)
    if built_for is None:
        raise IncompatibleVersionError("vLLM is not installed", remedy=INSTALL["cuda" if gpus else "cpu"])
    package = " ".join(next(iter(installed.items())))
    if asked == "cuda" and not gpus:
        raise UsageError("--device cuda, but the driver shows no GPU", remedy="nvidia-smi; or pass --device cpu")
    if asked == "cuda" and built_for == "cpu":
        raise IncompatibleVersionError(f"--device cuda, but {package} runs only on the CPU", remedy=INSTALL["cuda"])
    if asked == "cpu" and built_for == "cuda":
        raise IncompatibleVersionError(f"--device cpu, but {package} is built for GPUs", remedy=INSTALL["cpu"])
    if built_for == "cuda" and not gpus:
        remedy = f"nvidia-smi; or {INSTALL['cpu']}"
        raise IncompatibleVersionError(f"{package} is built for GPUs, and the driver shows none", remedy=remedy)
    many = "s" if len(gpus) > 1 else ""
    where = f"{len(gpus)} GPU{many} of {gpus[0] / 2**30:.0f} GiB" if built_for == "cuda" else "on the CPU"
    return built_for, f"{package}, {where}"


def gpu_memory_bytes() -> list[int]:
    """Return the memory of every visible GPU in bytes; empty without a GPU or driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, sizes = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        sizes.append(size.value)
    return sizes
