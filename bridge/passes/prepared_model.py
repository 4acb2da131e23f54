"""A model prepared for training: everything that its passes depend on, in one object.

A transformers model by itself computes each sequence separately. Everything that training adds is an attribute here,
set by `preparation.py` or by the caller; `release` removes it from the model again.

Not covered: how these settings are chosen and checked (`preparation.py`), and how much fits into a pass (`budget.py`).
Shape suffixes: T tokens of a pack, L tokens of this rank's slice of it, N rows (positions that predict a sampled
token), X experts of a token in all layers, H hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes import activation_offload, attention, image_embeddings, image_proof, layers, slices
from bridge.passes.attention import Spans
from bridge.passes.cut_layers import VocabularyPart
from bridge.passes.image_embeddings import PackedImages
from bridge.passes.layers import ALL, Kept
from bridge.passes.logprobs import Comparison, Prediction, Scores, head_of, token_logprobs
from bridge.passes.packing import MicroBatch, Sample
from bridge.passes.parallel import Parallel
from bridge.passes.routing import UNKNOWN, RouterReplay
from bridge.passes.slices import Rows, Slices

REPLACED = (
    "forward", "training", "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook",
    "_require_grads_hooks", "_compiled_call_impl",
)  # fmt: skip
"""Module attributes, set by the model, transformers or torch, that determine how a module computes."""


class PreparedModel:
    """A transformers model, and everything besides its parameters that its passes depend on."""

    def __init__(self, model: PreTrainedModel, parallel: Parallel | None = None) -> None:
        """Wrap a model as transformers built it, or one that `parallel.divide` cut into parts."""
        self.model = model
        self.parallel = parallel
        """How this rank computes with the other tensor-parallel ranks; None: it has all weights."""
        self.replay: RouterReplay | None = None
        """The blocks that compute with given experts; None: the routers choose."""
        self.slices: Slices | None = None
        """How packs are sliced among ranks; None: they are not sliced."""
        self.kept: Kept = ALL
        """Activations that layers keep for the backward pass."""
        self.shares_prompts = False
        """Whether the completions of a prompt may share it in a pack."""
        self.hooks = list[RemovableHandle]()
        """Module hooks that `release` removes."""
        self._are_images_proved = False
        self._attention = attention.chosen(model)
        self._before = {module: _replaceable(module) for module in model.modules()}

    @property
    def is_compiled(self) -> bool:
        """Whether the layers are compiled, or will be at their first call."""
        return layers.are_compiled(self.model)

    def logprobs(
        self, batch: MicroBatch, temperature: float, *, differentiates_entropies: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the first two results of `scores`: the log-probabilities of the targets, and the entropies."""
        logprobs_NX, entropies_N, _ = self.scores(batch, temperature, differentiates_entropies=differentiates_entropies)
        return logprobs_NX, entropies_N

    def scores(
        self,
        batch: MicroBatch,
        temperature: float,
        *,
        differentiates_entropies: bool = False,
        teacher: Comparison | None = None,
    ) -> Scores:
        """Return the log-probabilities of the targets, the entropies and the divergences from a teacher, in nats.

        The entropies have a gradient only with `differentiates_entropies`. `teacher` is what another model's
        `prediction` returned for the same rows.

        Shapes: -> [N] float32 x 2 or 3; with `several` targets of a row [N, K], [N], [N]. Every rank of a sliced pack
        gets all rows.
        """
        head_VH, bias_V, transform = head_of(self.model, temperature)
        computed, rows = self._computed(batch)
        hidden_NH = self._hidden(batch).index_select(0, computed.rows_N)
        targets = computed.targets_N if computed.several is None else computed.several.ids_NK
        scores = token_logprobs(
            hidden_NH, head_VH, bias_V, targets, transform, self.is_compiled, computed.kept, self._head_words,
            differentiates_entropies=differentiates_entropies, teacher=teacher,
        )  # fmt: skip
        scores = scores if rows is None else rows.of_all(scores)
        return scores if batch.distinct is None else scores.rows(batch.distinct.of_rows_N)

    @torch.no_grad()
    def prediction(self, batch: MicroBatch, temperature: float, like: MicroBatch | None = None) -> Prediction:
        """Return what the model predicts at the rows that it computes of a batch: this rank's, without repeats.

        `like` has the same rows in other sequences: prompts without a hint, for example. Then the result is for the
        rows that `scores` computes of it.
        """
        head_VH, bias_V, transform = head_of(self.model, temperature)
        computed, rows = self._computed(batch)
        hidden_NH = self._hidden(batch).index_select(0, computed.rows_N)
        if like is not None and rows is not None:  # a row may lie in the slice of another rank
            _, wanted = self._computed(like)
            assert wanted is not None
            hidden_NH = rows.joined(hidden_NH)[wanted.own_M]
        return Prediction(hidden_NG=hidden_NH, head_VG=head_VH, bias_V=bias_V, by=transform, words=self._head_words)

    @property
    def _head_words(self) -> VocabularyPart | None:
        return None if self.parallel is None else self.parallel.head_words

    def _computed(self, batch: MicroBatch) -> tuple[MicroBatch, Rows | None]:
        """Return the batch with the rows that this rank computes, and how the ranks of a sliced pack share them."""
        without_repeats = batch if batch.distinct is None else batch.of_rows(batch.distinct.chosen_M)
        if self.slices is None:
            return without_repeats, None
        rows = Rows(self.slices, without_repeats)
        return rows.own, rows

    def _hidden(self, batch: MicroBatch) -> Tensor:
        return self.own_hidden(batch.tokens_T, batch.positions_T, batch.spans, batch.experts_TX, batch.images)

    def own_hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        spans: Spans,
        experts_TX: Tensor | None = None,
        packed_images: PackedImages | None = None,
    ) -> Tensor:
        """Return the last hidden states of this rank's slice, or of the full pack if it is not sliced.

        Shapes: [T] x 2 -> [L, H].

        `experts_TX` is passed to `RouterReplay.choose`. A pack with images is never sliced (`Prompts` refuses it).
        If the attention is not Bridge's, transformers finds the sequences by their positions, and builds a mask; then
        prompts cannot be shared, and packs cannot be sliced.

        Raises:
            UnsupportedModelError: the pack is sliced, and the model's attention is not Bridge's.
        """
        model = self.model
        cut = self.slices
        num_tokens = len(tokens_T)
        is_ours = attention.chosen(model) == attention.NAME
        if cut is not None:
            assert packed_images is None, "images cannot be cut"
            if not is_ours:
                raise UnsupportedModelError(
                    f"{type(model).__name__} uses its own attention, which --context-parallel-size does not support",
                    hint=slices.HINT,
                )
            spans = cut.padded(spans, num_tokens)
            if experts_TX is not None:
                experts_TX = cut.own(experts_TX - UNKNOWN) + UNKNOWN  # padding has unknown experts
            tokens_T = cut.own(tokens_T)
            positions_T = cut.own(positions_T)
        if self.replay is not None:
            self.replay.choose(experts_TX, len(tokens_T))
        assert is_ours or spans.seen is None, "only Bridge's attention can share a prompt"
        boundaries = attention.boundaries(spans, cut) if is_ours else {}
        is_kept_on_host = self.kept.on_host and torch.is_grad_enabled()
        num_elements = len(tokens_T) * model.config.get_text_config().hidden_size
        with activation_offload.on_host(model, num_elements) if is_kept_on_host else nullcontext():
            taken: dict[str, Any] = {"input_ids": tokens_T.unsqueeze(0), "position_ids": positions_T.unsqueeze(0)}
            if packed_images is not None:
                taken = image_embeddings.inputs(model, tokens_T, positions_T, packed_images)
            output = model.get_decoder()(**taken, use_cache=False, **boundaries)
        hidden_1LH: Tensor = output.last_hidden_state
        return hidden_1LH[0]

    def whole_hidden(
        self, tokens_T: Tensor, positions_T: Tensor, spans: Spans, experts_TX: Tensor | None = None
    ) -> Tensor:
        """Return the last hidden states of the full pack on every rank: [T, H]; otherwise the same as `own_hidden`."""
        hidden_LH = self.own_hidden(tokens_T, positions_T, spans, experts_TX)
        return hidden_LH if self.slices is None else self.slices.joined(hidden_LH, len(tokens_T))

    @contextmanager
    def uncut(self) -> Iterator[None]:
        """Compute full packs on every rank inside the block."""
        cut = self.slices
        self.slices = None
        try:
            yield
        finally:
            self.slices = cut

    def prove_images(self, samples: Sequence[Sample]) -> None:
        """Compare packed samples that have images with transformers' own model, once, when the first ones arrive.

        Raises:
            UnsupportedModelError: the model treats images differently from Bridge.
        """
        with_images = [sample for sample in samples if sample.images is not None]
        if with_images and not self._are_images_proved:
            image_proof.prove(self.model, with_images)
            self._are_images_proved = True

    def release(self) -> None:
        """Restore the model's original behavior.

        If Liger kernels were requested, Liger's RoPE stays: Liger replaces it for all models of the process.
        """
        if self.replay is not None:
            self.replay.release()
        attention.choose(self.model, self._attention)
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()
        for module, before in self._before.items():
            for name in _replaceable(module).keys() - before.keys():
                delattr(module, name)
            for name, value in before.items():
                setattr(module, name, value)
        self.replay = None
        self.slices = None
        self.kept = ALL
        self.shares_prompts = False


def _replaceable(module: nn.Module) -> dict[str, Any]:
    """Return the module attributes that preparation may set: those of `REPLACED`, and dropout rates."""
    held = vars(module)
    rates = {name: rate for name, rate in held.items() if name.endswith("dropout") and isinstance(rate, float)}
    return {name: held[name] for name in REPLACED if name in held} | rates
