"""vLLM's share of a GPU, derived from what the trainer beside it needs."""

from pathlib import Path
from typing import Any

import pytest

from bridge.config import ServeConfig, TrainConfig
from bridge.errors import UsageError
from bridge.planning.model_size import ModelSize
from bridge.processes import accelerator
from bridge.processes.accelerator import MemoryShare
from tests.models.sizes import folder_of, qwen2

GIB = 2**30


def share_of(
    tmp_path: Path,
    *,
    size: str = "7B",
    gib: float = 140,
    ranks: int = 1,
    max_model_len: int | None = None,
    **choices: Any,
) -> MemoryShare:
    folder = tmp_path / size
    if not folder.exists():
        folder_of(qwen2(size), folder)
    return accelerator.derive(
        ServeConfig(model=str(folder), tensor_parallel_size=ranks, max_model_len=max_model_len),
        TrainConfig.model_validate({"model_name": "m", **choices}),
        gpu_bytes=int(gib * GIB),
    )


def test_trainer_gets_memory_vllm_does_not_need(tmp_path: Path) -> None:
    derived = share_of(tmp_path)
    kv = 32768 * 57344 / GIB
    assert 14.2 + 4.5 + kv < derived.share * 140 < 14.2 + 5 + 2 * kv + 2
    assert derived.reason == ("7.62B parameters: of 140 GiB training needs 87, and at least 3 for activations")


def test_longer_sequence_gets_a_larger_gpu_share(tmp_path: Path) -> None:
    shares = [share_of(tmp_path, max_model_len=tokens).share for tokens in (1024, 32768, 131072)]
    assert shares == sorted(shares)
    assert shares[2] * 140 > 14.2 + 4.5 + 131072 * 57344 / GIB


def test_adapter_leaves_vllm_more_and_a_second_copy_less(
    tmp_path: Path,
) -> None:
    small: dict[str, Any] = {"micro_batch_tokens": 4096, "gradient_checkpointing": True}
    adapter, full, copy = (share_of(tmp_path, mode=mode, **small) for mode in ("lora_only", "shared_vllm", "none"))
    assert copy.share < full.share < adapter.share
    assert full.share - copy.share == pytest.approx(14.2 / 140, abs=0.011)


@pytest.mark.parametrize(
    ("choices", "needs"),
    [
        ({}, 87),
        ({"optimizer": "adamw-8bit"}, 45),
        ({"offload_optimizer": True}, 16),
        ({"offload_optimizer": True, "gradient_release": True}, 3),
        ({"mode": "none"}, 101),
        ({"reference_model": "r", "kl_coef": 0.1}, 101),
    ],
)
def test_training_memory_follows_its_choices(tmp_path: Path, choices: dict[str, Any], needs: int) -> None:
    assert f"training needs {needs}, " in share_of(tmp_path, **choices).reason


def test_run_that_fits_only_asleep_gets_the_larger_share(tmp_path: Path) -> None:
    derived = share_of(tmp_path, size="32B", offload_optimizer=True)
    assert derived.share == 0.9
    assert derived.reason.endswith("while the KV cache sleeps")
    awake = share_of(tmp_path, size="32B", offload_optimizer=True, kv_sleep="never")
    assert awake.share < 0.65
    assert "more than available: see bridge plan" in awake.reason


def test_sleeping_kv_cache_gets_the_remaining_memory(tmp_path: Path) -> None:
    always = share_of(tmp_path, kv_sleep="always")
    assert always.share * 140 + 71 + 0.5 == pytest.approx(140, abs=1.5), "the optimizer's state stays"
    assert always.reason.endswith("while the KV cache sleeps")


def test_untrainable_model_still_gets_vllms_memory(tmp_path: Path) -> None:
    derived = share_of(tmp_path, size="14B", gib=80)
    assert derived.share * 80 > 27.5 + 4
    assert "more than available: see bridge plan" in derived.reason


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_trainer_on_another_device_leaves_the_gpu_to_vllm(tmp_path: Path, device: str) -> None:
    derived = share_of(tmp_path, mode="none", trainer_device=device)
    assert derived == MemoryShare(0.9, "the trainer is on another device")


def test_sharded_weights_are_trained_sharded(tmp_path: Path) -> None:
    assert "training needs 44, " in share_of(tmp_path, ranks=2).reason
    assert "training needs 101, " in share_of(tmp_path, ranks=2, mode="none").reason


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only"])
def test_gpus_of_a_replica_are_counted_once(tmp_path: Path, mode: str) -> None:
    given: dict[str, Any] = {"ranks": 2, "mode": mode, "gib": 24, "batch_size": 256}
    assert share_of(tmp_path, gpus=2, **given) == share_of(tmp_path, **given)


def test_model_of_unknown_size_gets_a_default_share() -> None:
    derived = accelerator.derive(ServeConfig(model="org/name-of-none"), gpu_bytes=80 * GIB)
    assert derived.share == accelerator.UNKNOWN_SHARE
    assert "is unknown until it is loaded" in derived.reason


def test_reason_of_derived_values_is_one_line(tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"mode": "lora_only"},
        {"mode": "none"},
        {"optimizer": "adamw-4bit", "gradient_release": True},
    ]
    for choices in ways:
        for gib in (16, 24, 80, 180):
            derived = share_of(tmp_path, gib=gib, **choices)
            assert "\n" not in derived.reason
            assert 0 < derived.share <= 0.9


def test_standalone_server_expects_the_trainer_of_its_flags() -> None:
    assert accelerator.expected(ServeConfig(model="m")).mode == "shared_vllm"
    adapter = accelerator.expected(ServeConfig(model="m", max_lora_rank=64))
    assert (adapter.mode, adapter.lora.r, adapter.lora.has_experts) == ("lora_only", 64, False)
    assert accelerator.expected(ServeConfig(model="m", max_lora_rank=64, lora_experts=True)).lora.has_experts
    with pytest.raises(UsageError, match="--max-lora-rank 12: the rank of adapters") as caught:
        accelerator.expected(ServeConfig(model="m", max_lora_rank=12, lora_experts=True))
    assert caught.value.hint == "--max-lora-rank 16"


def check_host(trainer: TrainConfig) -> None:
    accelerator.check_host(trainer.model_name, trainer.optimizer, trainer.mode, trainer.lora, hosts=trainer.hosts)


@pytest.mark.parametrize(
    ("choices", "bytes_per_parameter"),
    [
        ({}, 12), ({"gradient_release": True}, 16), ({"gpus": 4, "batch_size": 32}, 12),
        ({"max_new_tokens": 65_536}, 12),
    ],
)  # fmt: skip
def test_offloaded_state_larger_than_host_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any], bytes_per_parameter: int
) -> None:
    """All GPUs of a host together hold the state once."""
    model = str(folder_of(qwen2("7B"), tmp_path / "model"))
    needed = bytes_per_parameter * ModelSize.of(model).num_params
    trainer = TrainConfig.model_validate({"model_name": model, "offload_optimizer": True, **choices})
    monkeypatch.setattr(accelerator, "left_bytes", lambda: needed - GIB)
    with pytest.raises(UsageError, match=f"takes {needed / GIB:.1f} GiB of host memory"):
        check_host(trainer)
    check_host(trainer.changed(model_name="org/name-of-none"))
    monkeypatch.setattr(accelerator, "left_bytes", lambda: needed + GIB)
    check_host(trainer)
    check_host(TrainConfig.of(model_name=model))


class Driver:
    """The CUDA driver of a host with GPUs of these capabilities."""

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        self._capabilities = capabilities

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._capabilities)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, _device: Any) -> int:  # noqa: N802
        size._obj.value = 80 * GIB
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = self._capabilities[device.value][{75: 0, 76: 1}[attribute]]
        return 0


def test_lowest_gpu_capability_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, least in {((9, 0), (8, 9)): (8, 9), ((8, 0),): (8, 0), (): None}.items():
        monkeypatch.setattr("ctypes.CDLL", lambda _, of=capabilities: Driver(*of))
        assert accelerator.capability() == least
