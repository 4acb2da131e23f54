"""Check that a model computes for packed sequences what transformers computes for each sequence separately.

A model that treats positions or masks differently is refused here, whatever its family, rather than trained wrongly.

Shape suffixes: T tokens, H hidden size, X experts of a token in all layers.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes import attention, routing
from bridge.passes.packing import Sample, packs
from bridge.passes.prepared_model import PreparedModel

logger = logging.getLogger(__name__)

LENGTHS = (24, 13, 7, 6, 2)
"""Tokens of the sequences that are compared."""
PROMPTS = (8, 8, 3, 3, 1)
"""The number of these tokens that belong to the prompt."""
SHARING = ((0, 1), (2, 3))
"""Sequences that share a prompt."""
WINDOW = 5
"""Sliding windows are narrowed to this many tokens for the check, so that sequences are longer than the window."""
TOLERANCE = 1 / 8
"""Largest difference from the separate sequences, as a share of the difference if all were one sequence.

Tiny bf16 models of 21 families reached between 1/260 and 1/70; models that mix sequences or positions reached 1/3 or
more."""
ROUNDING_TOLERANCE = 1 / 4
"""The tolerance for differences that rounding can explain: 28 layers of random bf16 weights on an H200 reached 1/7."""
ROUNDINGS = 2
"""A difference up to this many epsilons of the model's dtype is always allowed: 48 layers of vLLM's dummy weights
reached 0.8 on an H200."""


@dataclass
class Expected:
    """Results of transformers' eager attention for a few separate sequences, with the tolerance for Bridge's."""

    tokens_T: Tensor
    """All sequences, one after the other."""
    experts_TX: Tensor | None
    """The routers' choice, the same for all passes: rounding alone could change it from pass to pass."""
    alone_TH: Tensor
    """Last hidden states of each sequence, computed separately."""
    mixed_up: float
    """The difference if all sequences were computed as one."""
    most: float
    """Largest difference that is accepted."""
    farthest: int
    """Largest start position at which the first sequence still fits; zero or less: unknown."""
    is_noted: bool = False

    @classmethod
    @torch.no_grad()
    def of(cls, prepared: PreparedModel, max_model_len: int | None = None) -> Self:
        """Run the model on each sequence separately, with eager and its own attention, and on all sequences as one."""
        model = prepared.model
        bounds = (getattr(model.config.get_text_config(), "max_position_embeddings", None), max_model_len)
        tokens_T = example_tokens(model)
        own_attention = attention.chosen(model)
        attention.choose(model, "eager")  # others omit features: sdpa has no logit softcap (Gemma 2)
        with _checking(model):
            experts_TX = _own_experts(prepared, tokens_T)
            alone_TH = _separate_hidden(prepared, tokens_T, experts_TX)
            if prepared.replay is not None:
                prepared.replay.choose(experts_TX, len(tokens_T))
            mixed_up = difference(routing.plain_hidden(model, tokens_T), alone_TH)
            attention.choose(model, own_attention)
            other_TH = _separate_hidden(prepared, tokens_T, experts_TX)
        explained = min(2 * difference(other_TH, alone_TH), ROUNDING_TOLERANCE * mixed_up)
        return cls(
            tokens_T=tokens_T,
            experts_TX=experts_TX,
            alone_TH=alone_TH,
            mixed_up=mixed_up,
            most=max(TOLERANCE * mixed_up, explained),
            farthest=min((bound for bound in bounds if isinstance(bound, int)), default=0) - LENGTHS[0],
        )

    def check(self, prepared: PreparedModel, *, share_prompts: bool = False) -> None:
        """Run the packed forward pass with the model's current attention and layers, and compare.

        Repeat the pass with the first sequence at the largest possible positions: the other sequences must not change.
        """
        tokens_T = self.tokens_T
        experts_TX = self.experts_TX
        with torch.no_grad(), _checking(prepared.model):
            if share_prompts:
                hidden_TH = packed_sharing(prepared, tokens_T, experts_TX)
            else:
                hidden_TH = packed(prepared, tokens_T, LENGTHS, experts_TX)
            differs = difference(hidden_TH, self.alone_TH)
            if self.farthest > 0 and not share_prompts:
                beside_TH = packed(prepared, tokens_T, LENGTHS, experts_TX, begin=self.farthest)
                beside = difference(beside_TH, self.alone_TH, first=1)
                differs = float(torch.tensor([differs, beside]).max())  # NaN if either one is NaN
        line = f"hidden states differ by {differs:.1%} from those of separate sequences, and by {self.mixed_up:.1%}"
        if not differs <= max(self.most, ROUNDINGS * torch.finfo(self.alone_TH.dtype).eps):
            raise UnsupportedModelError(
                f"{type(prepared.model).__name__} does not keep packed sequences apart: {line} if all are one sequence",
                hint="train another model, or report this one",
            )
        if differs > self.most and not self.is_noted:
            self.is_noted = True
            logger.info(f"attention hardly matters with these weights: {line} if all are one sequence")


def difference(hidden_TH: Tensor, alone_TH: Tensor, *, first: int = 0) -> float:
    """Return the largest median relative difference of a sequence, over the sequences from index `first` on.

    It is a median over tokens, since rounding alone may send a few tokens to different experts. Equal hidden states
    differ by 0 even if both are 0, as at the start of a sequence whose first embedding is 0.
    """
    error_T = (hidden_TH.float() - alone_TH.float()).norm(dim=1)
    relative_T = torch.where(error_T == 0, 0.0, error_T / alone_TH.float().norm(dim=1))
    medians = [part_T.median() for part_T in relative_T.split(LENGTHS)[first:]]
    return float(torch.stack(medians).max())  # NaN if any is NaN


def packed(
    prepared: PreparedModel,
    tokens_T: Tensor,
    lengths: Sequence[int],
    experts_TX: Tensor | None = None,
    *,
    begin: int = 0,
) -> Tensor:
    """Return the last hidden states of packed sequences; the first sequence's positions start at `begin`.

    Shapes: [T] -> [T, H]; `experts_TX` is passed to `RouterReplay.choose`.
    """
    positions_T = torch.cat([torch.arange(length, device=tokens_T.device) for length in lengths])
    positions_T[: lengths[0]] += begin
    starts_S1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens_T.device)
    spans = attention.Spans(starts_S1=starts_S1, longest=max(lengths))
    return prepared.whole_hidden(tokens_T, positions_T, spans, experts_TX)


def packed_sharing(prepared: PreparedModel, tokens_T: Tensor, experts_TX: Tensor | None = None) -> Tensor:
    """Return the last hidden states of the example sequences, packed with shared prompts: [T] -> [T, H]."""
    samples = []
    for part_T, prompt, part_TX in zip(tokens_T.split(LENGTHS), PROMPTS, _split(experts_TX), strict=True):
        ids = tuple(part_T.tolist())
        zeros = (0.0,) * (len(part_T) - prompt)
        tokens: dict[str, Any] = {"prompt_token_ids": ids[:prompt], "token_ids": ids[prompt:]}
        if part_TX is not None:
            tokens["experts"] = part_TX[:-1].cpu().numpy().astype("<i2").tobytes()
        samples.append(Sample(**tokens, sampled_logprobs=zeros, advantages=zeros, weight=0.0))
    (batch,) = packs(samples, max_tokens=sum(LENGTHS), device=tokens_T.device, share_prompts=True)
    hidden_TH = prepared.whole_hidden(batch.tokens_T, batch.positions_T, batch.spans, batch.experts_TX)
    seen = batch.spans.seen
    assert seen is not None
    sequences = [keys for keys in seen.keys_U.split(seen.starts_S1.diff().tolist()) if len(keys) in LENGTHS]
    return hidden_TH[torch.cat(sequences)]  # the other spans are shared prompts


def example_tokens(model: PreTrainedModel) -> Tensor:
    """Return the tokens of the example sequences (`LENGTHS`), some of which share their prompts (`SHARING`): [T]."""
    tokens_T = routing.made_up_tokens(model, sum(LENGTHS))
    starts = [0, *accumulate(LENGTHS)]
    for first, second in SHARING:
        tokens_T[starts[second] :][: PROMPTS[second]] = tokens_T[starts[first] :][: PROMPTS[first]]
    return tokens_T


def _own_experts(prepared: PreparedModel, tokens_T: Tensor) -> Tensor | None:
    """Return the experts that the routers choose for each separate sequence, the same for a shared prompt: [T, X].

    None: the routers choose again in every pass.
    """
    if prepared.replay is None:
        return None
    computations = [partial(routing.plain_hidden, prepared.model, part_T) for part_T in tokens_T.split(LENGTHS)]
    parts = [prepared.replay.watched(compute) for compute in computations]
    for first, second in SHARING:
        parts[second][: PROMPTS[second]] = parts[first][: PROMPTS[first]]
    return torch.cat(parts)


def _separate_hidden(prepared: PreparedModel, tokens_T: Tensor, experts_TX: Tensor | None) -> Tensor:
    """Return the last hidden states of the example sequences, computed separately: [T] -> [T, H]."""
    parts = []
    for part_T, part_TX in zip(tokens_T.split(LENGTHS), _split(experts_TX), strict=True):
        if prepared.replay is not None:
            prepared.replay.choose(part_TX, len(part_T))
        parts.append(routing.plain_hidden(prepared.model, part_T))
    return torch.cat(parts)


def _split(experts_TX: Tensor | None) -> Sequence[Tensor | None]:
    return [None] * len(LENGTHS) if experts_TX is None else experts_TX.split(LENGTHS)


@contextmanager
def _checking(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout off and narrow sliding windows inside the block, and restore both afterwards."""
    owners = (model.config.get_text_config(), *model.modules())
    windows = [(o, o.sliding_window) for o in owners if isinstance(getattr(o, "sliding_window", None), int)]
    for owner, _ in windows:
        owner.sliding_window = WINDOW
    try:
        with routing.without_dropout(model):
            yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window
