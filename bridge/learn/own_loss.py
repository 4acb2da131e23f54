"""A policy loss in a user's file, `--loss file.py:function`: load it, try it on made-up tensors, and call it.

The function gets a `LossTensors` and returns each token's term of the loss, and metrics:

    def my_loss(tensors):
        ratios = (tensors.logprobs - tensors.old_logprobs).exp()
        return -ratios * tensors.advantages, {"ratio": ratios}

Shape suffixes: N rows (positions that predict a sampled token), S sequences.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridge.core.foreign_code import described, find_object, foreign_code
from bridge.errors import RewardError

EXAMPLE = "return -ratios * tensors.advantages, {'ratio': ratios}"
MADE_UP = ((3, 2), (1,))
"""Lengths of the sequences in the made-up micro-batches."""


@dataclass(frozen=True, kw_only=True)
class LossTensors:
    """One micro-batch: N sampled tokens of S sequences, the tokens of a sequence one after the other."""

    logprobs: Tensor
    """[N] float32: log-probabilities of the policy that is trained, in nats; the only tensor with a gradient."""
    old_logprobs: Tensor
    """[N] float32: the same from before the first update of the batch; equal to `logprobs` in the first update."""
    sampled_logprobs: Tensor
    """[N] float32: those of vLLM, which sampled the tokens; NaN where unknown."""
    reference_logprobs: Tensor | None
    """[N] float32: those of the frozen reference; None without --kl-coef."""
    advantages: Tensor
    """[N] float32: after --advantage-scale, --top-entropy and --kl-in-reward."""
    weights: Tensor
    """[N] float32: what multiplies each token's term before all terms are summed: the share of its mean (--aggregation)
    times its importance weight (--mismatch)."""
    mask: Tensor
    """[N] bool: whether the weight is not 0."""
    sequences: Tensor
    """[N] int64: the sequence of each token, from 0 to S - 1."""
    lengths: Tensor
    """[S] int64: sampled tokens of each sequence."""


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """The function of a user."""

    name: str
    """As --loss names it."""
    function: Callable[[LossTensors], Any]
    metrics: tuple[str, ...] | None = None
    """Names of the metrics that it returns; None: not tried yet."""

    @property
    def file(self) -> Path:
        return Path(self.name.rpartition(":")[0]).expanduser().resolve()

    def __call__(self, tensors: LossTensors) -> tuple[Tensor, dict[str, Any]]:
        """Return each token's term, [N], or the micro-batch's part of the loss, []; and the metrics by name.

        Raises:
            RewardError: the function raised, or returned anything else.
        """
        with foreign_code(f"--loss {self.name}", str(self.file)):
            result = self.function(tensors)
        terms, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        shape = (len(tensors.logprobs),)
        if not isinstance(terms, Tensor) or not terms.is_floating_point():
            raise self.fault(f"returned {described(terms)}", f"a float tensor of shape {shape}, one term a token")
        if terms.shape not in (shape, ()):
            raise self.fault(f"returned a tensor of shape {tuple(terms.shape)}", f"shape {shape}, one term a token")
        if not terms.requires_grad:
            raise self.fault("returned terms without a gradient", "terms that depend on tensors.logprobs")
        if not isinstance(metrics, Mapping) or not all(map(_is_name, metrics)):
            raise self.fault(f"returned metrics {described(metrics)}", "a dict, its keys of letters, digits and _")
        if self.metrics is not None and {*metrics} != {*self.metrics}:
            raise self.fault(f"returned the metrics {sorted(metrics)}", f"{sorted(self.metrics)} in every call")
        return terms, {name: self._sum_and_count(name, metrics[name], shape) for name in sorted(metrics)}

    def fault(self, problem: str, expected: str) -> RewardError:
        """Return the error for something wrong with the function or with what it returned."""
        where = (
            f"{Path(inspect.getfile(self.function)).name} line {inspect.unwrap(self.function).__code__.co_firstlineno}"
        )
        return RewardError(f"--loss {self.name} {problem}, expected {expected} ({where})", remedy=EXAMPLE)

    def _sum_and_count(self, name: str, value: Any, shape: tuple[int, ...]) -> tuple[Tensor, Any]:
        is_pair = isinstance(value, tuple) and len(value) == 2
        total, count = value if is_pair else (value, shape[0])
        is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.shape == ())
        if not isinstance(total, Tensor) or total.shape != (() if is_pair else shape) or not is_number:
            expected = f"a tensor of shape {shape}, or a pair (sum, count) of scalar tensors"
            raise self.fault(f"returned {described(value)} as metric {name!r}", expected)
        return total.detach(), count

    def tried(self, lengths: tuple[int, ...], *, has_reference: bool) -> "OwnLoss":
        """Call the function on a made-up micro-batch, and return this loss with the metrics that it returned.

        Raises:
            RewardError: it raised, or what it returned or its gradient is unusable.
        """
        tensors = example_tensors(lengths, has_reference=has_reference)
        terms, metrics = self(tensors)
        with foreign_code(f"--loss {self.name}: its gradient", str(self.file)):
            (gradient,) = torch.autograd.grad(terms.sum(), tensors.logprobs, allow_unused=True)
        numbers = {"terms": terms, "gradient": gradient, **{name: total for name, (total, _) in metrics.items()}}
        for name, value in numbers.items():
            if value is None or not torch.isfinite(value).all():
                raise self.fault(f"has a {name} of {described(value)} for made-up tensors", "finite numbers")
        return replace(self, metrics=tuple(metrics))


def load(name: str, *, has_reference: bool) -> OwnLoss:
    """Load the function that `name`, `file.py:function`, refers to, and try it.

    Raises:
        UsageError: there is no such file or function, or it takes other arguments.
        RewardError: it raised, or returned something unusable.
    """
    return _load(name, Path.cwd(), has_reference)


@cache
def _load(name: str, _folder: Path, has_reference: bool) -> OwnLoss:
    function = find_object("loss", name)
    loss = OwnLoss(name=name, function=function)
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        expected = "one argument, the tensors"
        raise loss.fault(f"takes {inspect.signature(function)}", expected) from None
    for lengths in MADE_UP:
        loss = loss.tried(lengths, has_reference=has_reference)
    return loss


def example_tensors(lengths: tuple[int, ...], *, has_reference: bool) -> LossTensors:
    """Return a small micro-batch, the same every time."""
    num_rows, generator = sum(lengths), torch.Generator().manual_seed(0)
    sampled = -0.5 - torch.rand(num_rows, generator=generator)
    old, new, reference = (sampled + 0.1 * torch.randn(num_rows, generator=generator) for _ in range(3))
    return LossTensors(
        logprobs=new.requires_grad_(), old_logprobs=old, sampled_logprobs=sampled,
        reference_logprobs=reference if has_reference else None, advantages=1 - 2.0 * (torch.arange(num_rows) % 2),
        weights=torch.full((num_rows,), 1 / num_rows), mask=torch.ones(num_rows, dtype=torch.bool),
        sequences=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), lengths=torch.tensor(lengths),
    )  # fmt: skip


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w*", name) is not None
