"""Check that one process can open and write the memory of another, by doing it: over CUDA IPC, or through a memfd.

As a program (`python -m bridge.checks.sharing ROLE ...`) it is the trial's other processes.

Not covered: the weights of a live server (`bridge verify`).
"""

import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.checks.child import Ended, refuse, run_module
from bridge.checks.result import Check, failed, passed, skipped
from bridge.errors import AttachError

if TYPE_CHECKING:
    from bridge.server.manifest import CudaHandle

MODULE = "bridge.checks.sharing"
SHARED = "a second process wrote, the first one read it"
MEMFD, MEMFD_EXPECTED = "Shared memory", "a second process writes into the first one's memfd"
CUDA, CUDA_EXPECTED = "CUDA IPC", "a second process writes into the first one's GPU memory"
TRIAL_TIMEOUT_S, WRITER_TIMEOUT_S = 90.0, 60.0
MEMFD_TIMEOUT_S = 20.0
MEMFD_MARK = b"bridge was here"
MARK = 20_261
"""What the second process writes over CUDA IPC."""
DTYPE = "float32"
"""One that a manifest may name, and that holds the mark."""
NUM_ELEMENTS, PLACE = 1024, 321
READ = "read "
"""Begins the exporter's last line, before the value that it read."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
NAMESPACES = (
    "run both as one user in one pid namespace, with /proc mounted without hidepid; docker run --pid=container:NAME"
)


class Cause(NamedTuple):
    """A known reason why the driver refuses."""

    signs: tuple[str, ...]
    """Any of these in the error, in lower case."""
    meaning: str
    """The reason in words."""
    remedy: str
    """How to fix it."""


SURE = (
    Cause(
        ("busy or unavailable", "exclusive"),
        "the GPU takes one process at a time (compute mode)",
        "sudo nvidia-smi -c DEFAULT",
    ),
    Cause(
        ("out of memory",),
        "no memory is left on the GPU for two small processes",
        "nvidia-smi names the processes that use the GPU: stop yours, or lower --gpu-memory-utilization",
    ),
    Cause(
        ("no space left", "shared memory", "shm"),
        "/dev/shm, which holds torch's reference counters, is full or missing",  # noqa: S108  a name
        "docker run --shm-size=1g ..., or: df -h /dev/shm",
    ),
)
"""Their signs have no other meaning."""
LIKELY = (
    Cause(
        ("pidfd", "operation not permitted", "permission denied"),
        "the kernel forbids one process to reach into the other (ptrace rules)",
        "docker run --cap-add=SYS_PTRACE ..., or on the host: sudo sysctl kernel.yama.ptrace_scope=0",
    ),
    Cause(
        ("invalid", "mapping", "os call failed", "not supported", "peer"),
        "the two processes do not share the namespaces that the driver needs, or the platform has no CUDA IPC",
        "docker run --ipc=host --pid=host ... (or container:NAME for both); in WSL 2 update the driver",
    ),
)
"""Their signs also appear when the allocator's segments are expandable."""


def over_memfd(
    create: Callable[[str, int], int] = os.memfd_create,
    writer: Callable[[str], Ended] = lambda path: run_module(MODULE, "memfd", path, timeout_s=MEMFD_TIMEOUT_S),
) -> Check:
    """Create a memfd as the server does, let a second process write into it, and read it."""
    try:
        descriptor = create("bridge-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    except OSError as error:
        remedy = "sudo sysctl vm.memfd_noexec=0, or allow memfd_create in the container's seccomp profile"
        return failed(MEMFD, f"memfd_create: {error.strerror}", MEMFD_EXPECTED, remedy)
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            trouble = writer(f"/proc/{os.getpid()}/fd/{descriptor}").trouble()
            found = memory[: len(MEMFD_MARK)]
    except OSError as error:
        remedy = "free memory; dmesg names the cause"
        return failed(MEMFD, f"the memfd cannot be used: {error.strerror}", MEMFD_EXPECTED, remedy)
    finally:
        os.close(descriptor)
    if trouble:
        return failed(MEMFD, f"the second process: {trouble}", MEMFD_EXPECTED, NAMESPACES)
    if found != MEMFD_MARK:
        words = f"the second process wrote {MEMFD_MARK!r}, the first one reads {found!r}"
        return failed(MEMFD, words, MEMFD_EXPECTED, NAMESPACES)
    return passed(MEMFD, SHARED, MEMFD_EXPECTED)


def over_cuda_ipc(uuid: str | None, environment: Mapping[str, str]) -> Check:
    """Let two processes share memory of the GPU `uuid`."""
    if uuid is None:
        return skipped(CUDA, "needs a GPU", CUDA_EXPECTED)
    return judge(run_module(MODULE, "export", uuid, timeout_s=TRIAL_TIMEOUT_S), environment)


def judge(trial: Ended, environment: Mapping[str, str]) -> Check:
    """Tell from the exporter's end whether the memory was one, and if not, why."""
    trouble = trial.trouble()
    if trouble is None:
        found = trial.stdout.strip().rpartition("\n")[2].removeprefix(READ)
        if found == str(MARK):
            return passed(CUDA, SHARED, CUDA_EXPECTED)
        return failed(
            CUDA,
            f"the handle opened, but the first process read {found or 'nothing'} where the second wrote {MARK}",
            CUDA_EXPECTED,
            "run both on the same GPU driver: bridge doctor inside the container that serves",
        )
    expandable = [  # then any error may come from them
        Cause(("",), f"{variable} asks for expandable segments", f"unset {variable}")
        for variable in ALLOCATOR_VARIABLES
        if EXPANDABLE in environment.get(variable, "")
    ]
    for cause in (*SURE, *expandable, *LIKELY):
        if any(sign in trouble.lower() for sign in cause.signs):
            return failed(CUDA, f"{trouble}: {cause.meaning}", CUDA_EXPECTED, cause.remedy)
    return failed(
        CUDA, trouble, CUDA_EXPECTED, f"run it by hand for the whole error: python -m {MODULE} export GPU-UUID"
    )


def _write_memfd(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with mmap.mmap(descriptor, 0) as memory:
            memory[: len(MEMFD_MARK)] = MEMFD_MARK
    except (OSError, ValueError) as error:
        return refuse(str(error))
    return 0


def _export(uuid: str) -> int:
    """Share zeros, let another process write the mark, and print what is there then: one memory, if it is the mark."""
    import torch

    from bridge.weights import cuda_ipc

    tensor = torch.zeros(NUM_ELEMENTS, dtype=getattr(torch, DTYPE), device=cuda_ipc.device_of(uuid))
    torch.cuda.synchronize(tensor.device)
    handle = cuda_ipc.export(tensor).model_dump_json()
    writer = run_module(MODULE, "write", uuid, timeout_s=WRITER_TIMEOUT_S, stdin=handle, own_group=False)
    if trouble := writer.trouble():
        return refuse(f"the second process: {trouble}")
    torch.cuda.synchronize(tensor.device)
    sys.stdout.write(f"{READ}{int(tensor[PLACE].item())}\n")
    return 0


def _write(uuid: str, handle: "CudaHandle") -> int:
    """Open the exporter's memory and write the mark into it."""
    import torch

    from bridge.weights import cuda_ipc

    device = cuda_ipc.device_of(uuid)
    starter: Any = torch.cuda
    starter.init()  # the opener expects a started CUDA
    tensor = torch.empty(0, dtype=getattr(torch, handle.dtype), device=device)
    tensor.set_(cuda_ipc.open_storage(handle, device), handle.tensor_offset, handle.shape, handle.stride)
    tensor[PLACE] = MARK
    torch.cuda.synchronize(device)
    return 0


def main(role: str, place: str) -> int:
    """Be the trial's process of the given role, on the memfd or the GPU at `place`."""
    if role == "memfd":
        return _write_memfd(place)
    from bridge.server.manifest import CudaHandle

    try:
        return _export(place) if role == "export" else _write(place, CudaHandle.model_validate_json(sys.stdin.read()))
    except (AttachError, RuntimeError) as error:
        return refuse(str(getattr(error, "message", error)).strip().partition("\n")[0])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
