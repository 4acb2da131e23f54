"""Judge from a model's configuration which modes can train it, without reading weights.

Unless the family is known to work, a child process also builds the model's class without weights, to find what the
configuration does not show.

Not covered: what only vLLM's own loader reveals (`patches/bridge_patches/loading.py`), and whether the model fits
(`bridge plan`).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge import errors
from bridge.checks import Check, failed, judged, passed, probe, skipped, warned
from bridge.core import json_lines, paths
from bridge.core.paths import ADAPTER_CONFIG, CONFIG_NAME
from bridge.errors import UsageError
from bridge.planning.model_size import (
    EXPERTS,
    KEEPS_A_STATE,
    RESIZE,
    SEEING,
    folder_of,
    is_tied,
    layer_types,
    lone_head,
    other_rows,
    own_head,
    rival_weights,
)
from bridge.weights import model_files

Config = Mapping[str, Any]
SHARED, LORA, NONE = MODES = ("shared_vllm", "lora_only", "none")
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Suffixes of the classes that transformers' AutoModelForCausalLM builds."""
INSIDE = "ForConditionalGeneration"
"""Suffix of the classes that contain a language model among other parts."""
ANOTHER = "use a plain language model, such as those in docs/families.md"
ALTERNATING = "gemma2"
"""A family with a window in every other layer, whose older configurations have no `layer_types`."""
EXPANDED = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Input widths of the second layers of feed-forward parts."""
PROVED = frozenset({
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm4", "glm4_moe", "granite",
    "llama", "mistral", "mistral3", "mixtral", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "smollm3", "starcoder2",
})  # fmt: skip
"""Values of `model_type` that are known to work: those of docs/families.md."""
SERVED_IN_BFLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4", "plamo2"})
"""Families that vLLM 0.26 to 0.33 serves in bfloat16 if their configuration says float16."""


@dataclass(frozen=True)
class Obstacle:
    """One reason why some modes cannot train a model."""

    reason: str
    """What the model is or has, and why that rules it out."""
    hint: str = ANOTHER
    """What to use instead."""
    modes: tuple[str, ...] = MODES
    """The modes that it rules out."""


def read(model: str) -> Config | None:
    """Return the configuration of `model`, a folder or a name in the hub's cache; None if neither has one."""
    path: Any = paths.expanded(model) / "config.json"
    if not paths.is_file(path):
        from huggingface_hub import try_to_load_from_cache

        try:
            path = try_to_load_from_cache(model, "config.json")
        except Exception:  # noqa: BLE001  it cannot be a name
            return None
    try:
        document = json_lines.parsed(Path(path).read_bytes()) if isinstance(path, str | Path) else None
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _language(config: Config | None) -> Config:
    """Return the configuration of the language model only."""
    config = config or {}
    language = config.get("text_config")
    return language if language and isinstance(language, dict) else config


def has_experts(config: Config | None) -> bool:
    """Return whether a model has mixtures of experts."""
    return any(_language(config).get(name) for name in EXPERTS)


def window(config: Config | None, max_tokens: int | None) -> int | None:
    """Return the sliding window that every layer has, in tokens, if a sequence may be longer than that.

    `max_tokens` is the length limit of a sequence; None: the model's own limit.
    """
    config = _language(config)
    size = config.get("sliding_window")
    if not isinstance(size, int) or config.get("use_sliding_window") is False:
        return None
    in_turns = config.get("model_type") == ALTERNATING or "sliding_window_pattern" in config
    if in_turns or "full_attention" in (config.get("layer_types") or []):
        return None
    return size if size < (max_tokens or config.get("max_position_embeddings") or math.inf) else None


def dynamic_limit(config: Config | None) -> int | None:
    """Return the longest sequence, in tokens, that vLLM has frequencies for if the model uses dynamic RoPE.

    vLLM's own default is longer by the scaling factor, and reads past the end of its table.
    """
    config = _language(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limit = config.get("max_position_embeddings")
    is_dynamic = "dynamic" in (rope.get("rope_type"), rope.get("type"))
    return limit if is_dynamic and isinstance(limit, int) else None


def longest_sequence(config: Config | None) -> int | None:
    """Return the longest sequence, in tokens, that vLLM serves by default; None: unknown, as with scaled RoPE.

    Source: `_get_and_verify_max_len` of vLLM 0.26 to 0.33.
    """
    config = _language(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_scaled = "factor" in json.dumps(rope) and "llama3" not in (rope.get("rope_type"), rope.get("type"))
    limit = config.get("max_position_embeddings")
    return limit if isinstance(limit, int) and not is_scaled else None


def undivided(config: Config | None, num_ranks: int) -> str:
    """Return what prevents vLLM from cutting a model into `num_ranks` parts; empty: nothing, or it is unknown.

    A key-value head may be replicated on several ranks.

    Source: `QKVParallelLinear` and `divide` of vLLM 0.26 to 0.33.
    """
    described = _language(config)
    names = {
        "num_attention_heads": "attention heads", "intermediate_size": "intermediate columns",
        "linear_num_key_heads": "key heads of linear attention",
    }  # fmt: skip
    for key, name in names.items():
        if isinstance(count := described.get(key), int) and count % num_ranks:
            return f"{count} {name}"
    heads = described.get("num_key_value_heads")
    is_uneven = isinstance(heads, int) and heads % num_ranks and num_ranks % heads
    return f"{heads} key-value heads" if is_uneven else ""


def unblocked(config: Config | None, size: int, num_ranks: int) -> str:
    """Return an input width of a linear layer that is not a multiple of `size` on each of `num_ranks`.

    Empty: there is none, or it is unknown. vLLM quantizes the inputs of a layer in groups of `size`.
    """
    described = _language(config)
    heads = described.get("num_attention_heads")
    hidden = described.get("hidden_size")
    head = described.get("head_dim")
    if not head and hidden and heads:
        head = hidden // heads
    of_heads = head * heads if head and heads else None
    vision = (config or {}).get("vision_config") or {}  # vLLM quantizes it, too
    inputs = [("hidden_size", hidden, 1), ("the width of all heads", of_heads, num_ranks)]
    inputs += [(name, described.get(name), num_ranks) for name in EXPANDED]
    inputs += [(f"the vision model's {name}", vision.get(name), num_ranks) for name in ("hidden_size", *EXPANDED)]
    for name, width, parts in inputs:
        if isinstance(width, int) and width % (parts * size):
            return f"{name} {width}"
    return ""


def uncut(config: Config | None, num_slices: int) -> str:
    """Return what prevents cutting a model's packs into `num_slices`; empty: nothing, or it is unknown."""
    described = _language(config)
    if KEEPS_A_STATE in layer_types(described):
        return "cannot cut layers that carry a state from token to token"
    heads = described.get("num_attention_heads")
    return f"does not divide the {heads} attention heads" if isinstance(heads, int) and heads % num_slices else ""


def is_half(config: Config | None) -> bool:
    """Return whether the configuration says float16, in which gradients overflow: its largest number is 65,504."""
    parts = (config or {}, _language(config))
    return "float16" in [part.get(name) for part in parts for name in ("dtype", "torch_dtype")]


def obstacles(config: Config) -> list[Obstacle]:
    """Return every obstacle that the configuration shows, the most serious first.

    Source: `models/deepseek_v2.py` of vLLM 0.26 to 0.33, for weights that cannot be shared.
    """
    problems = []
    language = _language(config)
    is_inside = language is not config
    if quantized := config.get("quantization_config") or language.get("quantization_config"):
        method = quantized.get("quant_method", "no named method") if isinstance(quantized, dict) else quantized
        reason = f"quantized ({method}): an optimizer cannot update such weights"
        problems.append(Obstacle(reason, "use the unquantized model, in bfloat16"))
    if is_half(config):
        reason = "in float16: gradients would overflow in the trainer's own copy"
        problems.append(Obstacle(reason, f"--mode {SHARED} --dtype bfloat16, or convert it to bfloat16", (NONE,)))
    if config.get("is_encoder_decoder"):
        problems.append(Obstacle("an encoder-decoder model, not a causal language model"))
    if is_inside:
        reason = f"a {config.get('model_type', 'model')}, whose language model is one of several parts"
        problems.append(Obstacle(reason, f"--mode {SHARED}, which leaves the other parts unchanged", (LORA, NONE)))
    names = config.get("architectures") or []
    suffixes = (*CAUSAL, INSIDE) if is_inside else CAUSAL
    if names and not any(str(name).endswith(suffixes) for name in names):
        problems.append(Obstacle(f"{', '.join(names)}: not a causal language model"))
    others = f"--mode {LORA} or --mode {NONE}"
    if language.get("kv_lora_rank") and language.get("index_topk"):  # DeepSeek-V3.2's indexer
        reason = "sparse latent attention: vLLM computes with projections that it derives from kv_b_proj"
        problems.append(Obstacle(reason, others, (SHARED,)))
    return problems


def contradictions(model: str, config: Config) -> list[Obstacle]:
    """Return how the local files of `model`, if any, contradict its configuration or each other.

    Only tensor names and a few bytes are read.
    """
    try:
        folder = folder_of(model)
        return [
            *_unequal_readers(folder),
            *_other_vocabulary(folder, config),
            *(_tied_otherwise(folder) if is_tied(config) else ()),
        ]
    except (UsageError, OSError):
        return []  # vLLM reports a damaged file, and downloads a missing one


def _unequal_readers(folder: Path) -> Iterator[Obstacle]:
    """Yield files that vLLM and transformers would read differently."""
    if (folder / ADAPTER_CONFIG).is_file():
        error = errors.beside_adapter(ADAPTER_CONFIG)
        yield Obstacle(error.message, error.hint)
    elif rival := rival_weights(folder):
        name, ours, theirs = rival
        yield Obstacle(
            f"two sets of weights: {name} in {ours.name}, which transformers loads, differs from that in"
            f" {theirs.name}, which vLLM loads",
            "remove the files that are not the model's, with their index",
        )


def _other_vocabulary(folder: Path, config: Config) -> Iterator[Obstacle]:
    """Yield an embedding whose number of rows is not `vocab_size`, for families where the two must be equal."""
    vocabulary = _language(config).get("vocab_size")
    if config.get("model_type") not in PROVED or not isinstance(vocabulary, int):
        return
    if found := other_rows(folder, vocabulary):
        name, rows = found
        yield Obstacle(
            f"{name} has {rows:,} rows in its files, but its config.json says vocab_size {vocabulary:,}",
            f'set "vocab_size": {rows} in its config.json, if the files are right',
        )


def _tied_otherwise(folder: Path) -> Iterator[Obstacle]:
    """Yield why the files of a model do not tie the weights that its configuration ties."""
    if head := lone_head(folder):
        yield Obstacle(
            f"tied, but stored only under the name of its head ({head}): vLLM finds no weights for its embedding",
            "save it again: transformers loads it, and save_pretrained stores the embedding",
        )
    elif names := own_head(folder):
        error = errors.own_head(*names)
        yield Obstacle(error.message, error.hint)


def unbuildable(model: str, config: Config) -> list[Obstacle]:
    """Return why the class that transformers has for `model` cannot be trained, if so.

    A process that fails for any other reason proves nothing about the model.
    """
    if config.get("model_type") in {*PROVED, None}:
        return []
    unsupported = probe.ask("build", model=model).unsupported
    return [Obstacle(unsupported.removeprefix(f"{model} "))] if unsupported else []


def modes(model: str, config: Config | None) -> Iterator[Check]:
    """Yield a check per mode: whether it can train `model`, or why not."""
    if config is None:
        expected = "a folder with config.json, or a name in the hub's cache"
        yield skipped("Model", f"no configuration of {model} here", expected)
        return
    against = obstacles(config) or contradictions(model, config) or unbuildable(model, config)
    first = {mode: next((obstacle for obstacle in against if mode in obstacle.modes), None) for mode in MODES}
    is_trainable = None in first.values()
    for mode, obstacle in first.items():
        name = f"Model, {mode}"
        expected = f"{model} can be trained by --mode {mode}"
        if obstacle is None:
            yield passed(name, f"its configuration allows it{_notes(config, mode)}", expected)
        elif is_trainable:
            yield warned(name, obstacle.reason, expected, obstacle.hint)
        else:
            yield failed(name, obstacle.reason, expected, obstacle.hint)


def saving(model: str) -> Iterator[Check]:
    """Check that checkpoints of a folder can be complete: its tokenizer and its other files exist and are readable."""
    folder = paths.expanded(model)
    if not paths.is_folder(folder):
        return
    name = "Model, saving"
    expected = f"checkpoints contain the other files of {model} beside its weights"
    try:
        files = model_files.source_files(folder)
    except UsageError as error:
        yield failed(name, error.message, expected, error.hint)
    else:
        found = f"{CONFIG_NAME} and {len(files.paths)} other files"
        if note := files.note():
            found += f"; {note}"
        yield passed(name, found, expected)


def tokens(facts: probe.Facts) -> Iterator[Check]:
    """Check the model's tokens for training: that a turn ends where the server stops, and that all have embeddings."""
    turn, rows = "Model, end of a turn", "Model, vocabulary"
    expected_end = "the token that ends a turn in the chat template ends a sequence for the server"
    expected_rows = "every token of the tokenizer has an embedding"
    found = facts.tokens
    if found is None:
        reason = f"its tokenizer cannot be read: {facts.trouble or 'no answer'}"
        yield skipped(turn, reason, expected_end)
        yield skipped(rows, "its tokenizer cannot be read", expected_rows)
        return
    if not found.has_template:
        yield skipped(turn, "it has no chat template: prompts are text", expected_end)
    elif not found.end_of_turn:
        yield warned(
            turn, "its chat template does not end a turn with a token of its own", expected_end,
            "end completions with --stop TEXT, or give the model a different chat_template.jinja",
        )  # fmt: skip
    else:
        what = f"{found.end_of_turn} ({found.end_id}) ends a turn"
        if not found.stops_there:
            what += (
                ", but is not an eos_token_id: Bridge ends completions there, but a server of the trained model would"
                " not"
            )
        hint = f"add {found.end_id} to eos_token_id in its generation_config.json"
        yield judged(turn, found.stops_there, what, expected_end, hint, otherwise="WARN")
    if found.num_embeddings is None:
        yield skipped(rows, f"{found.num_tokens:,} tokens; its configuration has no vocab_size", expected_rows)
        return
    if not found.beyond:
        yield passed(rows, f"{found.num_tokens:,} tokens, {found.num_embeddings:,} embeddings", expected_rows)
    elif found.chat_is_beyond:
        every = "every prompt of chat messages has one of them"
        yield failed(rows, f"{found.beyond}; {every}", expected_rows, RESIZE)
    else:
        yield warned(rows, found.beyond, expected_rows, RESIZE)


def sight(config: Config) -> str:
    """Return what a model's vision encoder is used for; empty if it has none."""
    if "vision_config" not in config:
        return ""
    takes_images = config.get("model_type") in SEEING
    return "prompts may have images" if takes_images else "trained on text only, without images"


def _notes(config: Config, mode: str) -> str:
    notes = []
    if mode == SHARED and (seen := sight(config)):
        notes.append(seen)
    language = _language(config)
    if is_half(config):
        notes.append("use --dtype bfloat16: gradients overflow in its own float16")
    if mode == SHARED and language.get("kv_lora_rank"):
        notes.append("latent attention runs in its plain form (VLLM_MLA_DISABLE=1), whose cache is larger")
    if windowed := window(config, None):
        notes.append(f"CUDA graphs leave attention out, unless --max-model-len is {windowed:,} or less")
    if mode == LORA and has_experts(config):
        notes.append("routed experts get an adapter with --lora-target-modules all-linear,experts")
    if language.get("output_router_logits"):
        notes.append("the auxiliary loss of its routers is not trained: max_vio and dead_experts show their balance")
    return "".join(f"; {note}" for note in notes)
