"""Log-probabilities of given tokens, without ever holding tokens x vocabulary in float32.

Logits are float32 from bf16 rows and a bf16 head: products of bf16 numbers are exact in float32, so that only the
order of a sum is left to differ. Rounding logits to bf16 first costs up to 0.03 nats a token, as much as two engines
differ by altogether, and moves the probability ratio by as much.

Not covered: sampling, and top-k or top-p (the server has to sample from the whole distribution).
Shape suffixes: T tokens, N rows (positions that predict a sampled token), H hidden size, V vocabulary,
W words of one block of it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes import layers
from bridge.passes.attention import packed_hidden
from bridge.passes.logits import LogitTransform, blocks, multiply, operand, transformed
from bridge.passes.packing import MicroBatch

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
    compiles: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return float32 log-probabilities of `targets_N` and the entropies (without gradient), both in nats.

    With `compiles`, what is done to a block of logits is one kernel each way, instead of a dozen that read it anew.

    Shapes: [N, H], [V, H], [N] int64 -> [N] float32, [N] float32.
    """
    transform = LogitTransform(
        temperature=temperature, final_logit_softcapping=final_logit_softcapping, logits_scaling=logits_scaling
    )
    return _blocked_logprobs(hidden_NH, head_VH, bias_V, targets_N, transform, compiles)


def model_logprobs(model: PreTrainedModel, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the model's log-probabilities of the sampled tokens and its entropies (without gradient), both in nats.

    Shapes: -> [N] float32, [N] float32, aligned with `micro_batch.rows_N` (see `batch.py`).
    """
    hidden_TH = packed_hidden(model, micro_batch.tokens_T, micro_batch.positions_T, micro_batch.spans)
    head_VH, bias_V, transform = _head(model, temperature)
    hidden_NH, compiles = hidden_TH.index_select(0, micro_batch.rows_N), layers.are_compiled(model)
    return _blocked_logprobs(hidden_NH, head_VH, bias_V, micro_batch.targets_N, transform, compiles)


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
    ours_V = transformed(multiply(operand(hidden_1H), operand(head).T), bias_V, transform)[0]
    difference = float((ours_V - own_V).abs().max() / own_V.abs().max())
    if not difference <= HEAD_TOLERANCE:
        raise UnsupportedModelError(
            f"{type(model).__name__} turns hidden states into logits in a way of its own: they differ by "
            f"{difference:.1%}, expected at most {HEAD_TOLERANCE:.0%}",
            remedy="train another model, or report this one",
        )


def _blocked_logprobs(
    hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, by: LogitTransform, compiles: bool
) -> tuple[Tensor, Tensor]:
    applied: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_VH, bias_V, targets_N, by, compiles
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
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        by: LogitTransform,
        compiles: bool,
    ) -> tuple[Tensor, Tensor]:
        compiles = compiles and len(hidden_NH) > 1  # torch compiles fewer rows for themselves
        sums, add = _Sums.of_none(hidden_NH), _kernel(_added, compiles)
        hidden = operand(hidden_NH)
        for words in blocks(len(hidden_NH), len(head_VH), head_VH.device):
            raw_NW = multiply(hidden, operand(head_VH[words]).T)
            sums = add(sums, raw_NW, _part(bias_V, words), targets_N - words.start, by)
        normalisers_N = sums.maxima_N + sums.weights_N.log()
        ctx.save_for_backward(hidden_NH, head_VH, bias_V, targets_N, normalisers_N)
        ctx.by, ctx.compiles = by, compiles
        logprobs_N, entropies_N = sums.targets_N - normalisers_N, normalisers_N - sums.products_N / sums.weights_N
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, head_VH, bias_V, targets_N, normalisers_N = ctx.saved_tensors
        needs_hidden, needs_head, needs_bias, *_rest = ctx.needs_input_grad
        hidden, differentiate = operand(hidden_NH), _kernel(_raw_gradient, ctx.compiles)
        hidden_gradient_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        head_gradient_VH = torch.empty_like(head_VH) if needs_head else None
        bias_gradient_V = torch.empty_like(bias_V) if needs_bias else None
        for words in blocks(len(hidden_NH), len(head_VH), head_VH.device):
            head, bias_W, targets = operand(head_VH[words]), _part(bias_V, words), targets_N - words.start
            raw_NW = multiply(hidden, head.T)
            dtype = head.dtype if bias_gradient_V is None else raw_NW.dtype
            raw_NW = differentiate(raw_NW, bias_W, gradient_N, targets, normalisers_N, ctx.by, dtype)
            if bias_gradient_V is not None:
                bias_gradient_V[words] = raw_NW.sum(dim=0)
            raw_NW = raw_NW.to(head.dtype)
            if hidden_gradient_NH is not None:
                hidden_gradient_NH += multiply(raw_NW, head)
            if head_gradient_VH is not None:
                head_gradient_VH[words] = multiply(raw_NW.T, hidden)
        if hidden_gradient_NH is not None:
            hidden_gradient_NH = hidden_gradient_NH.to(hidden_NH.dtype)
        return hidden_gradient_NH, head_gradient_VH, bias_gradient_V, None, None, None


class _Sums(NamedTuple):
    """What a softmax needs of the blocks gone through so far, relative to the largest logit among them.

    Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.
    """

    maxima_N: Tensor
    weights_N: Tensor
    products_N: Tensor
    targets_N: Tensor

    @classmethod
    def of_none(cls, hidden_NH: Tensor) -> Self:
        maxima_N = hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=torch.float32)
        return cls(maxima_N, *torch.zeros_like(maxima_N).repeat(3, 1).unbind())


def _added(sums: _Sums, raw_NW: Tensor, bias_W: Tensor | None, targets_N: Tensor, by: LogitTransform) -> _Sums:
    """Take one block in: the head's product, and the targets counted from its first word, wherever they are."""
    logits_NW = transformed(raw_NW, bias_W, by)
    maxima_N = torch.maximum(sums.maxima_N, logits_NW.amax(dim=1))
    shrink_N = (sums.maxima_N - maxima_N).exp_()
    weights_NW = (logits_NW - maxima_N.unsqueeze(1)).exp_()
    inside_N, local_N = _within(targets_N, logits_NW.shape[1])
    found_N = logits_NW.gather(1, local_N.unsqueeze(1)).squeeze(1)
    return _Sums(
        maxima_N,
        sums.weights_N * shrink_N + weights_NW.sum(dim=1),
        sums.products_N * shrink_N + weights_NW.mul_(logits_NW).sum(dim=1),
        torch.where(inside_N, found_N, sums.targets_N),
    )


def _raw_gradient(
    raw_NW: Tensor,
    bias_W: Tensor | None,
    gradient_N: Tensor,
    targets_N: Tensor,
    normalisers_N: Tensor,
    by: LogitTransform,
    dtype: torch.dtype,
) -> Tensor:
    """Return gradient * (onehot(target) - softmax), taken back through the transform and rounded to `dtype`."""
    logits_NW = transformed(raw_NW, bias_W, by)
    result_NW = (logits_NW - normalisers_N.unsqueeze(1)).exp_().mul_(-gradient_N.unsqueeze(1))
    if torch.compiler.is_compiling():  # scattering would be a kernel of its own, and keep this one from being fused
        words_W = torch.arange(result_NW.shape[1], device=result_NW.device)
        result_NW = torch.where(words_W == targets_N.unsqueeze(1), result_NW + gradient_N.unsqueeze(1), result_NW)
    else:
        inside_N, local_N = _within(targets_N, result_NW.shape[1])
        result_NW.scatter_add_(1, local_N.unsqueeze(1), torch.where(inside_N, gradient_N, 0.0).unsqueeze(1))
    return by.backward(result_NW, logits_NW).to(dtype)


def _within(targets_N: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """Return which targets lie among a block's words, and their places there: any for those that do not."""
    inside_N = (targets_N >= 0) & (targets_N < num_words)
    return inside_N, torch.where(inside_N, targets_N, 0)


def _part(bias_V: Tensor | None, words: slice) -> Tensor | None:
    return None if bias_V is None else bias_V[words]


def _kernel(function: Callable[..., Any], compiles: bool) -> Callable[..., Any]:
    return _compiled(function) if compiles else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as one kernel for any numbers of rows and words."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _head(model: PreTrainedModel, temperature: float) -> tuple[Tensor, Tensor | None, LogitTransform]:
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    transform = LogitTransform(
        temperature=temperature,
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
        logits_scaling=(getattr(config, "logits_scaling", None) or 1.0) / (getattr(config, "logit_scale", None) or 1.0),
    )
    return head.weight, getattr(head, "bias", None), transform
