"""The frozen reference of a KL divergence or a preference loss, and its log-probabilities.

With an adapter, the reference is the frozen base with the adapter switched off. A model that is trained in place
overwrites its own weights, so its reference is a second model.

Shape suffixes: N rows (positions that predict a sampled token).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from bridge.config import ComputeConfig, LossConfig
from bridge.errors import UsageError
from bridge.passes import preparation
from bridge.passes.packing import MicroBatch
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import ALONE, Ranks
from bridge.weights import loaded, skeleton


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A frozen model, or one whose adapter is switched off while it computes."""

    prepared: PreparedModel
    frozen: Callable[[], AbstractContextManager[None]] = nullcontext
    takes_experts: bool = True
    """Whether it computes with the trained model's experts, as that model itself does without its adapter."""

    @property
    def shares_prompts(self) -> bool:
        """Whether the completions of a prompt may share it in this model's packs."""
        return self.prepared.shares_prompts

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Return the reference's log-probabilities of the sampled tokens, without gradient.

        They are over its full vocabulary: top-k, top-p and min-p filter only the policy.

        Shapes: -> [N] float32.
        """
        batch = replace(micro_batch, kept=None)
        if not self.takes_experts:
            batch = replace(batch, experts_TX=None)
        with self.frozen():
            logprobs_N, _ = self.prepared.logprobs(batch, temperature)
        return logprobs_N


def check(model: str, reference: str | None) -> None:
    """Check the reference model, if there is one, before any memory is allocated.

    UsageError: the vocabularies differ. UnsupportedModelError: the model is split into tensor-parallel parts.
    """
    if reference is None:
        return
    config = skeleton.build(model, torch.bfloat16).config
    config_of_reference = skeleton.build(reference, torch.bfloat16).config
    loaded.refuse_several_parts(reference, config_of_reference)
    expected = config.get_text_config().vocab_size
    rows = config_of_reference.get_text_config().vocab_size
    ours = skeleton.tokenizer(model).get_vocab()
    theirs = skeleton.tokenizer(reference).get_vocab()
    odd = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if odd or rows != expected:
        first = f", the first: {odd[0]!r}" if odd else ""
        raise UsageError(
            f"--reference-model {reference} has a different vocabulary from {model}: {rows} rows, expected"
            f" {expected}; {len(odd)} tokens differ{first}",
            hint=f"use a model of the same family with the same vocabulary, such as {model} itself",
        )


def open_reference(
    loss: LossConfig,
    compute: ComputeConfig,
    prepared: PreparedModel,
    device: torch.device,
    *,
    has_adapter: bool,
    max_model_len: int | None = None,
    ranks: Ranks = ALONE,
) -> Reference | None:
    """Return the reference for the `prepared` model; None if the loss needs none.

    Call it after `check`, once the model is open. A second model is prepared like the trained one, so that both round
    equally, and its packs are sliced in the same way. `max_model_len` is the server's, since positions may depend on
    it.

    UsageError: the reference cannot be loaded, or does not fit. UnsupportedModelError: it is not a standard causal
    language model of transformers, or does not support packing.
    """
    if not loss.needs_reference:
        return None
    if has_adapter:
        return Reference(prepared=prepared, frozen=lambda: adapter_off(prepared.model))
    name = loss.reference_model
    assert name is not None, "refused by the configuration"
    own = loaded.load(
        name, device=str(device), dtype=prepared.model.dtype, max_model_len=max_model_len,
        hint="lower --gpu-memory-utilization, or --mode lora_only, whose base is the reference at no cost",
    ).model  # fmt: skip
    without_gradients = compute.model_copy(update={"gradient_checkpointing": False})
    of_own = preparation.prepare(own, without_gradients, max_model_len=max_model_len, ranks=ranks)
    return Reference(prepared=of_own, takes_experts=False)


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Switch off the adapter of `model` inside the block, without changing parameters."""
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
