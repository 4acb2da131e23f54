"""What every optimizer offers that writes into weights which somebody else also reads.

Not covered: the two of them, with their state beside the weights (`factory.py`) or in host memory (`offload.py`).
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bridge.errors import UsageError

EPS = 1e-8
"""Added to the denominator of an update."""


@dataclass(frozen=True)
class StateBytes:
    """What an optimizer holds beside the weights."""

    device: int
    """Where the weights lie."""
    host: int
    """In host memory."""


class InPlaceOptimizer(torch.optim.Optimizer):
    """Writes updates into parameters, and never moves one.

    Norms are those of the unscaled parameters: a group's `factor` (`scaled_group`) changes neither what is reported nor
    where gradients are clipped.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """

    flags: str
    """What on the command line makes another one with the same state."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._num_changed: list[Tensor] = []
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "factor": 1.0})
        _check_parameters(self._parameters())
        self._factors = {
            parameter: float(group["factor"]) for group in self.param_groups for parameter in group["params"]
        }
        """What each parameter is held multiplied by: its gradient is that of the unscaled one, divided by it."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: None = None, *, grad_norm: float | None = None, max_norm: float = math.inf
    ) -> None:
        """Write one AdamW update into every parameter that has a gradient, scaled down to a norm of at most `max_norm`.

        `grad_norm` is what `global_norm` returned; absent: computed here, one more pass over the gradients.

        Raises:
            UsageError: the norm is not finite; no weight was touched.
        """
        assert closure is None, "no closure: the gradients exist before the fence"
        norm = self.global_norm() if grad_norm is None else grad_norm
        if not math.isfinite(norm):
            self._num_changed = []
            raise UsageError(
                f"the gradients' norm is {norm}, expected a finite one: no weight was touched",
                remedy="skip this step; if it happens again lower --lr",
            )
        self._step(norm, max_norm)

    @abstractmethod
    def releasing(self, *, max_norm: float = math.inf) -> AbstractContextManager[None]:
        """Take each gradient away as soon as a backward pass inside has completed it; `step` ends the update."""

    @abstractmethod
    def allocate(self) -> None:
        """Take all memory that the state needs, unless that was done."""

    def expect(self, gradients: torch.dtype) -> None:
        """Compile for gradients of this type, unless that was done or nothing is compiled."""

    @abstractmethod
    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of `parameter`, allocated and as it is held, to be read or written."""

    @abstractmethod
    def described_parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return what `parts` returns, without memory."""

    @abstractmethod
    def num_updates(self, parameter: Tensor) -> int:
        """Return how many updates `parameter` had."""

    @abstractmethod
    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        """Take all memory, set every state to zero and the numbers of updates to these."""

    @property
    @abstractmethod
    def state_bytes(self) -> StateBytes:
        """Return what it holds now."""

    @abstractmethod
    def _step(self, norm: float, max_norm: float) -> None: ...

    def global_norm(self) -> float:
        """Return the L2 norm of all gradients together, of those that were released, too (waits for the device)."""
        return norm_of((each.grad, factor) for each, factor in self._factors.items() if each.grad is not None)

    @property
    def changed_weight_share(self) -> float:
        """Return the share of weights whose stored word the last update changed (waits for the device)."""
        if not self._num_changed:
            return 0.0
        counts = torch.stack([count.to(self._num_changed[0].device) for count in self._num_changed])
        return int(counts.sum()) / sum(parameter.numel() for parameter in self._parameters())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse: torch's way would cast moments and remainders to bf16. `trainer_state.read` is the one way."""
        raise AssertionError(f"a state of {len(state_dict)} entries: load it with trainer_state.read")

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])


def norm_of(scaled: Iterable[tuple[Tensor, float]]) -> float:
    """Return the L2 norm of all tensors together, each times its factor; summed in float32 whatever their dtype.

    Few kernels for those of one dtype, device and factor. Waits for the device.
    """
    alike: dict[tuple[torch.dtype, torch.device, float], list[Tensor]] = {}
    for tensor, factor in scaled:
        alike.setdefault((tensor.dtype, tensor.device, factor), []).append(tensor)
    return math.hypot(*(factor * _norm(each) for (_, _, factor), each in alike.items()))


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))))


def _check_parameters(parameters: Iterable[Tensor]) -> None:
    end = 0
    for parameter in sorted(parameters, key=Tensor.data_ptr):
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            raise UsageError(
                f"the weights are {parameter.dtype}, expected bfloat16 or float32",
                remedy="restart the server with --dtype bfloat16",
            )
        assert parameter.is_contiguous(), (parameter.shape, parameter.stride())
        assert parameter.data_ptr() >= end, f"a parameter of shape {tuple(parameter.shape)} overlaps another one"
        end = parameter.data_ptr() + parameter.nbytes
