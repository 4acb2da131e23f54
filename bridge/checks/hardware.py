"""Check the GPU, its driver, GPU and host memory, and that one process can open and write another's memory.

Sharing is checked by doing it, through a memfd and over CUDA IPC: the peer processes run the functions in `PEERS`.
Not covered: the weights of a live server (`bridge verify`).
"""

import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bridge.checks import Check, failed, judged, passed, skipped, warned
from bridge.checks.probe import Facts, Gpu
from bridge.checks.software import REPLACE_CPU_BUILD, Device
from bridge.core.python_child import Ended, exit_code, run_child
from bridge.server.manifest import CudaHandle

GIB, MIB = 2**30, 2**20
TRAINING_GIB = 2.0
"""Memory that a trainer of the smallest models needs: CUDA's context, gradients and activations."""
SHARE_FOR_BOTH = 0.5
"""Share of the GPU that should be free for a server and a trainer."""
NEEDED_GIB = 4.0
"""Memory that vLLM and a trainer need in addition to the weights, with the smallest KV cache."""
NEEDED_SHM_MIB = 64.0
"""Upper bound for torch's and vLLM's message queues between processes. The weights are never in /dev/shm."""
ON_THE_CPU = "not checked: vLLM runs on the CPU"
RELOAD = "nvidia-smi must list the GPU; if it hangs or fails, reload the driver or reboot"
SHARED = "a second process wrote, the first one read it"
MEMFD, MEMFD_EXPECTED = "Shared memory", "a second process writes into the first one's memfd"
CUDA, CUDA_EXPECTED = "CUDA IPC", "a second process writes into the first one's GPU memory"
TRIAL_TIMEOUT_S, WRITER_TIMEOUT_S, MEMFD_TIMEOUT_S = 90.0, 60.0, 20.0
MODULE = "bridge.checks.hardware"
MEMFD_MARK = b"bridge was here"
MARK = 20_261
"""Number that the second process writes over CUDA IPC."""
DTYPE = "float32"
"""A dtype that a manifest may name and that represents the mark exactly."""
NUM_ELEMENTS, MARKED_ELEMENT = 1024, 321
READ = "read "
"""Prefix of the exporter's last line, before the value that it read."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
NAMESPACES = (
    "run both as one user in one pid namespace, with /proc mounted without hidepid; docker run --pid=container:NAME"
)
Cause = tuple[tuple[str, ...], str, str]
"""A cause of a driver error: texts that the error contains in lower case (any of them); the reason; the fix."""
SURE: tuple[Cause, ...] = (
    (("busy or unavailable", "exclusive"), "the GPU takes one process at a time (compute mode)",
     "sudo nvidia-smi -c DEFAULT"),
    (("out of memory",), "the GPU has no memory left for two small processes",
     "nvidia-smi lists the processes that use the GPU: stop yours, or lower --gpu-memory-utilization"),
    (("no space left", "shared memory", "shm"),
     "/dev/shm, which holds torch's reference counters, is full or missing",  # noqa: S108  a name
     "docker run --shm-size=1g ..., or: df -h /dev/shm"),
)  # fmt: skip
"""Causes whose texts cannot mean anything else."""
LIKELY: tuple[Cause, ...] = (
    (("pidfd", "operation not permitted", "permission denied"),
     "the kernel forbids one process to access the other (ptrace rules)",
     "docker run --cap-add=SYS_PTRACE ..., or on the host: sudo sysctl kernel.yama.ptrace_scope=0"),
    (("invalid", "mapping", "os call failed", "not supported", "peer"),
     "the two processes do not share the namespaces that the driver needs, or the platform has no CUDA IPC",
     "docker run --ipc=host --pid=host ... (or container:NAME for both); in WSL 2 update the driver"),
)  # fmt: skip
"""Causes whose texts also appear if the allocator uses expandable segments."""


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
        hint = "docker run --gpus all ..., or: bridge doctor --device cpu"
    elif facts.torch is not None and facts.torch_cuda is None:
        found = f"hidden from torch {facts.torch}, a CPU build"
        hint = REPLACE_CPU_BUILD
    elif visible is not None:
        found = f"none visible: CUDA_VISIBLE_DEVICES={visible!r} hides them"
        hint = "unset CUDA_VISIBLE_DEVICES"
    else:
        found = f"unusable: {facts.cuda_error or facts.trouble or 'torch finds none'}"
        hint = RELOAD
    return (failed if device == "cuda" else warned)(name, found, expected, hint)


def driver_runs_torch(facts: Facts) -> Check:
    name = "NVIDIA driver"
    needs = facts.torch_cuda
    has = facts.driver_cuda
    if needs is None:
        return skipped(name, ON_THE_CPU, "new enough for torch's CUDA")
    expected = f"CUDA {needs.partition('.')[0]}.0 or newer: torch was built for CUDA {needs}"
    if has is None:
        return failed(name, facts.trouble or "no driver answers", expected, RELOAD)
    is_new_enough = int(has.partition(".")[0]) >= int(needs.partition(".")[0])
    hint = "update the NVIDIA driver (580 or newer runs CUDA 13), or install a torch built for the driver's CUDA"
    return judged(name, is_new_enough, f"runs CUDA {has}", expected, hint)


def gpu_memory(gpu: Gpu, *, server_lives: bool) -> Check:
    name = "GPU memory"
    total_gib = gpu.total_bytes / GIB
    needed_gib = SHARE_FOR_BOTH * total_gib
    expected = f"at least {needed_gib:.0f} GiB free for a server and a trainer"
    if server_lives:
        needed_gib = TRAINING_GIB
        expected = f"at least {needed_gib:.0f} GiB free for the trainer"
    if gpu.free_bytes is None:
        hint = "nvidia-smi lists the processes that use the GPU: stop yours"
        return failed(name, f"{gpu.name}: {gpu.error or 'the driver does not report it'}", expected, hint)
    free_gib = gpu.free_bytes / GIB
    share = max(free_gib / total_gib * 0.5, 0.05)
    hint = f"stop what nvidia-smi lists, or: bridge serve-vllm --gpu-memory-utilization {share:.2f} ..."
    if server_lives:
        hint = "restart the server with less: bridge serve-vllm --gpu-memory-utilization 0.3 ..."
    found = f"{free_gib:.1f} of {total_gib:.1f} GiB free on {gpu.name}"
    return judged(name, free_gib >= needed_gib, found, expected, hint, otherwise="WARN")


def main_memory(available: int, cgroup_left: int | None) -> Check:
    left = available
    where = ""
    hint = "stop other programs, or use a smaller model"
    if cgroup_left is not None and cgroup_left < available:
        left = cgroup_left
        where = " within the container's limit"
        hint = "docker run --memory=8g ..., or use a smaller model"
    found = f"{left / GIB:.1f} GiB available{where}"
    expected = f"at least {NEEDED_GIB:.0f} GiB available in addition to the weights"
    return judged("Main memory", left >= NEEDED_GIB * GIB, found, expected, hint, otherwise="WARN")


def shm_space(free: int | None) -> Check:
    """Check that message queues fit into /dev/shm, which has `free` bytes; None: it does not exist."""
    if free is None:
        found = "missing"
    elif free >= GIB:
        found = f"{free / GIB:.1f} GiB free"
    else:
        found = f"{free / MIB:.0f} MiB free"
    has_room = (free or 0) >= NEEDED_SHM_MIB * MIB
    expected = f"at least {NEEDED_SHM_MIB:.0f} MiB free for message queues"
    hint = "docker run --shm-size=1g ..., or: sudo mount -o remount,size=1g /dev/shm"
    return judged("/dev/shm", has_room, found, expected, hint, otherwise="WARN")  # noqa: S108  a name


def over_memfd() -> Check:
    """Create a memfd as the server does, let a second process write into it, and read it."""
    try:
        descriptor = os.memfd_create("bridge-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    except OSError as error:
        hint = "sudo sysctl vm.memfd_noexec=0, or allow memfd_create in the container's seccomp profile"
        return failed(MEMFD, f"memfd_create: {error.strerror}", MEMFD_EXPECTED, hint)
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            trouble = run_child(MODULE, "write-memfd", path, timeout_s=MEMFD_TIMEOUT_S).trouble()
            mark = memory[: len(MEMFD_MARK)]
    except OSError as error:
        found = f"the memfd cannot be used: {error.strerror}"
        return failed(MEMFD, found, MEMFD_EXPECTED, "free memory; dmesg names the cause")
    finally:
        os.close(descriptor)
    fault = f": {trouble}" if trouble else f" wrote {MEMFD_MARK!r}, the first one reads {mark!r}"
    good = trouble is None and mark == MEMFD_MARK
    return judged(MEMFD, good, SHARED if good else f"the second process{fault}", MEMFD_EXPECTED, NAMESPACES)


def write_memfd(path: str) -> None:
    with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:  # noqa: PTH123
        memory[: len(MEMFD_MARK)] = MEMFD_MARK


def over_cuda_ipc(uuid: str | None, environment: Mapping[str, str]) -> Check:
    """Let two processes share memory of the GPU `uuid`."""
    if uuid is None:
        return skipped(CUDA, "needs a GPU", CUDA_EXPECTED)
    return judge_trial(run_child(MODULE, "export-cuda", uuid, timeout_s=TRIAL_TIMEOUT_S), environment)


def judge_trial(trial: Ended, environment: Mapping[str, str]) -> Check:
    """Judge from the exporter's output and exit whether both processes used the same memory, and if not, why."""
    trouble = trial.trouble()
    if trouble is None:
        value = trial.stdout.strip().rpartition("\n")[2].removeprefix(READ)
        is_shared = value == str(MARK)
        odd = f"the handle opened, but the first process read {value or 'nothing'} where the second wrote {MARK}"
        hint = "run both on the same GPU driver: bridge doctor inside the container that serves"
        return judged(CUDA, is_shared, SHARED if is_shared else odd, CUDA_EXPECTED, hint)
    expandable: list[Cause] = [  # expandable segments can cause errors with any text
        (("",), f"{variable} enables expandable segments", f"unset {variable}")
        for variable in ALLOCATOR_VARIABLES
        if EXPANDABLE in environment.get(variable, "")
    ]
    for signs, meaning, hint in (*SURE, *expandable, *LIKELY):
        if any(sign in trouble.lower() for sign in signs):
            return failed(CUDA, f"{trouble}: {meaning}", CUDA_EXPECTED, hint)
    return failed(CUDA, trouble, CUDA_EXPECTED, f"for the whole error: python -m {MODULE} export-cuda GPU-UUID")


def export_cuda(uuid: str) -> None:
    """Share a tensor of zeros, let a second process write the mark into it, and print the value found afterwards."""
    import torch

    from bridge.weights import cuda_ipc

    tensor = torch.zeros(NUM_ELEMENTS, dtype=getattr(torch, DTYPE), device=cuda_ipc.device_of(uuid))
    torch.cuda.synchronize(tensor.device)
    handle = cuda_ipc.export(tensor).model_dump_json()
    writer = run_child(MODULE, "write-cuda", uuid, timeout_s=WRITER_TIMEOUT_S, stdin=handle, own_group=False)
    if trouble := writer.trouble():
        raise RuntimeError(f"the second process: {trouble}")
    torch.cuda.synchronize(tensor.device)
    sys.stdout.write(f"{READ}{int(tensor[MARKED_ELEMENT].item())}\n")


def write_cuda(uuid: str) -> None:
    """Open the exporter's memory, whose handle is on stdin, and write the mark into it."""
    import torch

    from bridge.weights import cuda_ipc

    handle = CudaHandle.model_validate_json(sys.stdin.read())
    device = cuda_ipc.device_of(uuid)
    torch.cuda.init()  # a handle can be opened only after CUDA is initialized
    tensor = torch.empty(0, dtype=getattr(torch, handle.dtype), device=device)
    tensor.set_(cuda_ipc.open_storage(handle, device), handle.tensor_offset, handle.shape, handle.stride)
    tensor[MARKED_ELEMENT] = MARK
    torch.cuda.synchronize(device)


PEERS: Mapping[str, Callable[[str], None]] = {
    "write-memfd": write_memfd,
    "export-cuda": export_cuda,
    "write-cuda": write_cuda,
}
"""Functions that the child processes of a trial run, by name."""

if __name__ == "__main__":
    sys.exit(exit_code(PEERS[sys.argv[1]], *sys.argv[2:]))
