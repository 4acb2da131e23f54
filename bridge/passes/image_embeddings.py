"""Images in packed sequences: the model's frozen vision tower, on vLLM's weights, computes their embeddings.

The decoder gets these embeddings in place of the image tokens. In Qwen's families it also gets the features that its
first layers add to them (DeepStack), and positions in time, rows and columns. Without images the tower does not run and
takes no memory. With images it takes less memory than the decoder: 0.2 MB per image token (Qwen3-VL-2B and 8B), of
which the decoder takes 0.2 to 7.7.

Not covered: how images become tokens and tensors (`bridge/rollouts/encoded_prompts.py`).
Source: positions as in Qwen2-VL (arXiv 2409.12191, section 2.1), `get_rope_index` in transformers 5.19.
Shape suffixes: T tokens of a pack, P tokens of a prompt, I image tokens, D image tokens of distinct images, H hidden
size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.types import Images

SIZES = "image_sizes"
"""A processor's key for the height and width of each image in pixels."""


@dataclass(frozen=True, kw_only=True)
class PackedImages:
    """The images of a pack, in token order."""

    indices_I: Tensor
    """int64: indices of all image tokens in T."""
    positions_3T: Tensor
    """int64: the positions of all tokens in time, rows and columns."""
    distinct: Sequence[Images]
    """Each prompt's images, without repetitions; they become tensors when the tower needs them."""
    rows_I: Tensor
    """int64: the row of the tower's output that each token of `indices_I` gets."""


class Gathered:
    """Collects the images of a pack from its spans, in any order, on the host."""

    def __init__(self) -> None:
        self._positions: dict[int, Any] = {}
        """Position ids of each span, by the index of its first token."""
        self._images: dict[int, Images] = {}
        """Images of each prompt, by the index of its first token."""

    def add(self, images: Images | None, indices: range, first: int) -> None:
        """Add a sequence whose prompt has these images: its tokens from `first` on, which are at `indices` in T."""
        self._positions[indices.start] = positions(first + len(indices), images)[:, first:]
        if images is not None and first == 0:  # first > 0: a completion that shares its prompt, which has the images
            self._images[indices.start] = images

    def packed(self, device: torch.device) -> PackedImages:
        """Return the collected images, with all indices on `device`."""
        in_order = sorted(self._images.items(), key=lambda item: item[0])
        positions_3T = np.concatenate([self._positions[start] for start in sorted(self._positions)], axis=1)
        distinct = {images.digest: images for _, images in in_order}
        first_rows = accumulate((len(image_tokens(images)) for images in distinct.values()), initial=0)
        first_row_of = dict(zip(distinct, first_rows, strict=False))
        rows = [
            first_row_of[images.digest] + number
            for _, images in in_order
            for number in range(len(image_tokens(images)))
        ]
        return PackedImages(
            indices_I=_indices([start + index for start, images in in_order for index in image_tokens(images)], device),
            rows_I=_indices(rows, device),
            positions_3T=torch.from_numpy(positions_3T).to(device),
            distinct=[*distinct.values()],
        )


def _indices(indices: list[int], device: torch.device) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64).to(device)


def image_tokens(images: Images) -> list[int]:
    """Return the indices of the image tokens in a prompt."""
    ranges = [range(start, start + prod(grid)) for start, grid in zip(images.starts, images.grids, strict=True)]
    return [index for tokens in ranges for index in tokens]


def positions(num_tokens: int, images: Images | None) -> Any:
    """Return the positions of a prompt's tokens in time, rows and columns: [3, P] int64.

    For text, all three positions count up together. An image's tokens count along each axis, starting where the text
    before it ends; the text after the image starts after its largest position.
    """
    result = np.empty((3, num_tokens), dtype=np.int64)
    end = 0
    begin = 0
    for start, grid in zip(images.starts, images.grids, strict=True) if images else ():
        result[:, end:start] = np.arange(begin, begin + start - end)
        begin += start - end
        end = start + prod(grid)
        result[:, start:end] = np.indices(grid).reshape(3, -1) + begin
        begin += max(grid)
    result[:, end:] = np.arange(begin, begin + num_tokens - end)
    return result


def tensors(several: Sequence[Images]) -> dict[str, Tensor]:
    """Return the tower's inputs for all images of several prompts, in host memory."""
    parts: dict[str, list[Tensor]] = {}
    for images in several:
        for array in images.arrays:
            tensor = torch.frombuffer(bytearray(array.content), dtype=getattr(torch, array.dtype)).view(array.shape)
            parts.setdefault(array.name, []).append(tensor)
    return {name: torch.cat(of_prompts) for name, of_prompts in parts.items()}


@torch.no_grad()
def features(model: PreTrainedModel, several: Sequence[Images]) -> list[Any]:
    """Return the tower's outputs for the images of several prompts, in order; one call for all prompts if possible.

    A tower that takes sizes in pixels (Pixtral's) gets one prompt at a time: its mask covers all pairs of patches, and
    prompts are padded to different sizes.
    """
    is_dense = any(array.name == SIZES for array in several[0].arrays)
    made = []
    for at_once in [[one] for one in several] if is_dense else [several]:
        on_device = {name: tensor.to(model.device) for name, tensor in tensors(at_once).items()}
        get_features: Any = model.get_image_features
        made.append(get_features(**on_device, return_dict=True))
    return made


def inputs(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, images: PackedImages) -> dict[str, Any]:
    """Return the decoder's inputs for a pack with images, by name: embeddings instead of tokens, and positions.

    Raises:
        UnsupportedModelError: the tower returns more or fewer embeddings than there are image tokens.
    """
    of_tower = features(model, images.distinct)
    embeds_TH = model.get_input_embeddings()(tokens_T)
    of_distinct_DH = _of_all(one.pooler_output for one in of_tower).to(embeds_TH.dtype)
    num_tokens = sum(len(image_tokens(of_prompt)) for of_prompt in images.distinct)
    if len(of_distinct_DH) != num_tokens:
        raise UnsupportedModelError(
            f"{type(model).__name__} returns {len(of_distinct_DH)} embeddings for {num_tokens} image tokens",
            hint="use a model of a family in docs/families.md, with the processor that belongs to it",
        )
    of_images_IH = of_distinct_DH.index_select(0, images.rows_I)
    taken: dict[str, Any] = {
        "inputs_embeds": embeds_TH.index_copy(0, images.indices_I, of_images_IH).unsqueeze(0),
        "position_ids": positions_T.unsqueeze(0),
    }
    if "mrope_section" in (model.config.get_text_config().rope_parameters or {}):
        taken["position_ids"] = torch.cat([taken["position_ids"], images.positions_3T]).unsqueeze(1)
    if (deep := getattr(of_tower[0], "deepstack_features", None)) is not None:
        is_image_T = torch.zeros_like(tokens_T, dtype=torch.bool).index_fill(0, images.indices_I, True)
        taken["visual_pos_masks"] = is_image_T.unsqueeze(0)
        taken["deepstack_visual_embeds"] = [_of_all([of_layer]).index_select(0, images.rows_I) for of_layer in deep]
    return taken


def _of_all(several: Iterable[Tensor | Sequence[Tensor]]) -> Tensor:
    """Join all images' embeddings into one tensor: transformers splits them by image, before 5.18 in some models."""
    return torch.cat([one for embeds in several for one in ([embeds] if isinstance(embeds, Tensor) else embeds)])
