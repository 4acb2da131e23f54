"""The base class of optimizers that write their updates into parameters in place."""

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bridge.errors import CheckpointError, GradientError, UsageError
from bridge.optimizers.gradient_hooks import norm_of

EPS = 1e-8
"""Added to the denominator of an update."""


class InPlaceOptimizer(torch.optim.Optimizer):
    """Writes updates into parameters and never moves one.

    A new one defines `_step`, and keeps its tensors in torch's `state` or overrides `_state`. One that trains on
    several ranks derives from `ShardedOptimizer`. Norms are those of the unscaled parameters: a group's `factor`
    (`scaled_group`) changes neither the reported norm nor clipping.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """

    flags: str = ""
    """Command-line flags of an optimizer with the same state."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = EPS,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "factor": 1.0})
        self._factors: dict[Tensor, float] = {
            parameter: float(group["factor"]) for group in self.param_groups for parameter in group["params"]
        }
        """Factor of each stored parameter; its gradient is divided by it."""
        _check_parameters(self._factors)
        self._rates = [float(group["lr"]) for group in self.param_groups]
        """Each group's learning rate before it is scaled."""
        self._steps = dict.fromkeys(self._factors, 0)
        """Number of updates of each parameter."""
        self._num_changed: list[Tensor] = []
        """Words that the last update changed, counted piece by piece."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is made; UsageError afterwards, since its state is laid out once."""
        if hasattr(self, "_factors"):
            raise UsageError(
                "an optimizer of Bridge takes all of its parameters when it is made",
                hint="make a new one with all groups",
            )
        super().add_param_group(param_group)

    def scale_rates(self, factor: float) -> None:
        """Multiply the learning rates that the optimizer was made with; replaces an earlier factor."""
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: None = None, *, grad_norm: float | None = None, max_norm: float = math.inf
    ) -> None:
        """Update every parameter that has a gradient, clipped to a global norm of `max_norm`.

        `grad_norm` is the result of `global_norm`; without it, one more pass over the gradients computes it.

        Raises:
            UsageError: the norm is not finite; no weight was changed.
        """
        assert closure is None, "no closure: the gradients exist before the fence"
        norm = self.global_norm() if grad_norm is None else grad_norm
        if not math.isfinite(norm):
            self._num_changed = []
            raise GradientError(
                f"the gradient norm is {norm}, expected a finite number: no weight was changed",
                hint="skip this step; if it happens again, lower --lr",
            )
        self._step(norm, max_norm)

    @abstractmethod
    def _step(self, norm: float, max_norm: float) -> None: ...

    def releasing(self, *, max_norm: float = math.inf) -> AbstractContextManager[None]:
        """Take each gradient away as soon as a backward pass inside has completed it; `step` ends the update."""
        raise NotImplementedError

    def allocate(self) -> None:
        """Allocate the whole state, unless that is done."""

    def expect(self, gradients: torch.dtype) -> None:
        """Compile for gradients of this dtype, unless that is done or nothing is compiled."""

    def exchange(self) -> None:
        """Add up the gradients of several ranks; called by each before `global_norm`.

        Raises:
            UsageError: it cannot, and each rank would train other weights.
        """
        raise UsageError(
            f"{type(self).__name__} adds up no gradients: several ranks would train different weights",
            hint="derive it from ShardedOptimizer, or train with one process",
        )

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the allocated state of `parameter` in its stored form; called by all ranks."""
        return dict(self.state[parameter])

    def put(self, parameter: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Copy what `parts` returned into the state of `parameter`; some of its parts may be left out."""
        own = self.parts(parameter)
        for name, part in parts.items():
            own[name].copy_(part)

    def _state(self) -> Iterable[Tensor]:
        """Return all tensors of the state that are allocated."""
        return [tensor for parts in self.state.values() for tensor in parts.values()]

    def num_updates(self, parameter: Tensor) -> int:
        return self._steps[parameter]

    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        """Zero the state and set the numbers of updates; they default to 0."""
        self._steps = {parameter: num_updates.get(parameter, 0) for parameter in self._steps}
        for tensor in self._state():
            tensor.zero_()

    def global_norm(self) -> float:
        """Return the L2 norm of all gradients together, including released ones (waits for the device)."""
        return norm_of((p.grad, factor) for p, factor in self._factors.items() if p.grad is not None)

    @property
    def changed_weight_share(self) -> float:
        """Share of weights whose stored word the last update changed (waits for the device)."""
        return int(self._changed()) / sum(parameter.numel() for parameter in self._steps)

    def _changed(self) -> Tensor:
        """Return the number of words that the last update changed, where it was counted."""
        if not self._num_changed:
            return torch.zeros((), dtype=torch.int64)
        return torch.stack([count.to(self._num_changed[0].device) for count in self._num_changed]).sum()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in its stored form, without a copy: the parts of each parameter, and its number of updates.

        Checkpoints hold it by name (`checkpoints/optimizer_state.py`); this is for loops that save as torch does.
        """
        packed = super().state_dict()
        steps = ((index, parameter, self._steps[parameter]) for index, parameter in enumerate(self._steps))
        state = {index: {"step": step, **self.parts(parameter)} for index, parameter, step in steps if step}
        return {**packed, "state": state, "flags": self.flags}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy in what `state_dict` returned, hyperparameters included; torch would cast remainders to bf16.

        Raises:
            CheckpointError: it belongs to another kind of optimizer, or to other parameters; nothing was loaded.
        """
        parameters = [*self._steps]
        state = state_dict["state"]
        if (flags := state_dict.get("flags", "another optimizer")) != self.flags:
            raise CheckpointError(
                f"the optimizer's state was saved with {flags}, and this one is {self.flags}",
                hint=f"load it with {flags}",
            )
        known = [index for index in state if index in range(len(parameters))]
        shapes = {(index, name): part.shape for index in known for name, part in self.parts(parameters[index]).items()}
        held = {
            (index, name): part.shape
            for index, parts in state.items()
            for name, part in parts.items()
            if name != "step"
        }
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if held != shapes or sizes != [len(group["params"]) for group in self.param_groups]:
            raise CheckpointError(
                "the optimizer's state has other parameters", hint="load it for the model that it was saved with"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        copies = {(index, name): state[index][name].clone() for index, name in held}  # they may be these very tensors
        self.reset({parameters[index]: parts["step"] for index, parts in state.items()})
        for (index, name), copy in copies.items():
            self.put(parameters[index], {name: copy})


def check_hyperparameters(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UsageError unless those of all groups are numbers: inside the fence it would leave weights half-written."""
    for group in groups:
        given = {name: group[name] for name in ("lr", "eps", "weight_decay")}
        given |= {f"betas[{index}]": value for index, value in enumerate(group.get("betas", ()))}
        for name, value in given.items():
            if not math.isfinite(number(value)):
                raise UsageError(
                    f"{name} of the optimizer is {value!r}, expected a finite number",
                    hint="policy.optimizer('adamw', lr=1e-6, weight_decay=0.01)",
                )


def number(value: Any) -> float:
    """Return a number, or a tensor or an array of a single one, as a float; NaN if it is anything else.

    A tensor as a hyperparameter would differ from an equal one of another parameter, in the middle of an update.
    """
    if isinstance(value, bool | str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: Any, served: Iterable[Tensor]) -> float:
    """Clip the gradients, unless `optimizer` clips them itself, and return the norm that they had before.

    `served` are the server's parameters.

    Raises:
        UsageError: it is not finite, `max_norm` is no positive number, or `optimizer` needs a closure or changes
            nothing of the server's.
    """
    if not number(max_norm) > 0:
        raise UsageError(
            f"max_norm is {max_norm!r}, expected a number above 0", hint="leave max_norm out to clip nothing"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} needs a closure, and the gradients exist before the fence",
            hint="use an optimizer whose step() takes no argument, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, InPlaceOptimizer):
        check_hyperparameters(optimizer.param_groups)
    served_ids = {id(parameter) for parameter in served}
    changed = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if changed and not any(id(parameter) in served_ids for parameter in changed):
        raise UsageError(
            f"none of the {len(changed)} parameters that {type(optimizer).__name__} would change is the server's",
            hint="make it with policy.parameters(), before anything is added to policy.model",
        )
    if isinstance(optimizer, InPlaceOptimizer):
        norm = optimizer.global_norm()
    else:
        for parameter in changed:
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                parameter.grad = parameter.grad.to(parameter.dtype)  # a sum in float32; torch's own take no other dtype
        norm = norm_of((parameter.grad, 1.0) for parameter in changed)
        if math.isfinite(norm) and norm > max_norm:
            torch._foreach_mul_([parameter.grad for parameter in changed], number(max_norm) / norm)
    if not math.isfinite(norm):
        raise GradientError(
            f"the gradient norm is {norm}, expected a finite number: no weight was changed",
            hint="optimizer.zero_grad() and continue with the next batch; if it happens again, lower the learning rate",
        )
    return norm


def _check_parameters(parameters: Iterable[Tensor]) -> None:
    end = 0
    for parameter in sorted(parameters, key=Tensor.data_ptr):
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            raise UsageError(
                f"the weights are {parameter.dtype}, expected bfloat16 or float32",
                hint="restart the server with --dtype bfloat16",
            )
        assert parameter.is_contiguous(), (parameter.shape, parameter.stride())
        assert parameter.data_ptr() >= end, f"a parameter of shape {tuple(parameter.shape)} overlaps another one"
        end = parameter.data_ptr() + parameter.nbytes
