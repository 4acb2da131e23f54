"""AdamW that writes bf16 weights in place and keeps what bf16 would lose in a remainder of its own.

Not covered: the elementwise update (`split_master.py`), keeping the state (`trainer_state.py`), float16, bf16 or 8-bit
moments, states on the host, DTensors.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bridge.errors import UsageError
from bridge.training.split_master import Coefficients, step_float32, step_split

EPS = 1e-8
"""Added to the denominator of an update."""
CHUNK_ELEMENTS = 2**24
"""Elements that are stepped at once: a float32 temporary takes at most 64 MiB."""


def clip_by_global_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients down to a global norm of at most `max_norm`; return the norm before that.

    A norm that is not finite leaves every gradient as it is: the caller skips the step.
    """
    parameters = list(parameters)
    norm = global_norm(parameters)
    if max_norm < norm < math.inf:
        for gradient in _gradients(parameters):
            gradient.mul_(max_norm / norm)
    return norm


def global_norm(parameters: Iterable[Tensor]) -> float:
    """Return the L2 norm of all gradients together, summed in float32 whatever their dtype (waits for the device)."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in _gradients(parameters)]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def scaled_group(parameter: Tensor, factor: float, *, lr: float, weight_decay: float) -> dict[str, Any]:
    """Return the group of a parameter that is held multiplied by `factor`, so that it is trained as if it were not.

    A master B kept as B' = factor * B has 1 / factor of its gradient: AdamW then takes the same steps of B, decay
    and eps included, with these hyperparameters.
    """
    return {
        "params": [parameter],
        "lr": lr * factor,
        "weight_decay": weight_decay / factor,
        "eps": EPS / factor,
    }


def fresh_state(parameter: Tensor) -> dict[str, Any]:
    """Return the state of `parameter` before its first step."""
    state = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    if parameter.dtype == torch.bfloat16:
        state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
    return {"step": 0, **state}


class SplitMasterAdamW(torch.optim.Optimizer):
    """AdamW that loses no update to bf16 and never moves a parameter.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = EPS,
        weight_decay: float = 0.0,
    ) -> None:
        self._num_changed: list[Tensor] = []
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take over more parameters: contiguous, bf16 or float32, and none overlapping another."""
        super().add_param_group(param_group)
        _check_parameters(self._parameters())

    @torch.no_grad()
    def step(self, closure: None = None, *, grad_norm: float | None = None) -> None:  # type: ignore[override]
        """Write one AdamW update into every parameter that has a gradient.

        `grad_norm` is what `clip_by_global_norm` returned; absent: computed here, one more pass over the gradients.

        Raises:
            UsageError: the norm is not finite; no weight was touched.
        """
        assert closure is None, "no closure: the gradients exist before the fence"
        self._num_changed = []
        norm = global_norm(self._parameters()) if grad_norm is None else grad_norm
        if not math.isfinite(norm):
            raise UsageError(
                f"the gradients' norm is {norm}, expected a finite one: no weight was touched",
                remedy="skip this step; if it happens again lower --lr",
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._num_changed += _step(parameter, self.state[parameter], group)

    @property
    def changed_weight_share(self) -> float:
        """Return the share of weights whose stored word the last step changed (waits for the device)."""
        if not self._num_changed:
            return 0.0
        return int(torch.stack(self._num_changed).sum()) / sum(parameter.numel() for parameter in self._parameters())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse: torch's way would cast moments and remainders to bf16. `trainer_state.read` is the one way."""
        raise AssertionError(f"a state of {len(state_dict)} entries: load it with trainer_state.read")

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])


def _step(parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Iterator[Tensor]:
    """Step one parameter, chunk by chunk; yield how many words of each chunk changed."""
    state.update(state or fresh_state(parameter))
    state["step"] += 1
    by = Coefficients.of(group, state["step"])
    assert parameter.grad is not None
    tensors = [parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"], parameter]
    if "remainder" in state:
        tensors[3:] = [parameter.view(torch.int16), state["remainder"]]
    for chunks in zip(*(tensor.view(-1).split(CHUNK_ELEMENTS) for tensor in tensors), strict=True):
        gradient, first, second, weight, *remainder = chunks
        if remainder:
            yield step_split(weight, remainder[0], (first, second), gradient.float(), by)
        else:
            yield step_float32(weight, (first, second), gradient.float(), by)


def _gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    return (parameter.grad for parameter in parameters if parameter.grad is not None)


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
