"""Image processors of tiny vision-language models: vLLM loads one even to serve only text."""

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

IMAGE, VIDEO, START, END = TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Tokens that the processors look up in the tokenizer."""
FIRST_TOKEN = 290
"""Number of the first of them; the others follow."""


def write(config: PretrainedConfig, folder: Path) -> None:
    """Write the processor of a model of this configuration into its folder."""
    for name, document in (_pixtral if config.model_type == "mistral3" else _qwen3_vl)(config.vision_config).items():
        (folder / name).write_text(json.dumps(document))


def _pixtral(vision: PretrainedConfig) -> dict[str, dict[str, Any]]:
    tokens = {"image_token": IMAGE, "image_break_token": START, "image_end_token": END}
    patches = {"patch_size": vision.patch_size}
    image = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": vision.image_size}}
    return {
        "preprocessor_config.json": image | patches,
        "processor_config.json": {"processor_class": "PixtralProcessor", "spatial_merge_size": 2} | patches | tokens,
    }


def _qwen3_vl(vision: PretrainedConfig) -> dict[str, dict[str, Any]]:
    patches = {"merge_size": vision.spatial_merge_size}
    patches |= {name: getattr(vision, name) for name in ("patch_size", "temporal_patch_size")}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 64, "longest_edge": 1024}}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 128, "longest_edge": 4096}}
    return {
        "preprocessor_config.json": image | patches,
        "video_preprocessor_config.json": video | patches,
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    }
