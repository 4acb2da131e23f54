"""How vLLM shards each parameter among GPUs with tensor parallelism, by the names that the tested families use.

Heads, neurons and words are divided into runs of equal length. If there are fewer KV heads than parts, neighbors
share one. Fused parameters have a run of each piece. The vocabulary is first padded to a multiple of 64.
"""

import math
from collections.abc import Mapping, Sequence

from transformers import PretrainedConfig

from bridge.weights.rank_parts import Cut, Runs

COLUMN = (
    "q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "fc1", "c_fc", "in_proj_z", "in_proj_b", "in_proj_a",
    "in_proj_qkvz", "in_proj_ba", "A_log", "dt_bias",
)  # fmt: skip
KEYS = ("k_proj", "v_proj")
ROW = ("o_proj", "down_proj", "dense", "fc2", "c_proj", "out_proj")
OF_STATES = ("in_proj_qkv", "conv1d")
VOCABULARY = ("embed_tokens", "lm_head")
PADDING = 64


def cuts(config: PretrainedConfig, shapes: Mapping[str, Sequence[int]], num_parts: int) -> list[dict[str, Cut]]:
    """Return the cut of every parameter that each part holds."""
    return [
        {name: _cut(config.get_text_config(), name, tuple(shape), part, num_parts) for name, shape in shapes.items()}
        for part in range(num_parts)
    ]


def _cut(config: PretrainedConfig, name: str, shape: tuple[int, ...], part: int, num_parts: int) -> Cut:
    layer, _, leaf = name.rpartition(".")
    layer = layer.rpartition(".")[2] if leaf in ("weight", "bias") else leaf  # stacked experts are parameters
    axis = len(shape) - 1 if layer in ROW else 0 if layer in OF_STATES else max(0, len(shape) - 2)
    is_whole = layer in ROW and leaf == "bias"
    runs = None if is_whole else _runs(config, layer, shape[axis] if shape else 0, part, num_parts)
    whole = Cut.whole(shape)
    return whole if runs is None else Cut(shape, (*whole.runs[:axis], runs, *whole.runs[axis + 1 :]))


def _runs(config: PretrainedConfig, layer: str, size: int, part: int, num_parts: int) -> Runs | None:
    heads, pairs = (getattr(config, f"num_{kind}_heads", None) or 1 for kind in ("attention", "key_value"))
    if layer in VOCABULARY:
        part_size = math.ceil(size / PADDING) * PADDING // num_parts
        return ((part * part_size, min(part_size, size - part * part_size)),)
    if layer in KEYS:
        return (_held(0, size, pairs, part, num_parts),)
    if layer == "qkv_proj":
        head = size // (heads + 2 * pairs)
        pieces = ((0, heads), (heads, pairs), (heads + pairs, pairs))
        return tuple(_held(first * head, number * head, number, part, num_parts) for first, number in pieces)
    if layer in OF_STATES:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        pieces = ((0, keys), (keys, keys), (2 * keys, size - 2 * keys))
        return tuple(_held(first, number, number, part, num_parts) for first, number in pieces)
    if layer == "gate_up_proj":
        return tuple(_held(first, size // 2, size // 2, part, num_parts) for first in (0, size // 2))
    return (_held(0, size, size, part, num_parts),) if layer in (*COLUMN, *ROW) else None


def _held(start: int, size: int, number: int, part: int, num_parts: int) -> tuple[int, int]:
    """Return the run that a part holds of `number` indivisible pieces, which neighbors share if there are too few."""
    sharing = max(1, num_parts // number)
    length = size * sharing // num_parts
    assert length * num_parts == size * sharing, (size, number, num_parts)
    return start + part // sharing * length, length
