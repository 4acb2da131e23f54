"""The trainer's model without its weights (on the meta device; computed buffers are real), and its tokenizer.

Server and trainer build it with the same function, so that both use the same parameter names. The model's own code
computes its buffers, which keeps every kind of RoPE scaling as its author wrote it. A buffer that is stored in the
model's files, such as a router's bias, comes from the server like a parameter, and stays a buffer: it is not trained.

Code that ships with a model is never run: both sides build transformers' own classes, even if vLLM runs with
`--trust-remote-code`. A model family that exists only in such code is refused.
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
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

from bridge.core import json_lines, paths
from bridge.core.foreign_code import described
from bridge.errors import UnsupportedModelError, UsageError, first_line
from bridge.weights.layout import OTHER_MODES, Shape
from bridge.weights.model_folder import state, stored_buffers

MISBUILT = (
    ValueError, ImportError, TypeError, AttributeError, LookupError, ArithmeticError, NotImplementedError,
    StrictDataclassError,
)  # fmt: skip
"""Exceptions that transformers raises if it cannot build a model from its configuration."""


def configuration(model: str) -> PretrainedConfig:
    """Load `model`'s configuration without settings of how its last user ran transformers.

    The attention implementation may be a package that is not installed here, and Bridge cannot call a model that
    returns tuples. vLLM ignores these settings.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None  # also for sub-configurations
    for part in (config, config.get_text_config()):
        part.return_dict = True
    return config


def build(model: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return `model` with everything that its files store on the meta device.

    The parameters of its language model require gradients.
    """
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
            f"{model} is quantized: an optimizer cannot update its weights",
            hint="use the unquantized model",
        )
    try:
        with init_empty_weights(include_buffers=False):
            skeleton: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    except MISBUILT as error:
        raise UnsupportedModelError(
            f"{model} is not a transformers language model: {first_line(error)}", hint=OTHER_MODES
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
    stored = {id(buffer): buffer.to("meta") for buffer in stored_buffers(skeleton).values()}
    for module in skeleton.modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            setattr(module, leaf, stored.get(id(buffer), buffer))
    return skeleton


def _refuse_unknown_family(model: str) -> None:
    """Refuse a model for which transformers has no classes, even if the model ships with its own code."""
    try:
        document, _ = PretrainedConfig.get_config_dict(model)
    except (OSError, *MISBUILT):
        return  # the model has no configuration
    family = document.get("model_type")
    if not isinstance(family, str) or family in CONFIG_MAPPING:
        return
    version = transformers.__version__
    only_code = ": only code that ships with the model does, and Bridge never runs it" if "auto_map" in document else ""
    raise UnsupportedModelError(
        f"{model} belongs to family {family}, which transformers {version} does not support{only_code}",
        hint="train a model of a supported family, such as those in docs/families.md, or upgrade transformers",
    )


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class that builds the model; a language model inside a larger model is built with all of it."""
    return AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText


def _untrainable(skeleton: PreTrainedModel) -> str | None:
    """Return why `bridge/passes` cannot run a model of this class; None if it can."""
    decoder = skeleton.get_decoder()
    head = skeleton.get_output_embeddings()
    taken = inspect.signature(decoder.forward).parameters
    if decoder is skeleton or "input_ids" not in taken:
        return "has no decoder that transformers can find: its get_decoder() returns something else"
    if "position_ids" not in taken:
        return "does not accept position_ids: packed sequences would run into each other"
    if not isinstance(getattr(head, "weight", None), nn.Parameter):
        return "has no output embeddings, which turn hidden states into logits"
    return None


def shapes(skeleton: PreTrainedModel) -> dict[str, Shape]:
    """Return the shape of every parameter and stored buffer by name; a tied parameter appears once."""
    return {name: tuple(tensor.shape) for name, tensor in state(skeleton).items()}


def tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load `model`'s tokenizer, with the chat template of its processor if it has none; UsageError if there is none."""
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        if loaded.chat_template is None:
            loaded.chat_template = _template_of_processor(model)
    except Exception as error:  # the exception depends on the tokenizer and on optional libraries
        raise UsageError(
            f"{model!r} has no usable tokenizer: {first_line(error) or type(error).__name__}",
            hint="copy tokenizer.json and tokenizer_config.json into the model's folder",
        ) from error
    return loaded


def _template_of_processor(model: str) -> str | None:
    """Return the chat template that only the processor of a model with images reads, as vLLM does; None: there is none.

    Mistral Small 3.1 and others keep it in the earlier form, `chat_template.json`.
    """
    try:
        is_seeing = hasattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "vision_config")
    except (OSError, *MISBUILT):  # a folder with a tokenizer alone
        return None
    if not is_seeing:
        return None
    path = cached_file(
        model, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    held = json_lines.parsed(Path(path).read_bytes()) if path else {}
    template = held.get("chat_template") if isinstance(held, dict) else None
    return template if isinstance(template, str) else None


def num_embeddings(model: str) -> int | None:
    """Return the number of rows of `model`'s token embedding according to its configuration; None if unknown."""
    try:
        size = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config().vocab_size
    except (OSError, *MISBUILT):
        return None
    return size if isinstance(size, int) else None


def tokens_beyond(tokenizer: PreTrainedTokenizerBase, num_embeddings: int | None) -> str:
    """Return a sentence about the tokens without an embedding; empty if all have one, or if their number is unknown."""
    if num_embeddings is None:
        return ""
    ids = sorted((token_id, text) for text, token_id in tokenizer.get_vocab().items())
    without = [(token_id, text) for token_id, text in ids if token_id >= num_embeddings]
    if not without:
        return ""
    token_id, text = without[0]
    return (
        f"{len(without):,} tokens of the tokenizer are beyond the model's {num_embeddings:,} embeddings, the first:"
        f" {described(text)} ({token_id})"
    )


def absolute(model: str) -> str:
    """Return the absolute path of a local model; return a hub name unchanged."""
    path = Path(model)
    return str(path.resolve()) if paths.is_folder(path) else model
