"""The base class of optimizers that write their updates into parameters in place."""

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bridge.errors import CheckpointError, GradientError, UsageError
from bridge.optimizers.gradient_hooks import norm_of

EPS = 1e-8
"""Added to the denominator of an update."""


@dataclass(frozen=True)
class KeptState:
    """A copy of an optimizer's state, in its stored form."""

    tensors: list[Tensor]
    steps: Mapping[Tensor, int]
    """Number of updates of each parameter."""


class InPlaceOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that write updates into parameters and never move them.

    A subclass defines `_step`, and keeps its tensors in torch's `state` or overrides `_state`. To train on several
    ranks, derive from `ShardedOptimizer`. Norms refer to unscaled parameters: a group's `factor` (`scaled_group`)
    changes neither the reported norm nor clipping.

    Raises:
        UsageError: a parameter is neither bf16 nor float32.
    """

    flags: str = ""
    """The command-line flags that choose an optimizer with the same state."""

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
        """The factor of each stored parameter, by which its gradient is divided."""
        _check_parameters(self._factors)
        self._rates = [float(group["lr"]) for group in self.param_groups]
        """Each group's learning rate before `scale_rates`."""
        self._made_with = [_hyperparameters_of(group) for group in self.param_groups]
        """Each group's other hyperparameters before `replace_hyperparameters`."""
        self._steps = dict.fromkeys(self._factors, 0)
        """Number of updates of each parameter."""
        self._num_changed: list[Tensor] = []
        """Numbers of stored values that the last update changed, one count per piece."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction. UsageError: later, since the state is laid out only once."""
        if hasattr(self, "_factors"):
            raise UsageError(
                "Bridge's optimizers take all parameters when they are created",
                hint="create a new optimizer with all groups",
            )
        super().add_param_group(param_group)

    def scale_rates(self, factor: float) -> None:
        """Multiply the learning rates that the optimizer was created with; this replaces an earlier factor."""
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def replace_hyperparameters(
        self,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        """Step all parameters with these values from now on; None: with the values given at construction."""
        for group, initial in zip(self.param_groups, self._made_with, strict=True):
            group.update(initial)
            if betas is not None:
                group["betas"] = betas
            if eps is not None:
                group["eps"] = eps / group["factor"]
            if weight_decay is not None:
                group["weight_decay"] = weight_decay / group["factor"]

    def regroup(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Train with the hyperparameters of these groups, one for each that the optimizer was made with, in order."""
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in new.items() if name != "params"})
            self._factors.update(dict.fromkeys(group["params"], float(group["factor"])))
        self._rates = [float(group["lr"]) for group in self.param_groups]
        self._made_with = [_hyperparameters_of(group) for group in self.param_groups]

    def kept_state(self) -> "KeptState":
        """Return a copy of the whole state, for `put_back`."""
        return KeptState([tensor.clone() for tensor in self._state()], dict(self._steps))

    def put_back(self, kept: "KeptState") -> None:
        """Continue from a result of `kept_state`."""
        self._steps = dict(kept.steps)
        for tensor, copy in zip(self._state(), kept.tensors, strict=True):
            tensor.copy_(copy)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: None = None, *, grad_norm: float | None = None, max_norm: float = math.inf
    ) -> None:
        """Update every parameter that has a gradient, clipped to a global norm of `max_norm`.

        `grad_norm` is the result of `global_norm`; if omitted, it is computed in one more pass over the gradients.

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
        """Consume each gradient as soon as it is complete inside the block; `step` ends the update."""
        raise NotImplementedError

    def allocate(self) -> None:
        """Allocate the full state, unless it is allocated already."""

    def expect(self, gradients: torch.dtype) -> None:
        """Compile for gradients of this dtype, unless that is done already or compilation is off."""

    def exchange(self) -> None:
        """Sum the gradients over all ranks; every rank calls this before `global_norm`.

        Raises:
            UsageError: this optimizer cannot exchange gradients, so the ranks' weights would diverge.
        """
        raise UsageError(
            f"{type(self).__name__} does not sum gradients over ranks, so the ranks' weights would diverge",
            hint="derive it from ShardedOptimizer, or train with one process",
        )

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the allocated state of `parameter` in its stored form. All ranks must call it."""
        return dict(self.state[parameter])

    def put(self, parameter: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Copy the result of `parts`, or some of its entries, into the state of `parameter`."""
        own = self.parts(parameter)
        for name, part in parts.items():
            own[name].copy_(part)

    def _state(self) -> Iterable[Tensor]:
        """Return all allocated state tensors."""
        return [tensor for parts in self.state.values() for tensor in parts.values()]

    def num_updates(self, parameter: Tensor) -> int:
        return self._steps[parameter]

    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        """Zero the state, and set the number of updates of each parameter (0 if it is not listed)."""
        self._steps = {parameter: num_updates.get(parameter, 0) for parameter in self._steps}
        for tensor in self._state():
            tensor.zero_()

    def global_norm(self) -> float:
        """Return the joint L2 norm of all gradients, including released ones (waits for the device)."""
        return norm_of((p.grad, factor) for p, factor in self._factors.items() if p.grad is not None)

    @property
    def changed_weight_share(self) -> float:
        """Share of the weights whose stored value the last update changed (waits for the device)."""
        return int(self._changed()) / sum(parameter.numel() for parameter in self._steps)

    def _changed(self) -> Tensor:
        """Return the number of stored values that the last update changed, on the device that counted them."""
        if not self._num_changed:
            return torch.zeros((), dtype=torch.int64)
        return torch.stack([count.to(self._num_changed[0].device) for count in self._num_changed]).sum()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in its stored form, without a copy: each parameter's parts and number of updates.

        This is for loops that save as torch does; checkpoints store the state by parameter name instead
        (`checkpoints/optimizer_state.py`).
        """
        packed = super().state_dict()
        steps = ((index, parameter, self._steps[parameter]) for index, parameter in enumerate(self._steps))
        state = {index: {"step": step, **self.parts(parameter)} for index, parameter, step in steps if step}
        return {**packed, "state": state, "flags": self.flags}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, hyperparameters included; torch's own method would cast remainders to bf16.

        Raises:
            CheckpointError: it belongs to a different kind of optimizer or to different parameters; nothing was loaded.
        """
        parameters = [*self._steps]
        state = state_dict["state"]
        if (flags := state_dict.get("flags", "another optimizer")) != self.flags:
            raise CheckpointError(
                f"the optimizer's state was saved with {flags}, but this optimizer is {self.flags}",
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
                "the optimizer's state is for different parameters", hint="load it for the model that it was saved with"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        # `reset` zeroes the optimizer's tensors, and `state_dict` may contain the same ones.
        copies = {(index, name): state[index][name].clone() for index, name in held}
        self.reset({parameters[index]: parts["step"] for index, parts in state.items()})
        for (index, name), copy in copies.items():
            self.put(parameters[index], {name: copy})


def _hyperparameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("betas", "eps", "weight_decay")}


def check_hyperparameters(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UsageError unless all hyperparameters are numbers: an error in the fence leaves weights half-written."""
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
    """Return a number, or a tensor or array with a single element, as a float; NaN for anything else.

    Hyperparameters that are tensors would compare as different even if they are equal, in the middle of an update.
    """
    if isinstance(value, bool | str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: Any, served: Iterable[Tensor]) -> float:
    """Clip the gradients, unless `optimizer` clips them itself, and return their norm before clipping.

    `served` are the server's parameters.

    Raises:
        GradientError: the norm is not finite.
        UsageError: `max_norm` is not a positive number, or `optimizer` needs a closure or has none of the server's
            parameters.
    """
    if not number(max_norm) > 0:
        raise UsageError(
            f"max_norm is {max_norm!r}, expected a number above 0", hint="leave max_norm out to clip nothing"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} needs a closure, but gradients are computed before the fence",
            hint="use an optimizer whose step() needs no argument, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, InPlaceOptimizer):
        check_hyperparameters(optimizer.param_groups)
    served_ids = {id(parameter) for parameter in served}
    changed = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if changed and not any(id(parameter) in served_ids for parameter in changed):
        raise UsageError(
            f"none of the {len(changed)} parameters that {type(optimizer).__name__} would change is the server's",
            hint="create it with policy.parameters(), before adding anything to policy.model",
        )
    if isinstance(optimizer, InPlaceOptimizer):
        norm = optimizer.global_norm()
    else:
        for parameter in changed:
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                parameter.grad = parameter.grad.to(parameter.dtype)  # was float32; torch's optimizers need one dtype
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
        assert parameter.data_ptr() >= end, f"a parameter of shape {tuple(parameter.shape)} overlaps another"
        end = parameter.data_ptr() + parameter.nbytes
