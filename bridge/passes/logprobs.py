"""Log-probabilities of given tokens, without ever holding tokens x vocabulary in float32.

Logits are float32 from bf16 rows and a bf16 head: products of bf16 numbers are exact in float32, so that only the
order of a sum is left to differ. Rounding logits to bf16 first costs up to 0.03 nats a token, as much as two engines
differ by altogether, and moves the probability ratio by as much.

Not covered: sampling, and top-k or top-p (the server has to sample from the whole distribution).
Shape suffixes: T tokens, N rows (positions that predict a sampled token), H hidden size, V vocabulary,
W words of one block of it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes.attention import packed_hidden
from bridge.passes.batch import MicroBatch
from bridge.passes.logits import LogitTransform, blocks, multiply, operand, project

HEAD_TOLERANCE = 0.02
"""Largest difference of logits, relative to the largest logit, that bf16 explains."""


def token_logprobs(
    hidden_NH: Tensor,
    head_VH: Tensor,
    targets_N: Tensor,
    temperature: float,
    bias_V: Tensor | None = None,
    *,
    final_logit_softcapping: float | None = None,
    logits_scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return float32 log-probabilities of `targets_N` and the entropies (without gradient), both in nats.

    Shapes: [N, H], [V, H], [N] int64 -> [N] float32, [N] float32.
    """
    transform = LogitTransform(
        temperature=temperature, final_logit_softcapping=final_logit_softcapping, logits_scaling=logits_scaling
    )
    return _blocked_logprobs(hidden_NH, head_VH, bias_V, targets_N, transform)


def model_logprobs(model: PreTrainedModel, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the model's log-probabilities of the sampled tokens and its entropies (without gradient), both in nats.

    Shapes: -> [N] float32, [N] float32, aligned with `micro_batch.rows_N` (see `batch.py`).
    """
    hidden_TH = packed_hidden(model, micro_batch.tokens_T, micro_batch.positions_T, micro_batch.spans)
    head_VH, bias_V, transform = _head(model, temperature)
    return _blocked_logprobs(
        hidden_TH.index_select(0, micro_batch.rows_N), head_VH, bias_V, micro_batch.targets_N, transform
    )


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Check once, before training, that `model_logprobs` computes what the model's own forward pass does.

    Raises:
        UnsupportedModelError: the model treats its hidden states or logits in a way that is not known here.
    """
    tokens_1T = torch.arange(4, device=model.device).unsqueeze(0)
    own_V = model(input_ids=tokens_1T, use_cache=False).logits[0, -1].float()
    hidden_1H = model.get_decoder()(input_ids=tokens_1T, use_cache=False).last_hidden_state[0, -1:]
    head, bias_V, transform = _head(model, temperature=1.0)
    ours_V = project(operand(hidden_1H), operand(head), bias_V, transform)[0]
    difference = float((ours_V - own_V).abs().max() / own_V.abs().max())
    if not difference <= HEAD_TOLERANCE:
        raise UnsupportedModelError(
            f"{type(model).__name__} turns hidden states into logits in a way of its own: they differ by "
            f"{difference:.1%}, expected at most {HEAD_TOLERANCE:.0%}",
            remedy="train another model, or report this one",
        )


def _blocked_logprobs(
    hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, by: LogitTransform
) -> tuple[Tensor, Tensor]:
    applied: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_VH, bias_V, targets_N, by
    )
    return applied


class _TokenLogprobs(torch.autograd.Function):
    """Blocks of the vocabulary, forward and backward: logits are computed twice instead of being kept.

    Blocks of words and not of rows: the head's gradient then comes out block by block, summed over all rows by the
    product itself, and needs no float32 sum of [V, H] beside it; what is summed over the blocks is [N, H].

    The second time could be saved if the gradient of each log-probability were known in the forward pass, as it is for
    a cross entropy (liger-kernel does so). Here it is the loss's to say, from all rows of a sequence at once (GSPO).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, by: LogitTransform
    ) -> tuple[Tensor, Tensor]:
        sums = _Sums(hidden_NH)
        hidden = operand(hidden_NH)
        for words in blocks(len(hidden_NH), len(head_VH), head_VH.device):
            sums.add(project(hidden, operand(head_VH[words]), _part(bias_V, words), by), *_within(targets_N, words))
        normalisers_N = sums.maxima_N + sums.weights_N.log()
        ctx.save_for_backward(hidden_NH, head_VH, bias_V, targets_N, normalisers_N)
        ctx.by = by
        logprobs_N, entropies_N = sums.targets_N - normalisers_N, normalisers_N - sums.products_N / sums.weights_N
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, head_VH, bias_V, targets_N, normalisers_N = ctx.saved_tensors
        needs_hidden, needs_head, needs_bias, *_rest = ctx.needs_input_grad
        hidden = operand(hidden_NH)
        hidden_gradient_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        head_gradient_VH = torch.empty_like(head_VH) if needs_head else None
        bias_gradient_V = torch.empty_like(bias_V) if needs_bias else None
        for words in blocks(len(hidden_NH), len(head_VH), head_VH.device):
            head = operand(head_VH[words])
            logits_NW = project(hidden, head, _part(bias_V, words), ctx.by)
            raw_NW = _raw_gradient(logits_NW, gradient_N, *_within(targets_N, words), normalisers_N, ctx.by)
            if bias_gradient_V is not None:
                bias_gradient_V[words] = raw_NW.sum(dim=0)
            raw_NW = raw_NW.to(head.dtype)
            if hidden_gradient_NH is not None:
                hidden_gradient_NH += multiply(raw_NW, head)
            if head_gradient_VH is not None:
                head_gradient_VH[words] = multiply(raw_NW.T, hidden)
        if hidden_gradient_NH is not None:
            hidden_gradient_NH = hidden_gradient_NH.to(hidden_NH.dtype)
        return hidden_gradient_NH, head_gradient_VH, bias_gradient_V, None, None


class _Sums:
    """What a softmax needs of the blocks gone through so far, relative to the largest logit among them.

    Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.
    """

    def __init__(self, hidden_NH: Tensor) -> None:
        self.maxima_N = hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=torch.float32)
        self.weights_N, self.products_N, self.targets_N = torch.zeros_like(self.maxima_N).repeat(3, 1).unbind()

    def add(self, logits_NW: Tensor, targets_N: Tensor, inside_N: Tensor) -> None:
        """Take one block in: its logits, and which of its words are the targets that lie inside it."""
        maxima_N = torch.maximum(self.maxima_N, logits_NW.amax(dim=1))
        shrink_N = (self.maxima_N - maxima_N).exp_()
        weights_NW = (logits_NW - maxima_N.unsqueeze(1)).exp_()
        self.weights_N = self.weights_N * shrink_N + weights_NW.sum(dim=1)
        self.products_N = self.products_N * shrink_N + weights_NW.mul_(logits_NW).sum(dim=1)
        found_N = logits_NW.gather(1, targets_N.unsqueeze(1)).squeeze(1)
        self.targets_N = torch.where(inside_N, found_N, self.targets_N)
        self.maxima_N = maxima_N


def _within(targets_N: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Return the targets counted from the block's first word (any word for those outside), and which lie inside."""
    local_N = targets_N - words.start
    inside_N = (local_N >= 0) & (local_N < words.stop - words.start)
    return torch.where(inside_N, local_N, 0), inside_N


def _part(bias_V: Tensor | None, words: slice) -> Tensor | None:
    return None if bias_V is None else bias_V[words]


def _raw_gradient(
    logits_NW: Tensor,
    gradient_N: Tensor,
    targets_N: Tensor,
    inside_N: Tensor,
    normalisers_N: Tensor,
    by: LogitTransform,
) -> Tensor:
    """Return gradient * (onehot(target) - softmax), taken back through the transform; `logits_NW` are used up."""
    result_NW = (logits_NW - normalisers_N.unsqueeze(1)).exp_().mul_(-gradient_N.unsqueeze(1))
    result_NW.scatter_add_(1, targets_N.unsqueeze(1), torch.where(inside_N, gradient_N, 0.0).unsqueeze(1))
    return by.backward(result_NW, logits_NW)


def _head(model: PreTrainedModel, temperature: float) -> tuple[Tensor, Tensor | None, LogitTransform]:
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    transform = LogitTransform(
        temperature=temperature,
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
        logits_scaling=getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0),
    )
    return head.weight, getattr(head, "bias", None), transform
