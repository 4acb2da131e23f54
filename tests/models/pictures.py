"""Image prompts for tiny vision-language models, created without a processor: random pixels and their tokens."""

from typing import Any

import torch
from torch.nn import functional
from transformers import PretrainedConfig

from bridge.types import Array, Images


def prompt(config: PretrainedConfig, *parts: tuple[int, int] | int, seed: int = 0) -> tuple[tuple[int, ...], Images]:
    """Return a prompt's token ids and its images; each part is a text token, or the size of an image in tokens."""
    draw = torch.Generator().manual_seed(seed)
    make = _of_pixtral if config.model_type == "mistral3" else _of_qwen
    return make(config, parts, draw)


def _of_qwen(config: PretrainedConfig, parts: Any, draw: torch.Generator) -> tuple[tuple[int, ...], Images]:
    vision = config.vision_config
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


def _of_pixtral(config: PretrainedConfig, parts: Any, draw: torch.Generator) -> tuple[tuple[int, ...], Images]:
    """A separate token ends each row of image tokens, and images are padded to one size."""
    side, row_end = config.spatial_merge_size * config.vision_config.patch_size, config.image_token_id + 1
    ids, starts, grids, sizes, pixels = list[int](), list[int](), list[tuple[int, int, int]](), [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        rows, columns = part
        for _ in range(rows):
            starts.append(len(ids))
            grids.append((1, 1, columns))
            ids += [*[config.image_token_id] * columns, row_end]
        sizes.append([rows * side, columns * side])
        pixels.append(torch.randn(3, rows * side, columns * side, generator=draw))
    height, width = (max(of_axis) for of_axis in zip(*sizes, strict=True))
    padded = [functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in pixels]
    arrays = array("image_sizes", torch.tensor(sizes)), array("pixel_values", torch.stack(padded))
    return tuple(ids), Images.of(arrays, starts=tuple(starts), grids=tuple(grids))


def array(name: str, tensor: torch.Tensor) -> Array:
    content: Any = tensor.contiguous().numpy()
    return Array(
        name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), content=content.tobytes()
    )
