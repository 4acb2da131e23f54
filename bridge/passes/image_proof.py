"""Check, on the first samples with images, that the decoder gets the same inputs as in transformers' own model.

For the comparison, transformers' model runs on each sequence by itself, up to the call of its decoder: it places the
embeddings and computes the positions. A family that does so differently from `image_embeddings.py`, or passes other
inputs to its decoder, is refused before any update.

Not covered: the packed decoder itself (`preparation.py`).
Shape suffixes: T tokens, I image tokens, H hidden size.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError, with_class
from bridge.passes import image_embeddings
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.types import Images

NUM_PROMPTS = 2
"""Number of prompts that are packed together and compared."""
TOLERANCE = 1 / 16
"""Largest relative difference of embeddings that counts as rounding: the tower may get all images of a pack together.

Tiny models differed by 0 on a CPU, and by 0.9 or more with their images in the wrong order."""
MISFITS = (AttributeError, TypeError, ValueError, LookupError, RuntimeError)
"""Errors raised by a model whose image inputs have an unsupported signature."""


class _Called(Exception):  # noqa: N818  not an error
    """Raised when the decoder is called; it carries the keyword arguments of that call."""


@torch.no_grad()
def prove(model: PreTrainedModel, samples: Sequence[Sample]) -> None:
    """Compare the shortest prompts of these samples, packed together, with each prompt by itself; all have images.

    Raises:
        UnsupportedModelError: the model treats images differently from Bridge.
    """
    by_prompt = {sample.prompt: sample for sample in samples}
    shortest = sorted(by_prompt.values(), key=lambda sample: len(sample.prompt_token_ids))[:NUM_PROMPTS]
    tried = [_prompt_of(sample, number) for number, sample in enumerate(shortest)]
    (batch,) = packs(tried, max_tokens=sum(sample.num_tokens for sample in tried), device=model.device)
    if fault := _fault(model, batch, [tried[number] for number in batch.weights_N.int().tolist()]):
        raise UnsupportedModelError(
            f"{type(model).__name__} treats images differently from Bridge: {fault}",
            hint="use a model with tested images (docs/families.md), or report this one",
        )


def _prompt_of(sample: Sample, number: int) -> Sample:
    """Return a sample of the prompt only: the prompt's last token becomes the completion, and `number` the weight."""
    *prompt, last = sample.prompt_token_ids
    return Sample(
        prompt_token_ids=tuple(prompt), token_ids=(last,), images=sample.images, sampled_logprobs=(0.0,),
        advantages=(0.0,), weight=float(number),
    )  # fmt: skip


def _fault(model: PreTrainedModel, batch: MicroBatch, in_order: Sequence[Sample]) -> str:
    """Describe how the decoder's inputs differ; empty: they are the same."""
    assert batch.images is not None
    try:
        ours = image_embeddings.inputs(model, batch.tokens_T, batch.positions_T, batch.images)
        alone = [
            given_to_decoder(model, sample.prompt_token_ids + sample.token_ids, sample.images)
            for sample in in_order
            if sample.images is not None
        ]
    except torch.OutOfMemoryError:
        raise
    except MISFITS as error:
        return with_class(error)
    theirs = {name for given in alone for name, value in given.items() if isinstance(value, Tensor | list | tuple)}
    if theirs | {"position_ids"} != ours.keys():
        return f"its decoder gets {', '.join(sorted(theirs))}, expected {', '.join(sorted(ours))}"
    positions = torch.cat([*map(_positions, alone)], dim=1)
    if not torch.equal(positions, _positions(ours)):
        return "the positions of tokens differ"
    deep = [torch.cat(of_layer) for of_layer in zip(*(given.get(DEEP, ()) for given in alone), strict=True)]
    pairs = [(torch.cat([given["inputs_embeds"][0] for given in alone]), ours["inputs_embeds"][0])]
    pairs += zip(deep, ours.get(DEEP, ()), strict=True)
    differs = max(float((own_XH - their_XH).norm() / their_XH.norm()) for their_XH, own_XH in pairs)
    return "" if differs <= TOLERANCE else f"embeddings differ by {differs:.1%}"


def _positions(given: Mapping[str, Any]) -> Tensor:
    """Return a decoder's position ids, by axis; without position ids in `given`, they are 0, 1, 2, ..."""
    positions: Tensor | None = given.get("position_ids")
    if positions is None:
        return torch.arange(given["inputs_embeds"].shape[1], device=given["inputs_embeds"].device).unsqueeze(0)
    return positions[-3:, 0] if positions.dim() > 2 else positions


DEEP = "deepstack_visual_embeds"
"""Visual features that the first layers add to image tokens (Qwen3-VL)."""
KINDS = "mm_token_type_ids"
"""Marks image tokens, for families whose position ids depend on it."""


def given_to_decoder(model: PreTrainedModel, ids: Sequence[int], of_prompt: Images) -> Mapping[str, Any]:
    """Return the keyword arguments with which transformers' own model calls its decoder for one sequence."""
    tokens_1T = torch.tensor([ids], device=model.device)
    kinds_1T = torch.zeros_like(tokens_1T)
    kinds_1T[0, image_embeddings.image_tokens(of_prompt)] = 1
    tensors = {name: tensor.to(model.device) for name, tensor in image_embeddings.tensors([of_prompt]).items()}
    if KINDS in signature(type(model).forward).parameters:
        tensors[KINDS] = kinds_1T
    handle = model.get_decoder().register_forward_pre_hook(_stop, with_kwargs=True)
    try:
        model(input_ids=tokens_1T, use_cache=False, **tensors)
    except _Called as called:
        given: Mapping[str, Any] = called.args[0]
        return given
    finally:
        handle.remove()
    raise AttributeError("the model does not call its decoder")


def _stop(_: nn.Module, __: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    raise _Called(given)
