"""Read model folders in another Python environment, and print a line of JSON for each. Does not import Bridge.

python reader.py transformers|rewrite|vllm FOLDER...
"""

import json
import sys
from pathlib import Path
from typing import Any

TOKENS = list(range(40, 88))
COMPARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window", "layer_types",
    "tie_word_embeddings", "attention_bias", "num_experts_per_tok", "eos_token_id", "pad_token_id", "hidden_act",
    "query_pre_attn_scalar", "routed_scaling_factor", "logits_scaling", "embedding_multiplier", "dtype",
)  # fmt: skip


def rope(config: Any) -> dict[str, Any]:
    """Return a configuration's RoPE settings in the same form for every version of transformers."""
    parameters = getattr(config, "rope_parameters", None)
    local = getattr(config, "rope_local_base_freq", None)
    if not parameters:  # transformers 4
        scaling = dict(getattr(config, "rope_scaling", None) or {})
        parameters = scaling | {"rope_theta": getattr(config, "rope_theta", None)}
    elif isinstance(parameters.get("full_attention"), dict):
        local = (parameters.get("sliding_attention") or {}).get("rope_theta")
        parameters = parameters["full_attention"]
    found = {name: value for name, value in parameters.items() if name not in ("type", "partial_rotary_factor")}
    found["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    found["partial"] = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    original = getattr(config, "original_max_position_embeddings", None)
    if original is not None and found["rope_type"] == "longrope":
        found["original_max_position_embeddings"] = original
    if local is not None and local != found.get("rope_theta"):
        found["local"] = local
    return found


def known(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - transformers 5 refuses to give one value where layers differ
        return None


def described(config: Any) -> dict[str, Any]:
    text = config.get_text_config()
    found = {name: value for name in COMPARED if (value := known(text, name)) is not None}
    found["dtype"] = str(getattr(config, "dtype", None)).replace("torch.", "")
    found["architectures"] = config.architectures
    return found | {"rope": rope(text)}


def by_transformers(folder: Path) -> dict[str, Any]:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    name = config.architectures[0]
    if not hasattr(transformers, name):
        return {"error": f"absent: {name}"}
    model, report = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"]:
        return {"error": f"missing {sorted(report['missing_keys'])[:3]}, extra {sorted(report['unexpected_keys'])[:3]}"}
    if name == "DeepseekV2ForCausalLM" and transformers.__version__.startswith("4."):
        correct_scale(model)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([TOKENS])).logits[0, :-1].float()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    found = {"config": described(config), "logprobs": chosen.tolist()}
    kind = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    if kind is None or hasattr(transformers, kind):  # transformers 4 has no class for what transformers 5 wrote
        found["config"]["tokens"] = transformers.AutoTokenizer.from_pretrained(folder)("2+3=")["input_ids"]
    return found


def correct_scale(model: Any) -> None:
    """Scale attention by YaRN's `mscale_all_dim`, as DeepSeek's own code and transformers 5, not 4, do."""
    import math

    scaling = model.config.rope_scaling or {"mscale_all_dim": 0.0, "factor": 1.0}
    mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
    for layer in model.model.layers:
        layer.self_attn.scaling *= mscale**2


def rewritten(folder: Path) -> dict[str, Any]:
    """Write a copy of a model in this version's format next to it; weights and tokenizer stay unchanged."""
    import shutil

    import transformers

    # Add what the source lacks in this version's format by hand, as if the model had been published in this format.
    held = json.loads((folder / "config.json").read_text())
    if held["model_type"] == "qwen3_moe":
        held["num_experts"] = held.pop("num_local_experts")
    parts = [held, *([held["text_config"]] if "text_config" in held else [])]
    for part in parts:
        parameters = part.pop("rope_parameters", None) or {}
        if isinstance(parameters.get("full_attention"), dict):
            windowed = parameters.get("sliding_attention") or {}
            parameters = parameters["full_attention"]
            if windowed.get("rope_theta") != parameters.get("rope_theta"):
                part["rope_local_base_freq"] = windowed.get("rope_theta")
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in parameters:
                part[name] = parameters[name]
        kind = parameters.get("rope_type", "default")
        rest = {k: v for k, v in parameters.items() if k not in ("rope_theta", "partial_rotary_factor", "rope_type")}
        if kind == "longrope":
            part["original_max_position_embeddings"] = rest.pop("original_max_position_embeddings")
            part["rope_scaling"] = {"type": kind, **rest}
        elif kind != "default" or rest:
            part["rope_scaling"] = {"rope_type": kind, **rest}
    out = folder.with_name("source-of-4")
    shutil.copytree(folder, out)
    (out / "config.json").write_text(json.dumps(held))
    config = transformers.AutoConfig.from_pretrained(out)
    if not hasattr(transformers, config.architectures[0]):
        return {"error": f"absent: {config.architectures[0]}"}
    config.save_pretrained(out)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(out / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(out)
    return {"written": str(out)}


def by_vllm(folder: Path) -> dict[str, Any]:
    from vllm.config import ModelConfig
    from vllm.transformers_utils.config import get_config

    config = get_config(str(folder), trust_remote_code=False)
    found = described(config)
    if "vision_config" in config:  # their classes need torchvision
        return {"config": found}
    engine = ModelConfig(model=str(folder))
    built = {"dtype": str(engine.dtype).replace("torch.", ""), "architectures": [engine.architecture]}
    sizes = {
        "vocab_size": engine.get_vocab_size(), "hidden_size": engine.get_hidden_size(),
        "num_attention_heads": engine.model_arch_config.total_num_attention_heads,
    }  # fmt: skip
    return {"config": found | built | sizes, "longest": engine.max_model_len}


def version(form: str) -> str:
    import transformers

    if form != "vllm":
        return str(transformers.__version__)
    from importlib.metadata import version as installed

    return f"{installed('vllm')} with transformers {transformers.__version__}"


if __name__ == "__main__":
    form, *folders = sys.argv[1:]
    read = {"transformers": by_transformers, "rewrite": rewritten, "vllm": by_vllm}[form]
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries may print to stdout
    for name in folders:
        try:
            found = read(Path(name))
        except Exception as error:  # noqa: BLE001 - reported
            text = " ".join(str(error).split())
            unknown = "does not recognize this architecture" in text
            found = {"error": f"absent: {text[:80]}" if unknown else f"{type(error).__name__}: {text[:300]}"}
        print(json.dumps({"folder": name, "version": version(form), **found}), file=out, flush=True)
