"""Tell from a model's configuration alone by which modes it can be trained; no weight is read, and torch is not needed.

What a configuration does not show, a child process finds by building the model's class without its weights, unless
families are proved that are built so.

Not covered: what only vLLM's own loader shows (`patches/loading.py`), and whether the model fits
the memory (`bridge plan`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.checks.child import Ended, run_module
from bridge.checks.result import Check, failed, passed, skipped, warned
from bridge.errors import UnsupportedModelError

Config = Mapping[str, Any]
NAME = "Model"
SHARED, LORA, NONE = "shared_vllm", "lora_only", "none"
MODES = (SHARED, LORA, NONE)
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the classes are called that transformers' AutoModelForCausalLM makes."""
ANOTHER = "take a plain language model, of those in docs/families.md"
WHOLE_ATTENTION = "full_attention"
"""How `layer_types` calls a layer without a window."""
ALTERNATING = "gemma2"
"""Has a window in every other layer; older configurations have no `layer_types` that say so."""
PROVED = frozenset({
    "deepseek_v2", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "olmo2", "phi", "phi3",
    "qwen2", "qwen3", "qwen3_moe", "starcoder2",
})  # fmt: skip
"""Types of models that are built in a way that is known to work: those of docs/families.md."""
TRIAL_LIMIT_S = 120.0
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What families call the number of a layer's experts."""


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """One reason why a model cannot be trained by some modes."""

    modes: tuple[str, ...]
    """The modes that it rules out."""
    reason: str
    """What it is, and why."""
    remedy: str
    """What to use instead."""


def read(model: str) -> Config | None:
    """Return the configuration of `model`, a folder or a name of which the hub's cache keeps it; None: neither."""
    path: Any = Path(model).expanduser() / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return None
    try:
        document = json.loads(Path(path).read_bytes()) if isinstance(path, str | Path) else None
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def has_experts(config: Config | None) -> bool:
    """Tell whether its layers are mixtures of experts."""
    return config is not None and any(config.get(name) for name in EXPERTS)


def window(config: Config | None, max_tokens: int | None) -> int | None:
    """Return the tokens of the sliding window that every layer has, if a sequence may be longer.

    `max_tokens` is the most that a sequence may have; None: as many as the model can.
    """
    size = (config or {}).get("sliding_window")
    if config is None or not isinstance(size, int) or config.get("use_sliding_window") is False:
        return None
    in_turns = config.get("model_type") == ALTERNATING or "sliding_window_pattern" in config
    if in_turns or WHOLE_ATTENTION in (config.get("layer_types") or []):
        return None
    longest = max_tokens or config.get("max_position_embeddings") or math.inf
    return size if size < longest else None


def dynamic_limit(config: Config | None) -> int | None:
    """Return the tokens for which vLLM has frequencies of dynamic RoPE; None: the model has no such RoPE.

    vLLM's own default is longer by the factor of the scaling, and reads beyond the end of its table there.
    """
    rope = (config or {}).get("rope_parameters") or (config or {}).get("rope_scaling") or {}
    limit = (config or {}).get("max_position_embeddings")
    is_dynamic = "dynamic" in (rope.get("rope_type"), rope.get("type"))
    return limit if is_dynamic and isinstance(limit, int) else None


def obstacles(config: Config) -> list[Obstacle]:
    """Return every reason that the configuration shows, the gravest first."""
    return [obstacle for rule in RULES for obstacle in rule(config)]


def build_by_trial(model: str) -> Ended:
    """Let a child process build the class of `model`, without its weights."""
    return run_module("bridge.checks.model_trial", model, timeout_s=TRIAL_LIMIT_S)


def unbuildable(model: str, config: Config, trial: Callable[[str], Ended] = build_by_trial) -> Iterator[Obstacle]:
    """Yield why the class that transformers has for `model` cannot be trained, if it cannot.

    A trial that fails for any other reason proves nothing about the model.
    """
    if config.get("model_type") in {*PROVED, None}:
        return
    ended = trial(model)
    if ended.returncode == UnsupportedModelError.exit_code:
        yield Obstacle(modes=MODES, reason=ended.last_error_line.removeprefix(f"{model} "), remedy=ANOTHER)


def modes(model: str, config: Config | None, trial: Callable[[str], Ended] = build_by_trial) -> Iterator[Check]:
    """Yield a check per mode: whether `model` can be trained by it, and what stands against it."""
    if config is None:
        yield skipped(
            NAME, f"no configuration of {model} here", "a folder with config.json, or a name in the hub's cache"
        )
        return
    found = obstacles(config) or [*unbuildable(model, config, trial)]
    usable = [mode for mode in MODES if not any(mode in obstacle.modes for obstacle in found)]
    for mode in MODES:
        name, expected = f"{NAME}, {mode}", f"{model} can be trained by --mode {mode}"
        against = next((obstacle for obstacle in found if mode in obstacle.modes), None)
        if against is None:
            yield passed(name, f"nothing in its configuration stands against it{_notes(config, mode)}", expected)
        else:
            report = warned if usable else failed
            yield report(name, against.reason, expected, against.remedy)


def _notes(config: Config, mode: str) -> str:
    notes = []
    if _dtype(config) == "float16":
        notes.append("with --dtype bfloat16: gradients overflow in its own float16")
    if mode == SHARED and config.get("kv_lora_rank"):
        notes.append("with latent attention in its plain form (VLLM_MLA_DISABLE=1), whose cache is larger")
    if windowed := window(config, None):
        notes.append(f"CUDA graphs without attention, unless --max-model-len is {windowed:,} or less")
    if mode == LORA and has_experts(config):
        notes.append("experts get no adapter")
    return "".join(f"; {note}" for note in notes)


def _dtype(config: Config) -> object:
    return config.get("dtype") or config.get("torch_dtype")


def _quantised(config: Config) -> Iterator[Obstacle]:
    quantised = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "of no named method") if isinstance(quantised, dict) else quantised
        reason = f"quantised ({method}): its weights are no plain numbers that an optimizer could step"
        yield Obstacle(modes=MODES, reason=reason, remedy="take the unquantised model, in bfloat16")


def _encoder(config: Config) -> Iterator[Obstacle]:
    if config.get("is_encoder_decoder"):
        yield Obstacle(modes=MODES, reason="an encoder and a decoder: not a causal language model", remedy=ANOTHER)


def _of_several(config: Config) -> Iterator[Obstacle]:
    if config.get("text_config"):
        kind = config.get("model_type", "model")
        yield Obstacle(
            modes=MODES, reason=f"a {kind}, in which the language model is one part of several", remedy=ANOTHER
        )


def _not_causal(config: Config) -> Iterator[Obstacle]:
    names = config.get("architectures") or []
    if names and not any(str(name).endswith(CAUSAL) for name in names):
        yield Obstacle(modes=MODES, reason=f"{', '.join(names)}: not a causal language model", remedy=ANOTHER)


def _sparse_latent(config: Config) -> Iterator[Obstacle]:
    """DeepSeek-V3.2's: vLLM 0.26 to 0.33, `models/deepseek_v2.py`, has its indexer in latent attention alone."""
    if config.get("kv_lora_rank") and config.get("index_topk"):
        reason = "sparse latent attention: vLLM computes with projections that it derives from kv_b_proj"
        yield Obstacle(modes=(SHARED,), reason=reason, remedy="--mode lora_only or --mode none")


def _router_bias(config: Config) -> Iterator[Obstacle]:
    """DeepSeek-V3's: vLLM 0.26 to 0.33, `models/deepseek_v2.py`, keeps it as a float32 parameter."""
    if config.get("topk_method") == "noaux_tc" or config.get("model_type") == "deepseek_v3":
        reason = "mlp.gate.e_score_correction_bias: a float32 parameter in vLLM, and no parameter in transformers"
        yield Obstacle(modes=(SHARED,), reason=reason, remedy="--mode lora_only or --mode none")


RULES: tuple[Callable[[Config], Iterator[Obstacle]], ...] = (
    _quantised,
    _encoder,
    _of_several,
    _not_causal,
    _sparse_latent,
    _router_bias,
)
