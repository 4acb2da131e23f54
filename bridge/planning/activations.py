"""Bytes of activations that a forward and backward pass holds, by a model's dimensions.

Not covered: logits (`bridge/passes/logits.py` holds one block at a time), compiled layers and liger-kernel's, which
save about a quarter less.
Source: transformers' decoder layers in bf16, tensor by tensor as autograd saves them, with attention that keeps no
matrix of scores.
"""

from bridge.config import TrainConfig
from bridge.planning.dimensions import Dimensions

SLACK = 1.15
"""For what the allocator cannot fill: 7.6B took 7.2 MB a token on an H200, 6.3 MB follow from its widths."""
PROMPT_TOKENS = 256
"""Assumed length of a prompt, which nothing tells before a run."""
LEAST_TOKENS, MOST_TOKENS = 4_096, 16_384
"""Of a micro-batch whose size is left to be found: fewer leave a GPU idle, more gain nothing."""


def sequence_tokens(config: TrainConfig) -> int:
    """Return the length of a prompt and its completion in tokens."""
    return PROMPT_TOKENS + config.sampling.longest


def micro_batch_tokens(config: TrainConfig) -> tuple[int, int]:
    """Return the tokens of the smallest and the largest micro-batch that `config` leaves open."""
    longest = sequence_tokens(config)
    whole = longest * config.rollouts.batch_size // config.optimizer.updates_per_batch
    if (
        config.optimizer.gradient_release and not config.optimizer.offload
    ):  # a parameter is stepped after one backward pass
        return whole, whole
    if config.compute.micro_batch_tokens is not None:
        return config.compute.micro_batch_tokens, config.compute.micro_batch_tokens
    return max(longest, min(LEAST_TOKENS, whole)), max(longest, min(MOST_TOKENS, whole))


def activation_bytes(widths: Dimensions, num_tokens: int, *, recomputed: bool) -> float:
    """Return the bytes that `num_tokens` take, with the layers' activations kept or recomputed one layer at a time."""
    layer = layer_bytes(widths)
    ends = 16 * widths.hidden  # the embedding's output, the last norm, and the head's rows with a float32 gradient
    kept = 2 * widths.hidden * widths.num_layers + 1.5 * layer if recomputed else layer * widths.num_layers
    return SLACK * num_tokens * (kept + ends)


def layer_bytes(widths: Dimensions) -> int:
    """Return what autograd keeps of one token in one layer.

    Per norm a float32 copy, the normalised and the scaled bf16 one (8 bytes); queries, keys, values and attention's
    output; of the feed-forward part gate, activated gate, up and their product (8 bytes); a copy per expert.
    """
    norms = 2 * 8 * widths.hidden
    attention = 4 * widths.query + 4 * widths.key_value
    return norms + attention + 8 * widths.active + 4 * widths.num_routes * widths.hidden
