"""Tinker's loss functions: sums over the tokens of a call, and never means.

Clips are bounds of the ratio itself, not distances from 1. A ratio is that of the trained weights to those that sampled
(`logprobs` of a datum), and the same everywhere: beyond `MAX_LOG_RATIO` it is constant, so that a token that counts
for nothing cannot be infinity times 0.

Source: the formulas of Tinker's documentation, tinker-docs.thinkingmachines.ai/losses, and of its page for each loss.
Shape suffixes: N rows of several data; K targets of a row, X: nothing, or K.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bridge.errors import UsageError
from bridge.learn.policy_loss import MAX_LOG_RATIO

Config = Mapping[str, float]


class Rows(NamedTuple):
    """Inputs of a loss of probability ratios, one entry per row."""

    logprobs_N: Tensor
    """Log-probabilities of the trained weights, with gradients."""
    sampled_N: Tensor
    """Log-probabilities of the weights that sampled the tokens."""
    advantages_N: Tensor
    mask_N: Tensor
    """Whether a row is part of its sequence's ratio: `sequence_ratio_mask`."""
    sequences_N: Tensor
    """Number of each row's datum, from 0."""


@dataclass(frozen=True, kw_only=True)
class LossFunction:
    """A loss that `loss_fn` can name."""

    inputs: tuple[str, ...]
    """Names of the inputs that each datum needs besides its targets."""
    compute: Callable[[Rows, Config], Tensor]
    config: Mapping[str, float | None]
    """Configuration keys with their defaults; None: the key is required."""

    def chosen(self, name: str, given: Mapping[str, object]) -> Config:
        """Return the configuration of a call. UsageError: a key is unknown or missing, or its value is not a number."""
        if unknown := sorted(given.keys() - self.config.keys()):
            known = ", ".join(self.config) or "none"
            raise UsageError(f"loss_fn_config of {name} has {unknown[0]!r}, expected {known}", hint="leave it out")
        whole = {**self.config, **given}
        for key, value in whole.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
                found = "is missing" if value is None else f"is {value!r}, expected a number"
                raise UsageError(f"loss_fn_config of {name}: {key} {found}", hint=f'loss_fn_config={{"{key}": 0.1}}')
        return {key: float(value) for key, value in whole.items() if isinstance(value, int | float)}


def cross_entropy(logprobs_NX: Tensor, weights_NX: Tensor) -> Tensor:
    """Return the weighted sum of negative log-probabilities, with one or several targets per row."""
    return -(logprobs_NX * weights_NX).sum()


def _ratios(rows: Rows) -> Tensor:
    return _exp(rows.logprobs_N - rows.sampled_N)


def _exp(log_ratios_N: Tensor) -> Tensor:
    return log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratios_N: Tensor, config: Config) -> Tensor:
    return ratios_N.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _lower(ratios_N: Tensor, rows: Rows, config: Config) -> Tensor:
    """Return PPO's loss: the negative of the lower of the clipped and the unclipped objective."""
    clipped_N = _clipped(ratios_N, config)
    return -torch.minimum(ratios_N * rows.advantages_N, clipped_N * rows.advantages_N).sum()


def _importance_sampling(rows: Rows, _: Config) -> Tensor:
    return -(_ratios(rows) * rows.advantages_N).sum()


def _ppo(rows: Rows, config: Config) -> Tensor:
    return _lower(_ratios(rows), rows, config)


def _cispo(rows: Rows, config: Config) -> Tensor:
    factors_N = _clipped(_ratios(rows).detach(), config)
    return -(factors_N * rows.logprobs_N * rows.advantages_N).sum()


def _dro(rows: Rows, config: Config) -> Tensor:
    squares_N = (rows.logprobs_N - rows.sampled_N).square()
    return -(rows.logprobs_N * rows.advantages_N - 0.5 * config["beta"] * squares_N).sum()


def _gspo(rows: Rows, config: Config) -> Tensor:
    """Each token has its sequence's ratio, the geometric mean over the mask, and its own gradient (GSPO-token)."""
    own_N = rows.logprobs_N.detach()
    is_inside_N = (rows.mask_N != 0).to(own_N.dtype)
    sums = own_N.new_zeros(int(rows.sequences_N.max()) + 1 if len(own_N) else 1, 2)
    sums.index_add_(0, rows.sequences_N, torch.stack([(own_N - rows.sampled_N) * is_inside_N, is_inside_N], dim=1))
    means_N = (sums[:, 0] / sums[:, 1].clamp(min=1))[rows.sequences_N]
    return _lower(_exp(means_N) * (rows.logprobs_N - own_N).exp(), rows, config)


RATIOS = ("logprobs", "advantages")
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
OF_RATIOS: Mapping[str, LossFunction] = {
    "importance_sampling": LossFunction(inputs=RATIOS, compute=_importance_sampling, config={}),
    "ppo": LossFunction(inputs=RATIOS, compute=_ppo, config=CLIPS),
    "cispo": LossFunction(
        inputs=RATIOS, compute=_cispo, config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    ),
    "dro": LossFunction(inputs=RATIOS, compute=_dro, config={"beta": None}),
    "gspo": LossFunction(inputs=(*RATIOS, "sequence_ratio_mask"), compute=_gspo, config=CLIPS),
}
"""The losses of probability ratios. `cross_entropy` is the only other loss, and the only one with several targets."""
NAMES = ("cross_entropy", *OF_RATIOS)


def refuse_other(name: str) -> None:
    """Raise UsageError if the loss is unknown."""
    if name not in NAMES:
        raise UsageError(
            f"loss_fn {name!r} is not supported here, only {', '.join(NAMES)}, and losses of your own by"
            " forward_backward_custom",
            hint="recipes take loss_fn=importance_sampling, ppo or cispo",
        )
