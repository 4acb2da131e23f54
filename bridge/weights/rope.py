"""Match the server's RoPE: where frequencies depend on sequence length, the trainer always uses the server's.

transformers chooses the frequencies for each batch by its longest position, so a short sequence batched with a long one
would be trained with different frequencies than it was sampled with. vLLM chooses once, by its maximum model length.
Source: `vllm/model_executor/layers/rotary_embedding`, the same in vLLM 0.26, 0.32 and 0.33, and transformers'
`modeling_rope_utils.py`.

Not covered: scaling that does not depend on the length (linear, llama3, yarn), which transformers and vLLM compute the
same way.
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
"""The RoPE type for which transformers never recomputes a module's frequencies."""
GENERIC = "Transformers"
"""Prefix of vLLM's classes that run transformers' own model, which chooses frequencies for each batch."""
TOLERANCE = 1e-4
"""Error of a float32 cosine at positions up to about 100,000."""

Parameters = Mapping[str, Any]


def follow_server(model: PreTrainedModel, max_model_len: int | None, *, server_class: str = "") -> None:
    """Set the RoPE frequencies of `model` to those of a server with this `max_model_len` (None: unknown).

    A model whose RoPE does not depend on the length is not changed. Call this again when the server changes.
    `server_class` is the class that vLLM runs the model as, if known.

    Raises:
        UnsupportedModelError: transformers and vLLM compute RoPE for this model differently.
        UsageError: the server's maximum length is unknown or too large.
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
                f"{name} has {kind} RoPE, which depends on max_model_len, but the server does not report it",
                hint="use bridge serve-vllm, or a vLLM that reports max_model_len at /v1/models",
            )
        prefix = "" if layer_type is None else f"{layer_type}_"
        if kind == LONGROPE:
            frequencies, scaling = _longrope(module.config, layer_type, parameters, max_model_len)
        else:  # within max_position_embeddings, both use the module's initial frequencies
            _refuse_dynamic(name, parameters, module.config.max_position_embeddings, max_model_len)
            frequencies = getattr(module, f"{prefix}original_inv_freq")
            scaling = getattr(module, f"{prefix}attention_scaling")
        frequencies = frequencies.to(getattr(module, f"{prefix}inv_freq").device)
        setattr(module, f"{prefix}inv_freq", frequencies)
        setattr(module, f"{prefix}attention_scaling", scaling)
        module.rope_type = FIXED if layer_type is None else {**module.rope_type, layer_type: FIXED}
        if not _uses(module, layer_type, frequencies, scaling, max_model_len):  # PhiMoE's code does not
            raise UnsupportedModelError(
                f"{type(module).__name__} computes {kind} RoPE differently from vLLM",
                hint="use another model, such as one in docs/families.md, or report this one",
            )


def _check_width(model: PreTrainedModel) -> None:
    """Refuse a model whose configuration limits the rotated part of each head in a field that transformers ignores.

    MiniMax-M2's `rotary_dim` is such a field: vLLM reads it, but transformers before 5.18 rotates entire heads.
    """
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        config = getattr(module, "config", None)
        width = getattr(config, "rotary_dim", None)
        if frequencies is not None and isinstance(width, int) and 2 * len(frequencies) != width:
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} rotates {2 * len(frequencies)} dimensions of each head of"
                f" {type(model).__name__}, but vLLM only the first {width}: rotary_dim in config.json",
                hint="pip install --upgrade transformers",
            )


def _dependent(model: PreTrainedModel) -> Iterator[tuple[Any, str | None, Parameters]]:
    """Yield each module whose frequencies depend on the length, its layer type (None: all layers) and parameters."""
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
            f"{name} has dynamic RoPE, for which vLLM has frequencies only up to {most} tokens, but the server's"
            f" max_model_len is {max_model_len}",
            hint=f"restart the server with --max-model-len {most}",
        )


def _longrope(config: Any, layer_type: str | None, parameters: Parameters, max_model_len: int) -> tuple[Tensor, float]:
    """Return the frequencies and scaling of vLLM's `Phi3LongRoPEScaledRotaryEmbedding`.

    It uses the long factors for all sequences if any sequence may need them.
    """
    original = parameters["original_max_position_embeddings"]
    is_long = max_model_len > original
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](config, None, seq_len=original + is_long, layer_type=layer_type)
    scaling = parameters.get("long_mscale" if is_long else "short_mscale")
    if scaling is None:  # transformers would also consider `attention_factor` and `factor`
        stretch = max(config.max_position_embeddings / original, 1.0)
        scaling = math.sqrt(1 + math.log(stretch) / math.log(original))
    return frequencies, scaling


@torch.no_grad()
def _uses(module: nn.Module, layer_type: str | None, frequencies: Tensor, scaling: float, max_model_len: int) -> bool:
    """Return whether `module` computes the cosines of `frequencies`, both for short positions and for the longest."""
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
