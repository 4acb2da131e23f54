"""Check that one process can open and write the memory of another, by doing it: over CUDA IPC, or through a memfd.

As a program (`python -m bridge.checks.sharing ROLE PLACE`) it is the trial's other processes.

Not covered: the weights of a live server (`bridge verify`).
"""

import fcntl
import mmap
import os
import sys
from collections.abc import Mapping

from bridge.checks.child import Ended, refuse, run_module
from bridge.checks.result import Check, failed, passed, skipped
from bridge.errors import AttachError

MODULE = "bridge.checks.sharing"
SHARED = "a second process wrote, the first one read it"
MEMFD, MEMFD_EXPECTED = "Shared memory", "a second process writes into the first one's memfd"
CUDA, CUDA_EXPECTED = "CUDA IPC", "a second process writes into the first one's GPU memory"
TRIAL_TIMEOUT_S, WRITER_TIMEOUT_S, MEMFD_TIMEOUT_S = 90.0, 60.0, 20.0
MEMFD_MARK = b"bridge was here"
MARK = 20_261
"""The number that the second process writes over CUDA IPC."""
DTYPE = "float32"
"""A type that a manifest may name and that holds the mark exactly."""
NUM_ELEMENTS, PLACE = 1024, 321
READ = "read "
"""Prefix of the exporter's last line, before the value that it read."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
NAMESPACES = (
    "run both as one user in one pid namespace, with /proc mounted without hidepid; docker run --pid=container:NAME"
)
Cause = tuple[tuple[str, ...], str, str]
"""Why the driver refuses: any of these signs in the error, in lower case; the reason in words; the fix."""
SURE: tuple[Cause, ...] = (
    (("busy or unavailable", "exclusive"), "the GPU takes one process at a time (compute mode)",
     "sudo nvidia-smi -c DEFAULT"),
    (("out of memory",), "the GPU has no memory left for two small processes",
     "nvidia-smi lists the processes that use the GPU: stop yours, or lower --gpu-memory-utilization"),
    (("no space left", "shared memory", "shm"),
     "/dev/shm, which holds torch's reference counters, is full or missing",  # noqa: S108  a name
     "docker run --shm-size=1g ..., or: df -h /dev/shm"),
)  # fmt: skip
"""Causes whose signs have no other meaning."""
LIKELY: tuple[Cause, ...] = (
    (("pidfd", "operation not permitted", "permission denied"),
     "the kernel forbids one process to reach into the other (ptrace rules)",
     "docker run --cap-add=SYS_PTRACE ..., or on the host: sudo sysctl kernel.yama.ptrace_scope=0"),
    (("invalid", "mapping", "os call failed", "not supported", "peer"),
     "the two processes do not share the namespaces that the driver needs, or the platform has no CUDA IPC",
     "docker run --ipc=host --pid=host ... (or container:NAME for both); in WSL 2 update the driver"),
)  # fmt: skip
"""Causes whose signs also appear if the allocator's segments are expandable."""


def over_memfd() -> Check:
    """Create a memfd as the server does, let a second process write into it, and read it."""
    try:
        descriptor = os.memfd_create("bridge-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    except OSError as error:
        remedy = "sudo sysctl vm.memfd_noexec=0, or allow memfd_create in the container's seccomp profile"
        return failed(MEMFD, f"memfd_create: {error.strerror}", MEMFD_EXPECTED, remedy)
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            trouble = run_module(MODULE, "memfd", path, timeout_s=MEMFD_TIMEOUT_S).trouble()
            found = memory[: len(MEMFD_MARK)]
    except OSError as error:
        remedy = "free memory; dmesg names the cause"
        return failed(MEMFD, f"the memfd cannot be used: {error.strerror}", MEMFD_EXPECTED, remedy)
    finally:
        os.close(descriptor)
    if trouble is None and found == MEMFD_MARK:
        return passed(MEMFD, SHARED, MEMFD_EXPECTED)
    words = f": {trouble}" if trouble else f" wrote {MEMFD_MARK!r}, the first one reads {found!r}"
    return failed(MEMFD, f"the second process{words}", MEMFD_EXPECTED, NAMESPACES)


def over_cuda_ipc(uuid: str | None, environment: Mapping[str, str]) -> Check:
    """Let two processes share memory of the GPU `uuid`."""
    if uuid is None:
        return skipped(CUDA, "needs a GPU", CUDA_EXPECTED)
    return judge(run_module(MODULE, "export", uuid, timeout_s=TRIAL_TIMEOUT_S), environment)


def judge(trial: Ended, environment: Mapping[str, str]) -> Check:
    """Judge from the exporter's end whether both processes used the same memory, and if not, why."""
    trouble = trial.trouble()
    if trouble is None:
        value = trial.stdout.strip().rpartition("\n")[2].removeprefix(READ)
        if value == str(MARK):
            return passed(CUDA, SHARED, CUDA_EXPECTED)
        found = f"the handle opened, but the first process read {value or 'nothing'} where the second wrote {MARK}"
        remedy = "run both on the same GPU driver: bridge doctor inside the container that serves"
        return failed(CUDA, found, CUDA_EXPECTED, remedy)
    expandable: list[Cause] = [  # these can cause any error
        (("",), f"{variable} enables expandable segments", f"unset {variable}")
        for variable in ALLOCATOR_VARIABLES
        if EXPANDABLE in environment.get(variable, "")
    ]
    for signs, meaning, remedy in (*SURE, *expandable, *LIKELY):
        if any(sign in trouble.lower() for sign in signs):
            return failed(CUDA, f"{trouble}: {meaning}", CUDA_EXPECTED, remedy)
    return failed(CUDA, trouble, CUDA_EXPECTED, f"for the whole error: python -m {MODULE} export GPU-UUID")


def _write_memfd(path: str) -> None:
    with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:  # noqa: PTH123
        memory[: len(MEMFD_MARK)] = MEMFD_MARK


def _export(uuid: str) -> None:
    """Share zeros, let another process write the mark, and print what is there then."""
    import torch

    from bridge.weights import cuda_ipc

    tensor = torch.zeros(NUM_ELEMENTS, dtype=getattr(torch, DTYPE), device=cuda_ipc.device_of(uuid))
    torch.cuda.synchronize(tensor.device)
    handle = cuda_ipc.export(tensor).model_dump_json()
    writer = run_module(MODULE, "write", uuid, timeout_s=WRITER_TIMEOUT_S, stdin=handle, own_group=False)
    if trouble := writer.trouble():
        raise RuntimeError(f"the second process: {trouble}")
    torch.cuda.synchronize(tensor.device)
    sys.stdout.write(f"{READ}{int(tensor[PLACE].item())}\n")


def _write(uuid: str) -> None:
    """Open the exporter's memory, whose handle is on stdin, and write the mark into it."""
    import torch

    from bridge.server.manifest import CudaHandle
    from bridge.weights import cuda_ipc

    handle = CudaHandle.model_validate_json(sys.stdin.read())
    device = cuda_ipc.device_of(uuid)
    torch.cuda.init()  # the opener expects an initialized CUDA
    tensor = torch.empty(0, dtype=getattr(torch, handle.dtype), device=device)
    tensor.set_(cuda_ipc.open_storage(handle, device), handle.tensor_offset, handle.shape, handle.stride)
    tensor[PLACE] = MARK
    torch.cuda.synchronize(device)


ROLES = {"memfd": _write_memfd, "export": _export, "write": _write}
"""The other processes of a trial; each works on the memfd or the GPU at its place."""


def main(role: str, place: str) -> int:
    """Be one of the trial's other processes."""
    try:
        ROLES[role](place)
    except (AttachError, OSError, RuntimeError, ValueError) as error:
        return refuse(str(getattr(error, "message", error)).strip().partition("\n")[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
