"""One call of `forward_backward`: samples become passes, their gradients are summed, and log-probs return in order.

Shape suffixes: N rows (positions that predict a sampled token) of a micro-batch or of one sample; K targets of a row;
X: nothing, or K.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, filterfalse
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from bridge.config import LossConfig
from bridge.core.foreign_code import described
from bridge.engine.trainable import Trainable
from bridge.errors import UsageError
from bridge.learn.mismatch import Tally, measure
from bridge.learn.policy_loss import LossSpec, means, policy_loss
from bridge.passes.packing import MicroBatch, Sample, units
from bridge.rollouts.distribution import filters

Loss = Callable[[Tensor, MicroBatch], Tensor]
"""Returns a micro-batch's contribution to an update's loss, given its log-probabilities: [N] float32 -> []; [N, K] of
samples with `several` targets."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Result of `forward_backward`."""

    logprobs: Sequence[Tensor]
    """Log-probabilities of each sample's sampled tokens, or of its targets, in nats, in the order of the call: [N]
    float32, or [N, K]."""
    entropies: Sequence[Tensor]
    """Entropies in nats, in the same order and shape."""
    metrics: Mapping[str, float]
    """Metrics over all ranks, by their names in `metrics.jsonl`: `loss`, `entropy`, `tokens_trained`, the mismatch with
    the server, and the metrics of the loss."""


@dataclass(frozen=True)
class Given:
    """A sample that this rank trains on, as passed by the caller."""

    index: int
    """Position in the caller's list."""
    sample: Sample
    old_logprobs_N: Tensor | None
    """Log-probabilities from before the first update of the batch; None: this is the first update."""


class Gradients:
    """One call of `forward_backward` on this rank."""

    def __init__(self, trainable: Trainable, loss: Loss | LossConfig | None, given: Sequence[Given]) -> None:
        """Store this rank's samples. UsageError: the loss needs something that a single call cannot provide."""
        self._trainable = trainable
        self.given = given
        self._samples = [one.sample for one in given]
        self._loss: Loss | None = loss if callable(loss) else None
        self._spec = LossSpec.of(LossConfig() if loss is None or callable(loss) else loss)
        if self._spec.top_entropy < 1:
            raise UsageError(
                f"top_entropy is {self._spec.top_entropy:g}, but one pass does not know the entropies in the others",
                hint="give the tokens to leave out an advantage of 0, or train with bridge run --top-entropy",
            )
        if self._loss is None and self._spec.needs_reference and trainable.reference is None:
            is_preference = self._spec.objective == "preference"
            cause, chosen = (
                ("the loss is dpo", 'name="dpo"')
                if is_preference
                else (f"kl_coef is {self._spec.kl_coef:g}", "kl_coef=...")
            )
            raise UsageError(
                f"{cause}, but no reference model is loaded",
                hint=f"pass it when attaching: bridge.attach(loss=bridge.LossConfig({chosen}, reference_model=...))",
            )
        alone = next((one.index for one in given if one.sample.pair is None), None)
        if self._loss is None and self._spec.objective == "preference" and alone is not None:
            raise UsageError(
                f"sample {alone} belongs to no pair, but loss dpo compares two completions of a prompt",
                hint='bridge.samples(groups, bridge.LossConfig(name="dpo")), with groups of two completions',
            )
        if self._loss is None and self._spec.teacher_weight > 0 and trainable.teacher is None:
            raise UsageError(
                "the loss has a teacher, but none is loaded",
                hint="pass it when attaching: bridge.attach(loss=bridge.LossConfig(name='distill', teacher=...))",
            )
        several = next((one.index for one in given if one.sample.num_targets), None)
        if self._loss is None and several is not None:
            raise UsageError(
                f"sample {several} has several targets per token, but loss is a LossConfig, whose ratios need a single"
                " target per token",
                hint="loss=lambda logprobs, batch: -(logprobs * batch.several.weights_NK).sum()",
            )
        if self._loss is None and self._spec.teacher_weight > 0:
            self._samples = trainable.graded(self._samples)
        self._start()

    def _start(self) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=self._trainable.device)
        self._logprobs: dict[int, Tensor] = {}
        self._entropies: dict[int, Tensor] = {}
        self._total = zero.clone()
        self._entropy = zero.clone()
        self._num_tokens = 0
        self._tally = Tally.zero(self._trainable.device)
        self._sums = {name: torch.zeros(2, dtype=torch.float64, device=zero.device) for name in self._spec.metrics}

    def add(self, *, is_first: bool) -> None:
        """Compute and add the gradients; `is_first`: no earlier call of this update has added any."""
        self._start()
        batches = self._trainable.budget.packs(self._samples, self._samples)
        if batches and not is_first:
            self._trainable.widen_gradients()
        self._trainable.add_gradients(batches, self._loss_of, widens=len(batches) > 1 or not is_first)
        release = self._trainable.choices.gradient_release
        if batches and not release and all(parameter.grad is None for parameter in self._trainable.parameters):
            raise _not_a_loss("does not depend on any parameter of the model")

    @torch.no_grad()
    def measure(self) -> None:
        """Compute the log-probabilities and the loss, without gradients."""
        self._start()
        for batch in self._trainable.budget.packs(self._samples, self._samples):
            self._loss_of(batch, needs_gradient=False)

    def pack_for_one_pass(self) -> None:
        """Pack the samples into one pass. UsageError: they need several."""
        budget = self._trainable.budget
        self._batches = budget.packs(self._samples, self._samples)
        if len(self._batches) > 1:
            raise budget.too_few_for_one_pass(self._samples, len(self._batches), num_updates=1)

    def losses(self) -> list[Tensor]:
        """Run the forward passes that `pack_for_one_pass` packed, and return their losses."""
        self._start()
        return [self._loss_of(batch) for batch in self._batches]

    def _loss_of(self, batch: MicroBatch, *, needs_gradient: bool = True) -> Tensor:
        if not filters(self._trainable.sampling):  # a teacher, for example, is not filtered as its student is
            batch = replace(batch, kept=None)
        if self._loss is not None:
            logprobs_NX, entropies_N = self._trainable.logprobs(batch)
            self._keep(batch, logprobs_NX.detach(), entropies_N.detach())
            loss = _one_number(self._loss(logprobs_NX, batch), needs_gradient=needs_gradient)
        else:
            inputs = self._trainable.loss_inputs(batch, self._spec)
            batch = replace(batch, several=None)  # a teacher's server added targets to the sampled tokens
            self._keep(batch, inputs.logprobs_N.detach(), inputs.entropies_N.detach())
            reference_N = self._trainable.reference_logprobs(batch) if self._spec.needs_reference else None
            old_N = self._old_logprobs(batch, inputs.logprobs_N)
            loss, sums = policy_loss(
                inputs.logprobs_N, old_N, batch, self._spec, reference_N,
                inputs.entropies_N, inputs.divergences_N, inputs.teacher_logprobs_N,
            )  # fmt: skip
            for name, pair in sums.items():
                self._sums[name] += pair
        self._total += loss.detach()
        return loss

    def _old_logprobs(self, batch: MicroBatch, logprobs_N: Tensor) -> Tensor:
        old = [self.given[index].old_logprobs_N for index in batch.indices]
        known = [of_sample_N.detach().to(logprobs_N.device) for of_sample_N in old if of_sample_N is not None]
        return torch.cat(known).float() if known else logprobs_N.detach()

    def _keep(self, batch: MicroBatch, logprobs_NX: Tensor, entropies_N: Tensor) -> None:
        samples = [self._samples[index] for index in batch.indices]
        sizes = [sample.num_trained for sample in samples]
        of_samples = [*logprobs_NX.split(sizes)]
        if batch.several is not None:  # drop the padding to the batch's largest number of targets
            of_samples = [
                of_sample_NK[:, : sample.num_targets] if sample.num_targets else of_sample_NK[:, 0]
                for of_sample_NK, sample in zip(of_samples, samples, strict=True)
            ]
        self._logprobs.update(zip(batch.indices, of_samples, strict=True))
        self._entropies.update(zip(batch.indices, entropies_N.split(sizes), strict=True))
        self._entropy += entropies_N.sum(dtype=torch.float64)
        self._num_tokens += len(logprobs_NX)
        if batch.several is None:  # the server's log-probs are comparable only for sampled tokens
            sequences_N = self._spec.weighted_sequences(batch)
            self._tally += measure(logprobs_NX, batch.sampled_logprobs_N, self._spec.correction, sequences_N)

    def passes(self, *, are_own: bool) -> Passes:
        """Wait for the device, and return all ranks' results; with `are_own`, log-probs of only this rank's samples.

        All ranks must call it.
        """
        ranks = self._trainable.ranks
        own = {one.index: (self._logprobs[number], self._entropies[number]) for number, one in enumerate(self.given)}
        if ranks.num_shares > 1 and not are_own:
            on_host = {index: (pair[0].cpu(), pair[1].cpu()) for index, pair in own.items()}
            of_shares = ranks.one_per_share(ranks.all_gather_object(on_host))
            own = {index: pair for of_share in of_shares for index, pair in of_share.items()}
        in_order = [own[index] for index in sorted(own)]
        return Passes(
            logprobs=[logprobs_N for logprobs_N, _ in in_order],
            entropies=[entropies_N for _, entropies_N in in_order],
            metrics=self._metrics(),
        )

    def _metrics(self) -> dict[str, float]:
        ranks = self._trainable.ranks
        numbers = torch.stack([self._total, self._entropy, torch.full_like(self._total, self._num_tokens)])
        total, entropy, num_tokens = ranks.all_reduce_shares(numbers).tolist()
        tallies = ranks.one_per_share(ranks.all_gather_object(self._tally.cpu()))
        metrics = {"loss": total, "tokens_trained": num_tokens}
        if num_tokens:
            metrics["entropy"] = entropy / num_tokens
        metrics |= sum(tallies, Tally.zero(torch.device("cpu"))).metrics()
        if self._loss is None:
            summed = ranks.all_reduce_shares(torch.stack([*self._sums.values()]))
            metrics |= means(dict(zip(self._sums, summed, strict=True)))
        return metrics


def checked(samples: Any, embedding: nn.Module) -> list[Sample]:
    """Return the samples of one call as a list. UsageError: one of them cannot be trained on; the first is named."""
    if not isinstance(samples, Iterable):
        raise UsageError(
            f"samples is {described(samples)}, expected a list of bridge.Sample", hint="bridge.samples(groups)"
        )
    taken = [*samples]
    num_words: int = getattr(embedding, "num_embeddings", 2**31)
    for index, sample in enumerate(taken):
        try:
            fault = _fault(sample, num_words) if isinstance(sample, Sample) else f"is {described(sample)}"
        except TypeError as error:  # an entry that is not a number
            fault = f"cannot be used: {error}"
        if fault:
            raise UsageError(
                f"sample {index} {fault}", hint="bridge.samples(groups) and policy.encode(prompt, text) make samples"
            )
    if fault := _fault_of_pairs(taken):
        raise UsageError(fault, hint='bridge.samples(groups, bridge.LossConfig(name="dpo")) makes pairs')
    return taken


def _fault_of_pairs(samples: Sequence[Sample]) -> str:
    """Describe what is wrong with the first incomplete pair; empty: all are valid."""
    for unit in units(samples):
        pair = samples[unit[0]].pair
        signs = [samples[index].advantages[0] > 0 for index in unit]
        if pair is not None and sorted(signs) != [False, True]:
            return (
                f"pair {pair} has {len(unit)} samples, of which {sum(signs)} are preferred (have a positive advantage),"
                " expected two samples and one of them"
            )
    return ""


def _fault(sample: Sample, num_words: int) -> str:
    """Describe what is wrong with a sample; empty: it is valid. Wrong lengths could silently train the wrong tokens."""
    tuples = (
        "prompt_token_ids", "token_ids", "sampled_logprobs", "advantages", "kept", "targets", "target_weights",
        "teacher_prompt_token_ids",
    )  # fmt: skip
    other = next((name for name in tuples if not isinstance(getattr(sample, name), tuple)), None)
    if other is not None:
        return f"has {described(getattr(sample, other))} as {other}, expected a tuple"
    if not sample.prompt_token_ids or not sample.token_ids:
        return "has no prompt" if sample.token_ids else "has no tokens"
    if sample.sampled is not None and len(sample.sampled) != len(sample.token_ids):
        return f"has {len(sample.token_ids)} tokens but {len(sample.sampled)} flags in `sampled`"
    num_sampled = len(sample.token_ids) if sample.sampled is None else sum(sample.sampled)
    if not num_sampled:
        return "has no sampled token"
    num_rows: Any = sample.num_prompt_rows
    if not isinstance(num_rows, Integral):
        return f"has {described(num_rows)} as num_prompt_rows, expected an integer"
    if not 0 <= sample.num_prompt_rows < len(sample.prompt_token_ids):
        return f"has {sample.num_prompt_rows} prompt rows and a prompt of {len(sample.prompt_token_ids)} tokens"
    if sample.num_prompt_rows and sample.teacher_prompt_token_ids:
        return "has num_prompt_rows and teacher_prompt_token_ids, but a teacher's prompt has other rows"
    num_sampled += sample.num_prompt_rows
    for name in ("sampled_logprobs", "advantages", "kept"):
        if (length := len(getattr(sample, name))) != num_sampled and (length or name != "kept"):
            return f"has {num_sampled} sampled tokens and {length} {name}"
    if wrong := next(filterfalse(math.isfinite, sample.advantages), None):
        return f"has an advantage of {wrong}, expected a finite number"
    weight: Any = sample.weight
    if not isinstance(weight, Real) or math.isnan(weight):
        return f"has {described(weight)} as weight, expected a number"
    if fault := _fault_of_targets(sample, num_sampled):
        return fault
    targets: Any = sample.targets
    flat = [*chain.from_iterable(targets)] if sample.num_targets else targets
    ids = *sample.prompt_token_ids, *sample.token_ids, *sample.teacher_prompt_token_ids, *flat
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= num_words:
        wrong_id = lowest if lowest < 0 else highest
        return f"has the token id {wrong_id}, but the model has only {num_words:,} embeddings"
    if len(sample.experts) % (2 * (sample.num_tokens - 1)):
        return f"has {len(sample.experts)} bytes of experts for {sample.num_tokens} tokens"
    return ""


def _fault_of_targets(sample: Sample, num_sampled: int) -> str:
    """Describe what is wrong with the targets of a sample or their weights; empty: they are valid."""
    targets: Any = sample.targets
    weights: Any = sample.target_weights
    if not targets:
        return "has target_weights but no targets" if weights else ""
    if len(targets) != num_sampled:
        return f"has {num_sampled} sampled tokens and {len(targets)} targets"
    counts = [0]
    if any(issubclass(kind, tuple) for kind in {*map(type, targets)}):
        counts = sorted({len(of_token) if isinstance(of_token, tuple) else 0 for of_token in targets})
    if len(counts) > 1 or (counts == [0] and isinstance(targets[0], tuple)):
        return f"has between {counts[0]} and {counts[-1]} targets per token, expected the same number for each token"
    if not weights:
        return ""
    if counts == [0]:
        return "has target_weights, but only one target per token; scale that by weight or by an advantage"
    shape = {len(of_token) if isinstance(of_token, tuple) else 0 for of_token in weights}
    if len(weights) != num_sampled or shape != set(counts):
        return f"has target_weights whose shape differs from its {num_sampled} x {counts[0]} targets"
    wrong = next((value for value in chain.from_iterable(weights) if not math.isfinite(value)), None)
    return "" if wrong is None else f"has a target weight of {wrong}, expected a finite number"


def refuse_other_logprobs(old: Sequence[Any], samples: Sequence[Sample], *, is_function: bool) -> None:
    """Raise UsageError unless every sampled token has an old log-probability, and the loss uses them."""
    hint = "pass the logprobs of an earlier forward_backward with the same samples"
    if is_function:
        raise UsageError(
            "old_logprobs are only for the ratios of a LossConfig, but loss is a function, which does not get them",
            hint="let the function read them itself: batch.indices has the index of each of its samples",
        )
    if len(old) != len(samples):
        raise UsageError(f"old_logprobs has {len(old)} samples, expected {len(samples)}", hint=hint)
    for index, (logprobs_N, sample) in enumerate(zip(old, samples, strict=True)):
        shape = tuple(logprobs_N.shape) if isinstance(logprobs_N, Tensor) else described(logprobs_N)
        if shape != (sample.num_trained,) or not logprobs_N.is_floating_point():
            raise UsageError(
                f"old_logprobs of sample {index}: {shape}, expected a tensor of floats of shape"
                f" ({sample.num_trained},)",
                hint=hint,
            )
    if samples and any(logprobs_N.isnan().any() for logprobs_N in old):
        raise UsageError("old_logprobs has NaN, which marks unknown log-probabilities", hint=hint)


def _one_number(loss: Any, *, needs_gradient: bool) -> Tensor:
    """Return the result of a loss function as a scalar. UsageError: it is not a scalar with a gradient."""
    if not isinstance(loss, Tensor):
        raise _not_a_loss(f"is {described(loss)}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise _not_a_loss(f"is a tensor of shape {tuple(loss.shape)}, {loss.dtype}")
    if needs_gradient and not loss.requires_grad:
        raise _not_a_loss("has no gradient")
    return loss.reshape(())


def _not_a_loss(what: str) -> UsageError:
    return UsageError(
        f"the loss {what}, expected one number that depends on the log-probabilities",
        hint="return a scalar tensor, such as -(logprobs * batch.advantages_N * batch.weights_N).sum(); of a"
        " micro-batch without a term, logprobs.sum() * 0",
    )
