"""Log-probabilities of given tokens, without ever holding tokens x vocabulary in float32.

Logits are float32 from bf16 rows and a bf16 head: products of bf16 numbers are exact in float32, so that only the
order of a sum is left to differ. Rounding logits to bf16 first costs up to 0.03 nats a token, as much as two engines
differ by altogether, and moves the probability ratio by as much.

Not covered: sampling, and top-k or top-p (the server has to sample from the whole distribution).
Shape suffixes: B sequences, T tokens, N rows (positions that predict a sampled token), C rows of one chunk,
H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.training.batch import MicroBatch
from bridge.training.logits import LogitTransform, multiply, operand, project, row_chunks

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
    return _chunked_logprobs(hidden_NH, head_VH, bias_V, targets_N, transform)


def model_logprobs(model: PreTrainedModel, micro_batch: MicroBatch, temperature: float) -> Tensor:
    """Return the model's log-probability of token t + 1 at every position of `mask_BT`, 0 elsewhere.

    Shapes: -> [B, T] float32, aligned with `micro_batch.mask_BT` and `.sampled_logprobs_BT` (see `batch.py`).
    """
    mask_BT = micro_batch.mask_BT
    hidden_BTH = _hidden(model, micro_batch.tokens_BT, micro_batch.attention_mask_BT)
    targets_N = micro_batch.tokens_BT.roll(-1, dims=1)[mask_BT]
    head_VH, bias_V, transform = _head(model, temperature)
    logprobs_N, _ = _chunked_logprobs(hidden_BTH[mask_BT], head_VH, bias_V, targets_N, transform)
    return torch.zeros_like(mask_BT, dtype=torch.float32).masked_scatter(mask_BT, logprobs_N)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Check once, before training, that `model_logprobs` computes what the model's own forward pass does.

    Raises:
        UnsupportedModelError: the model treats its hidden states or logits in a way that is not known here.
    """
    tokens_BT = torch.arange(4, device=model.device).unsqueeze(0)
    own_V = model(input_ids=tokens_BT, use_cache=False).logits[0, -1].float()
    hidden_1H = _hidden(model, tokens_BT, torch.ones_like(tokens_BT))[0, -1:]
    head, bias_V, transform = _head(model, temperature=1.0)
    ours_V = project(operand(hidden_1H), operand(head).T, bias_V, transform)[0]
    difference = float((ours_V - own_V).abs().max() / own_V.abs().max())
    if not difference <= HEAD_TOLERANCE:
        raise UnsupportedModelError(
            f"{type(model).__name__} turns hidden states into logits in a way of its own: they differ by "
            f"{difference:.1%}, expected at most {HEAD_TOLERANCE:.0%}",
            remedy="train another model, or report this one",
        )


def _chunked_logprobs(
    hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, by: LogitTransform
) -> tuple[Tensor, Tensor]:
    applied: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_VH, bias_V, targets_N, by
    )
    return applied


class _TokenLogprobs(torch.autograd.Function):
    """Chunks of rows, forward and backward: logits are computed twice instead of being kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, by: LogitTransform
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, normalisers_N, entropies_N = hidden_NH.new_empty((3, len(hidden_NH)), dtype=torch.float32)
        head_HV = operand(head_VH).T
        for rows in row_chunks(len(hidden_NH), len(head_VH)):
            logits_CV = project(operand(hidden_NH[rows]), head_HV, bias_V, by)
            maxima_C = logits_CV.amax(dim=1)
            weights_CV = (logits_CV - maxima_C.unsqueeze(1)).exp_()
            sums_C = weights_CV.sum(dim=1)
            normalisers_N[rows] = maxima_C + sums_C.log()
            logprobs_N[rows] = logits_CV.gather(1, targets_N[rows].unsqueeze(1)).squeeze(1) - normalisers_N[rows]
            entropies_N[rows] = normalisers_N[rows] - weights_CV.mul_(logits_CV).sum(dim=1) / sums_C
        ctx.save_for_backward(hidden_NH, head_VH, bias_V, targets_N, normalisers_N)
        ctx.by = by
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, head_VH, bias_V, targets_N, normalisers_N = ctx.saved_tensors
        needs_hidden, needs_head, needs_bias, *_rest = ctx.needs_input_grad
        head = operand(head_VH)
        hidden_gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # summed in float32 over the chunks: bf16 would round once per chunk
        head_gradient_VH = torch.zeros_like(head_VH, dtype=torch.float32) if needs_head else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for rows in row_chunks(len(hidden_NH), len(head_VH)):
            hidden = operand(hidden_NH[rows])
            logits_CV = project(hidden, head.T, bias_V, ctx.by)
            raw_CV = _raw_gradient(logits_CV, gradient_N[rows], targets_N[rows], normalisers_N[rows], ctx.by)
            if bias_gradient_V is not None:
                bias_gradient_V += raw_CV.sum(dim=0)
            raw_CV = raw_CV.to(head.dtype)
            if hidden_gradient_NH is not None:
                hidden_gradient_NH[rows] = multiply(raw_CV, head).to(hidden_NH.dtype)
            if head_gradient_VH is not None:
                head_gradient_VH += multiply(raw_CV.T, hidden)
        return (
            hidden_gradient_NH,
            None if head_gradient_VH is None else head_gradient_VH.to(head_VH.dtype),
            None if bias_gradient_V is None else bias_gradient_V.to(bias_V.dtype),
            None,
            None,
        )


def _raw_gradient(
    logits_CV: Tensor, gradient_C: Tensor, targets_C: Tensor, normalisers_C: Tensor, by: LogitTransform
) -> Tensor:
    """Return gradient * (onehot(target) - softmax), taken back through the transform; `logits_CV` are used up."""
    gradient_C1 = gradient_C.unsqueeze(1)
    result_CV = (logits_CV - normalisers_C.unsqueeze(1)).exp_().mul_(-gradient_C1)
    result_CV.scatter_add_(1, targets_C.unsqueeze(1), gradient_C1)
    return by.backward(result_CV, logits_CV)


def _hidden(model: PreTrainedModel, tokens_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
    decoder = model.get_decoder()
    hidden_BTH: Tensor = decoder(
        input_ids=tokens_BT, attention_mask=attention_mask_BT, use_cache=False
    ).last_hidden_state
    return hidden_BTH


def _head(model: PreTrainedModel, temperature: float) -> tuple[Tensor, Tensor | None, LogitTransform]:
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    transform = LogitTransform(
        temperature=temperature,
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
        logits_scaling=getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0),
    )
    return head.weight, getattr(head, "bias", None), transform
