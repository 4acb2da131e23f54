"""Choose vLLM's device, and a share of the GPU that leaves room for training, without importing torch or vLLM.

Not covered: whether the GPU fits the installed vLLM (`bridge doctor`), the arithmetic (`bridge/planning/memory.py`).
Source: `cuda.h`, the CUDA driver's API (`cuInit`, `cuDeviceGetCount`, `cuDeviceTotalMem_v2`, `cuDeviceGetAttribute`),
which honors CUDA_VISIBLE_DEVICES.
"""

import ctypes
import math
from typing import NamedTuple

from bridge.checks import software
from bridge.checks.software import INSTALL, Device
from bridge.config import DeviceChoice, LoraConfig, OptimizerConfig, ServeConfig, TrainConfig
from bridge.core.host_memory import left_bytes
from bridge.errors import IncompatibleVersionError, UsageError
from bridge.planning import memory
from bridge.planning.memory import GIB, Need
from bridge.planning.model_size import ModelSize

UNKNOWN_SHARE = 0.45
"""Share of the GPU for a model of unknown size."""
CAPABILITY = (75, 76)
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
FULL = TrainConfig.of(model_name="")
"""The default trainer: it trains the server's own weights."""


def choose(requested: DeviceChoice) -> tuple[Device, str]:
    """Return where vLLM will run, and why."""
    installed = software.installed_vllm()
    gpus = gpu_memory_bytes()
    built_for = software.built_for(installed)
    if built_for is None:
        raise IncompatibleVersionError("vLLM is not installed", hint=INSTALL["cuda" if gpus else "cpu"])
    package = " ".join(next(iter(installed.items())))
    if requested == "cuda" and not gpus:
        raise UsageError("--device cuda, but the driver shows no GPU", hint="nvidia-smi; or pass --device cpu")
    if requested == "cuda" and built_for == "cpu":
        raise IncompatibleVersionError(f"--device cuda, but {package} runs only on the CPU", hint=INSTALL["cuda"])
    if requested == "cpu" and built_for == "cuda":
        raise IncompatibleVersionError(f"--device cpu, but {package} is built for GPUs", hint=INSTALL["cpu"])
    if built_for == "cuda" and not gpus:
        hint = f"nvidia-smi; or {INSTALL['cpu']}"
        raise IncompatibleVersionError(f"{package} is built for GPUs, but the driver shows none", hint=hint)
    if built_for == "cpu":
        return built_for, f"{package}, on the CPU"
    many = "s" if len(gpus) > 1 else ""
    return built_for, f"{package}, {len(gpus)} GPU{many} of {gpus[0] / 2**30:.0f} GiB"


def gpu_memory_bytes() -> list[int]:
    """Return the memory of every visible GPU in bytes; empty without a GPU or driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    sizes = list[int]()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device = ctypes.c_int()
        size = ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        sizes.append(size.value)
    return sizes


def capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the visible GPUs; None without a GPU or driver."""
    capabilities = list[tuple[int, int]]()
    for index in range(len(gpu_memory_bytes())):
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        values = (ctypes.c_int(), ctypes.c_int())
        driver.cuDeviceGet(ctypes.byref(device), index)
        for attribute, value in zip(CAPABILITY, values, strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capabilities.append((values[0].value, values[1].value))
    return min(capabilities, default=None)


class MemoryShare(NamedTuple):
    """vLLM's share of one GPU."""

    share: float
    """Value of `--gpu-memory-utilization`."""
    reason: str
    """How the value was derived."""


def derive(serve: ServeConfig, trainer: TrainConfig = FULL, *, gpu_bytes: int | None = None) -> MemoryShare:
    """Derive vLLM's share of a GPU from the size of the model and the choices of its `trainer`.

    `gpu_bytes` is the GPU's memory; None: that of the smallest visible one.
    """
    if gpu_bytes is None:
        gpu_bytes = min(gpu_memory_bytes())
    tensor_parallel_size = serve.tensor_parallel_size
    try:
        size = ModelSize.of(serve.model).quantized(serve.quantization)
    except UsageError as error:
        return MemoryShare(UNKNOWN_SHARE, f"the size of {serve.model} is unknown until it is loaded: {error.message}")
    if trainer.trains_in_server:
        trainer = trainer.changed(gpus=max(1, trainer.gpus // tensor_parallel_size))  # replicas
    need = Need.of(size, trainer, gpu_bytes=gpu_bytes, host_bytes=left_bytes(), num_ranks=tensor_parallel_size)
    if need.apart:
        return MemoryShare(memory.LARGEST_SHARE, "the trainer is on another device")
    # vLLM does not start if its KV cache is too small for the longest sequence
    longest = memory.sequence_tokens(trainer.sampling)
    max_model_len = serve.max_model_len or size.max_tokens
    least_kv_tokens = memory.least_kv_tokens(trainer.completions_per_replica, longest, max_model_len)
    least_kv = need.kv_per_token * least_kv_tokens
    fitted = memory.fit(need, least_kv=least_kv, kv_sleep=trainer.publishing.kv_sleep)
    exactly = min(memory.share(need, fitted, least_kv=least_kv), memory.LARGEST_SHARE)
    fixed = need.own + need.state + need.gradients + need.temporaries
    reason = (
        f"{size.num_params / 1e9:.2f}B parameters: of {need.gpu / GIB:.0f} GiB training needs {fixed / GIB:.0f}, "
        f"and at least {need.least_activations / GIB:.0f} for activations"
    )
    if fitted.asleep:
        reason += ", while the KV cache sleeps"
    if fitted.lacking:
        reason += f"; {fitted.lacking / GIB:.0f} GiB more than available: see bridge plan"
    return MemoryShare(math.floor(100 * exactly) / 100, reason)


def expected(config: ServeConfig) -> TrainConfig:
    """Return the trainer that `bridge serve-vllm` leaves room for: one of an adapter, or of all weights."""
    if config.max_lora_rank is None:
        return FULL
    if config.lora_experts and config.max_lora_rank % 8:
        raise UsageError(
            f"--max-lora-rank {config.max_lora_rank}: the rank of adapters of routed experts must be a multiple of 8",
            hint=f"--max-lora-rank {math.ceil(config.max_lora_rank / 8) * 8}",
        )
    names = "all-linear,experts" if config.lora_experts else "all-linear"
    return TrainConfig.of(model_name="", mode="lora_only", lora_r=config.max_lora_rank, lora_target_modules=names)


def check_host(model_name: str, optimizer: OptimizerConfig, mode: str, lora: LoraConfig, *, hosts: int) -> None:
    """Check that the state of an offloaded optimizer fits into this host's free memory."""
    if not optimizer.offload:
        return
    try:
        size = ModelSize.of(model_name)
    except UsageError:
        return  # the size is unknown until the model is loaded
    needed = memory.host_state_bytes(size, optimizer, mode, lora, hosts=hosts)
    left = left_bytes()
    if needed > left:
        raise UsageError(
            f"--offload-optimizer takes {needed / GIB:.1f} GiB of host memory, but only {left / GIB:.1f} GiB are left",
            hint="leave it out, and use --optimizer adamw-8bit or adamw-4bit: their state is small; see bridge plan",
        )
