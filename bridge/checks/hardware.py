"""Check the GPU, its driver, and the memory of GPU and host.

Not covered: sharing memory between two processes (`sharing.py`).
"""

from collections.abc import Mapping
from pathlib import Path

from bridge.checks.facts import Facts, Gpu
from bridge.checks.result import Check, failed, judged, passed, skipped, warned
from bridge.checks.software import REPLACE_CPU_BUILD, Device

GIB, MIB = 2**30, 2**20
TRAINING_GIB = 2.0
"""Needed by a trainer of the smallest models: CUDA's context, gradients and activations."""
SHARE_FOR_BOTH = 0.5
"""Share of the GPU that should be free for a server and a trainer."""
NEEDED_GIB = 4.0
"""Needed by vLLM and a trainer beside the weights, with the smallest KV cache."""
NEEDED_SHM_MIB = 64.0
"""Upper bound for torch's and vLLM's message queues between processes. The weights are never in /dev/shm."""
ON_THE_CPU = "not checked: vLLM runs on the CPU"
RELOAD = "nvidia-smi must list the GPU; if it hangs or fails, reload the driver or reboot"


def nvidia_driver_loaded() -> bool:
    """Return whether the kernel has an NVIDIA driver, even if torch cannot use it."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def gpu_visible(facts: Facts, device: Device, environment: Mapping[str, str], *, driver_loaded: bool) -> Check:
    name, expected = "GPU", "at least one NVIDIA GPU that torch can use"
    if facts.gpus:
        found = ", ".join(f"{gpu.name} ({gpu.total_bytes / GIB:.0f} GiB, {gpu.uuid})" for gpu in facts.gpus)
        return passed(name, found, expected) if device == "cuda" else skipped(name, f"{found}; {ON_THE_CPU}", expected)
    if device == "cpu" and not driver_loaded:
        return skipped(name, "no NVIDIA GPU in this machine; vLLM runs on the CPU", expected)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not driver_loaded:
        found = "no NVIDIA driver in this machine or container"
        remedy = "docker run --gpus all ..., or: bridge doctor --device cpu"
    elif facts.torch is not None and facts.torch_cuda is None:
        found, remedy = f"hidden from torch {facts.torch}, a CPU build", REPLACE_CPU_BUILD
    elif visible is not None:
        found = f"none visible: CUDA_VISIBLE_DEVICES={visible!r} hides them"
        remedy = "unset CUDA_VISIBLE_DEVICES"
    else:
        found, remedy = f"unusable: {facts.cuda_error or facts.trouble or 'torch finds none'}", RELOAD
    return (failed if device == "cuda" else warned)(name, found, expected, remedy)


def driver_runs_torch(facts: Facts) -> Check:
    name, needs, has = "NVIDIA driver", facts.torch_cuda, facts.driver_cuda
    if needs is None:
        return skipped(name, ON_THE_CPU, "new enough for torch's CUDA")
    expected = f"CUDA {needs.partition('.')[0]}.0 or newer: torch was built for CUDA {needs}"
    if has is None:
        return failed(name, facts.trouble or "no driver answers", expected, RELOAD)
    is_new_enough = int(has.partition(".")[0]) >= int(needs.partition(".")[0])
    remedy = "update the NVIDIA driver (580 or newer runs CUDA 13), or install a torch built for the driver's CUDA"
    return judged(name, is_new_enough, f"runs CUDA {has}", expected, remedy)


def gpu_memory(gpu: Gpu, *, server_lives: bool) -> Check:
    name, total_gib = "GPU memory", gpu.total_bytes / GIB
    needed_gib = TRAINING_GIB if server_lives else SHARE_FOR_BOTH * total_gib
    expected = f"at least {needed_gib:.0f} GiB free for {'the trainer' if server_lives else 'a server and a trainer'}"
    if gpu.free_bytes is None:
        remedy = "nvidia-smi lists the processes that use the GPU: stop yours"
        return failed(name, f"{gpu.name}: {gpu.error or 'the driver does not report it'}", expected, remedy)
    free_gib = gpu.free_bytes / GIB
    share = max(free_gib / total_gib * 0.5, 0.05)
    remedy = f"stop what nvidia-smi lists, or: bridge serve-vllm --gpu-memory-utilization {share:.2f} ..."
    if server_lives:
        remedy = "restart the server with less: bridge serve-vllm --gpu-memory-utilization 0.3 ..."
    found = f"{free_gib:.1f} of {total_gib:.1f} GiB free on {gpu.name}"
    return judged(name, free_gib >= needed_gib, found, expected, remedy, otherwise="WARN")


def main_memory(available: int, cgroup_left: int | None) -> Check:
    limited = cgroup_left is not None and cgroup_left < available
    left = min(available, available if cgroup_left is None else cgroup_left)
    found = f"{left / GIB:.1f} GiB available" + (" within the container's limit" if limited else "")
    expected = f"at least {NEEDED_GIB:.0f} GiB available beside the weights"
    remedy = f"{'docker run --memory=8g ...' if limited else 'stop other programs'}, or use a smaller model"
    return judged("Main memory", left >= NEEDED_GIB * GIB, found, expected, remedy, otherwise="WARN")


def shm_space(free: int | None) -> Check:
    """Check that message queues fit into /dev/shm, which has `free` bytes; None: it does not exist."""
    name, expected = "/dev/shm", f"at least {NEEDED_SHM_MIB:.0f} MiB free for message queues"  # noqa: S108  a name
    remedy = "docker run --shm-size=1g ..., or: sudo mount -o remount,size=1g /dev/shm"
    size = free or 0
    found = f"{size / GIB:.1f} GiB free" if size >= GIB else f"{size / MIB:.0f} MiB free"
    found = "missing" if free is None else found
    return judged(name, size >= NEEDED_SHM_MIB * MIB, found, expected, remedy, otherwise="WARN")
