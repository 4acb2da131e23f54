"""Main memory, /dev/shm and the memfd trial, which runs for real."""

import errno
import os
from pathlib import Path

import pytest

from bridge.checks import hardware, sharing
from bridge.checks.child import Ended, run_module
from bridge.core import memory as host

GIB = 2**30


def fake_root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_two_real_processes_share_a_memfd() -> None:
    assert sharing.over_memfd().status == "PASS"


def test_a_writer_that_is_refused_fails_with_its_error() -> None:
    check = sharing.over_memfd(writer=lambda _: run_module(sharing.MODULE, "memfd", "/proc/self/fd/9999", timeout_s=20))
    assert check.status == "FAIL"
    assert "No such file" in check.found


def test_a_writer_that_wrote_elsewhere_fails() -> None:
    check = sharing.over_memfd(writer=lambda _: Ended(returncode=0, stdout="", last_error_line=""))
    assert check.status == "FAIL"
    assert "the first one reads" in check.found


def test_a_kernel_that_refuses_memfds_fails() -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name, flags)

    check = sharing.over_memfd(create=refuse)
    assert check.status == "FAIL"
    assert "memfd_create: Permission denied" in check.found


def test_memory_that_cannot_be_had_fails_and_the_memfd_is_closed() -> None:
    opened: list[int] = []

    def read_only(_name: str, _flags: int) -> int:
        opened.append(os.open("/dev/null", os.O_RDONLY))
        return opened[0]

    assert sharing.over_memfd(create=read_only).status == "FAIL"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_available_memory_is_the_kernels_figure(tmp_path: Path) -> None:
    root = fake_root(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:       5 kB\n"})
    assert host.available_bytes(root) == 5 * 1024


def test_a_cgroup_v2_limit_counts_and_its_file_cache_does_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "1000\n",
        "sys/fs/cgroup/a/memory.current": "700\n",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 50\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "10\n",
        "sys/fs/cgroup/a/b/memory.stat": "inactive_file 0\n",
    }
    assert host.cgroup_left_bytes(fake_root(tmp_path, files)) == 350


def test_a_cgroup_v1_limit_counts(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/not/mounted/here\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "1000",
        f"{folder}/memory.usage_in_bytes": "400",
        f"{folder}/memory.stat": "total_inactive_file 100\n",
    }
    assert host.cgroup_left_bytes(fake_root(tmp_path, files)) == 700


def test_no_limit_is_no_figure(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "400",
        "sys/fs/cgroup/memory/memory.stat": "",
    }
    assert host.cgroup_left_bytes(fake_root(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("available", "limit", "status", "words"),
    [
        (8 * GIB, None, "PASS", "8.0 GiB available"),
        (2 * GIB, None, "WARN", "2.0 GiB available"),
        (64 * GIB, 1 * GIB, "WARN", "within the container's limit"),
        (64 * GIB, 8 * GIB, "PASS", "within the container's limit"),
    ],
)
def test_the_tighter_of_machine_and_container_decides(
    available: int, limit: int | None, status: str, words: str
) -> None:
    check = hardware.main_memory(available, limit)
    assert check.status == status
    assert words in check.found


@pytest.mark.parametrize(
    ("free", "status"), [(None, "WARN"), (60 * 2**20, "WARN"), (64 * 2**20, "PASS"), (GIB, "PASS")]
)
def test_shm_holds_the_message_queues(free: int | None, status: str) -> None:
    assert hardware.shm_space(free).status == status


def test_a_missing_shm_has_no_size(tmp_path: Path) -> None:
    assert host.shm_free_bytes(tmp_path / "none") is None
    assert host.shm_free_bytes(tmp_path) is not None
