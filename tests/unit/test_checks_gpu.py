"""Each check of the GPU, from facts; the CUDA IPC trial's end is judged here and run in tests/gpu."""

import pytest
import torch
from pydantic import TypeAdapter

from bridge.checks import hardware, sharing
from bridge.checks.child import Ended
from bridge.checks.facts import CudaState, Facts, TorchBuild
from bridge.checks.sharing import MARK
from bridge.server.manifest import Dtype
from tests.unit.checks_sample import CPU_FACTS, UUID, gpu_facts

BLIND = Facts(
    torch=TorchBuild(version="2.11.0+cu130", cuda="13.0"),
    cuda=CudaState(driver_cuda="13.0", gpus=(), error="No CUDA GPUs are available"),
)


def ended(error: str = "", stdout: str = "") -> Ended:
    return Ended(returncode=1 if error else 0, stdout=stdout, last_error_line=error)


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
        (Facts(torch=BLIND.torch, trouble="no answer within the time limit (start CUDA)"), {}, "no answer within"),
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
    assert hardware.gpu_memory(gpu_facts(free_gib=free_gib).gpus()[0], server_lives=server_lives).status == status


def test_a_gpu_that_does_not_tell_its_memory_fails() -> None:
    silent = gpu_facts().gpus()[0].model_copy(update={"free_bytes": None, "error": "CUDA error: out of memory"})
    check = hardware.gpu_memory(silent, server_lives=False)
    assert check.status == "FAIL"
    assert "out of memory" in check.found


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
