"""GPU, driver, memory and /dev/shm from facts and files; a real memfd trial; the judgment of a CUDA IPC trial.

Not covered: the trial of CUDA IPC itself (`tests/gpu`).
"""

import errno
import os
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from bridge.checks import Check, hardware
from bridge.checks.hardware import MARK, READ
from bridge.checks.probe import Facts
from bridge.core import host_memory as host
from bridge.core.python_child import Ended, run_child
from bridge.server.manifest import Dtype
from tests.unit.checks_sample import CPU_FACTS, UUID, gpu_facts

GIB = 2**30
V2, V1 = "sys/fs/cgroup/a", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/memory.max": "1000\n",
                f"{V2}/memory.current": "700\n",
                f"{V2}/memory.stat": "anon 1\ninactive_file 50\n",
                f"{V2}/b/memory.max": "max\n",
                f"{V2}/b/memory.current": "10\n",
                f"{V2}/b/memory.stat": "inactive_file 0\n",
            },
            350,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/not/mounted/here\n0::/\n",
                f"{V1}/memory.limit_in_bytes": "1000",
                f"{V1}/memory.usage_in_bytes": "400",
                f"{V1}/memory.stat": "total_inactive_file 100\n",
            },
            700,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712",
                f"{V1}/memory.usage_in_bytes": "400",
                f"{V1}/memory.stat": "",
            },
            None,
        ),
    ],
)
def test_cgroup_limit_counts_without_its_file_cache(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host.cgroup_left_bytes(tmp_path) == left


def test_missing_shm_is_reported_without_a_size(tmp_path: Path) -> None:
    assert host.shm_free_bytes(tmp_path / "none") is None
    assert host.shm_free_bytes(tmp_path) is not None


BLIND = Facts(torch="2.11.0+cu130", torch_cuda="13.0", driver_cuda="13.0", cuda_error="No CUDA GPUs are available")
HUNG = BLIND.model_copy(update={"cuda_error": None, "trouble": "no answer within the time limit (start CUDA)"})
SILENT = gpu_facts().gpus[0].model_copy(update={"free_bytes": None, "error": "CUDA error: out of memory"})
FULL, EMPTY = gpu_facts(free_gib=1).gpus[0], gpu_facts().gpus[0]
BUSY = gpu_facts(free_gib=20).gpus[0]


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        (hardware.main_memory(8 * GIB, None), "PASS", "8.0 GiB available"),
        (hardware.main_memory(2 * GIB, None), "WARN", "2.0 GiB available"),
        (hardware.main_memory(64 * GIB, GIB), "WARN", "within the container's limit"),
        (hardware.main_memory(64 * GIB, 8 * GIB), "PASS", "within the container's limit"),
        (hardware.shm_space(None), "WARN", "missing"),
        (hardware.shm_space(60 * 2**20), "WARN", "60 MiB"),
        (hardware.shm_space(64 * 2**20), "PASS", "64 MiB"),
        (hardware.shm_space(GIB), "PASS", "1.0 GiB"),
        (hardware.gpu_visible(gpu_facts(), "cuda", {}, driver_loaded=True), "PASS", UUID),
        (hardware.gpu_visible(CPU_FACTS, "cpu", {}, driver_loaded=False), "SKIP", ""),
        (hardware.gpu_visible(CPU_FACTS, "cuda", {}, driver_loaded=False), "FAIL", ""),
        (hardware.driver_runs_torch(gpu_facts(driver_cuda="13.0")), "PASS", ""),
        (hardware.driver_runs_torch(gpu_facts(driver_cuda="13.2")), "PASS", ""),
        (hardware.driver_runs_torch(gpu_facts(driver_cuda="14.0")), "PASS", ""),
        (hardware.driver_runs_torch(gpu_facts(driver_cuda="12.9")), "FAIL", "12.9"),
        (hardware.driver_runs_torch(gpu_facts(driver_cuda=None)), "FAIL", ""),
        (hardware.driver_runs_torch(CPU_FACTS), "SKIP", ""),
        (hardware.gpu_memory(EMPTY, server_lives=False), "PASS", "130.0 of 140.0"),
        (hardware.gpu_memory(BUSY, server_lives=False), "WARN", "20.0"),
        (hardware.gpu_memory(BUSY, server_lives=True), "PASS", "20.0"),
        (hardware.gpu_memory(FULL, server_lives=True), "WARN", "1.0"),
        (hardware.gpu_memory(SILENT, server_lives=False), "FAIL", "out of memory"),
        (hardware.over_cuda_ipc(None, {}), "SKIP", "needs a GPU"),
    ],
)
def test_hardware_check_gives_the_expected_verdict(check: Check, status: str, words: str) -> None:
    assert check.status == status
    assert words in check.found


@pytest.mark.parametrize(
    ("facts", "environment", "cause"),
    [
        (CPU_FACTS, {}, "a CPU build"),
        (BLIND, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=''"),
        (BLIND, {}, "No CUDA GPUs are available"),
        (HUNG, {}, "no answer within"),
    ],
)
def test_invisible_gpu_is_explained(facts: Facts, environment: dict[str, str], cause: str) -> None:
    assert hardware.gpu_visible(facts, "cpu", environment, driver_loaded=True).status == "WARN"
    check = hardware.gpu_visible(facts, "cuda", environment, driver_loaded=True)
    assert (check.status, cause in check.found) == ("FAIL", True)


def test_two_real_processes_share_a_memfd() -> None:
    assert hardware.over_memfd().status == "PASS"


def test_writer_that_fails_or_writes_elsewhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run_child(hardware.MODULE, "write-memfd", "/proc/self/fd/9999", timeout_s=20)
    for ended, words in (refused, "No such file"), (Ended(returncode=0), "the first one reads"):
        monkeypatch.setattr(hardware, "run_child", lambda *_, ended=ended, **__: ended)
        check = hardware.over_memfd()
        assert (check.status, words in check.found) == ("FAIL", True)


def test_kernel_that_refuses_memfds_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name, flags)

    monkeypatch.setattr(os, "memfd_create", refuse)
    check = hardware.over_memfd()
    assert (check.status, check.found) == ("FAIL", "memfd_create: Permission denied")


def test_memfd_is_closed_if_it_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def read_only(_name: str, _flags: int) -> int:
        opened.append(os.open("/dev/null", os.O_RDONLY))
        return opened[0]

    monkeypatch.setattr(os, "memfd_create", read_only)
    assert hardware.over_memfd().status == "FAIL"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


@pytest.mark.parametrize(
    ("stdout", "status"), [(f"noise\n{READ}{MARK}\n", "PASS"), ("", "FAIL"), (f"{READ}0\n", "FAIL")]
)
def test_mark_read_by_the_first_process_proves_sharing(stdout: str, status: str) -> None:
    assert hardware.judge_trial(Ended(returncode=0, stdout=stdout), {}).status == status


EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("error", "environment", "hint"),
    [
        ("CUDA error: invalid resource handle", {}, "--ipc=host --pid=host"),
        ("pidfd_getfd: Operation not permitted", {}, "SYS_PTRACE"),
        ("pidfd_getfd: Operation not permitted", EXPANDABLE, "unset PYTORCH_ALLOC_CONF"),
        ("CUDA error: invalid argument", {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"},
         "unset PYTORCH_CUDA_ALLOC_CONF"),
        ("CUDA error: out of memory", EXPANDABLE, "nvidia-smi"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", {}, "nvidia-smi -c DEFAULT"),
        ("unable to open shared memory object </torch_1>", {}, "--shm-size"),
        ("something never seen", {}, "python -m bridge.checks.hardware export-cuda"),
    ],
)  # fmt: skip
def test_driver_error_is_classified(error: str, environment: dict[str, str], hint: str) -> None:
    check = hardware.judge_trial(Ended(returncode=1, last_error_line=error), environment)
    assert (check.status, error in check.found, hint in str(check.hint)) == ("FAIL", True, True)


def test_hanging_driver_fails_the_trial() -> None:
    check = hardware.judge_trial(Ended(returncode=None), {})
    assert (check.status, "time limit" in check.found) == ("FAIL", True)


def test_trial_dtype_is_in_manifests_and_holds_the_mark() -> None:
    assert TypeAdapter(Dtype).validate_python(hardware.DTYPE) == hardware.DTYPE
    assert torch.tensor(MARK, dtype=getattr(torch, hardware.DTYPE)).item() == MARK
