"""A decoder's dimensions as its configuration has them, and the parameters that follow from them.

Not covered: reading the configuration and weights (`model_size.py`); parts other than attention and gated feed-forward.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Of a dense decoder, or of one whose feed-forward parts are mixtures of experts."""

    num_layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    query: int
    """Width of all query heads together."""
    key_value: int
    """Width of all key heads together, and of all value heads."""
    vocabulary: int
    """Rows of the head."""
    tied: bool
    """Whether the head is the embedding."""
    biased: bool
    """Whether queries, keys and values have biases."""
    num_dense_layers: int
    """Layers without experts."""
    dense: int
    """Width of their feed-forward part."""
    num_experts: int
    """Experts of each other layer; 0: there is none."""
    num_routes: int
    """Experts that one token goes through."""
    expert: int
    """Width of one expert."""
    shared_expert: int
    """Width of the expert that every token goes through; 0: there is none."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read them off a configuration; a KeyError names what it lacks."""
        hidden, heads, layers = (config[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        head, kind = config.get("head_dim") or hidden // heads, str(config.get("model_type"))
        experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
        width = _first(config, "moe_intermediate_size") or config["intermediate_size"]
        return cls(
            num_layers=layers,
            hidden=hidden,
            query=head * heads,
            key_value=head * (config.get("num_key_value_heads") or heads),
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", kind.startswith(("gemma", "cohere"))),
            biased=config.get("attention_bias", kind.startswith("qwen2")),
            num_dense_layers=_num_dense_layers(config, layers) if experts else layers,
            dense=config.get("intermediate_size") or width,
            num_experts=experts,
            num_routes=config["num_experts_per_tok"] if experts else 0,
            expert=width if experts else 0,
            shared_expert=_shared_expert(config, width) if experts else 0,
        )

    @property
    def num_params(self) -> int:
        """Return the parameters, tied ones once: exact but for small vectors of some families."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        norms = self.hidden * (2 * self.num_layers + 1)
        attention = 2 * self.hidden * (self.query + self.key_value)
        attention += self.query + 2 * self.key_value if self.biased else 0
        dense = 3 * self.hidden * self.dense
        mixture = self.hidden * (3 * (self.num_experts * self.expert + self.shared_expert) + self.num_experts)
        return embeddings + norms + self.num_layers * attention + self._feed_forward(dense, mixture)

    @property
    def active(self) -> int:
        """Return the feed-forward width that one token goes through, in the widest kind of layer."""
        return max(self.dense if self.num_dense_layers else 0, self.num_routes * self.expert + self.shared_expert)

    @property
    def adaptable(self) -> int:
        """Return inputs and outputs of all linear layers; an adapter has its rank times as many parameters.

        Experts are no linear layers to transformers and PEFT, and get no adapter.
        """
        attention = 4 * self.hidden + 2 * (self.query + self.key_value)
        shared = 3 * (self.hidden + self.shared_expert) if self.shared_expert else 0
        return self.num_layers * attention + self._feed_forward(3 * (self.hidden + self.dense), shared)

    @property
    def largest(self) -> int:
        """Return the elements of the largest parameter: the embedding, or the fused first halves of all experts."""
        return max(self.vocabulary * self.hidden, 2 * self.num_experts * self.expert * self.hidden)

    def _feed_forward(self, dense: int, mixture: int) -> int:
        """Return the sum over the layers of what a dense one and one of experts have."""
        return self.num_dense_layers * dense + (self.num_layers - self.num_dense_layers) * mixture


def _num_dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers of a mixture of experts have none."""
    step, named = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    first = config.get("first_k_dense_replace") or 0
    return sum(layer < first or layer in named or (layer + 1) % step > 0 for layer in range(layers))


def _shared_expert(config: Mapping[str, Any], width: int) -> int:
    return int(config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width)


def _first(config: Mapping[str, Any], *keys: str) -> int:
    return next((config[key] for key in keys if config.get(key)), 0)
