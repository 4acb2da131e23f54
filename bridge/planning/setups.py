"""The setups that `bridge plan` considers, most precise first, with how each fits and its command."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from bridge.config import ServeConfig, TrainConfig, combinations
from bridge.config.choices import flag
from bridge.config.optimizers import OPTIMIZERS
from bridge.errors import UsageError
from bridge.planning import memory
from bridge.planning.memory import GIB, SERVERS_GPU, Need
from bridge.planning.model_size import ModelSize

Choices = Mapping[str, Any]
SETUPS = tuple(
    {"optimizer": name, "offload_optimizer": offloaded, "gradient_release": released}
    for has_master, released, offloaded in product((True, False), (False, True), (False, True))
    for name, spec in OPTIMIZERS.items()
    if spec.has_master == has_master and (spec.can_offload or not offloaded)
)
"""Exact float32 masters come before rounded weights; then clipping by the norm of all gradients before stepping each
parameter separately; then state on the GPU before state on the host."""
ANOTHER_GPU = "cuda:1"
TRAINERS: tuple[tuple[Choices, tuple[Choices, ...]], ...] = (
    ({"mode": "shared_vllm"}, SETUPS),
    ({"mode": "lora_only"}, ({"lora_handover": "memory"}, {"lora_handover": "disk"})),
    ({"mode": "none", "trainer_device": "auto"}, SETUPS),
    ({"mode": "none", "trainer_device": ANOTHER_GPU}, SETUPS),
)
"""Mode and device of the trainer, each with its setups."""
VARIED = {field for trainer, ways in TRAINERS for choices in (trainer, *ways) for field in choices}


class Limits(NamedTuple):
    """The available memory, and the minimum size of the KV cache."""

    gpu_bytes: float
    host_bytes: float  # infinite if unknown
    kv_tokens: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setup, and how it fits; sizes in GiB."""

    mode: str
    trainer_device: str
    name: str  # the optimizer, or how the adapter is published, and other options
    flags: tuple[str, ...]  # the flags that choose this setup
    verdict: str  # `fits`, `fits asleep` (the KV cache sleeps while training) or `does not fit`
    lacking_gib: float  # shortfall on the GPU or in host memory; 0 if it fits
    weights_gib: float  # vLLM's weights and the trainer's own, on one device or two
    gradients_gib: float  # as many gradients as exist at once, in bf16
    sums_gib: float  # added by float32 sums; 0: an update has too few micro-batches for them
    state_gib: float
    host_gib: float  # of all replicas: optimizer state, and everything that a trainer on the CPU holds
    activations_gib: float  # of the smallest micro-batch worth training with, recomputed layer by layer
    rest_gib: float  # contexts, vLLM's buffers and graphs, and temporaries
    kv_awake_gib: float  # left for a KV cache that is always awake
    kv_asleep_gib: float | None  # left for a KV cache that sleeps while training; None: the mode does not allow it
    kv_tokens: int  # size in tokens of the KV cache assumed for the verdict


def plan_rows(
    size: ModelSize, config: TrainConfig, limits: Limits, modes: Collection[str], num_gpus: int, num_parts: int
) -> list[Row]:
    """Return every setup in one of `modes` that agrees with the choices given in `config`, most precise first.

    `config.gpus` servers have `num_gpus` GPUs each; if `num_parts` is more than 1, the weights are trained in place.
    """
    given = {key: value for key, value in sorted(config.given().items()) if key in VARIED}
    setups = [{**trainer, **way} for trainer, ways in TRAINERS if trainer["mode"] in modes for way in ways]
    rows = []
    for choices in setups:
        if not all(_agree(choices, *item) for item in given.items()):
            continue
        chosen = {**choices, **given}
        setup = config.changed(**chosen)
        if num_parts > 1 and not setup.trains_in_server:
            continue
        if combinations.error(setup, tensor_parallel_size=num_parts) is not None:
            continue
        if setup.publishing.reload == "transfer" and chosen["trainer_device"] in SERVERS_GPU:
            continue
        need = Need.of(size, setup, gpu_bytes=limits.gpu_bytes, host_bytes=limits.host_bytes, num_ranks=num_gpus)
        rows.append(_row(need, chosen, limits, setup.publishing.kv_sleep))
    if not rows:
        flags = " ".join(part for item in given.items() for part in _flag(*item))
        raise UsageError(f"no setup matches all of {flags}", hint="omit one of these flags")
    return rows


def _agree(choices: Choices, field: str, value: Any) -> bool:
    """Return whether `choices` leave the field open or have this value; all devices other than vLLM's count as one."""
    if field == "trainer_device":
        return (value in SERVERS_GPU) == (choices.get(field, "auto") in SERVERS_GPU)
    return bool(choices.get(field, value) == value)


def _row(need: Need, choices: Choices, limits: Limits, kv_sleep: str) -> Row:
    """Return how the setup with these `choices` and this `need` fits into the `limits`."""
    least_kv = limits.kv_tokens * need.kv_per_token
    fit = memory.fit(need, least_kv=least_kv, kv_sleep=kv_sleep)
    awake, asleep = (memory.fit_by(need, least_kv, asleep=way) for way in (False, True))
    lacking = max(fit.lacking, need.host - limits.host_bytes, 0)
    name = choices["lora_handover"] if choices["mode"] == "lora_only" else choices["optimizer"]
    if choices.get("offload_optimizer"):
        name += ", offloaded"
    if choices.get("gradient_release"):
        name += ", released"
    verdict = "fits"
    if lacking:
        verdict = "does not fit"
    elif fit.asleep:
        verdict = "fits asleep"
    return Row(
        mode=choices["mode"],
        trainer_device=choices.get("trainer_device", TrainConfig.default("trainer_device")),
        name=name,
        flags=tuple(part for item in choices.items() for part in _flag(*item)),
        verdict=verdict,
        lacking_gib=lacking / GIB,
        weights_gib=(need.served + need.own) / GIB,
        gradients_gib=need.gradients / GIB,
        sums_gib=need.sums / GIB,
        state_gib=need.state / GIB,
        host_gib=need.host / GIB,
        activations_gib=need.least_activations / GIB,
        rest_gib=(need.engine + memory.CONTEXT_BYTES + need.temporaries) / GIB,
        kv_awake_gib=awake.kv / GIB,
        kv_asleep_gib=asleep.kv / GIB if need.can_sleep else None,
        kv_tokens=int(fit.kv / need.kv_per_token),
    )


def command(row: Row, size: ModelSize, serve: ServeConfig, given: Choices, sequence_tokens: int) -> str:
    """Return the command that trains with the setup of `row` and every other choice that was `given`.

    `sequence_tokens` is the length of a prompt and its completion.
    """
    parts = ["bridge", "run", "--model", serve.model, *row.flags]
    if serve.quantization:
        parts += ["--quantization", serve.quantization]
    if serve.tensor_parallel_size > 1:
        parts += ["--tensor-parallel-size", str(serve.tensor_parallel_size)]
    if row.verdict == "fits asleep":
        parts += ["--kv-sleep", "always"]
    elif "kv_sleep" in given:
        parts += _flag("kv_sleep", given["kv_sleep"])
    for key in sorted(given.keys() - VARIED - {"model_name", "kv_sleep"}):
        parts += _flag(key, given[key])
    if given.get("hosts", 1) > 1 and given.get("rendezvous") is None:
        parts += ["--rendezvous", "HOST:PORT"]
    longest = serve.max_model_len or size.max_tokens or 0
    if longest > row.kv_tokens:  # vLLM does not start if its KV cache cannot hold one sequence
        longest = max(2 ** (row.kv_tokens.bit_length() - 1), sequence_tokens)
    if longest != size.max_tokens:
        parts += ["--max-model-len", str(longest)]
    return shlex.join(parts)


def _flag(key: str, value: Any) -> tuple[str, ...]:
    """Return the flag of a choice and its value; empty for the default."""
    if value == TrainConfig.default(key):
        return ()
    if isinstance(value, bool):
        return (flag(key if value else f"no_{key}"),)
    return flag(key), str(value)
