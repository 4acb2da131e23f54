"""Learn from vLLM's own `load_weights` where in its parameters every Hugging Face parameter lies.

vLLM's model is given the model's parameters under the names that its files have, without a value, and every copy that
it makes of them is recorded instead of done (`bridge/weights/copy_recorder.py`). So whatever vLLM fuses, stacks, pads,
renames or ties is known from the code that does it, and there is no table per model family.

Not covered: what vLLM does to weights once they are loaded (`loading.py`), and whether anything is left without a
partner (`bridge/weights/layout.py`). Seen in vLLM 0.26 to 0.33.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from bridge.errors import BridgeError, UnsupportedModelError
from bridge.server.shard import View
from bridge.weights.copy_recorder import CopyRecorder
from bridge.weights.cuts import join
from bridge.weights.layout import OTHER_MODES
from bridge.weights.saved_form import saved_form

WRAPPED = "base_layer"
"""What vLLM's LoRA layers call the layer that they wrap (vLLM 0.26 to 0.33)."""
LOADING_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What a `load_weights` raises that asks a weight for its value, or finds no place for it."""


def views(model: Any, skeleton: PreTrainedModel) -> dict[str, View]:
    """Return where in vLLM's `model`, as it is before its weights are loaded, each parameter of `skeleton` would lie.

    Raises:
        UnsupportedModelError: a parameter that vLLM does not copy as it is, or not to one place.
    """
    sources = {name: parameter.detach() for name, parameter in skeleton.named_parameters()}
    saved = saved_form(skeleton, sources)
    recorder = CopyRecorder(sources, dict(model.named_parameters()))
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(saved.items()))
    except BridgeError:
        raise
    except LOADING_ERRORS as error:
        raise UnsupportedModelError(
            f"vLLM's {type(model).__name__} does more than copying when it loads: {_first_line(error)}",
            remedy=OTHER_MODES,
        ) from error
    copies = recorder.copies(dict(model.named_parameters()))
    return {name: join(name, tuple(sources[name].shape), parts) for name, parts in copies.items()}


def padding(model: nn.Module) -> dict[str, int]:
    """Return, per padded vocabulary, how many elements at its end stand for no token."""
    tails = {}
    for name, parameter in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, VocabParallelEmbedding):
            spare = parameter.shape[0] - int(layer.shard_indices.num_org_elements)
            if spare:
                tails[name] = spare * parameter[0].numel()
    return tails


def plain_names(model: nn.Module) -> dict[str, str]:
    """Return the name of each parameter as it would be without LoRA -> its name."""
    names = (name for name, _ in model.named_parameters())
    return {".".join(part for part in name.split(".") if part != WRAPPED): name for name in names}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
