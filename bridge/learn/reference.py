"""The frozen reference of the KL divergence, and its log-probabilities.

An adapter is trained beside a frozen base, which is the reference once the adapter is switched off. Where the model
itself is trained in place, nothing is left of what it was: the reference is then a model of its own, beside it.

Not covered: the divergence (`policy_loss.py`), a reference on another machine or one that moves along.
Shape suffixes: N rows (positions that predict a sampled token).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.passes import preparation
from bridge.passes.logprobs import model_logprobs
from bridge.passes.packing import MicroBatch
from bridge.weights import loaded, skeleton


class Reference:
    """A model that does not change, or one that is put aside for as long as it is asked."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        weight_bytes: int,
        frozen: Callable[[], AbstractContextManager[None]],
        shares_prompts: bool = True,
    ) -> None:
        self._model, self._frozen = model, frozen
        self.weight_bytes = weight_bytes
        """Bytes of weights that it holds beside the trained model's."""
        self.shares_prompts = shares_prompts
        """Whether completions of one prompt may share it, as far as this model is concerned."""

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Return its log-probabilities of the sampled tokens, without gradient.

        Shapes: -> [N] float32.
        """
        with self._frozen():
            logprobs_N, _ = model_logprobs(self._model, micro_batch, temperature)
        return logprobs_N


def check(config: TrainConfig) -> None:
    """Check the reference that is asked for before any memory is taken.

    Raises:
        UsageError: it is of another vocabulary than the model.
    """
    if config.loss.reference_model is not None:
        _check_vocabulary(config.model_name, config.loss.reference_model)


def open_reference(
    config: TrainConfig,
    model: PreTrainedModel,
    device: torch.device,
    note: Callable[[str], None],
    *,
    max_model_len: int | None = None,
) -> Reference | None:
    """Return the reference of what `model` is trained to be; None where no KL divergence is asked for.

    Call it once the model is open, after `check`. A model beside it is prepared as the trained one is, so that the two
    round alike; `note` hears what that has to say. `max_model_len` is the server's, on which positions may depend.

    Raises:
        UsageError: it cannot be loaded, or there is not enough memory.
        UnsupportedModelError: it is no plain causal language model of transformers, or treats packed sequences in a way
            of its own.
    """
    if config.loss.kl_coef == 0:
        return None
    if config.mode == "lora_only":
        return Reference(model, weight_bytes=0, frozen=lambda: adapter_off(model))
    assert config.loss.reference_model is not None, "refused by the configuration"
    _check_memory(config.loss.reference_model, device, model.dtype)
    own = loaded.load(config.loss.reference_model, device=str(device), dtype=model.dtype, max_model_len=max_model_len)
    without = config.compute.model_copy(update={"gradient_checkpointing": False})
    shares_prompts = preparation.prepare(own.model, without, note, max_model_len=max_model_len)
    return Reference(own.model, weight_bytes=own.weight_bytes, frozen=nullcontext, shares_prompts=shares_prompts)


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` compute what it would without its adapter, whose parameters are afterwards as they were."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "the model has no adapter"
    assert not any(layer.disable_adapters for layer in layers)
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _check_vocabulary(model: str, reference: str) -> None:
    sizes = [skeleton.build(name, torch.bfloat16).config.vocab_size for name in (model, reference)]
    ours, theirs = (skeleton.tokenizer(name).get_vocab() for name in (model, reference))
    odd = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if odd or sizes[0] != sizes[1]:
        raise UsageError(
            f"--reference-model {reference} has another vocabulary than {model}: {sizes[1]} rows, expected {sizes[0]}; "
            f"{len(odd)} tokens differ{f', the first: {odd[0]!r}' if odd else ''}",
            remedy=f"take a model of the same family and size of vocabulary, such as {model} itself",
        )


def _check_memory(reference: str, device: torch.device, dtype: torch.dtype) -> None:
    empty = skeleton.build(reference, dtype)
    needed = sum(parameter.nbytes for parameter in empty.parameters())
    free = loaded.free_bytes(device)
    if free < needed:
        raise UsageError(
            f"--reference-model {reference} needs {needed / loaded.GIB:.3g} GiB on {device}, where "
            f"{free / loaded.GIB:.3g} GiB are free",
            remedy="lower --gpu-memory-utilization, or --mode lora_only, whose base is the reference at no cost",
        )
