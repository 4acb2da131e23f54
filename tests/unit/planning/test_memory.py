"""What a run holds on a GPU, and whether it fits."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from bridge.config import TrainConfig
from bridge.config.optimizers import OPTIMIZERS
from bridge.planning import memory
from bridge.planning.memory import GIB, Need, activation_bytes, micro_batch_tokens
from bridge.planning.model_size import Dimensions, ModelSize
from tests.models.sizes import PARAMETERS, qwen2

H200 = 139.8 * GIB


def size_of(name: str) -> ModelSize:
    return ModelSize(num_params=PARAMETERS[name], exact=True, dimensions=Dimensions.of(qwen2(name)), max_tokens=32768)


def need_of(
    name: str, *, gpu_bytes: float = H200, host_bytes: float = math.inf, num_ranks: int = 1, **choices: Any
) -> Need:
    config = TrainConfig.model_validate({"model_name": "m", **choices})
    return Need.of(size_of(name), config, gpu_bytes=gpu_bytes, host_bytes=host_bytes, num_ranks=num_ranks)


TABLE: dict[tuple[str, bool, bool], dict[str, tuple[float, float | None]]] = {
    ("adamw", False, False): {"7B": (99, 389), "14B": (193, None), "32B": (427, None)},
    ("adamw-8bit", False, False): {"7B": (57, 1180), "14B": (110, 52)},
    ("adamw", True, False): {"7B": (28, 1690), "14B": (55, 355)},
    ("adamw", True, True): {"7B": (15, 1970), "14B": (29, 498), "32B": (63, 236)},
    ("adamw-4bit", False, True): {"7B": (23, 1820), "14B": (44, 417), "32B": (95, 104)},
}
"""(Optimizer, offloaded, released) -> GiB of weights, gradients and state, and thousands of tokens in the rest of 120
GiB.

The largest gradient is never released.
"""


@pytest.mark.parametrize(("way", "name"), [(way, name) for way, sizes in TABLE.items() for name in sizes])
def test_bytes_per_parameter_match_a_hand_computation(way: tuple[str, bool, bool], name: str) -> None:
    optimizer, offloaded, released = way
    need = need_of(name, optimizer=optimizer, offload_optimizer=offloaded, gradient_release=released)
    gib, thousands = TABLE[way][name]
    held = need.served + need.state + need.gradients
    assert held / GIB == pytest.approx(gib, rel=0.03)
    left = (120 * GIB - held) / need.kv_per_token / 1000
    assert left < 0 if thousands is None else left == pytest.approx(thousands, rel=0.05)


def test_parts_around_the_language_model_are_served_untrained() -> None:
    config = TrainConfig.of(model_name="m")
    alone = Need.of(size_of("7B"), config, gpu_bytes=80 * GIB)
    inside = Need.of(replace(size_of("7B"), num_untrained=10**9), config, gpu_bytes=80 * GIB)
    assert inside == replace(alone, served=alone.served + 2 * 10**9)


def test_host_holds_offloaded_master_moments_and_sums() -> None:
    assert need_of("7B", offload_optimizer=True).host == 12 * PARAMETERS["7B"]
    assert need_of("7B", offload_optimizer=True, gradient_release=True).host == 16 * PARAMETERS["7B"]
    assert need_of("7B").host == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gpus_share_the_offloaded_state(num_ranks: int) -> None:
    alone, shared = (need_of("7B", offload_optimizer=True, gpus=gpus, num_ranks=num_ranks) for gpus in (1, 4))
    assert shared.state == alone.state == 0
    assert shared.gradients == alone.gradients == 2 * PARAMETERS["7B"] / num_ranks
    assert shared.host == alone.host == 12 * PARAMETERS["7B"]
    two: dict[str, Any] = {"hosts": 2, "rendezvous": "10.0.0.1:29400"}
    assert need_of("7B", offload_optimizer=True, gpus=4, num_ranks=num_ranks, **two).host == 6 * PARAMETERS["7B"]


def test_released_gradient_exists_three_times_on_several_gpus() -> None:
    alone, shared = (need_of("7B", gradient_release=True, gpus=gpus) for gpus in (1, 2))
    assert shared.gradients == 3 * alone.gradients
    assert shared.state == alone.state / 2


def test_second_copy_of_a_sharded_server_is_not_sharded() -> None:
    shared, copy = need_of("7B", num_ranks=2), need_of("7B", mode="none", num_ranks=2)
    assert (shared.served, shared.own, shared.state) == (PARAMETERS["7B"], 0, 5 * PARAMETERS["7B"])
    assert (copy.served, copy.own, copy.state) == (PARAMETERS["7B"], 2 * PARAMETERS["7B"], 10 * PARAMETERS["7B"])
    assert shared.kv_per_token == need_of("7B").kv_per_token / 2


def test_adapter_is_trained_beside_a_frozen_base() -> None:
    memory_, disk = (need_of("7B", mode="lora_only", lora_handover=way) for way in ("memory", "disk"))
    assert memory_.gradients == 2 * 40_370_176
    assert memory_.served == 2 * (PARAMETERS["7B"] + 40_370_176)
    assert (memory_.own, disk.own) == (0, 2 * 40_370_176)
    assert memory_.temporaries == memory.LOGITS_BYTES, "a frozen head has no gradient"
    assert (memory_.can_sleep, disk.can_sleep) == (True, False)
    split = need_of("7B", mode="lora_only", lora_handover="disk", num_ranks=2)
    assert split.own == disk.own + 2 * PARAMETERS["7B"], "a sharded base is copied in full"


def test_frozen_reference_counts_toward_memory() -> None:
    assert need_of("7B", reference_model="r", kl_coef=0.1).own == 2 * PARAMETERS["7B"]


def test_activations_of_a_7b_model_are_as_measured() -> None:
    widths = Dimensions.of(qwen2("7B"))
    assert activation_bytes(widths, 1, recomputed=False) == pytest.approx(7.2e6, rel=0.03)
    assert activation_bytes(widths, 1000, recomputed=True) < 0.1 * activation_bytes(widths, 1000, recomputed=False)


def micro_batches(**choices: Any) -> tuple[int, int]:
    config = TrainConfig.of(model_name="m", **choices)
    longest = memory.sequence_tokens(config.sampling)
    update = longest * config.completions_per_replica // config.optimizer.updates_per_batch
    return micro_batch_tokens(longest, update, config.optimizer, config.compute)


def test_micro_batch_tokens_follow_the_choices() -> None:
    assert micro_batches(micro_batch_tokens=2000) == (2000, 2000)
    small = micro_batches(batch_size=2, group_size=2, max_new_tokens=44)
    assert small == (600, 600), "no micro-batch is larger than the batch"
    assert micro_batches(max_new_tokens=30000) == (30256, 30256), "nor smaller than its longest sequence"
    released = micro_batches(gradient_release=True, updates_per_batch=2)
    assert released == (16384, 16384), "a whole update is one backward pass"
    assert micro_batches(gradient_release=True, offload_optimizer=True) == micro_batches() == (4096, 16384)
    kept = need_of("7B", micro_batch_tokens=2000, gradient_checkpointing=False)
    assert kept.least_activations == kept.most_activations > need_of("7B", micro_batch_tokens=2000).least_activations


def test_gpu_holds_only_the_activations_of_its_slice() -> None:
    choices = {"gpus": 2, "max_new_tokens": 65_536, "batch_size": 16}
    whole, cut = need_of("7B", **choices), need_of("7B", **choices, context_parallel_size=2)
    assert cut.least_activations == pytest.approx(whole.least_activations / 2, rel=1e-3)
    assert (cut.gradients, cut.state, cut.served) == (whole.gradients, whole.state, whole.served)
    chosen = need_of("7B", gpus=2, micro_batch_tokens=8000, context_parallel_size=2)
    assert chosen.least_activations == need_of("7B", micro_batch_tokens=4000).least_activations


def fit(need: Need, tokens: int = 32768, *, kv_sleep: str = "auto") -> memory.Fit:
    return memory.fit(need, least_kv=tokens * need.kv_per_token, kv_sleep=kv_sleep)


def test_kv_cache_stays_awake_if_it_fits() -> None:
    fitted = fit(need_of("7B"))
    assert (fitted.asleep, fitted.lacking) == (False, 0)
    need = need_of("7B")
    used = need.served + need.engine + memory.CONTEXT_BYTES + need.allocated + fitted.kv
    assert used == pytest.approx(need.gpu), "awake, everything is held at once"


def test_kv_cache_sleeps_if_it_fits_only_then() -> None:
    need = need_of("32B", offload_optimizer=True)
    fitted = fit(need)
    assert (fitted.asleep, fitted.lacking) == (True, 0)
    held = need.served + need.engine + memory.CONTEXT_BYTES + need.own + need.state
    assert held + need.gradients + need.temporaries + need.least_activations <= need.gpu
    assert held + fitted.kv <= need.gpu
    assert held + fitted.kv + need.gradients > need.gpu, "otherwise it would not have to sleep"
    assert fit(need, kv_sleep="never").lacking > 0


def test_adding_the_missing_bytes_makes_the_run_fit() -> None:
    need = need_of("14B", optimizer="adamw")
    lacking = fit(need).lacking
    assert 64 * GIB < lacking < 65 * GIB
    more = need_of("14B", optimizer="adamw", gpu_bytes=need.gpu + lacking + 1)
    assert fit(more).lacking == 0
    assert fit(need_of("14B", optimizer="adamw", gpu_bytes=need.gpu + lacking - GIB)).lacking > 0


def test_kv_sleep_is_obeyed_if_the_cache_can_sleep() -> None:
    assert fit(need_of("7B"), kv_sleep="always").asleep
    assert not fit(need_of("7B", mode="none"), kv_sleep="always").asleep
    assert fit(need_of("7B"), kv_sleep="always").kv > fit(need_of("7B"), kv_sleep="never").kv


def test_trainer_on_another_gpu_uses_none_of_the_servers_memory() -> None:
    apart = need_of("14B", mode="none", trainer_device="cuda:1", optimizer="adamw-8bit")
    assert fit(apart).kv == pytest.approx(0.9 * H200 - apart.served - apart.engine)
    assert fit(apart).lacking == 0 < fit(need_of("14B", mode="none", optimizer="adamw-8bit")).lacking
    assert fit(need_of("14B", mode="none", trainer_device="cuda:1")).lacking > 0, "its own GPU must hold it"


def test_trainer_on_the_cpu_is_held_by_the_host() -> None:
    need = need_of("14B", mode="none", trainer_device="cpu")
    assert fit(need).lacking == 0
    assert need.host == need.allocated > 14 * PARAMETERS["14B"]


WAYS: list[dict[str, Any]] = [
    {"mode": mode, **device, "optimizer": optimizer, "offload_optimizer": offloaded, "gradient_release": released}
    for (mode, device), optimizer, offloaded, released in itertools.product(
        [("shared_vllm", {}), ("lora_only", {}), ("none", {}), ("none", {"trainer_device": "cuda:1"})],
        OPTIMIZERS,
        (False, True),
        (False, True),
    )
    if optimizer == "adamw" or not offloaded
]


@pytest.mark.parametrize("kv_sleep", ["auto", "always", "never"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_more_memory_never_makes_the_fit_worse(name: str, kv_sleep: str) -> None:
    for way in WAYS:
        fits = [fit(need_of(name, gpu_bytes=gib * GIB, **way), kv_sleep=kv_sleep) for gib in range(8, 400, 3)]
        lacking = [fitted.lacking for fitted in fits]
        assert lacking == sorted(lacking, reverse=True), way
        fitting = [fitted for fitted in fits if not fitted.lacking]
        assert all(fitted.kv > 0 for fitted in fitting), way
        awake = [fitted.asleep for fitted in fitting]
        assert awake == sorted(awake, reverse=True), f"{way}: awake on the smaller GPU, asleep on the larger"


@pytest.mark.parametrize("name", PARAMETERS)
def test_sleep_and_smaller_states_never_make_the_fit_worse(name: str) -> None:
    for gib in range(8, 400, 14):
        kinds = [need_of(name, gpu_bytes=gib * GIB, optimizer=kind) for kind in OPTIMIZERS]
        for need in kinds:
            assert fit(need, kv_sleep="always").kv >= fit(need, kv_sleep="never").kv
            assert fit(need).lacking == min(fit(need, kv_sleep=way).lacking for way in ("always", "never"))
        lacking = [fit(need).lacking for need in kinds]
        assert lacking == sorted(lacking, reverse=True)


@pytest.mark.parametrize("name", PARAMETERS)
def test_share_leaves_enough_for_server_and_trainer(name: str) -> None:
    for way, gib in itertools.product(WAYS, (24, 48, 80, 139.8, 180)):
        need = need_of(name, gpu_bytes=gib * GIB, **way)
        least = 32768 * need.kv_per_token
        fitted = fit(need)
        if fitted.lacking:
            continue
        taken = memory.share(need, fitted, least_kv=least) * need.gpu
        assert need.served + need.engine + least <= taken * (1 + 1e-9), way
        assert taken <= memory.LARGEST_SHARE * need.gpu * (1 + 1e-9), way
        kept = 0 if need.apart else memory.CONTEXT_BYTES + need.own + need.state
        training = 0 if need.apart or fitted.asleep else need.gradients + need.temporaries + need.least_activations
        assert taken + kept + training <= need.gpu * (1 + 1e-9), way


def test_spare_memory_goes_to_micro_batches_first() -> None:
    need = need_of("1.5B")
    least = 32768 * need.kv_per_token
    taken = memory.share(need, fit(need), least_kv=least) * need.gpu
    left = need.gpu - taken - memory.CONTEXT_BYTES - need.own - need.state - need.gradients - need.temporaries
    assert left == pytest.approx(need.most_activations)
    crowded = need_of("7B")
    least = 32768 * crowded.kv_per_token
    kv = memory.share(crowded, fit(crowded), least_kv=least) * crowded.gpu - crowded.served - crowded.engine
    assert kv == pytest.approx(least + memory.ENGINE_MARGIN_BYTES)


def test_least_kv_cache_is_a_batch_or_the_longest_sequence() -> None:
    assert memory.least_kv_tokens(64, 512) == 64 * 512
    assert memory.least_kv_tokens(64, 512, 100_000) == 100_000
    assert memory.least_kv_tokens(64, 512, 300) == 64 * 300


def test_batch_of_long_completions_need_not_fit_at_once() -> None:
    assert memory.least_kv_tokens(64, 4_096) == memory.BUSY_KV_TOKENS
    assert memory.least_kv_tokens(64, 65_792) == memory.BUSY_KV_TOKENS
    assert memory.least_kv_tokens(64, 200_000) == 200_000
    long = need_of("7B", max_new_tokens=65_536, optimizer="adamw-8bit")
    assert not fit(long, memory.least_kv_tokens(64, 65_792)).lacking


def test_vllm_takes_less_on_a_smaller_gpu() -> None:
    assert need_of("7B", gpu_bytes=24 * GIB).engine < 0.6 * need_of("7B").engine
    assert math.isclose(need_of("7B").engine, need_of("7B", gpu_bytes=80 * GIB).engine)


def test_offloaded_activations_are_planned_in_host_memory() -> None:
    on_device, on_host = (need_of("7B", max_new_tokens=131_072, activation_offload=chosen) for chosen in (False, None))
    inputs = 28 * 3_584 * 2 * 131_328
    assert on_device.least_activations - on_host.least_activations == pytest.approx(memory.SLACK * inputs * 26 / 28)
    assert on_host.offloaded - on_device.offloaded == pytest.approx(2 * 2 * inputs)  # attention's output is as wide
    short = (need_of("7B", max_new_tokens=1_000, activation_offload=chosen) for chosen in (False, None))
    assert next(short) == next(short)
    assert need_of("7B", max_new_tokens=131_072, gradient_checkpointing=False).offloaded == 0


def test_activations_are_not_planned_on_a_host_without_room() -> None:
    """A run then keeps them on the GPU; with the flag, the plan follows the flag."""
    choices: dict[str, Any] = {"max_new_tokens": 131_072, "offload_optimizer": True}
    on_device, on_host = (need_of("7B", activation_offload=chosen, **choices) for chosen in (False, True))
    kept = on_host.offloaded - on_device.offloaded
    enough = on_device.offloaded + kept / memory.HOST_SHARE
    assert need_of("7B", host_bytes=enough + GIB, **choices) == on_host
    assert need_of("7B", host_bytes=enough - GIB, **choices) == on_device
    assert need_of("7B", host_bytes=enough - GIB, activation_offload=True, **choices) == on_host


@pytest.mark.parametrize(("name", "copies"), [("7B", 1.43), ("14B", 1.45), ("0.5B", 1.36)])
def test_fp8_takes_half_of_its_source(name: str, copies: float) -> None:
    config = TrainConfig.of(model_name="m")
    plain, quantized = (
        Need.of(size, config, gpu_bytes=H200) for size in (size_of(name), size_of(name).quantized("fp8_per_block"))
    )
    assert quantized.served / plain.served == pytest.approx(copies, abs=0.01)
    assert quantized == replace(plain, served=quantized.served), "nothing else changes"
