"""Export a checkpoint as a model folder: an adapter is merged into its base, a full model is copied.

Not covered: uploading the folder (`bridge/core/hub.py`).
"""

import dataclasses
import difflib
import math
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bridge.checkpoints import checkpoint
from bridge.core import atomic_folder, folder_mark, json_lines, paths
from bridge.core.paths import ADAPTER_CONFIG, CONFIG_NAME
from bridge.errors import UsageError
from bridge.weights import loaded, model_files, model_folder, skeleton
from bridge.weights.stored_tensors import ADAPTER_WEIGHTS, headers, refuse_misfits

BASE_KEY = "base_model_name_or_path"
WHOLE = "base_model.model."
"""What PEFT writes in front of the names of a model's modules."""
MAIN = "main"
"""The revision of a model on the hub that is read if none is named."""
NAME_BASE = "name the base model that it was trained on: --model BASE"
OLDER_WEIGHTS = "adapter_model.bin"
WARN_ABOVE = 0.1
"""Relative error of an adapter's change of the weights above which the rounding of an export counts as large."""
NOT_SERVED = ("lora_bias", "use_dora", "modules_to_save", "alora_invocation_tokens", "layer_replication")
VLLM_RANK = 16
"""vLLM's default for --max-lora-rank."""
ExportDtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How much of an adapter's change of the weights is lost by rounding to the dtype of the files."""

    dtype: str
    relative_error: float
    """Norm of the rounding error over the norm of the change, over all weights."""
    cosine: float
    """Cosine similarity of the rounded change and the adapter's exact change."""

    @property
    def is_large(self) -> bool:
        return self.relative_error > WARN_ABOVE


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    folder: Path
    rounding: Rounding | None = None
    """None if no adapter was merged, or if the adapter does not change any weight."""
    is_base: bool = False
    """Whether the merged adapter does not change any weight, because it was never trained or its alpha is 0."""
    as_adapter: str = ""
    """How to use the adapter without merging it, which avoids the rounding."""
    missing: Sequence[str] = ()
    """Files of the source that could not be copied."""
    tokens_beyond: str = ""
    """A sentence about the tokenizer's tokens for which the merged model has no embedding; empty if there are none."""


def export(source: Path, out: Path, *, base: str | None = None, dtype: ExportDtype | None = None) -> Exported:
    """Write the model in `source`, including its tokenizer and other files, to `out` atomically.

    `source` is a checkpoint, or any folder with a model or an adapter. `base` overrides the base model named by an
    adapter, and `dtype` the base model's own dtype. An existing `out` is replaced only if it is an earlier export
    without additional files.

    Raises:
        UsageError: `source` is damaged or does not hold a model, `base` does not fit, an adapter cannot be merged
            completely, or `out` cannot be written.
    """
    is_adapter = holds_adapter(source, base=base, dtype=dtype)
    if checkpoint.is_checkpoint(source):
        checkpoint.read(source)
    with atomic_folder.write(out, replaceable=_is_export, flag="--out") as scratch:
        rounding = None
        missing = list[str]()
        as_adapter = ""
        beyond = ""
        if is_adapter:
            as_adapter = _serve(source, _settings(source))
            base = base or _base_of(source)
            if base.startswith("~"):  # as in --model=~/base, which the shell leaves
                base = str(paths.expanded(base))
            if not model_files.found(source).has_tokenizer:
                _check_tokenizer(base, source)
            model, rounding = _merged(source, base, dtype)
            missing = model_folder.save(model, base, scratch, tokenizer=source)
            with suppress(UsageError):  # a tokenizer that only its own code can load
                tokenizer = skeleton.tokenizer(str(scratch))
                beyond = skeleton.tokens_beyond(tokenizer, len(model.get_input_embeddings().weight))
        else:
            model_folder.copy(source, scratch)
        folder_mark.put(scratch, "export", names=[path.relative_to(scratch).as_posix() for path in scratch.rglob("*")])
    return Exported(
        folder=out.resolve(),
        rounding=rounding,
        is_base=is_adapter and rounding is None and _has_only_lora(source),
        as_adapter=as_adapter,
        missing=missing,
        tokens_beyond=beyond,
    )


def _check_tokenizer(base: str, source: Path) -> None:
    """Raise UsageError if `base`, the base model of the adapter in `source`, is not there or has no tokenizer."""
    files = model_files.found(base)
    if files.folder is None:
        raise UsageError(
            f"the adapter {source} was trained on {base}, but there is no such folder in {Path.cwd()}, and no such"
            " model on the hub or in its cache",
            hint=NAME_BASE,
        )
    if not files.has_tokenizer:
        model_files.source_files(base)


def holds_adapter(source: Path, *, base: str | None, dtype: ExportDtype | None = None) -> bool:
    """Return whether `source` holds an adapter rather than a full model.

    Raises:
        UsageError: it holds neither, or it holds a full model although `base` or `dtype` was given.
    """
    if (source / ADAPTER_CONFIG).is_file():
        return True
    has_weights = any(source.glob("*.safetensors*"))  # a run directory has a config.json, too, with the run's choices
    if not has_weights or not (source / CONFIG_NAME).is_file():
        message = (
            f"{source} holds neither a model nor an adapter" if source.is_dir() else f"there is no folder {source}"
        )
        raise UsageError(message, hint=_did_you_mean(source) or "name a checkpoint, such as SAVE_PATH/step_N")
    if base is not None:
        raise UsageError(f"--model {base}: {source} holds a full model, expected an adapter", hint="leave --model out")
    if dtype is not None:
        raise UsageError(
            f"--dtype {dtype}: {source} holds a full model, which is copied in its own dtype, expected an adapter",
            hint="leave --dtype out",
        )
    return False


def _did_you_mean(source: Path) -> str:
    """Suggest the newest checkpoint or an adapter below `source`, or else a folder next to it with a similar name."""
    below = [*source.glob("*_[0-9]*"), *source.glob("*/*_[0-9]*")]
    if steps := [folder for folder in below if checkpoint.is_checkpoint(folder)]:
        newest = max(steps, key=lambda folder: int(folder.name.rpartition("_")[2]))
        return f"did you mean {newest}?"
    if adapters := sorted(source.glob(f"*/{ADAPTER_CONFIG}")):  # PEFT saves each of several adapters in a folder
        return f"did you mean {adapters[0].parent}?"
    siblings = [] if source.is_dir() else [folder.name for folder in source.parent.glob("*/")]
    near = difflib.get_close_matches(source.name, siblings, n=1)
    return f"did you mean {source.parent / near[0]}?" if near else ""


def _is_export(folder: Path) -> bool:
    written = {*folder_mark.names_of(folder), folder_mark.NAME}
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return folder_mark.kind_of(folder) == "export" and held <= written


def _base_of(source: Path) -> str:
    """Return the base model that the adapter names: a folder, or a model on the hub in its main revision."""
    path = source / ADAPTER_CONFIG
    try:
        settings = json_lines.parsed(path.read_text())
        base, revision = settings.get(BASE_KEY), settings.get("revision")
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: the file does not hold an object
        raise UsageError(f"{path} cannot be read: {error}", hint="name a complete adapter") from error
    if not isinstance(base, str) or not base:
        raise UsageError(f"{path} does not name a base model", hint=NAME_BASE)
    if revision not in (None, "", MAIN) and not paths.is_folder(base):
        raise UsageError(
            f"{path} names revision {revision} of {base}, but Bridge reads only the revision {MAIN} of a model on the"
            " hub",
            hint="download that revision, and name the folder that is printed, with --model FOLDER: hf download"
            f" {shlex.quote(base)} --revision {shlex.quote(str(revision))}",
        )
    return base


def _settings(source: Path) -> Any:
    """Return PEFT's settings of an adapter that can be merged into a model's weights.

    Raises:
        UsageError: the settings cannot be read, or the adapter cannot be merged completely.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of settings that it does not know, which are checked below
            settings: Any = PeftConfig.from_pretrained(str(source))
    except Exception as error:
        raise UsageError(
            f"{source / ADAPTER_CONFIG} cannot be read: {_shortened(error)}", hint="name a complete adapter"
        ) from error
    if unknown := _unknown_settings(source, settings):
        raise UsageError(
            f"{source / ADAPTER_CONFIG} has {', '.join(unknown)}, which PEFT {peft.__version__} does not know and would"
            " leave out: the merged weights might be others than those that were trained",
            hint="pip install -U peft, or remove the settings there that do not change the weights",
        )
    kind = str(getattr(settings.peft_type, "value", settings.peft_type))
    why = ""
    if settings.is_prompt_learning or settings.is_adaption_prompt:
        why = f"is a {kind}, which changes a model's input rather than its weights"
    elif getattr(settings, "alora_invocation_tokens", None):
        why = "is an activated LoRA (alora_invocation_tokens), which applies only after its own tokens"
    elif getattr(settings, "layer_replication", None):
        why = "repeats layers of its base (layer_replication), but a model's files hold the weights of each only once"
    if why:
        raise UsageError(f"the adapter {source} {why}: it cannot be merged", hint=_serve(source, settings))
    if not (source / ADAPTER_WEIGHTS).is_file():
        if (source / OLDER_WEIGHTS).is_file():
            raise UsageError(
                f"{source} holds its weights as {OLDER_WEIGHTS}, expected {ADAPTER_WEIGHTS}",
                hint=f"""python -c "import torch, safetensors.torch as s; s.save_file(torch.load('{OLDER_WEIGHTS}',"""
                f""" weights_only=True), '{ADAPTER_WEIGHTS}')" in {source}""",
            )
        raise UsageError(f"{source} has no {ADAPTER_WEIGHTS}", hint="name a complete adapter")
    return settings


def _unknown_settings(source: Path, settings: Any) -> list[str]:
    """Return the settings of an adapter that are made but that the installed PEFT does not have."""
    known = {field.name for field in dataclasses.fields(settings)}
    written: dict[str, Any] = json_lines.parsed((source / ADAPTER_CONFIG).read_text())
    return [f"{name}={value!r}" for name, value in written.items() if name not in known and value]


def _serve(source: Path, settings: Any) -> str:
    """Return how to use an adapter without merging it: vLLM serves only plain LoRA, PEFT loads the rest."""
    if not isinstance(settings, LoraConfig) or any(getattr(settings, name, None) for name in NOT_SERVED):
        return f"load it with PEFT: PeftModel.from_pretrained(base, {str(source)!r})"
    ranks = [rank for rank in (settings.r, *(settings.rank_pattern or {}).values()) if isinstance(rank, int)]
    slots = 1 << (max(ranks, default=1) - 1).bit_length()  # vLLM supports powers of two
    flag = f" --max-lora-rank {slots}" if slots > VLLM_RANK else ""
    named = settings.base_model_name_or_path
    base = shlex.quote(named) if isinstance(named, str) and named else "BASE"
    if settings.revision:
        base += f" --revision {shlex.quote(str(settings.revision))}"
    return (
        f"serve it as an adapter: vllm serve {base} --enable-lora{flag} --lora-modules mine={shlex.quote(str(source))}"
    )


def _shortened(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _merged(source: Path, base: str, dtype: ExportDtype | None) -> tuple[PreTrainedModel, Rounding | None]:
    """Return the base model with the adapter merged into it, in `dtype` or the base's own dtype, and the rounding loss.

    Each sum W + alpha / r B A is computed in float32, and rounded once.

    Source: LoRA, arXiv 2106.09685; `merge_and_unload` of PEFT.
    """
    _refuse_quantized(base)
    try:
        model = loaded.from_pretrained(base, dtype or "auto")
    except UsageError as error:
        raise UsageError(f"{error.message} (the base of {source})", hint=NAME_BASE) from error
    _resize_embeddings(source, base, model)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    part = _adapted_part(source, model)
    try:
        adapted: Any = PeftModel.from_pretrained(part, str(source))
    except Exception as error:
        raise UsageError(f"the adapter {source} does not fit {base}: {_shortened(error)}", hint=NAME_BASE) from error
    settings = adapted.peft_config[adapted.active_adapter]
    _refuse_other_weights(source, adapted, part)
    ends = (part.get_input_embeddings(), part.get_output_embeddings())
    if is_tied and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise UsageError(
            f"the adapter {source} changes the head or the embedding of {base}, which share one tensor: merging it"
            " would change both",
            hint=_serve(source, settings),
        )
    if biased := [name for name, layer in _layers(adapted) if _lacks_a_bias(layer)]:
        raise UsageError(
            f"the adapter {source} has biases (lora_bias) for {len(biased)} layers without a bias in {base}, the first:"
            f" {biased[0].removeprefix('base_model.model.')}",
            hint=_serve(source, settings),
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns that layers are already merged
            rounding = _merge_layers(adapted)
            adapted.merge_and_unload()
    except Exception as error:
        raise UsageError(
            f"the adapter {source}, a {settings.peft_type}, cannot be merged into {base}: {_shortened(error)}",
            hint=_serve(source, settings),
        ) from error
    if rounding is not None and not math.isfinite(rounding.relative_error):
        raise UsageError(
            f"the adapter {source} changes weights by values that are not finite: its training diverged",
            hint="export an earlier checkpoint",
        )
    model.set_output_embeddings(part.get_output_embeddings())
    return model, rounding


def _adapted_part(source: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that an adapter was trained on: `model` itself, or only its language model.

    Trainers load a model with images as its language model alone if they train on text. The adapter's modules then
    lack the prefix that they have in the whole model. Both models share all modules.
    """
    leaves = {name for name, module in model.named_modules() if not any(module.children())}
    paths_of_tensors = [_prefixes(name) for name in headers(source / ADAPTER_WEIGHTS)]
    if model.config.get_text_config() is model.config or any(leaves.intersection(names) for names in paths_of_tensors):
        return model
    try:
        with init_empty_weights():
            alone: PreTrainedModel = AutoModelForCausalLM.from_config(model.config.get_text_config())
    except ValueError:  # transformers has no class for this family's language model alone
        return model
    setattr(alone, alone.base_model_prefix, model.get_decoder())
    alone.set_output_embeddings(model.get_output_embeddings())
    return alone


def _prefixes(key: str) -> Iterator[str]:
    """Yield the names of modules that may hold a tensor of an adapter."""
    names = key.removeprefix(WHOLE).split(".")
    return (".".join(names[:end]) for end in range(1, len(names)))


def _resize_embeddings(source: Path, base: str, model: PreTrainedModel) -> None:
    """Give the model as many embeddings as the adapter was trained with, if the adapter holds all of their rows.

    Raises:
        UsageError: the rows of the embedding or of the head are missing.
    """
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    names = {name: module for name, module in model.named_modules() if module in ends.values()}
    num_before, width = ends["embedding"].weight.shape
    rows = dict[nn.Module, int]()
    for key, stored in headers(source / ADAPTER_WEIGHTS).items():
        is_whole = key.endswith(".weight") and ".lora_" not in key and stored.shape[1:] == (width,)
        for name, module in names.items():
            if is_whole and key.startswith(f"{WHOLE}{name}."):
                rows[module] = stored.shape[0]
    num_rows = next((count for count in rows.values() if count != num_before), num_before)
    if num_rows == num_before:
        return
    is_tied = ends["embedding"].weight is ends["head"].weight
    lacking = [which for which, module in ends.items() if rows.get(module) != num_rows and not is_tied]
    if lacking:
        raise UsageError(
            f"the adapter {source} was trained with {num_rows:,} embeddings, but {base} has {num_before:,}, and the"
            f" adapter lacks the rows of the {lacking[0]}",
            hint="save the base as it was resized before training, and name it: --model BASE",
        )
    model.resize_token_embeddings(num_rows, mean_resizing=False)


def _refuse_quantized(base: str) -> None:
    try:
        quantized = getattr(AutoConfig.from_pretrained(base, trust_remote_code=False), "quantization_config", None)
    except Exception:  # noqa: BLE001 - loading the model raises the error with its reason
        return
    if quantized:
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else quantized
        raise UsageError(
            f"{base} is quantized ({method}): an adapter cannot be added to such weights",
            hint="name the unquantized model with --model",
        )


def _refuse_other_weights(source: Path, adapted: Any, model: PreTrainedModel) -> None:
    """Refuse an adapter with tensors that do not fit the model: PEFT would drop them silently.

    With an adapter on the embedding or the head, PEFT also saves and loads the full base tensor, which is accepted. If
    the embedding was resized, PEFT saves some of its tensors twice, once under their internal names.
    """
    held = {name: torch.empty(part.shape, device="meta") for name, part in headers(source / ADAPTER_WEIGHTS).items()}
    settings = adapted.peft_config[adapted.active_adapter]
    stacked = convert_peft_adapter_state_dict_for_transformers(model, settings, held)  # stacks the experts
    shapes = {name: tuple(tensor.shape) for name, tensor in stacked.items()}
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    whole = {name: tuple(tensor.shape) for name, tensor in adapted.state_dict().items()}
    whole |= {name.replace(f".{adapted.active_adapter}", ""): shape for name, shape in whole.items()}
    taken = {name for name in shapes.keys() - expected.keys() if whole.get(name) == shapes[name]}
    shapes = {name: shape for name, shape in shapes.items() if name not in taken}
    refuse_misfits(f"the adapter {source}", shapes, expected)


def _has_only_lora(source: Path) -> bool:
    """Return whether an adapter holds only LoRA matrices, and no weights that replace the base's."""
    return all(".lora_" in name for name in headers(source / ADAPTER_WEIGHTS))


def _layers(adapted: Any) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in adapted.named_modules() if isinstance(layer, BaseTunerLayer)]


def _lacks_a_bias(layer: Any) -> bool:
    """Return whether a layer's adapter has a bias, but the base layer has no bias to add it to."""
    return any(getattr(layer, "lora_bias", {}).values()) and getattr(layer.get_base_layer(), "bias", None) is None


def _merge_layers(adapted: Any) -> Rounding | None:
    """Merge each layer in float32, round it to its own dtype, and return the rounding loss over all layers."""
    wanted_sum = lost_sum = held_sum = common_sum = 0.0
    dtype = torch.float32
    with torch.no_grad():
        for _, layer in _layers(adapted):
            parameters = [*layer.get_base_layer().parameters(recurse=False)]
            before = [parameter.detach().clone() for parameter in parameters]
            for parameter in parameters:
                parameter.data = parameter.data.float()
            layer.merge()
            for parameter, old in zip(parameters, before, strict=True):
                wanted = parameter.data - old.float()
                parameter.data = parameter.data.to(old.dtype)
                held = parameter.data.float() - old.float()
                if wanted.any():
                    dtype = old.dtype
                    wanted_sum += float(wanted.double().square().sum())
                    held_sum += float(held.double().square().sum())
                    lost_sum += float((held - wanted).double().square().sum())
                    common_sum += float((held.double() * wanted.double()).sum())
    if not wanted_sum:
        return None
    cosine = common_sum / math.sqrt(held_sum * wanted_sum) if held_sum else 0.0
    return Rounding(
        dtype=str(dtype).removeprefix("torch."), relative_error=math.sqrt(lost_sum / wanted_sum), cosine=cosine
    )
