"""Shared memory on the CPU: one anonymous file per server rank, which other processes open by path.

The file is a memfd: it leaves no name to clean up after a crash, is not limited by the size of `/dev/shm` (64 MiB in a
default container), and its memory is freed when the last process unmaps it. Its size is sealed, so that it cannot
shrink under a mapping.

Not covered: the layout within the file (`bridge/server/manifest.py`), GPU memory (`cuda_ipc.py`).
"""

import fcntl
import mmap
import os
from typing import NamedTuple

import torch

from bridge.core import host_memory
from bridge.errors import AttachError

ALIGNMENT_BYTES = 256
"""Alignment of every storage, the same as in CUDA's allocator."""


class SharedBlock(NamedTuple):
    """A shared file of this process and its mapping."""

    path: str  # other processes of the same user open it by this path
    storage: torch.UntypedStorage  # the entire file


def allocate(num_bytes: int) -> SharedBlock:
    """Create and map a shared file of `num_bytes`; it lives as long as this process or a mapping does."""
    left = host_memory.left_bytes()
    if num_bytes > left:  # Linux would not refuse the allocation, but kill a process later
        raise _no_room(num_bytes, f"{left / 2**30:.2f} GiB are left")
    descriptor = os.memfd_create("bridge-weights", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise _no_room(num_bytes, os.strerror(error.errno or 0)) from error
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return SharedBlock(f"/proc/{os.getpid()}/fd/{descriptor}", _map(descriptor, num_bytes))


def open_storage(path: str, num_bytes: int) -> torch.UntypedStorage:
    """Map the first `num_bytes` of another process's shared file, readable and writable."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise AttachError(
            f"cannot open the server's weights at {path}: {error.strerror}",
            hint="run the trainer as the server's user, on its host and in its pid namespace (bridge doctor)",
        ) from error
    try:
        if not _is_sealed(descriptor):
            raise AttachError(
                f"{path} is not a server's shared memory: its size is not sealed",
                hint="the manifest was edited or is stale: restart the server, which rewrites it",
            )
        size = os.fstat(descriptor).st_size
        if size < num_bytes:
            raise AttachError(
                f"the server's weights at {path} have {size} bytes, expected at least {num_bytes}",
                hint="the manifest belongs to a different server: restart this one, which rewrites it",
            )
        return _map(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _no_room(num_bytes: int, reason: str) -> AttachError:
    return AttachError(
        f"{num_bytes / 2**30:.2f} GiB of shared memory for the weights are not available ({reason})",
        hint="free memory, or use a smaller model; bridge doctor shows what is available",
    )


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # only shared memory has seals
        return False


def _map(descriptor: int, num_bytes: int) -> torch.UntypedStorage:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8).untyped_storage()
