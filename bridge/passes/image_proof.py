"""Prove, on the first samples with images, that the decoder gets what transformers' own model gives it.

transformers places the embeddings and computes the positions of each sequence alone, up to the call of the decoder. A
family that does it in another way than `image_embeddings.py`, or gives its decoder something else, is refused before
any update.

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
"""How many prompts are compared, packed together."""
TOLERANCE = 1 / 16
"""Largest relative difference of embeddings, which rounding explains: the tower may get all images of a pack at once.

Tiny models came to 0 on a CPU, and those of images in another order to 0.9 and more."""
MISFITS = (AttributeError, TypeError, ValueError, LookupError, RuntimeError)
"""Errors of a model whose image inputs have another signature."""


class _Called(Exception):  # noqa: N818  not an error
    """The decoder was called, with these names and values."""


@torch.no_grad()
def prove(model: PreTrainedModel, samples: Sequence[Sample]) -> None:
    """Compare the shortest prompts of these samples, all of which have images, packed, with each alone.

    Raises:
        UnsupportedModelError: the model does something else with images.
    """
    by_prompt = {sample.prompt: sample for sample in samples}
    shortest = sorted(by_prompt.values(), key=lambda sample: len(sample.prompt_token_ids))[:NUM_PROMPTS]
    tried = [_prompt_of(sample, number) for number, sample in enumerate(shortest)]
    (batch,) = packs(tried, max_tokens=sum(sample.num_tokens for sample in tried), device=model.device)
    if fault := _fault(model, batch, [tried[number] for number in batch.weights_N.int().tolist()]):
        raise UnsupportedModelError(
            f"{type(model).__name__} treats images in another way than Bridge: {fault}",
            hint="use a model whose images are proved (docs/families.md), or report this one",
        )


def _prompt_of(sample: Sample, number: int) -> Sample:
    """Return the sample's prompt alone, as one with a single token behind it and `number` as its weight."""
    *prompt, last = sample.prompt_token_ids
    return Sample(
        prompt_token_ids=tuple(prompt), token_ids=(last,), images=sample.images, sampled_logprobs=(0.0,),
        advantages=(0.0,), weight=float(number),
    )  # fmt: skip


def _fault(model: PreTrainedModel, batch: MicroBatch, in_order: Sequence[Sample]) -> str:
    """Return what differs between the decoder's inputs; empty: nothing does."""
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
        return f"its decoder takes {', '.join(sorted(theirs))}, expected {', '.join(sorted(ours))}"
    positions = torch.cat([*map(_positions, alone)], dim=1)
    if not torch.equal(positions, _positions(ours)):
        return "tokens have other positions"
    deep = [torch.cat(of_layer) for of_layer in zip(*(given.get(DEEP, ()) for given in alone), strict=True)]
    pairs = [(torch.cat([given["inputs_embeds"][0] for given in alone]), ours["inputs_embeds"][0])]
    pairs += zip(deep, ours.get(DEEP, ()), strict=True)
    differs = max(float((own_XH - their_XH).norm() / their_XH.norm()) for their_XH, own_XH in pairs)
    return "" if differs <= TOLERANCE else f"embeddings differ by {differs:.1%}"


def _positions(given: Mapping[str, Any]) -> Tensor:
    """Return the positions that a decoder is given, by axis; one that is given none counts."""
    positions: Tensor | None = given.get("position_ids")
    if positions is None:
        return torch.arange(given["inputs_embeds"].shape[1], device=given["inputs_embeds"].device).unsqueeze(0)
    return positions[-3:, 0] if positions.dim() > 2 else positions


DEEP = "deepstack_visual_embeds"
"""Visual features that the first layers add to image tokens (Qwen3-VL)."""
KINDS = "mm_token_type_ids"
"""Marks image tokens, for families whose position ids depend on it."""


def given_to_decoder(model: PreTrainedModel, ids: Sequence[int], of_prompt: Images) -> Mapping[str, Any]:
    """Return what transformers' own model calls its decoder with, for one sequence: names and values."""
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
    raise AttributeError("it does not call its decoder")


def _stop(_: nn.Module, __: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    raise _Called(given)
