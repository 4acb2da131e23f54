"""Environment variables that cause trouble, and their harmless values."""

from pathlib import Path

import pytest

from bridge.checks.environment import environment_variables
from bridge.checks.software import Device

PLUGINS = ["bridge", "bridge_routes"]


@pytest.mark.parametrize(
    ("name", "value", "device", "status"),
    [
        ("VLLM_PLUGINS", "", "cpu", "WARN"),
        ("VLLM_PLUGINS", "bridge,other", "cpu", "WARN"),
        ("VLLM_PLUGINS", "bridge,bridge_routes,other", "cpu", "PASS"),
        ("VLLM_ENABLE_SHARED_WEIGHTS", "0", "cpu", "WARN"),
        ("VLLM_ENABLE_SHARED_WEIGHTS", "1", "cpu", "PASS"),
        ("VLLM_SKIP_WEIGHT_DAEMON", "0", "cpu", "WARN"),
        ("VLLM_SKIP_WEIGHT_DAEMON", "1", "cpu", "PASS"),
        ("NUM_INFERENCE_NODES", "2", "cpu", "WARN"),
        ("NUM_INFERENCE_NODES", "0", "cpu", "PASS"),
        ("LOGDIR", "/dev/null", "cpu", "FAIL"),
        ("LOGDIR", "/dev/null/below", "cpu", "FAIL"),
        ("LOGDIR", "/tmp/not/yet/there", "cpu", "PASS"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "cuda", "WARN"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", "cuda", "WARN"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", "cuda", "PASS"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "cpu", "PASS"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "cpu", "WARN"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "cuda", "PASS"),
        ("VLLM_PORT", "tcp://10.0.0.1:8000", "cpu", "FAIL"),
        ("VLLM_PORT", "29500", "cpu", "PASS"),
        ("VLLM_USE_RUST_FRONTEND", "1", "cuda", "FAIL"),
        ("VLLM_USE_RUST_FRONTEND", "0", "cuda", "PASS"),
        ("VLLM_CPU_KVCACHE_SPACE", "1.5", "cpu", "FAIL"),
        ("VLLM_CPU_KVCACHE_SPACE", "2", "cpu", "PASS"),
        ("VLLM_API_KEY", "hidden", "cpu", "PASS"),
        ("VLLM_API_KEY", "hidden\n", "cpu", "FAIL"),
        ("VLLM_SERVER_DEV_MODE", "1", "cpu", "FAIL"),
        ("VLLM_SERVER_DEV_MODE", "0", "cpu", "PASS"),
        ("VLLM_USE_MODELSCOPE", "True", "cpu", "WARN"),
        ("HF_HUB_OFFLINE", "1", "cpu", "WARN"),
        ("TRANSFORMERS_OFFLINE", "yes", "cpu", "WARN"),
        ("HF_HUB_OFFLINE", "0", "cpu", "PASS"),
        ("HTTP_PROXY", "http://user:hidden@proxy", "cpu", "PASS"),
    ],
)
def test_a_variable_is_judged_by_its_value(name: str, value: str, device: Device, status: str) -> None:
    (check,) = environment_variables({name: value}, device, PLUGINS)
    assert check.status == status
    assert status == "PASS" or check.name == name
    assert "hidden" not in check.found


def test_a_folder_that_may_not_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (check,) = environment_variables({"LOGDIR": str(tmp_path)}, "cpu", PLUGINS)
    assert check.status == "FAIL"
    assert "is not writable" in check.found


def test_every_finding_is_told_at_once() -> None:
    found = environment_variables({"VLLM_PORT": "x", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}, "cpu", PLUGINS)
    assert len(found) == 3


def test_an_empty_environment_passes() -> None:
    assert [check.status for check in environment_variables({}, "cuda", PLUGINS)] == ["PASS"]
