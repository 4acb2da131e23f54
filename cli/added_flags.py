"""The flags and variables of vLLM that Bridge adds to those that were given, and why.

Not covered: flags that may not be given (`vllm_flags.py`).
Source: `MaxLoRARanks` in `vllm/config/lora.py`, vLLM 0.26 to 0.33.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bridge.checks import model as model_checks
from bridge.checks.software import Device
from bridge.config import ServeConfig, TrainConfig
from bridge.errors import UsageError
from cli import accelerator, memory_share, vllm_flags

LOGPROBS_MODE = "--logprobs-mode"
PROCESSED_LOGPROBS = (LOGPROBS_MODE, "processed_logprobs")
"""The trainer compares with the distribution that was sampled from, after temperature."""
WORKER_EXTENSION = ("--worker-extension-cls", "patches.worker.BridgeWorker")
SLEEP_MODE = "--enable-sleep-mode"
"""Lets vLLM free its KV cache while a trainer needs the memory; costs nothing until then."""
SLEEP_MODE_IS_THEIRS = {SLEEP_MODE, "--no-enable-sleep-mode", "--kv-transfer-config"}
"""With one of these the user decides; 0.33 refuses to start with it and a KV connector that cannot sleep."""
MOE_BACKEND = ("--moe-backend", "triton")
"""Its kernels read experts as they are loaded; those that vLLM prefers on some GPUs repack them."""
GRAPHS_OF_PIECES = ("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}')
"""Leaves attention out of CUDA graphs. With a sliding window in every layer, shorter than --max-model-len, the whole
graphs of vLLM 0.33 decoded differently on an H200 than it did without: by 0.8 nats a token, against 0.008."""
GRAPHS_ARE_THEIRS = {GRAPHS_OF_PIECES[0], "--enforce-eager", "--optimization-level"}
"""With one of these the user decides."""
RESHAPING = ("--logits-processors", "--watermark-config")
"""They change what every request samples from; no request can turn them off."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's sizes of an adapter slot."""


@dataclass(frozen=True, kw_only=True)
class Added:
    """What Bridge adds for one reason."""

    argv: tuple[str, ...] = ()
    """Flags of vLLM."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of vLLM."""
    notes: tuple[str, ...] = ()
    """What a user would not expect, and why, a line each."""


def for_memory(config: ServeConfig, flags: Sequence[str], device: Device, trainer: TrainConfig) -> Added:
    """Limit vLLM's share of the GPU, so that `trainer` fits beside it."""
    if config.gpu_memory_utilization:
        return Added(argv=("--gpu-memory-utilization", str(config.gpu_memory_utilization)))
    if device == "cpu" or "--kv-cache-memory-bytes" in vllm_flags.names(flags):
        return Added()
    derived = memory_share.derive(
        config.model,
        gpu_bytes=min(accelerator.gpu_memory_bytes()),
        tensor_parallel_size=config.tensor_parallel_size,
        trainer=trainer,
        max_model_len=config.max_model_len,
    )
    argv = ("--gpu-memory-utilization", str(derived.share))
    return Added(argv=argv, notes=(f"{' '.join(argv)}: {derived.reason}",))


def for_training(config: ServeConfig, flags: Sequence[str], device: Device, *, shares_weights: bool) -> Added:
    """Let a trainer use the server: its log-probabilities, its weights, its memory."""
    given, on_gpu = vllm_flags.names(flags), device == "cuda"
    model = model_checks.read(config.model) if on_gpu else None
    argv: tuple[str, ...] = () if LOGPROBS_MODE in given else PROCESSED_LOGPROBS
    if shares_weights:
        argv += WORKER_EXTENSION
        argv += (SLEEP_MODE,) if on_gpu and given.isdisjoint(SLEEP_MODE_IS_THEIRS) else ()  # no such mode on a CPU
        argv += MOE_BACKEND if MOE_BACKEND[0] not in given and model_checks.has_experts(model) else ()
    notes = tuple(
        f"{flag}: it changes what is sampled, and the trainer cannot reproduce that: importance weights and KL are off"
        for flag in RESHAPING
        if flag in given
    )
    window = model_checks.window(model, config.max_model_len)
    if window is not None and given.isdisjoint(GRAPHS_ARE_THEIRS):
        why = f"every layer's window, {window:,} tokens, may be shorter than a sequence: vLLM's whole CUDA graphs err"
        return Added(argv=argv + GRAPHS_OF_PIECES, notes=(*notes, f"{' '.join(GRAPHS_OF_PIECES)}: {why}"))
    return Added(argv=argv, notes=notes)


def for_adapters(rank: int | None, flags: Sequence[str]) -> Added:
    """Let the server take one adapter of `rank` at a time; None: no adapters."""
    if rank is None:
        return Added()
    size = next((size for size in RANKS if size >= rank), None)
    if size is None:
        raise UsageError(
            f"--max-lora-rank {rank}: vLLM takes adapters up to rank {RANKS[-1]}",
            remedy=f"--lora-r {RANKS[-1]}, or train all weights with --mode shared_vllm",
        )
    wanted = {"--enable-lora": [], "--max-lora-rank": [str(size)], "--max-loras": ["1"]}
    missing = wanted.keys() - vllm_flags.names(flags)
    note = f"--max-lora-rank {size}: vLLM's smallest slot that takes rank {rank}"
    return Added(
        argv=tuple(part for flag, value in wanted.items() if flag in missing for part in (flag, *value)),
        environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        notes=(note,) if size != rank and "--max-lora-rank" in missing else (),
    )


def for_cpu(config: ServeConfig, outer: Mapping[str, str]) -> Added:
    """Give vLLM on a CPU little memory for KV, and each rank its own cores, which it cannot tell apart on one node."""
    derived = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if config.tensor_parallel_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // config.tensor_parallel_size)
        groups = [cores[rank * each : (rank + 1) * each] for rank in range(config.tensor_parallel_size)]
        derived["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    unset = {name: value for name, value in derived.items() if not outer.get(name)}
    return Added(environment=unset, notes=tuple(f"{name}={value}: not set, derived" for name, value in unset.items()))
