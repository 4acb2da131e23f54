"""Shared memory: one file, mapped by two real processes, that cannot be truncated."""

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from bridge.core.host_memory import available_bytes
from bridge.errors import AttachError
from bridge.weights import shared_memory
from bridge.weights.shared_memory import SharedBlock, allocate, open_storage

WRITE = """
import sys, torch
from bridge.weights.shared_memory import open_storage
words = torch.empty(0, dtype=torch.int32).set_(open_storage(sys.argv[1], int(sys.argv[2])))
print(words[0].item(), flush=True)
words[1] = 42
"""
EXPORT = """
import sys, torch
from bridge.weights.shared_memory import allocate
block = allocate(4096)
torch.empty(0, dtype=torch.int32).set_(block.storage)[0] = 7
print(block.path, flush=True)
input()
"""


def words(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32).set_(storage)


def descriptor(block: SharedBlock) -> int:
    return int(Path(block.path).name)


def open_files() -> Counter[tuple[int, int]]:
    """Count this process's descriptors of each file; the garbage collector may close those of other tests meanwhile."""
    counts: Counter[tuple[int, int]] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            status = path.stat()
            counts[status.st_dev, status.st_ino] += 1
    return counts


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_writes_by_another_process_are_visible() -> None:
    block = allocate(4096)
    assert block.path.startswith(f"/proc/{os.getpid()}/fd/")
    words(block.storage)[0] = 7
    assert words(block.storage)[1] == 0
    output, _ = python(WRITE, block.path, "4096").communicate(timeout=60)
    assert output == "7\n"
    assert words(block.storage)[:2].tolist() == [7, 42]


def test_mapping_survives_the_exporters_death() -> None:
    with python(EXPORT) as exporter:
        assert exporter.stdout is not None
        path = exporter.stdout.readline().strip()
        mapped = words(open_storage(path, 4096))
        assert mapped[0] == 7
        exporter.send_signal(signal.SIGKILL)
        exporter.wait()
    assert not Path(path).exists()
    assert mapped[0] == 7
    mapped[0] = 8
    assert mapped.sum() == 8
    with pytest.raises(AttachError, match="cannot open"):
        open_storage(path, 4096)


def test_two_mappings_in_one_process_share_memory() -> None:
    block = allocate(256)
    one, other = words(open_storage(block.path, 256)), words(open_storage(block.path, 128))
    one[3] = 5
    assert other[3] == words(block.storage)[3] == 5
    assert one.data_ptr() != other.data_ptr()


def test_mapping_lives_as_long_as_its_tensors() -> None:
    block = allocate(256)
    tensor = words(open_storage(block.path, 256))[5:6]
    words(block.storage)[5] = 3
    assert tensor.item() == 3


def test_shared_file_that_is_too_small_is_refused() -> None:
    block = allocate(256)
    with pytest.raises(AttachError, match="256 bytes, expected at least 257"):
        open_storage(block.path, 257)


def test_shared_file_size_is_sealed() -> None:
    block = allocate(8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor(block), size)
    assert os.fstat(descriptor(block)).st_size == 8192


def test_child_process_does_not_inherit_the_descriptor() -> None:
    block = allocate(256)
    assert not os.get_inheritable(descriptor(block))
    look = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False)
    assert "bridge-weights" not in look.stdout
    assert "bridge-weights" in str(Path(block.path).readlink())


def test_opened_file_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    block = allocate(256)
    (tmp_path / "plain").write_bytes(bytes(4096))
    before = open_files()
    storage = open_storage(block.path, 256)
    for path, size in ((block.path, 10**6), (str(tmp_path / "plain"), 4096)):
        with pytest.raises(AttachError):
            open_storage(path, size)
    assert (open_files() - before).total() <= 1  # the mapping's own descriptor
    assert storage.nbytes() == 256


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_foreign_memory_is_refused_and_not_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notes"
    if kind == "file":
        path.write_bytes(b"mine" * 1024)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(AttachError, match=str(path)):
        open_storage(str(path), 4096)
    assert kind != "file" or path.read_bytes() == b"mine" * 1024


def test_unsealed_memfd_is_refused() -> None:
    unsealed = os.memfd_create("somebody-elses", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, 4096)
    try:
        with pytest.raises(AttachError, match="not sealed"):
            open_storage(f"/proc/self/fd/{unsealed}", 4096)
    finally:
        os.close(unsealed)


def test_allocating_more_than_is_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory was requested"))
    for left in (available_bytes(), 1000):
        monkeypatch.setattr("bridge.core.host_memory.cgroup_left_bytes", lambda left=left: left)
        with pytest.raises(AttachError, match="GiB of shared memory"):
            allocate(left + 2**30)


def test_failed_allocation_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _start: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_files()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(AttachError, match="No space left"):
        allocate(4096)
    assert not open_files() - before


def test_block_is_page_aligned() -> None:
    assert allocate(1).storage.data_ptr() % mmap.PAGESIZE == 0
    assert mmap.PAGESIZE % shared_memory.ALIGNMENT_BYTES == 0
