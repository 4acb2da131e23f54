"""Floating-point operations that a model's forward and backward passes need, and a device's peak rate.

Matrix products, recurrent states and attention are counted exactly for the spans of a pass: each query with the keys
that it may attend to, each shared prompt once, and only the experts that a token is routed to. An update counts as one
forward and one backward pass. Recomputed activations, log-probs from before the first update, and the reference are not
counted: they depend on the training setup.

Source: the terms as in PaLM (arXiv 2204.02311, appendix B), which counts attention without its causal mask: twice as
many operations for long sequences.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from bridge.passes import layers
from bridge.passes.attention import Span
from bridge.passes.kernels import head_size
from bridge.passes.packing import MicroBatch
from bridge.planning.model_size import EXPERTS, KEEP_KEYS_AND_VALUES

DENSE_BF16 = {
    "A100": 312e12, "A10": 125e12, "A30": 165e12, "A40": 150e12, "B200": 2_250e12, "GH200": 989e12,
    "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "L4": 121e12, "L40": 181e12,
    "L40S": 362e12,
}  # fmt: skip
"""Operations per second of dense bf16 matrix products, by the driver's name of the GPU. Source: NVIDIA's data sheets,
which quote twice these numbers, for sparse products."""


def peak_flops(device: torch.device) -> float:
    """Return a device's peak bf16 operations per second; NaN if unknown, as for every CPU."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else math.nan


def peak_of(name: str) -> float:
    """Return the peak bf16 operations per second of the named GPU, such as `NVIDIA H100 80GB HBM3`; NaN if unknown."""
    words = name.replace("-", " ").split()
    known = [gpu for gpu in DENSE_BF16 if set(gpu.split()) <= set(words)]
    return DENSE_BF16[max(known, key=len)] if known else math.nan


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operation counts of one rank's model."""

    of_token: float
    """Operations per token in the layers' matrix products and recurrent states, forward and backward."""
    of_row: float
    """Operations in the head per token whose logits are computed."""
    of_pair: Mapping[int, float]
    """Attention operations per query-key pair, keyed by the layers' window; 0: no window."""

    @classmethod
    def of(cls, model: PreTrainedModel, num_parts: int = 1) -> Self:
        """Count a model's operations; the model is one of `num_parts` tensor-parallel parts."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        tables = (module for module in model.get_decoder().modules() if isinstance(module, nn.Embedding))
        apart = {id(parameter) for module in (*tables, head) for parameter in module.parameters()}
        of_token = 0.0
        for parameter in model.get_decoder().parameters():
            if parameter.ndim > 1 and id(parameter) not in apart:
                of_token += _passes(parameter) * 2 * parameter.numel() * _active(parameter, config)
        num_stateful = sum(kind not in KEEP_KEYS_AND_VALUES for kind in getattr(config, "layer_types", None) or ())
        of_token += 3 * num_stateful * _state(config) / num_parts
        return cls(
            of_token=of_token,
            of_row=_passes(head.weight) * 2 * head.weight.numel(),
            of_pair={window: 3 * of_layers / num_parts for window, of_layers in _pairs(model, config).items()},
        )

    def of_batch(self, batch: MicroBatch) -> float:
        """Return the operations of one forward and backward pass."""
        pairs = 0.0
        for window, per_pair in self.of_pair.items():
            pairs += per_pair * sum(num_pairs(span, window) for span in batch.lengths)
        return self.of_token * len(batch.tokens_T) + self.of_row * batch.num_computed + pairs


def num_pairs(span: Span, window: int) -> int:
    """Return the number of query-key pairs in a span's causal attention; `window` 0: all preceding keys."""
    queries, keys = span
    first = keys - queries  # position of the first query
    growing = max(min(window or keys, keys) - first, 0)  # queries that see every key up to their own
    growing_pairs = growing * first + growing * (growing + 1) // 2
    return growing_pairs + (queries - growing) * window


def _passes(parameter: nn.Parameter) -> int:
    """Return how often a product is computed: forward, for its input's gradient and, if trained, for its weight's."""
    return 3 if parameter.requires_grad else 2


def _active(parameter: nn.Parameter, config: Any) -> float:
    """Return the share of a parameter that one token uses: for stacked experts, the ones that it is routed to."""
    num_experts = next((value for key in EXPERTS if (value := getattr(config, key, None))), 0)
    is_stacked = parameter.ndim == 3 and parameter.shape[0] == num_experts
    return config.num_experts_per_tok / num_experts if is_stacked else 1.0


def _pair(config: Any) -> int:
    """Return one layer's forward operations per query-key pair, over all heads: for the score and for the value."""
    if hasattr(config, "qk_nope_head_dim"):  # latent attention
        return int(
            2 * config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
        )
    return int(4 * config.num_attention_heads * head_size(config))


def _state(config: Any) -> int:
    """Return one layer's forward operations per token in its heads' recurrent states: read, update, read again."""
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return int(6 * math.prod(getattr(config, name, 0) for name in names))


def _pairs(model: PreTrainedModel, config: Any) -> Counter[int]:
    """Return the forward operations per query-key pair in all layers, keyed by the attention window; 0: no window."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers.decoder_layers(model))
    own = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(kinds)
    pairs = Counter[int]()
    for kind, of_layer in zip(kinds, own, strict=True):
        if kind in KEEP_KEYS_AND_VALUES:
            pairs[window if kind == "sliding_attention" else 0] += _pair(of_layer)
    return pairs
