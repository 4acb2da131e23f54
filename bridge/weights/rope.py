"""RoPE as the server has it: where frequencies depend on the length, the trainer uses the server's for every sequence.

transformers chooses them for each batch by its longest position, so that a short sequence beside a long one would be
trained differently from how it was sampled. vLLM chooses once, by the longest sequence that it was started for.
Source: `vllm/model_executor/layers/rotary_embedding`, the same in vLLM 0.26, 0.32 and 0.33, and transformers'
`modeling_rope_utils.py`.

Not covered: scaling that does not depend on the length (linear, llama3, yarn): transformers computes it as vLLM does.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bridge.errors import UnsupportedModelError, UsageError

LONGROPE = "longrope"
DYNAMIC = "dynamic"
FIXED = "default"
"""The type with which transformers never recomputes a module's frequencies."""
GENERIC = "Transformers"
"""Prefix of vLLM's classes that run transformers' own model, which chooses by the batch at hand."""
TOLERANCE = 1e-4
"""Error of a cosine in float32 at positions up to about 100,000."""

Parameters = Mapping[str, Any]


def follow_server(model: PreTrainedModel, max_model_len: int | None, *, server_class: str = "") -> None:
    """Give `model` the frequencies of a server whose longest sequence has `max_model_len` tokens; None: not known.

    A model whose RoPE does not depend on the length is left alone. It may be called again for another server.
    `server_class` is vLLM's class of the model, if known.

    Raises:
        UnsupportedModelError: transformers or vLLM computes RoPE in its own way.
        UsageError: the server's longest sequence is not known, or too long.
    """
    _check_width(model)
    for module, layer_type, parameters in _dependent(model):
        kind = parameters["rope_type"]
        name = type(model).__name__
        if server_class.startswith(GENERIC):
            raise UnsupportedModelError(
                f"{name} has {kind} RoPE, and vLLM runs it as {server_class}, whose frequencies change with each batch",
                hint="use a model for which vLLM has its own class, such as Phi-3",
            )
        if max_model_len is None:
            raise UsageError(
                f"{name} has {kind} RoPE, which depends on the server's longest sequence, and the server reports none",
                hint="bridge serve-vllm, or a vLLM that lists max_model_len under /v1/models",
            )
        prefix = "" if layer_type is None else f"{layer_type}_"
        if kind == LONGROPE:
            frequencies, scaling = _longrope(module.config, layer_type, parameters, max_model_len)
        else:  # within max_position_embeddings both use the frequencies that the module began with
            _refuse_dynamic(name, parameters, module.config.max_position_embeddings, max_model_len)
            frequencies = getattr(module, f"{prefix}original_inv_freq")
            scaling = getattr(module, f"{prefix}attention_scaling")
        frequencies = frequencies.to(getattr(module, f"{prefix}inv_freq").device)
        setattr(module, f"{prefix}inv_freq", frequencies)
        setattr(module, f"{prefix}attention_scaling", scaling)
        module.rope_type = FIXED if layer_type is None else {**module.rope_type, layer_type: FIXED}
        if not _uses(module, layer_type, frequencies, scaling, max_model_len):  # the code of PhiMoE does not
            raise UnsupportedModelError(
                f"{type(module).__name__} computes {kind} RoPE in its own way, which is not vLLM's",
                hint="use another model, such as one in docs/families.md, or report this one",
            )


def _check_width(model: PreTrainedModel) -> None:
    """Refuse a model whose files say how much of a head is rotated where transformers does not read it.

    MiniMax-M2's `rotary_dim` is such a field: vLLM reads it, and transformers before 5.18 rotates whole heads.
    """
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        config = getattr(module, "config", None)
        width = getattr(config, "rotary_dim", None)
        if frequencies is not None and isinstance(width, int) and 2 * len(frequencies) != width:
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} rotates {2 * len(frequencies)} numbers of each head of"
                f" {type(model).__name__}, and vLLM the first {width}: rotary_dim of config.json",
                hint="pip install --upgrade transformers",
            )


def _dependent(model: PreTrainedModel) -> Iterator[tuple[Any, str | None, Parameters]]:
    """Yield each module whose frequencies depend on the length, with the type of layer that it serves (None: all)."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        given = getattr(config, "rope_parameters", None) or {}
        nested = {layer: given.get(layer) for layer in kinds} if isinstance(kinds, dict) else {None: given}
        for layer_type, parameters in nested.items() if kinds is not None else ():
            if parameters and parameters.get("rope_type") in (LONGROPE, DYNAMIC):
                yield module, layer_type, parameters


def _refuse_dynamic(name: str, parameters: Parameters, most: int, max_model_len: int) -> None:
    if "max_trained_positions" in parameters:
        raise UnsupportedModelError(
            f"{name} has dynamic RoPE with max_trained_positions, which transformers does not support",
            hint="use another model, such as one in docs/families.md",
        )
    if max_model_len > most:
        raise UsageError(
            f"{name} has dynamic RoPE, for which vLLM has frequencies up to {most} tokens, and the server's longest"
            f" sequence has {max_model_len}",
            hint=f"restart the server with --max-model-len {most}",
        )


def _longrope(config: Any, layer_type: str | None, parameters: Parameters, max_model_len: int) -> tuple[Tensor, float]:
    """Return the table of `Phi3LongRoPEScaledRotaryEmbedding`: long factors for all if any sequence may need them."""
    original = parameters["original_max_position_embeddings"]
    is_long = max_model_len > original
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](config, None, seq_len=original + is_long, layer_type=layer_type)
    scaling = parameters.get("long_mscale" if is_long else "short_mscale")
    if scaling is None:  # transformers would also look at `attention_factor` and `factor`
        stretch = max(config.max_position_embeddings / original, 1.0)
        scaling = math.sqrt(1 + math.log(stretch) / math.log(original))
    return frequencies, scaling


@torch.no_grad()
def _uses(module: nn.Module, layer_type: str | None, frequencies: Tensor, scaling: float, max_model_len: int) -> bool:
    """Run `module` on near positions alone and beside the farthest: it must give these frequencies' cosines in both."""
    layers = {} if layer_type is None else {"layer_type": layer_type}
    for batch in ([0, 1], [0, 1, max_model_len - 1]):
        positions = torch.tensor([batch], device=frequencies.device)
        made = module(torch.zeros(1, device=frequencies.device), positions, **layers)
        cosines = made[0] if isinstance(made, tuple) else made.real
        expected = (positions[..., None].float() * frequencies).cos() * scaling
        repeats = cosines.shape[-1] // expected.shape[-1]  # both halves, one after the other or interleaved
        expected = expected.repeat(1, 1, repeats).sort().values
        if not torch.allclose(cosines.sort().values, expected, atol=TOLERANCE):
            return False
    return True
