"""The GPU, its driver, main memory and /dev/shm, from facts and files."""

from pathlib import Path

import pytest

from bridge.checks import hardware
from bridge.checks.facts import Facts
from bridge.core import memory as host
from tests.unit.checks_sample import CPU_FACTS, UUID, gpu_facts

GIB = 2**30


def fake_root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


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


BLIND = Facts(
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    driver_cuda="13.0",
    cuda_error="No CUDA GPUs are available",
)


def test_a_visible_gpu_passes_with_its_uuid() -> None:
    check = hardware.gpu_visible(gpu_facts(), "cuda", {}, driver_loaded=True)
    assert check.status == "PASS"
    assert UUID in check.found


def test_a_machine_without_a_gpu_is_no_fault_on_the_cpu() -> None:
    assert hardware.gpu_visible(CPU_FACTS, "cpu", {}, driver_loaded=False).status == "SKIP"
    assert hardware.gpu_visible(CPU_FACTS, "cuda", {}, driver_loaded=False).status == "FAIL"


@pytest.mark.parametrize(
    ("facts", "environment", "cause"),
    [
        (CPU_FACTS, {}, "a CPU build"),
        (BLIND, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=''"),
        (BLIND, {}, "No CUDA GPUs are available"),
        (
            Facts(
                torch=BLIND.torch, torch_cuda=BLIND.torch_cuda, trouble="no answer within the time limit (start CUDA)"
            ),
            {},
            "no answer within",
        ),
    ],
)
def test_a_gpu_that_cannot_be_seen_is_explained(facts: Facts, environment: dict[str, str], cause: str) -> None:
    assert hardware.gpu_visible(facts, "cpu", environment, driver_loaded=True).status == "WARN"
    check = hardware.gpu_visible(facts, "cuda", environment, driver_loaded=True)
    assert check.status == "FAIL"
    assert cause in check.found


@pytest.mark.parametrize(
    ("driver", "status"), [("13.0", "PASS"), ("13.2", "PASS"), ("14.0", "PASS"), ("12.9", "FAIL"), (None, "FAIL")]
)
def test_the_driver_runs_torchs_cuda_of_any_minor_version(driver: str | None, status: str) -> None:
    assert hardware.driver_runs_torch(gpu_facts(driver_cuda=driver)).status == status


def test_a_cpu_build_needs_no_driver() -> None:
    assert hardware.driver_runs_torch(CPU_FACTS).status == "SKIP"


@pytest.mark.parametrize(
    ("free_gib", "server_lives", "status"),
    [(130, False, "PASS"), (20, False, "WARN"), (20, True, "PASS"), (1, True, "WARN")],
)
def test_memory_is_left_for_who_still_comes(free_gib: float, server_lives: bool, status: str) -> None:
    assert hardware.gpu_memory(gpu_facts(free_gib=free_gib).gpus[0], server_lives=server_lives).status == status


def test_a_gpu_that_does_not_tell_its_memory_fails() -> None:
    silent = gpu_facts().gpus[0].model_copy(update={"free_bytes": None, "error": "CUDA error: out of memory"})
    check = hardware.gpu_memory(silent, server_lives=False)
    assert check.status == "FAIL"
    assert "out of memory" in check.found
