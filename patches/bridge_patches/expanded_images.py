"""Pass vLLM's engine a prompt whose image tokens are already expanded, together with its image tensors.

vLLM's routes accept images before its processor, which expands each image token itself: ids that are already expanded
would be expanded again. The engine accepts the processor's output.

vLLM's own rules for the model family determine which tokens belong to an image. If they do not find all of them, the
request is refused.
Source: `vllm/multimodal/processing/processor.py` and `vllm/inputs/engine.py`, vLLM 0.26 to 0.33.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from fastapi import HTTPException

from bridge.server.protocol import SentArray

PINS = """
vllm.inputs.engine: call mm_input(prompt_token_ids, mm_kwargs, mm_hashes, mm_placeholders)
vllm.v1.engine.async_llm: AsyncLLM: renderer
vllm.renderers.base: BaseRenderer: mm_processor
vllm.multimodal.inputs
    call MultiModalKwargsItems.from_hf_inputs(hf_inputs, config_by_key)
    MultiModalFieldElem: data
vllm.multimodal.parse
    MultiModalDataItems
    call ImageProcessorItems.__init__(data)
    ImageProcessorItems: get_image_size
vllm.multimodal.processing.processor
    call BaseMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
    call BaseMultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
    call BaseMultiModalProcessor._bind_and_group_updates(prompt_updates, mm_item_counts)
    call BaseMultiModalProcessor._find_mm_placeholders(new_token_ids, mm_prompt_updates)
    PlaceholderFeaturesInfo: tokens
    call PlaceholderFeaturesInfo.to_range()
"""
IMAGE = "image"
"""vLLM's name for this kind of input."""
PIXELS = "pixel_values"
"""Name of the image tensor in a processor's output (Pixtral)."""
SIZES = "image_sizes"
"""Name of the image sizes in a processor's output (Pixtral)."""


def prompt(engine: Any, ids: Sequence[int], images: Mapping[str, SentArray]) -> Any:
    """Return a prompt in the engine's format.

    Raises:
        HTTPException: the model does not accept images, or the tensors and the tokens do not match.
    """
    if not images:
        return {"prompt_token_ids": list(ids)}
    processor = engine.renderer.mm_processor
    if processor is None:
        raise HTTPException(400, "this server does not accept images: it has no vision model, or that was disabled")
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems
    from vllm.multimodal.parse import MultiModalDataItems

    try:
        features = BatchFeature({name: _tensor(*array) for name, array in images.items()})
        shown = _cropped(features)
        items = MultiModalKwargsItems.from_hf_inputs(features, processor._get_mm_fields_config(features, {}))
        updates = processor._get_prompt_updates(MultiModalDataItems(shown), {}, items)
        counts = {IMAGE: len(items[IMAGE])}
        placeholders = processor._find_mm_placeholders(list(ids), processor._bind_and_group_updates(updates, counts))
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise HTTPException(400, f"the image tensors do not fit this model: {type(error).__name__}: {error}") from error
    of_images = placeholders.get(IMAGE, [])
    if fault := _fault(ids, of_images, counts[IMAGE]):
        raise HTTPException(400, fault)
    return mm_input(
        list(ids),
        items,
        {IMAGE: [_hash(item) for item in items[IMAGE]]},
        {IMAGE: [one.to_range() for one in of_images]},
    )


def _cropped(features: Any) -> dict[str, Any]:
    """Crop the padding of images whose processor reports sizes in pixels, and return them; otherwise return {}."""
    from vllm.multimodal.parse import ImageProcessorItems

    if SIZES not in features:
        return {}
    both = zip(features[PIXELS], features[SIZES].tolist(), strict=True)
    features[PIXELS] = [image[:, :height, :width] for image, (height, width) in both]
    return {IMAGE: ImageProcessorItems(features[PIXELS])}


def _fault(ids: Sequence[int], placeholders: Sequence[Any], num_images: int) -> str:
    """Return what is wrong with the image tokens; empty if vLLM finds all of them."""
    if len(placeholders) != num_images:
        return f"vLLM finds the tokens of {len(placeholders)} images in the prompt, expected those of {num_images}"
    of_images = {token for one in placeholders for token in one.tokens}
    num_found = sum(len(one.tokens) for one in placeholders)
    num_all = sum(token in of_images for token in ids)
    if num_found != num_all:
        return f"vLLM finds {num_found} image tokens in the prompt, which has {num_all}: were they expanded twice?"
    return ""


def _tensor(dtype: str, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(shape)


def _hash(item: Mapping[str, Any]) -> str:
    """Return the key of an image in vLLM's caches: a digest of everything that its embeddings are computed from."""
    digest = blake2b(digest_size=32)
    for name in sorted(item):
        tensor = item[name].data
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
