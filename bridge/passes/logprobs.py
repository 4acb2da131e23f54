"""Log-probabilities of given tokens, without ever materializing tokens x vocabulary in float32.

Logits are float32 products of bf16 rows and a bf16 head. Rounding logits to bf16 would add an error of up to 0.03 nats
per token, as large as the difference between two engines, and the probability ratio would be off by as much.

If top-k, top-p or min-p were used, probabilities are normalized over the words (vocabulary entries) that they kept:
those whose transformed logit is at least the row's threshold. If more or fewer words than the server kept are above the
threshold here, rounding or an update moved some of them across it. Each of these counts as if its logit equaled the
threshold, which is almost true. The normalizer log(n exp(t) + sum of max(exp(z) - exp(t), 0)), for n kept words and the
threshold t, is continuous in all logits z.

With tensor parallelism each rank has the logits of its own words. The ranks exchange a maximum and four sums per row,
and sum the gradients of the hidden states.

A row may have several targets: one product gives the logits of all of them, and only [N, K] numbers are kept.

A teacher's logits are computed in the same blocks, so that neither model's logits exist as a whole. Divergences need
both models' normalizers first, so forward goes over the vocabulary a second time. If the heads have different numbers
of rows, which pad the same words, divergences are over the words that both heads have, and normalized over these.

Shape suffixes: T tokens, N rows (positions that predict a sampled token), K targets of a row, H hidden size, G hidden
size of the teacher, V vocabulary, W words of one block of the vocabulary; X: nothing, or K.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes.cut_layers import VocabularyPart, reduced
from bridge.passes.divergence import Divergence
from bridge.passes.packing import Kept

HEAD_TOLERANCE = 0.02
"""Largest difference of logits, relative to the largest logit, that counts as bf16 rounding."""
BLOCK_ELEMENTS = {"cpu": 2**23, "cuda": 2**26}
"""Maximum float32 elements in a block's logits and in its part of the head's gradient: 256 MiB on a GPU, whose products
need large operands, and 32 MiB on the CPU, where caches matter. A few temporaries of the same size are needed, too."""
BLOCK_WORDS = 256
"""The number of words in a block is a multiple of this, so that products have regular shapes."""


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """A model's own scaling and soft cap of its logits, and the sampling temperature."""

    temperature: float = 1.0
    """Divides the logits, last."""
    final_logit_softcapping: float | None = None
    """c in c * tanh(logit / c), as in Gemma 2; None: no cap."""
    logits_scaling: float = 1.0
    """Divides the logits, first, as in Granite."""

    def apply(self, raw_NW: Tensor, bias_W: Tensor | None) -> Tensor:
        """Return the transformed logits, or `raw_NW` itself if nothing changes."""
        raw_NW = raw_NW if bias_W is None else raw_NW + bias_W
        cap = self.final_logit_softcapping
        if cap is None:
            divisor = self.logits_scaling * self.temperature
            return raw_NW if divisor == 1 else raw_NW / divisor
        return (raw_NW / (self.logits_scaling * cap)).tanh_().mul_(cap / self.temperature)

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the transformed `logits` into that of the raw ones; both tensors may be overwritten."""
        cap = self.final_logit_softcapping
        if cap is not None:
            gradient.mul_(logits.mul_(self.temperature / cap).square_().neg_().add_(1))
        divisor = self.temperature * self.logits_scaling
        return gradient if divisor == 1 else gradient.div_(divisor)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a frozen model predicts at some rows: logits are computed from it in blocks."""

    hidden_NG: Tensor
    head_VG: Tensor
    bias_V: Tensor | None
    by: LogitTransform
    words: VocabularyPart | None = None
    """The words in this rank's head; None: the head has all words."""

    def logits(self, start: int, stop: int) -> Tensor:
        """Return the transformed logits of the words from `start` to `stop`: [N, W] float32."""
        first = 0 if self.words is None else self.words.start
        block = slice(start - first, stop - first)
        raw_NW = _multiply(_operand(self.hidden_NG), _operand(self.head_VG[block]).T)
        return self.by.apply(raw_NW, None if self.bias_V is None else self.bias_V[block])

    @property
    def num_words(self) -> int:
        """The index after the last word in the head."""
        return len(self.head_VG) + (0 if self.words is None else self.words.start)


class Comparison(NamedTuple):
    """A frozen model's prediction at each row, and the divergence of the policy from it."""

    divergence: Divergence
    prediction: Prediction


class Scores(NamedTuple):
    """Results of `token_logprobs`, in nats."""

    logprobs_NX: Tensor
    entropies_N: Tensor
    divergences_N: Tensor | None = None
    """None: there is no teacher."""

    def rows(self, chosen_M: Tensor) -> "Scores":
        """Select the results of some rows."""
        divergences_N = self.divergences_N
        return Scores(
            self.logprobs_NX[chosen_M],
            self.entropies_N[chosen_M],
            None if divergences_N is None else divergences_N[chosen_M],
        )


def token_logprobs(
    hidden_NH: Tensor,
    head_VH: Tensor,
    bias_V: Tensor | None,
    targets_NX: Tensor,
    by: LogitTransform,
    compiles: bool,
    kept: Kept | None = None,
    words: VocabularyPart | None = None,
    *,
    differentiates_entropies: bool = False,
    teacher: Comparison | None = None,
) -> Scores:
    """Return float32 log-probabilities of `targets_NX`, the entropies and the divergences from a teacher, in nats.

    The entropies have a gradient only with `differentiates_entropies`. With a teacher, no words may be filtered.

    With `compiles`, a block of logits is processed by one kernel forward and one backward, instead of a dozen that each
    read it, unless rows have several targets. Both results are over the words that were `kept`; None: over all words.
    `words` are the ones in this rank's head, and all ranks must call this function with the same rows; None: the head
    has all words.

    Shapes: [N, H], [V, H], [V], [N] int64 -> [N] float32 x 2 or 3; with [N, K] targets -> [N, K], [N], [N].
    """
    assert teacher is None or kept is None, "the teacher's words are not filtered"
    applied = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_VH, bias_V, targets_NX, by, compiles, kept, words, differentiates_entropies, teacher
    )
    return Scores(*applied)


@torch.no_grad()
def check_head(model: PreTrainedModel, words: VocabularyPart | None = None) -> None:
    """Check that Bridge's logits equal the model's own; each part of the vocabulary checks its `words`.

    Raise UnsupportedModelError if the model transforms its hidden states or logits in an unsupported way.
    """
    head, bias_V, transform = head_of(model, temperature=1.0)
    tokens_1T = torch.arange(4, device=model.device).unsqueeze(0)
    own_V = model(input_ids=tokens_1T, use_cache=False).logits[0, -1].float()
    hidden_1H = model.get_decoder()(input_ids=tokens_1T, use_cache=False).last_hidden_state[0, -1:]
    ours_V = transform.apply(_multiply(_operand(hidden_1H), _operand(head).T), bias_V)[0]
    largest_2 = torch.stack([(ours_V - own_V).abs().max(), own_V.abs().max()])
    if words is not None:  # so that all parts reach the same decision
        largest_2 = reduced(largest_2.nan_to_num(torch.inf), "max", words.group)
    difference = float(largest_2[0] / largest_2[1])
    if not difference <= HEAD_TOLERANCE:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes logits in a way that Bridge does not support: they differ by "
            f"{difference:.1%} from Bridge's, expected at most {HEAD_TOLERANCE:.0%}",
            hint="train another model, or report this one",
        )


def head_of(model: PreTrainedModel, temperature: float) -> tuple[Tensor, Tensor | None, LogitTransform]:
    """Return the head's weight and bias, and the transform of its logits: [V, H], [V].

    Raise UnsupportedModelError if the head is more than a weight and a bias.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    if "weight" not in head._parameters:  # a wrapper, whose `head.weight` belongs to an inner layer
        raise UnsupportedModelError(
            f"the head of {type(model).__name__} is wrapped in {type(head).__name__}, perhaps by an adapter; expected a"
            " layer that owns its weight, since Bridge multiplies only by that weight",
            hint="leave the head out of the adapter, and of its modules_to_save",
        )
    transform = LogitTransform(
        temperature=temperature,
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
        logits_scaling=(getattr(config, "logits_scaling", None) or 1.0) / (getattr(config, "logit_scale", None) or 1.0),
    )
    return head.weight, getattr(head, "bias", None), transform


class _TokenLogprobs(torch.autograd.Function):
    """Computes log-probabilities in vocabulary blocks, forward and backward; logits are recomputed instead of kept.

    Blocks are of words, not of rows, so that the product itself sums the head's gradient over all rows, and only [N, H]
    must be summed over the blocks. Logits must be recomputed because, unlike in a cross entropy, the gradient of each
    log-probability may depend on the loss of all rows of a sequence (GSPO).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        targets_NX: Tensor,
        by: LogitTransform,
        compiles: bool,
        kept: Kept | None,
        words: VocabularyPart | None,
        differentiates_entropies: bool,
        teacher: Comparison | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        first_word = 0 if words is None else words.start
        num_common = len(head_VH)
        if teacher is not None:
            num_common = max(0, min(num_common, teacher.prediction.num_words - first_word))
        targets_NX = targets_NX - first_word
        # torch compiles a single row separately; with several targets it would compare every word with every target
        compiles = compiles and len(hidden_NH) > 1 and targets_NX.dim() == 1
        maxima_N = hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=torch.float32)
        maxima_N = maxima_N if kept is None else kept.thresholds_N
        weights_N, products_N, logits_N, counts_N = torch.zeros_like(maxima_N).repeat(4, 1).unbind()
        if targets_NX.dim() > 1:
            logits_N = torch.zeros_like(targets_NX, dtype=torch.float32)
        sums = of_common = _Sums(maxima_N, weights_N, products_N, logits_N, counts_N)
        add = _compiled(_added) if compiles else _added
        hidden = _operand(hidden_NH)
        for block, bias_W in _blocks(len(hidden_NH), head_VH, bias_V, num_common):
            raw_NW = _multiply(hidden, _operand(head_VH[block]).T)
            sums = add(sums, raw_NW, bias_W, targets_NX - block.start, by, kept)
            if block.stop == num_common:
                of_common = sums
        sums = sums if words is None else _over_parts(sums, words.group)
        sums = sums if kept is None else _corrected(sums, kept)
        normalizers_N = sums.maxima_N + sums.weights_N.log()
        ctx.by = by
        ctx.compiles = compiles
        ctx.kept = kept
        ctx.words = words
        logprobs_NX = sums.targets_NX - _per_target(normalizers_N, targets_NX)
        entropies_N = normalizers_N - sums.products_N / sums.weights_N
        ctx.save_for_backward(hidden_NH, head_VH, bias_V, targets_NX, normalizers_N, entropies_N)
        ctx.differentiates_entropies = differentiates_entropies
        if not differentiates_entropies:
            ctx.mark_non_differentiable(entropies_N)
        ctx.num_common = num_common
        ctx.compared = None
        ctx.prediction = None
        divergences_N = None
        if teacher is not None:
            ctx.prediction = teacher.prediction
            policy = Prediction(hidden_NG=hidden_NH, head_VG=head_VH, bias_V=bias_V, by=by, words=words)
            ctx.compared, divergences_N = _compared(policy, of_common, teacher, num_common, compiles)
        return logprobs_NX, entropies_N, divergences_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_NX: Tensor, of_entropies_N: Tensor, of_divergences_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, head_VH, bias_V, targets_NX, normalizers_N, entropies_N = ctx.saved_tensors
        by_entropy = (of_entropies_N.contiguous(), entropies_N) if ctx.differentiates_entropies else None
        first_word = 0 if ctx.words is None else ctx.words.start
        needs_hidden, needs_head, needs_bias, *_rest = ctx.needs_input_grad
        hidden = _operand(hidden_NH)
        differentiate = _compiled(_raw_gradient) if ctx.compiles else _raw_gradient
        gradient_NX = gradient_NX.contiguous()  # a sum's gradient is one expanded number, compiled separately
        hidden_gradient_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        head_gradient_VH = torch.empty_like(head_VH) if needs_head else None
        bias_gradient_V = torch.empty_like(bias_V) if needs_bias else None
        for block, bias_W in _blocks(len(hidden_NH), head_VH, bias_V, ctx.num_common):
            head = _operand(head_VH[block])
            targets = targets_NX - block.start
            raw_NW = _multiply(hidden, head.T)
            dtype = head.dtype if bias_gradient_V is None else raw_NW.dtype
            by_divergence = None
            if ctx.compared is not None and block.stop <= ctx.num_common:
                teacher_NW = ctx.prediction.logits(first_word + block.start, first_word + block.stop)
                assert of_divergences_N is not None
                by_divergence = (of_divergences_N.contiguous(), ctx.compared, teacher_NW)
            raw_NW = differentiate(
                raw_NW, bias_W, gradient_NX, targets, normalizers_N, ctx.by, dtype, ctx.kept, by_entropy, by_divergence
            )
            if bias_gradient_V is not None:
                bias_gradient_V[block] = raw_NW.sum(dim=0)
            raw_NW = raw_NW.to(head.dtype)
            if hidden_gradient_NH is not None:
                hidden_gradient_NH += _multiply(raw_NW, head)
            if head_gradient_VH is not None:
                head_gradient_VH[block] = _multiply(raw_NW.T, hidden)
        if hidden_gradient_NH is not None:
            if ctx.words is not None:
                hidden_gradient_NH = reduced(hidden_gradient_NH, "sum", ctx.words.group)
            hidden_gradient_NH = hidden_gradient_NH.to(hidden_NH.dtype)
        return hidden_gradient_NH, head_gradient_VH, bias_gradient_V, *[None] * 7


class _Compared(NamedTuple):
    """What the gradient of the divergences needs from the forward pass, per row and over the words that both have."""

    divergence: Divergence
    pulls_N: Tensor
    """Sums of the words' pulls."""
    normalizers_N: Tensor
    teacher_normalizers_N: Tensor

    def parts(self, logits_NW: Tensor, teacher_NW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the policy's log-probabilities of a block's words, their terms and their pulls."""
        logprobs_NW = logits_NW - self.normalizers_N.unsqueeze(1)
        terms_NW, pulls_NW = self.divergence.parts(logprobs_NW, teacher_NW - self.teacher_normalizers_N.unsqueeze(1))
        return logprobs_NW, terms_NW, pulls_NW


def _compared(
    policy: Prediction, of_common: "_Sums", teacher: Comparison, num_common: int, compiles: bool
) -> tuple[_Compared, Tensor]:
    """Return the divergences over the first `num_common` words of this rank's head, [N], and what gradients need.

    `of_common` are the policy's sums over the same words.
    """
    divergence, prediction = teacher
    first_word = 0 if policy.words is None else policy.words.start
    group = None if policy.words is None else policy.words.group
    blocks = [
        (first_word + block.start, first_word + block.stop)
        for block, _ in _blocks(len(policy.hidden_NG), policy.head_VG[:num_common], None, num_common)
    ]
    targets_N = torch.zeros(len(policy.hidden_NG), dtype=torch.int64, device=policy.hidden_NG.device)
    zeros_N = torch.zeros_like(of_common.maxima_N)
    of_teacher = _Sums(torch.full_like(zeros_N, -torch.inf), *zeros_N.repeat(4, 1).unbind())
    add = _compiled(_added) if compiles else _added
    for start, stop in blocks:
        of_teacher = add(of_teacher, prediction.logits(start, stop), None, targets_N, LogitTransform(), None)
    pair = [sums._replace(targets_NX=zeros_N) for sums in (of_common, of_teacher)]
    if group is not None:
        pair = [_over_parts(sums, group) for sums in pair]
    normalizers_N, teacher_normalizers_N = (sums.maxima_N + sums.weights_N.log() for sums in pair)
    compared = _Compared(divergence, zeros_N, normalizers_N, teacher_normalizers_N)
    sum_parts = _compiled(_summed_parts) if compiles else _summed_parts
    sums_2N = zeros_N.repeat(2, 1)
    for start, stop in blocks:
        sums_2N += sum_parts(compared, policy.logits(start, stop), prediction.logits(start, stop))
    if group is not None:
        sums_2N = reduced(sums_2N, "sum", group)
    divergences_N, pulls_N = sums_2N.unbind()
    return compared._replace(pulls_N=pulls_N), divergences_N


def _summed_parts(compared: _Compared, logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """Return the sums of a block's terms and of its pulls: [2, N]."""
    _, terms_NW, pulls_NW = compared.parts(logits_NW, teacher_NW)
    return torch.stack([terms_NW.sum(dim=1), pulls_NW.sum(dim=1)])


class _Sums(NamedTuple):
    """Running sums of a softmax over blocks, relative to the largest logit so far (arXiv 1805.02867, algorithm 3)."""

    maxima_N: Tensor
    weights_N: Tensor
    products_N: Tensor
    targets_NX: Tensor
    """Logits of the targets."""
    counts_N: Tensor
    """How many words are above the threshold; 0 if there is no threshold."""


def _added(
    sums: _Sums, raw_NW: Tensor, bias_W: Tensor | None, targets_NX: Tensor, by: LogitTransform, kept: Kept | None
) -> _Sums:
    """Add one block's logits to the sums; `targets_NX` are relative to the block's first word, and may lie outside."""
    logits_NW = by.apply(raw_NW, bias_W)
    maxima_N = torch.maximum(sums.maxima_N, logits_NW.amax(dim=1))
    shrink_N = (sums.maxima_N - maxima_N).exp_()
    weights_NW = (logits_NW - maxima_N.unsqueeze(1)).exp_()
    counts_N = sums.counts_N
    if kept is not None:
        dropped_NW = logits_NW < kept.thresholds_N.unsqueeze(1)
        weights_NW = weights_NW.masked_fill_(dropped_NW, 0)
        counts_N = counts_N + (dropped_NW.shape[1] - dropped_NW.sum(dim=1))
    inside_NX, local_NX = _within(targets_NX, logits_NW.shape[1])
    found_NX = logits_NW.gather(1, _columns(local_NX)).view_as(targets_NX)
    return _Sums(
        maxima_N,
        sums.weights_N * shrink_N + weights_NW.sum(dim=1),
        sums.products_N * shrink_N + weights_NW.mul_(logits_NW).sum(dim=1),
        torch.where(inside_NX, found_NX, sums.targets_NX),
        counts_N,
    )


def _over_parts(sums: _Sums, group: str) -> _Sums:
    """Combine the sums of all parts of the vocabulary; a target's logit is 0 on all parts except its own."""
    maxima_N = reduced(sums.maxima_N, "max", group)
    shrink_N = (sums.maxima_N - maxima_N).exp()
    if sums.targets_NX.dim() > 1:
        targets_NK = reduced(sums.targets_NX, "sum", group)
        rest = _over_parts(sums._replace(targets_NX=maxima_N), group)
        return rest._replace(targets_NX=targets_NK)
    shares_4N = torch.stack([sums.weights_N * shrink_N, sums.products_N * shrink_N, sums.targets_NX, sums.counts_N])
    return _Sums(maxima_N, *reduced(shares_4N, "sum", group).unbind())


def _corrected(sums: _Sums, kept: Kept) -> _Sums:
    """Correct the sums to the number of words that were kept: add or remove words whose logit is the threshold."""
    lacking_N = (kept.counts_N - sums.counts_N) * (kept.thresholds_N - sums.maxima_N).exp()
    return sums._replace(
        weights_N=sums.weights_N + lacking_N, products_N=sums.products_N + lacking_N * kept.thresholds_N
    )


def _raw_gradient(
    raw_NW: Tensor,
    bias_W: Tensor | None,
    gradient_NX: Tensor,
    targets_NX: Tensor,
    normalizers_N: Tensor,
    by: LogitTransform,
    dtype: torch.dtype,
    kept: Kept | None,
    by_entropy: tuple[Tensor, Tensor] | None = None,
    by_divergence: tuple[Tensor, _Compared, Tensor] | None = None,
) -> Tensor:
    """Return gradient * (onehot(target) - softmax over kept words), backpropagated through `by`, in `dtype`.

    With several targets, the terms are summed: the softmax is multiplied by the sum of their gradients. `by_entropy`
    are the gradients of the entropies, and the entropies: dH / dz = -p (log p + H) for a word with probability p.
    `by_divergence` are the gradients of the divergences, what `_compared` returned, and the teacher's logits.
    """
    logits_NW = by.apply(raw_NW, bias_W)
    gradient_N = gradient_NX if gradient_NX.dim() == 1 else gradient_NX.sum(dim=1)
    logprobs_NW = logits_NW - normalizers_N.unsqueeze(1)
    if by_entropy is None:
        result_NW = logprobs_NW.exp_().mul_(-gradient_N.unsqueeze(1))
    else:
        of_entropies_N, entropies_N = by_entropy
        factors_NW = (logprobs_NW + entropies_N.unsqueeze(1)).mul_(of_entropies_N.unsqueeze(1))
        result_NW = logprobs_NW.exp_().mul_(factors_NW.add_(gradient_N.unsqueeze(1)).neg_())
    if by_divergence is not None:
        of_divergences_N, compared, teacher_NW = by_divergence
        common_NW, _, pulls_NW = compared.parts(logits_NW, teacher_NW)
        pulls_NW = pulls_NW - common_NW.exp() * compared.pulls_N.unsqueeze(1)
        result_NW = result_NW + pulls_NW * of_divergences_N.unsqueeze(1)
    if kept is not None:
        result_NW = result_NW.masked_fill_(logits_NW < kept.thresholds_N.unsqueeze(1), 0)
    if torch.compiler.is_compiling():  # scattering would need a separate kernel, and prevent fusion
        words_W = torch.arange(result_NW.shape[1], device=result_NW.device)
        result_NW = torch.where(words_W == targets_NX.unsqueeze(1), result_NW + gradient_N.unsqueeze(1), result_NW)
    else:
        inside_NX, local_NX = _within(targets_NX, result_NW.shape[1])
        result_NW.scatter_add_(1, _columns(local_NX), _columns(torch.where(inside_NX, gradient_NX, 0.0)))
    return by.backward(result_NW, logits_NW).to(dtype)


def _within(targets_NX: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in a block, and their indices in it (0 for the others)."""
    inside_NX = (targets_NX >= 0) & (targets_NX < num_words)
    return inside_NX, torch.where(inside_NX, targets_NX, 0)


def _columns(of_targets_NX: Tensor) -> Tensor:
    """Return values per target as a matrix: [N] -> [N, 1], [N, K] -> [N, K]."""
    return of_targets_NX.unsqueeze(1) if of_targets_NX.dim() == 1 else of_targets_NX


def _per_target(of_rows_N: Tensor, targets_NX: Tensor) -> Tensor:
    """Return values per row in a shape that broadcasts with values per target."""
    return of_rows_N if targets_NX.dim() == 1 else of_rows_N.unsqueeze(1)


def _blocks(
    num_rows: int, head_VH: Tensor, bias_V: Tensor | None, border: int
) -> Iterator[tuple[slice, Tensor | None]]:
    """Divide the vocabulary into blocks of at most about `BLOCK_ELEMENTS` elements; yield each block with its bias.

    No block has words on both sides of `border`.
    """
    size = max(1, BLOCK_ELEMENTS[head_VH.device.type] // max(num_rows, head_VH.shape[1]) // BLOCK_WORDS) * BLOCK_WORDS
    starts = chain(range(0, border, size), range(border, len(head_VH), size))
    for start in starts:
        block = slice(start, min(start + size, border if start < border else len(head_VH)))
        yield block, None if bias_V is None else bias_V[block]


def _operand(matrix: Tensor) -> Tensor:
    """Return the matrix itself on a GPU; on the CPU, where `torch.mm` has no `out_dtype`, return a float32 copy."""
    return matrix if matrix.is_cuda else matrix.float()


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the float32 product of two operands."""
    assert left.dtype == right.dtype, (left.dtype, right.dtype)
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


@cache
def _compiled(function: Any) -> Any:
    """Return `function` compiled for any number of rows and words."""
    return torch.compile(function, dynamic=True)
