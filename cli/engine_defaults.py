"""The flags of vLLM that Bridge adds to those that were given, and why.

Not covered: flags that may not be given (`vllm_flags.py`), memory (`memory_share.py`), adapters (`adapters.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from bridge.checks import model as model_checks
from bridge.config import ServeConfig
from cli import vllm_flags
from cli.accelerator import Device

LOGPROBS_MODE = "--logprobs-mode"
PROCESSED_LOGPROBS = (LOGPROBS_MODE, "processed_logprobs")
"""The trainer compares with the distribution that was sampled from, after temperature."""
WORKER_EXTENSION = ("--worker-extension-cls", "patches.worker.BridgeWorker")
SLEEP_MODE = "--enable-sleep-mode"
"""With it vLLM can free its KV cache while a trainer needs the memory; it costs nothing until then."""
SLEEP_MODE_IS_THEIRS = {SLEEP_MODE, "--no-enable-sleep-mode", "--kv-transfer-config"}
"""vLLM's flags beside which the user chooses; 0.33 refuses to start with it and a KV connector that cannot sleep."""
MOE_BACKEND = ("--moe-backend", "triton")
"""vLLM's kernels that read experts as they are loaded; those that it prefers on some GPUs pack them anew."""
GRAPHS_OF_PIECES = ("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}')
"""Leaves attention out of CUDA graphs. With a sliding window in every layer, and one shorter than --max-model-len, vLLM
0.33's whole graphs decoded something else on an H200 than it did without: by 0.8 nats a token, against 0.008."""
GRAPHS_ARE_THEIRS = {GRAPHS_OF_PIECES[0], "--enforce-eager", "--optimization-level"}
"""vLLM's flags beside which the user chooses."""

RESHAPING = ("--logits-processors", "--watermark-config")
"""vLLM's flags that change what every request samples from; no request can turn them off."""


@dataclass(frozen=True, kw_only=True)
class EngineDefaults:
    """What Bridge adds."""

    argv: tuple[str, ...]
    """The flags."""
    notes: tuple[str, ...] = ()
    """What the user would not expect, and why, a line each."""

    @classmethod
    def of(cls, config: ServeConfig, flags: Sequence[str], device: Device, *, shares_weights: bool) -> Self:
        """Derive them for a server on `device`, beside the user's own `flags`."""
        given, on_gpu = vllm_flags.names(flags), device == "cuda"
        model = model_checks.read(config.model) if on_gpu else None
        argv: tuple[str, ...] = () if LOGPROBS_MODE in given else PROCESSED_LOGPROBS
        if shares_weights:
            argv += WORKER_EXTENSION
            argv += (SLEEP_MODE,) if on_gpu and given.isdisjoint(SLEEP_MODE_IS_THEIRS) else ()  # no such mode on a CPU
            argv += MOE_BACKEND if MOE_BACKEND[0] not in given and model_checks.has_experts(model) else ()
        notes = tuple(
            f"{flag}: it changes what is sampled, and the trainer does not know how: importance weights and KL are off"
            for flag in RESHAPING
            if flag in given
        )
        window = model_checks.window(model, config.max_model_len)
        if window is None or not given.isdisjoint(GRAPHS_ARE_THEIRS):
            return cls(argv=argv, notes=notes)
        why = (
            f"every layer's window, {window:,} tokens, is shorter than a sequence may be: vLLM's whole CUDA graphs err"
        )
        return cls(argv=argv + GRAPHS_OF_PIECES, notes=(*notes, f"{' '.join(GRAPHS_OF_PIECES)}: {why}"))
