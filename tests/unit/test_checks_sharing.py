"""Memory shared between two processes: the memfd trial runs for real, the outcome of the CUDA IPC trial is evaluated.

Not covered: the CUDA IPC trial itself (`tests/gpu`).
"""

import errno
import os

import pytest
import torch
from pydantic import TypeAdapter

from bridge.checks import sharing
from bridge.checks.child import Ended, run_module
from bridge.checks.sharing import MARK
from bridge.server.manifest import Dtype


def test_two_real_processes_share_a_memfd() -> None:
    assert sharing.over_memfd().status == "PASS"


def test_a_writer_that_is_refused_fails_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run_module(sharing.MODULE, "memfd", "/proc/self/fd/9999", timeout_s=20)
    monkeypatch.setattr(sharing, "run_module", lambda *_, **__: refused)
    check = sharing.over_memfd()
    assert check.status == "FAIL"
    assert "No such file" in check.found


def test_a_writer_that_wrote_elsewhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "run_module", lambda *_, **__: Ended(returncode=0))
    check = sharing.over_memfd()
    assert check.status == "FAIL"
    assert "the first one reads" in check.found


def test_a_kernel_that_refuses_memfds_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name, flags)

    monkeypatch.setattr(os, "memfd_create", refuse)
    check = sharing.over_memfd()
    assert check.status == "FAIL"
    assert "memfd_create: Permission denied" in check.found


def test_memory_that_cannot_be_allocated_fails_and_the_memfd_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def read_only(_name: str, _flags: int) -> int:
        opened.append(os.open("/dev/null", os.O_RDONLY))
        return opened[0]

    monkeypatch.setattr(os, "memfd_create", read_only)
    assert sharing.over_memfd().status == "FAIL"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def ended(error: str = "", stdout: str = "") -> Ended:
    return Ended(returncode=1 if error else 0, stdout=stdout, last_error_line=error)


def test_the_mark_read_by_the_first_process_proves_one_memory() -> None:
    assert sharing.judge(ended(stdout=f"noise\n{sharing.READ}{sharing.MARK}\n"), {}).status == "PASS"


@pytest.mark.parametrize("stdout", ["", f"{sharing.READ}0\n"])
def test_another_value_than_the_mark_fails(stdout: str) -> None:
    assert sharing.judge(ended(stdout=stdout), {}).status == "FAIL"


@pytest.mark.parametrize(
    ("error", "environment", "remedy"),
    [
        ("CUDA error: invalid resource handle", {}, "--ipc=host --pid=host"),
        ("pidfd_getfd: Operation not permitted", {}, "SYS_PTRACE"),
        (
            "pidfd_getfd: Operation not permitted",
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            "unset PYTORCH_ALLOC_CONF",
        ),
        (
            "CUDA error: invalid argument",
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"},
            "unset PYTORCH_CUDA_ALLOC_CONF",
        ),
        ("CUDA error: out of memory", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "nvidia-smi"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", {}, "nvidia-smi -c DEFAULT"),
        ("unable to open shared memory object </torch_1>", {}, "--shm-size"),
        ("something never seen", {}, "python -m bridge.checks.sharing export"),
    ],
)
def test_a_refusal_is_classified(error: str, environment: dict[str, str], remedy: str) -> None:
    check = sharing.judge(ended(error), environment)
    assert check.status == "FAIL"
    assert error in check.found
    assert check.remedy is not None
    assert remedy in check.remedy


def test_a_hanging_driver_is_a_failure_not_a_hang() -> None:
    check = sharing.judge(Ended(returncode=None, stdout="", last_error_line=""), {})
    assert check.status == "FAIL"
    assert "time limit" in check.found


def test_without_a_gpu_the_trial_is_skipped() -> None:
    assert sharing.over_cuda_ipc(None, {}).status == "SKIP"


def test_the_trial_shares_what_a_manifest_may_name_and_its_type_holds_the_mark() -> None:
    assert TypeAdapter(Dtype).validate_python(sharing.DTYPE) == sharing.DTYPE
    assert torch.tensor(MARK, dtype=getattr(torch, sharing.DTYPE)).item() == MARK
