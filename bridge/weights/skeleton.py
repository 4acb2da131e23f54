"""The trainer's model without its weights: parameters on the meta device, buffers real; and its tokenizer.

Server and trainer build it by the same function, so that both mean the same parameters. The model itself makes its
buffers: RoPE scaling of every kind stays what its author wrote. A buffer that its files hold, such as the bias of a
router, comes from the server like a parameter, and is one here, without a gradient.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
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


def build(model: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return `model` with every parameter on the meta device, of which its language model's require gradients."""
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, *MISBUILT) as error:
        raise UsageError(
            f"no usable model at {model!r}: {first_line(error)}",
            remedy="name a folder with a config.json, or a model on the hub",
        ) from error
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{model} is quantized: an optimizer cannot step its weights",
            remedy="use the unquantized model",
        )
    try:
        with init_empty_weights(include_buffers=False):
            skeleton: PreTrainedModel = auto_class(config).from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except MISBUILT as error:
        raise UnsupportedModelError(
            f"{model} is not a language model of transformers: {first_line(error)}", remedy=OTHER_MODES
        ) from error
    if reason := _untrainable(skeleton):
        raise UnsupportedModelError(
            f"{model} cannot be trained: its {type(skeleton).__name__} {reason}",
            remedy="use another model, such as one in docs/families.md",
        )
    skeleton.tie_weights()
    language = [p for part in (skeleton.get_decoder(), skeleton.get_output_embeddings()) for p in part.parameters()]
    skeleton.requires_grad_(False)
    for parameter in language:
        parameter.requires_grad_()
    for name, buffer in stored_buffers(skeleton).items():
        hold(skeleton, name, buffer.to("meta"))
    return skeleton


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
    decoder, head = skeleton.get_decoder(), skeleton.get_output_embeddings()
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
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # what is raised depends on the tokenizer, and on optional libraries
        raise UsageError(
            f"{model!r} has no usable tokenizer: {first_line(error) or type(error).__name__}",
            remedy="copy tokenizer.json and tokenizer_config.json into the model's folder",
        ) from error
    return loaded


def num_embeddings(model: str) -> int | None:
    """Return how many tokens the embedding of `model` has rows for, by its configuration; None: it says nothing."""
    try:
        size = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    except (OSError, *MISBUILT):
        return None
    return size if isinstance(size, int) else None


def absolute(model: str) -> str:
    """Return a local model's absolute folder, or a hub name unchanged."""
    path = Path(model)
    return str(path.resolve()) if paths.is_folder(path) else model
