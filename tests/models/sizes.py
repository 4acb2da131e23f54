"""Model folders with only a configuration."""

import json
from pathlib import Path
from typing import Any

PARAMETERS = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "7B": 7_615_616_512,
    "14B": 14_770_033_664,
    "32B": 32_763_876_352,
}
"""The Qwen2.5 sizes, as in their model cards and files."""
WIDTHS = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "14B": (5120, 48, 40, 8, 13824, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
}
KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip


def qwen2(size: str) -> dict[str, Any]:
    """Return the configuration of a Qwen2.5 of this size."""
    return {"model_type": "qwen2", "max_position_embeddings": 32768, **dict(zip(KEYS, WIDTHS[size], strict=True))}


def folder_of(config: dict[str, Any], folder: Path) -> Path:
    """Write `config` to `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
