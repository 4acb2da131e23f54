"""A policy loss in a user's file, `--loss file.py:function`: load it, try it on made-up tensors, and call it.

Trial calls check that the loss of a batch does not depend on how the batch is cut into micro-batches: twice the
weights must give twice the gradient, and the gradients of single sequences must add up to that of all sequences.

The function gets a `LossTensors` and returns each token's term of the loss, and metrics:

    def my_loss(tensors):
        ratios = (tensors.logprobs - tensors.old_logprobs).exp()
        return -ratios * tensors.advantages, {"ratio": ratios}

Shape suffixes: N rows (positions that predict a sampled token), S sequences.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridge.core import paths
from bridge.core.foreign_code import described, find_object, foreign_code
from bridge.errors import RewardError

EXAMPLE = "return -ratios * tensors.advantages, {'ratio': ratios}"
SUM = "return the terms, one per token, or a single number: (terms * tensors.weights).sum()"
TOLERANCE = 1e-3
"""Largest difference of gradients in the trial calls, relative to the largest gradient."""
MOST_COUNTED = 1e30
"""Largest number of tokens that a metric may be averaged over."""
MADE_UP = ((3, 2), (1,))
"""Sequence lengths of each made-up micro-batch."""


@dataclass(frozen=True, kw_only=True)
class LossTensors:
    """One micro-batch: N sampled tokens of S sequences; the tokens of a sequence are consecutive."""

    logprobs: Tensor
    """[N] float32: log-probabilities of the policy in training, in nats; the only tensor with a gradient."""
    old_logprobs: Tensor
    """[N] float32: the policy's from before the first update of the batch; in that update, equal to `logprobs`."""
    sampled_logprobs: Tensor
    """[N] float32: vLLM's log-probabilities when it sampled the tokens; NaN where unknown."""
    reference_logprobs: Tensor | None
    """[N] float32: the frozen reference's log-probabilities; None without --kl-coef."""
    advantages: Tensor
    """[N] float32: advantages after --advantage-scale, --top-entropy and --kl-in-reward."""
    weights: Tensor
    """[N] float32: factor of each token's term before all terms are summed: its weight in the mean (--aggregation)
    times its importance weight (--mismatch)."""
    mask: Tensor
    """[N] bool: True where the weight is not 0."""
    sequences: Tensor
    """[N] int64: the sequence of each token, from 0 to S - 1."""
    lengths: Tensor
    """[S] int64: number of sampled tokens in each sequence."""


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """A user's loss function."""

    name: str
    """The value of --loss."""
    function: Callable[[LossTensors], Any]
    metrics: tuple[str, ...] | None = None
    """Names of the metrics that the function returns; None: it was not tried yet."""

    @property
    def file(self) -> Path:
        return paths.expanded(self.name.rpartition(":")[0]).resolve()

    def __call__(self, tensors: LossTensors) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss, as one term per token [N] or as the micro-batch's sum [], and the metrics by name.

        Raises:
            RewardError: the function raised, or its result is unusable.
        """
        versions = _versions(tensors)
        with foreign_code(f"--loss {self.name}", str(self.file)):
            result = self.function(tensors)
        if changed := [name for name, version in _versions(tensors).items() if version != versions[name]]:
            raise self._changed(changed)
        terms, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        shape = (len(tensors.logprobs),)
        if not isinstance(terms, Tensor) or not terms.is_floating_point():
            raise self.fault(f"returned {described(terms)}", f"a float tensor of shape {shape}, one term per token")
        if terms.shape not in (shape, ()):
            raise self.fault(f"returned a tensor of shape {tuple(terms.shape)}", f"shape {shape}, one term per token")
        if terms.layout is not torch.strided or terms.device != tensors.logprobs.device:
            layout = str(terms.layout).removeprefix("torch.")
            raise self.fault(
                f"returned a {layout} tensor on {terms.device}", f"a dense tensor on {tensors.logprobs.device}"
            )
        if not terms.requires_grad:
            raise self.fault("returned terms without a gradient", "terms that depend on tensors.logprobs")
        if not isinstance(metrics, Mapping) or not all(map(_is_name, metrics)):
            raise self.fault(f"returned metrics {described(metrics)}", "a dict whose keys are of letters, digits and _")
        if self.metrics is not None and {*metrics} != {*self.metrics}:
            raise self.fault(f"returned the metrics {sorted(metrics)}", f"{sorted(self.metrics)} in every call")
        return terms, {name: self._sum_and_count(name, metrics[name], shape) for name in sorted(metrics)}

    def fault(self, problem: str, expected: str, hint: str = EXAMPLE) -> RewardError:
        """Return an error about the function or about what it returned, with its file and line."""
        where = (
            f"{Path(inspect.getfile(self.function)).name} line {inspect.unwrap(self.function).__code__.co_firstlineno}"
        )
        return RewardError(f"--loss {self.name} {problem}, expected {expected} ({where})", hint=hint)

    def _changed(self, names: Sequence[str]) -> RewardError:
        """Return an error about the inputs (`names`) that the function changed in place."""
        return self.fault(
            f"changes tensors.{' or tensors.'.join(names)} in place",
            "that its inputs stay unchanged, since later passes read them",
            f"work on a copy: tensors.{names[0]}.clone(), or x * 0.5 in place of x.mul_(0.5)",
        )

    def _sum_and_count(self, name: str, value: Any, shape: tuple[int, ...]) -> tuple[Tensor, Any]:
        is_pair = isinstance(value, tuple) and len(value) == 2
        total, count = value if is_pair else (value, shape[0])
        is_number = isinstance(count, Tensor) and count.shape == ()
        if isinstance(count, int | float):
            is_number = abs(count) <= MOST_COUNTED  # False for NaN
        if not isinstance(total, Tensor) or total.shape != (() if is_pair else shape) or not is_number:
            expected = f"a tensor of shape {shape}, or a pair (sum, count) of scalar tensors"
            raise self.fault(f"returned {described(value)} as metric {name!r}", expected)
        return total.detach(), count

    def tried(self, lengths: tuple[int, ...], *, has_reference: bool) -> "OwnLoss":
        """Call the function on a made-up micro-batch, and return this loss with the names of its metrics.

        Raises:
            RewardError: the function raised, its result or its gradient is unusable, or the loss depends on how a batch
                is cut into micro-batches.
        """
        tensors = example_tensors(lengths, has_reference=has_reference)
        gradient, metrics = self._gradient(tensors)
        loss = replace(self, metrics=tuple(metrics))
        is_random = not _are_close(loss._gradient(tensors, seed=1)[0], gradient)  # or it keeps state
        if is_random:
            return loss
        doubled = replace(tensors, weights=2 * tensors.weights)
        if not _are_close(loss._gradient(doubled)[0], 2 * gradient):
            raise self.fault(
                "has a gradient that does not double when tensors.weights do: it averages, sums without weights, or"
                " applies them twice",
                "a gradient that does, or the loss would depend on how the batch is cut into micro-batches",
                SUM,
            )
        parts = [loss._gradient(part)[0] for part in _sequences(tensors)]
        if not _are_close(torch.cat(parts), gradient):
            raise self.fault(
                "has a different gradient if each sequence is a separate micro-batch",
                "the same gradient, however the batch is cut into micro-batches",
                f"{SUM}; anything that depends on the full batch, such as a mean, belongs in the advantages",
            )
        return loss

    def _gradient(self, tensors: LossTensors, *, seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
        """Return the gradient of the loss of a made-up micro-batch, and the metrics."""
        tensors = replace(tensors, logprobs=tensors.logprobs.detach().clone().requires_grad_())
        before = {name: tensor.detach().clone() for name, tensor in _named(tensors)}
        default_dtype = torch.get_default_dtype()
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(seed)
                terms, metrics = self(tensors)
                if tensors.logprobs.grad is not None:
                    raise self.fault("calls backward() itself", "only the loss: Bridge computes its gradient", EXAMPLE)
                if not torch.is_grad_enabled() or torch.get_default_dtype() != default_dtype:
                    raise self.fault("changes torch's grad mode or default dtype", "that both stay unchanged")
                with foreign_code(f"--loss {self.name}: its gradient", str(self.file)):
                    loss = terms if terms.dim() == 0 else (terms * tensors.weights).sum()
                    (gradient,) = torch.autograd.grad(loss, tensors.logprobs, allow_unused=True)
        finally:
            torch.set_default_dtype(default_dtype)
        if changed := [name for name, tensor in _named(tensors) if not torch.equal(tensor, before[name])]:
            raise self._changed(changed)
        numbers = {"terms": terms, "gradient": gradient, **{name: total for name, (total, _) in metrics.items()}}
        for name, value in numbers.items():
            if value is None or not torch.isfinite(value).all():
                raise self.fault(f"has a {name} of {described(value)} for made-up tensors", "finite numbers")
        return gradient, metrics


def load(name: str, *, has_reference: bool) -> OwnLoss:
    """Load the function that `name` refers to, in the form `file.py:function`, and try it.

    Raises:
        UsageError: the file or function does not exist, or the function takes different arguments.
        RewardError: the function raised, or returned something unusable.
    """
    try:
        source = Path(name.rpartition(":")[0]).expanduser().read_bytes()
    except OSError:
        source = b""
    return _load(name, Path.cwd(), source, has_reference)


@lru_cache(maxsize=16)
def _load(name: str, _folder: Path, _source: bytes, has_reference: bool) -> OwnLoss:
    """Load and try the function, once per version of its file, which a notebook may edit."""
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
    num_rows = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    sampled = -0.5 - torch.rand(num_rows, generator=generator)
    old, new, reference = (sampled + 0.1 * torch.randn(num_rows, generator=generator) for _ in range(3))
    return LossTensors(
        logprobs=new.requires_grad_(), old_logprobs=old, sampled_logprobs=sampled,
        reference_logprobs=reference if has_reference else None, advantages=1 - 2.0 * (torch.arange(num_rows) % 2),
        weights=torch.full((num_rows,), 1 / num_rows), mask=torch.ones(num_rows, dtype=torch.bool),
        sequences=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), lengths=torch.tensor(lengths),
    )  # fmt: skip


def _named(tensors: LossTensors) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in vars(tensors).items() if tensor is not None]


def _versions(tensors: LossTensors) -> dict[str, int]:
    """Return torch's version counter of each tensor, which in-place changes increase."""
    return {name: tensor._version for name, tensor in _named(tensors) if not tensor.is_inference()}


def _sequences(tensors: LossTensors) -> list[LossTensors]:
    """Return each sequence as a separate micro-batch."""
    made = []
    for index in range(len(tensors.lengths)):
        rows = tensors.sequences == index
        own = {name: tensor[rows] for name, tensor in _named(tensors) if name != "lengths"}
        own["sequences"] = torch.zeros_like(own["sequences"])
        made.append(replace(tensors, **own, lengths=tensors.lengths[index : index + 1]))
    return made


def _are_close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max())


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w*", name) is not None
