"""The trainer's model without its weights: parameters on the meta device, buffers real; and its tokenizer.

Server and trainer build it by the same function, so that both mean the same parameters. The model itself makes its
buffers: RoPE scaling of every kind stays what its author wrote. A buffer that its files hold, such as the bias of a
router, comes from the server like a parameter, and is one here, without a gradient.

Code that comes with a model is never run: transformers' own classes are built on both sides, also where vLLM gets
`--trust-remote-code`. A family that only such code has is refused.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bridge.core import paths
from bridge.errors import UnsupportedModelError, UsageError, first_line
from bridge.weights.layout import OTHER_MODES, Shape
from bridge.weights.model_folder import stored_buffers

MISBUILT = (
    ValueError, ImportError, TypeError, AttributeError, LookupError, ArithmeticError, NotImplementedError,
    StrictDataclassError,
)  # fmt: skip
"""Raised by transformers if its classes cannot be built from a configuration."""


def configuration(model: str) -> PretrainedConfig:
    """Load `model`'s configuration without what only says how its last user ran transformers.

    Its attention may be a package that is not installed here, and a model that returns tuples cannot be called. vLLM
    reads none of that.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None  # of its parts, too: transformers chooses
    for part in (config, config.get_text_config()):
        part.return_dict = True
    return config


def build(model: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return `model` with every parameter on the meta device, of which its language model's require gradients."""
    try:
        config = configuration(model)
    except (OSError, *MISBUILT) as error:
        _refuse_unknown_family(model)
        raise UsageError(
            f"no usable model at {model!r}: {first_line(error)}",
            hint="name a folder with a config.json, or a model on the hub",
        ) from error
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{model} is quantized: an optimizer cannot step its weights",
            hint="use the unquantized model",
        )
    try:
        with init_empty_weights(include_buffers=False):
            skeleton: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    except MISBUILT as error:
        raise UnsupportedModelError(
            f"{model} is not a language model of transformers: {first_line(error)}", hint=OTHER_MODES
        ) from error
    if reason := _untrainable(skeleton):
        raise UnsupportedModelError(
            f"{model} cannot be trained: its {type(skeleton).__name__} {reason}",
            hint="use another model, such as one in docs/families.md",
        )
    skeleton.tie_weights()
    language = [p for part in (skeleton.get_decoder(), skeleton.get_output_embeddings()) for p in part.parameters()]
    skeleton.requires_grad_(False)
    for parameter in language:
        parameter.requires_grad_()
    for name, buffer in stored_buffers(skeleton).items():
        hold(skeleton, name, buffer.to("meta"))
    return skeleton


def _refuse_unknown_family(model: str) -> None:
    """Refuse a model of which transformers has no classes, also if code that comes with it has some."""
    try:
        document, _ = PretrainedConfig.get_config_dict(model)
    except (OSError, *MISBUILT):
        return  # there is no configuration
    family = document.get("model_type")
    if not isinstance(family, str) or family in CONFIG_MAPPING:
        return
    version = transformers.__version__
    only_code = ": only code that comes with it does, and Bridge runs none of that" if "auto_map" in document else ""
    raise UnsupportedModelError(
        f"{model} is of family {family}, which transformers {version} does not have{only_code}",
        hint="train a model of a family that transformers has, such as those in docs/families.md, or upgrade"
        " transformers",
    )


def hold(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace the buffer `name` of `model` by a parameter without a gradient."""
    module, _, leaf = name.rpartition(".")
    owner = model.get_submodule(module)
    delattr(owner, leaf)
    owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def auto_class(config: PretrainedConfig) -> Any:
    """Return what builds the model: a language model inside something larger comes with all of it."""
    return AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText


def _untrainable(skeleton: PreTrainedModel) -> str | None:
    """Return why `bridge/passes` cannot run this class, whatever its weights are."""
    decoder = skeleton.get_decoder()
    head = skeleton.get_output_embeddings()
    taken = inspect.signature(decoder.forward).parameters
    if decoder is skeleton or "input_ids" not in taken:
        return "has no decoder that transformers finds: its get_decoder() returns something else"
    if "position_ids" not in taken:
        return "takes no position_ids: packed sequences would run into one another"
    if not isinstance(getattr(head, "weight", None), nn.Parameter):
        return "has no output embeddings, which turn hidden states into logits"
    return None


def shapes(skeleton: PreTrainedModel) -> dict[str, Shape]:
    """Return every parameter's shape by name, a tied parameter once."""
    return {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}


def tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load `model`'s tokenizer; UsageError if it has none."""
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # what is raised depends on the tokenizer, and on optional libraries
        raise UsageError(
            f"{model!r} has no usable tokenizer: {first_line(error) or type(error).__name__}",
            hint="copy tokenizer.json and tokenizer_config.json into the model's folder",
        ) from error
    return loaded


def num_embeddings(model: str) -> int | None:
    """Return how many tokens the embedding of `model` has rows for, by its configuration; None: it says nothing."""
    try:
        size = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config().vocab_size
    except (OSError, *MISBUILT):
        return None
    return size if isinstance(size, int) else None


def absolute(model: str) -> str:
    """Return a local model's absolute folder, or a hub name unchanged."""
    path = Path(model)
    return str(path.resolve()) if paths.is_folder(path) else model
