"""Shared memory on the CPU: one anonymous file per server rank, opened by path from another process.

The file is a memfd: it has no name to clean up after a crash, is not bounded by the size of
`/dev/shm` (64 MiB in a default container), and its memory lives exactly as long as somebody maps it.
Its size is sealed, so a mapping can never be cut short.

Not covered: what lies where in the file (`bridge/server/manifest.py`), GPU memory (`cuda_ipc.py`).
"""

import fcntl
import mmap
import os
from dataclasses import dataclass

import torch

from bridge.core.memory import available_bytes, cgroup_left_bytes
from bridge.errors import AttachError

ALIGNMENT_BYTES = 256
"""Every storage starts at a multiple of this, as CUDA's allocator aligns too."""


@dataclass(frozen=True, kw_only=True)
class SharedBlock:
    """One shared file of this process, mapped."""

    path: str
    """Path by which another process of the same user opens it."""
    storage: torch.UntypedStorage
    """The whole file as one storage."""


def allocate(num_bytes: int) -> SharedBlock:
    """Create and map a shared file of `num_bytes`; it lives as long as this process or a mapping does.

    Raises:
        AttachError: the system has not that much memory.
    """
    left = _left_bytes()
    if num_bytes > left:  # asked for more, Linux does not refuse: it kills a process
        raise _no_room(num_bytes, f"{left / 2**30:.2f} GiB are left")
    descriptor = os.memfd_create("bridge-weights", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise _no_room(num_bytes, os.strerror(error.errno or 0)) from error
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return SharedBlock(path=f"/proc/{os.getpid()}/fd/{descriptor}", storage=_map(descriptor, num_bytes))


def open_storage(path: str, num_bytes: int) -> torch.UntypedStorage:
    """Map the first `num_bytes` of another process's shared file, readable and writable.

    Raises:
        AttachError: the file is gone, belongs to somebody else, is none of ours, or is smaller than expected.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise AttachError(
            f"cannot open the server's weights at {path}: {error.strerror}",
            remedy="run the trainer as the server's user, on its host and in its pid namespace (bridge doctor)",
        ) from error
    try:
        if not _is_sealed(descriptor):
            raise AttachError(
                f"{path} is no shared memory of a server: its size is not sealed",
                remedy="the manifest was edited or is stale: restart the server, which writes it anew",
            )
        found = os.fstat(descriptor).st_size
        if found < num_bytes:
            raise AttachError(
                f"the server's weights at {path} have {found} bytes, expected at least {num_bytes}",
                remedy="the manifest is of another server: restart the server, which writes it anew",
            )
        return _map(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _left_bytes() -> int:
    limit = cgroup_left_bytes()
    return available_bytes() if limit is None else min(limit, available_bytes())


def _no_room(num_bytes: int, reason: str) -> AttachError:
    return AttachError(
        f"{num_bytes / 2**30:.2f} GiB of shared memory for the weights are not to be had ({reason})",
        remedy="free memory, or take a smaller model; bridge doctor shows what is available",
    )


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # only shared memory knows seals
        return False


def _map(descriptor: int, num_bytes: int) -> torch.UntypedStorage:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8).untyped_storage()
