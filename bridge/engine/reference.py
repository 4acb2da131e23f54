"""Frozen models that compute beside the trained one: the reference of a KL divergence or a preference, and a teacher.

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

from bridge.config import OWN_WEIGHTS, ComputeConfig, LossConfig
from bridge.errors import UsageError
from bridge.passes import preparation
from bridge.passes.logprobs import Prediction
from bridge.passes.packing import MicroBatch
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import ALONE, Ranks
from bridge.weights import loaded, skeleton

UNKNOWN_WORD = -100.0
"""Log-probability of a token beyond the model's head: its padding is smaller than that of the trained model."""


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
        with self.frozen():
            logprobs_N, _ = self.prepared.logprobs(self._own(micro_batch), temperature)
        num_words = len(self.prepared.model.get_output_embeddings().weight)
        if self.prepared.parallel is None:
            logprobs_N = logprobs_N.masked_fill(micro_batch.targets_N >= num_words, UNKNOWN_WORD)
        return logprobs_N

    def prediction(self, micro_batch: MicroBatch, temperature: float, like: MicroBatch | None = None) -> Prediction:
        """Return what the model predicts at the rows that this rank computes, as `PreparedModel.prediction`."""
        with self.frozen():
            return self.prepared.prediction(self._own(micro_batch), temperature, like)

    def _own(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the batch with what this model computes with; it reads tokens that it lacks as its first one."""
        experts_TX = micro_batch.experts_TX if self.takes_experts else None
        tokens_T = micro_batch.tokens_T
        if self.prepared.parallel is None:
            num_known = len(self.prepared.model.get_input_embeddings().weight)
            tokens_T = tokens_T.masked_fill(tokens_T >= num_known, 0)
        return replace(micro_batch, tokens_T=tokens_T, kept=None, several=None, experts_TX=experts_TX)


def check(model: str, loss: LossConfig) -> None:
    """Check the reference model and the teacher, if they are loaded, before any memory is allocated.

    The heads may have different numbers of rows, which pad the same vocabulary.

    UsageError: the vocabularies differ. UnsupportedModelError: the model is split into tensor-parallel parts.
    """
    if loss.reference_model is not None:
        _check(model, "--reference-model", loss.reference_model)
    if loss.teacher not in (None, OWN_WEIGHTS) and not loss.has_remote_teacher:
        _check(model, "--teacher", loss.teacher)


def _check(model: str, named: str, other: str) -> None:
    try:
        config_of_other = skeleton.build(other, torch.bfloat16).config
    except UsageError as error:
        raise UsageError(f"{named} {other}: {error.message}", hint=error.hint) from error
    loaded.refuse_several_parts(other, config_of_other)
    ours = skeleton.tokenizer(model).get_vocab()
    theirs = skeleton.tokenizer(other).get_vocab()
    odd = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if odd:
        raise UsageError(
            f"{named} {other} has a different vocabulary from {model}: {len(odd)} tokens differ, the first: {odd[0]!r}",
            hint=f"use a model of the same family with the same vocabulary, such as {model} itself",
        )
    rows = config_of_other.get_text_config().vocab_size
    if rows <= (last := max(ours.values(), default=0)):
        raise UsageError(
            f"{named} {other} has {rows} embeddings, but the tokenizer of {model} has ids up to {last}",
            hint="use a model whose embeddings cover the tokenizer",
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
        return without_adapter(prepared)
    assert loss.reference_model is not None, "refused by the configuration"
    return loaded_beside(
        loss.reference_model, compute, prepared, device,
        max_model_len=max_model_len, ranks=ranks,
        hint="lower --gpu-memory-utilization, or --mode lora_only, whose base is the reference at no cost",
    )  # fmt: skip


def without_adapter(prepared: PreparedModel) -> Reference:
    """Return the frozen base of a model with an adapter."""
    return Reference(prepared=prepared, frozen=lambda: adapter_off(prepared.model))


def loaded_beside(
    name: str,
    compute: ComputeConfig,
    trained: PreparedModel,
    device: torch.device,
    *,
    max_model_len: int | None,
    ranks: Ranks,
    hint: str,
) -> Reference:
    """Load the model `name`, and prepare it like the `trained` one, so that both round and slice packs equally.

    Raises:
        UsageError: it cannot be loaded, or does not fit, with this `hint`.
        UnsupportedModelError: it is not a standard causal language model of transformers, or cannot be packed.
    """
    own = loaded.load(
        name, device=str(device), dtype=trained.model.dtype, max_model_len=max_model_len, hint=hint
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
