"""Prompts with images for tiny models of the Qwen-VL kind, made without a processor: random pixels and their tokens."""

from typing import Any

import torch
from transformers import PretrainedConfig

from bridge.types import Array, Images


def prompt(config: PretrainedConfig, *parts: tuple[int, int] | int, seed: int = 0) -> tuple[tuple[int, ...], Images]:
    """Return the token ids of a prompt, and its images; a part is a token of text, or an image of tokens by tokens."""
    vision, draw = config.vision_config, torch.Generator().manual_seed(seed)
    ids, starts, grids, patches, pixels = list[int](), list[int](), list[tuple[int, int, int]](), [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        rows, columns = part
        ids.append(config.vision_start_token_id)
        starts.append(len(ids))
        grids.append((1, rows, columns))
        ids += [config.image_token_id] * (rows * columns)
        ids.append(config.vision_end_token_id)
        merged = vision.spatial_merge_size
        patches.append([1, rows * merged, columns * merged])
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels.append(torch.randn(rows * columns * merged**2, width, generator=draw))
    arrays = array("image_grid_thw", torch.tensor(patches)), array("pixel_values", torch.cat(pixels))
    return tuple(ids), Images.of(arrays, starts=tuple(starts), grids=tuple(grids))


def array(name: str, tensor: torch.Tensor) -> Array:
    content: Any = tensor.numpy()
    return Array(
        name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), content=content.tobytes()
    )
