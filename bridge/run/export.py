"""Export a checkpoint as a plain model folder: an adapter is merged into its base, other weights are copied.

Not covered: uploading the folder (`bridge/core/hub.py`).
"""

import difflib
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

from bridge.core import atomic_folder, hub, json_lines, mark
from bridge.errors import UsageError
from bridge.run import checkpoint
from bridge.weights import loaded, model_folder
from bridge.weights.stored_tensors import ADAPTER_CONFIG, ADAPTER_WEIGHTS, headers, refuse_misfits

BASE_KEY = "base_model_name_or_path"
NAME_BASE = "name the base that it was trained on with --model"


def export(source: Path, out: Path, *, base: str | None = None) -> Path:
    """Write the model in `source` with its tokenizer to `out` atomically, and return the folder.

    `source` is a checkpoint, or any folder with a model or an adapter. `base` overrides the base that an adapter names.
    Only an earlier export without added files is replaced.

    Raises:
        UsageError: `source` is damaged or holds no model, `base` does not fit it, or `out` cannot be written.
    """
    is_adapter = holds_adapter(source, base=base)
    if checkpoint.is_checkpoint(source):
        checkpoint.read(source)
    with atomic_folder.write(out, replaceable=_is_export, flag="--out") as scratch:
        if is_adapter:
            base = base or _base_of(source)
            tokenizer = source if model_folder.has_tokenizer(source) else base  # earlier versions saved none
            model_folder.save(_merged(source, base), tokenizer, scratch)
        else:
            model_folder.copy(source, scratch)
        mark.put(scratch, "export")
    return out.resolve()


def holds_adapter(source: Path, *, base: str | None) -> bool:
    """Return whether `source` holds an adapter, and not a whole model.

    Raises:
        UsageError: it holds neither, or a whole model although `base` was named.
    """
    if (source / ADAPTER_CONFIG).is_file():
        return True
    has_weights = any(source.glob("*.safetensors*"))  # a run directory has a config.json as well: its choices
    if not has_weights or not (source / hub.CONFIG_NAME).is_file():
        message = (
            f"{source} holds neither a model nor an adapter" if source.is_dir() else f"there is no folder {source}"
        )
        raise UsageError(message, remedy=_did_you_mean(source) or "name a checkpoint, such as SAVE_PATH/step_N")
    if base is not None:
        raise UsageError(f"--model {base}: {source} holds no adapter, but a whole model", remedy="leave --model out")
    return False


def _did_you_mean(source: Path) -> str:
    """Suggest the newest checkpoint below `source`, or else a folder beside it with a similar name."""
    below = [*source.glob("*_[0-9]*"), *source.glob("*/*_[0-9]*")]
    if steps := [folder for folder in below if checkpoint.is_checkpoint(folder)]:
        return f"did you mean {max(steps, key=lambda folder: int(folder.name.rpartition('_')[2]))}?"
    beside = [] if source.is_dir() else [folder.name for folder in source.parent.glob("*/")]
    near = difflib.get_close_matches(source.name, beside, n=1)
    return f"did you mean {source.parent / near[0]}?" if near else ""


def _is_export(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    return mark.kind_of(folder) == "export" and all(model_folder.is_part(name) or name == mark.NAME for name in names)


def _base_of(source: Path) -> str:
    path = source / ADAPTER_CONFIG
    try:
        base = json_lines.parsed(path.read_text()).get(BASE_KEY)
    except (OSError, ValueError, AttributeError) as error:  # the last: it holds no object
        raise UsageError(f"{path} cannot be read: {error}", remedy="name a complete adapter") from error
    if not isinstance(base, str) or not base:
        raise UsageError(f"{path} names no base", remedy=NAME_BASE)
    return base


def _merged(source: Path, base: str) -> PreTrainedModel:
    """Return `base`, in its own dtype, with the adapter in `source` added to its weights: W + alpha / r B A.

    Source: LoRA, arXiv 2106.09685; `merge_and_unload` of PEFT.
    """
    try:
        model = loaded.from_pretrained(base, "auto")
    except UsageError as error:
        raise UsageError(f"{error.message} (the base of {source})", remedy=NAME_BASE) from error
    try:
        adapted: Any = PeftModel.from_pretrained(model, str(source))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"the adapter {source} does not fit {base}: {reason}", remedy=NAME_BASE) from error
    held = {name: torch.empty(part.shape, device="meta") for name, part in headers(source / ADAPTER_WEIGHTS).items()}
    settings = adapted.peft_config[adapted.active_adapter]
    stacked = convert_peft_adapter_state_dict_for_transformers(model, settings, held)  # those of experts
    shapes = {name: tuple(tensor.shape) for name, tensor in stacked.items()}
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    refuse_misfits(f"the adapter {source}", shapes, {name: tuple(tensor.shape) for name, tensor in state.items()})
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.tie_word_embeddings and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise UsageError(
            f"the adapter {source} changes the head or the embedding of {base}, which are one tensor: merged, it would"
            " change both",
            remedy="serve it as an adapter: vllm serve BASE --enable-lora",
        )
    return adapted.merge_and_unload()
