"""Check parallelism before training: layers in parts or on slices must match full layers, gradients included.

For one layer of each kind, every rank builds the full float32 layer and compares it with the sharded layer, both with
their adapter if there is one. With context parallelism, a layer on this rank's slice of a pack is compared with the
same layer on the full pack. Nothing else would show a wrong gradient: outputs and log-probabilities would still be
right.

Weights and inputs are random, and the same on every part. Trained weights could hide a fault, such as a bias of zeros
that every part adds, or cause a false alarm: with attention scores in the thousands, float32 rounding exceeds
`TOLERANCE`. Whether the parts hold the right weights shows in the comparison with the server's log-probabilities.

Not covered: the embedding and the head, whose code is the same for all models.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError, UsageError, first_line, with_class
from bridge.optimizers.gradient_hooks import each_gradient
from bridge.passes import cut_layers, layers, routing, slices
from bridge.passes.packing_proof import LENGTHS, packed
from bridge.passes.parallel import ONE_PART, Parallel
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.slices import Slices
from bridge.types import Result
from bridge.weights.model_folder import state

TOLERANCE = 1e-4
"""Largest relative difference; float32 rounding reached 2e-6, and deliberate faults 0.4 or more."""
FLOOR = 1e-3
"""Differences are relative to at least this share of the layer's largest gradient: some gradients are zero except for
rounding, such as those of key biases without position embeddings."""
NUM_TOKENS = 24
MISFITS = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, NotImplementedError, RuntimeError)
"""Errors raised by a layer that cannot compute with a part of its weights."""


class _Call(NamedTuple):
    """The arguments with which a model calls a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Computed:
    """A layer's output, and the gradients of its input and of this rank's part of the weights."""

    output: Tensor
    input_gradient: Tensor
    gradients: Mapping[str, Tensor]
    """Gradients by the model's parameter names."""


def check_layers(model: PreTrainedModel, parallel: Parallel) -> None:
    """Compare one layer of each kind with the full layer, in evaluation mode. Call it on every part."""
    names = _one_of_each(model, lambda layer, name: _kind(layer, name, parallel))
    try:
        with _exact():
            tokens_T = routing.made_up_tokens(model, NUM_TOKENS)
            compute = partial(model.get_decoder(), input_ids=tokens_T.unsqueeze(0), use_cache=False)
            calls = _compute_or_refuse(type(model).__name__, lambda: _calls(model, names, compute))
            for name, call in calls.items():
                _check_layer(name, call, model, parallel)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"out of memory while checking tensor parallelism against a full float32 layer of {type(model).__name__}:"
            f" {first_line(error)}",
            hint="a lower --gpu-memory-utilization",
        ) from error


def check_slices(prepared: PreparedModel) -> None:
    """Compare one layer of each kind on a slice with the same layer on the full pack, if packs are cut into slices.

    Call it on every rank that has a slice, once the model is prepared.
    """
    model = prepared.model
    cut = prepared.slices
    if cut is None:
        return
    names = _one_of_each(
        model, lambda layer, _: tuple((type(m), getattr(m, "sliding_window", None)) for m in layer.modules())
    )
    tokens_T = torch.arange(sum(LENGTHS), device=model.device) % model.config.get_text_config().vocab_size
    with _exact():
        own = _calls(model, names, lambda: packed(prepared, tokens_T, LENGTHS))
        with prepared.uncut():
            whole = _calls(model, names, lambda: packed(prepared, tokens_T, LENGTHS))
        for name in names:
            layer = copy.deepcopy(model.get_submodule(name)).eval().requires_grad_()
            _fill(layer, whole[name].args[0])
            on_slice = _run(layer, name, own[name], lambda _, gradient: gradient, cut)
            layer.zero_grad()
            on_all = _run(layer, name, whole[name], lambda _, gradient: gradient)
            _compare(name, _over_slices(on_slice, cut), on_all, cut.group, f"on {cut.size} slices", slices.HINT)


def _one_of_each(model: PreTrainedModel, kind: Callable[[nn.Module, str], Any]) -> list[str]:
    """Return the name of one decoder layer of each kind; `kind` is called with a layer and its name."""
    names = {id(module): name for name, module in model.named_modules()}
    by_kind = dict[Any, str]()
    for layer in layers.decoder_layers(model):
        by_kind.setdefault(kind(layer, names[id(layer)]), names[id(layer)])
    return [*by_kind.values()]


def _over_slices(computed: _Computed, cut: Slices) -> _Computed:
    """Return the results of all ranks together: outputs for all tokens, and summed gradients in a fixed order."""
    gradients = {
        leaf: cut_layers.reduced(computed.gradients[leaf], "sum", cut.group) for leaf in sorted(computed.gradients)
    }
    count = sum(LENGTHS)
    output_TH, input_gradient_TH = (cut.joined(x[0], count) for x in (computed.output, computed.input_gradient))
    return _Computed(output_TH.unsqueeze(0), input_gradient_TH.unsqueeze(0), gradients)


def _check_layer(name: str, call: _Call, model: PreTrainedModel, parallel: Parallel) -> None:
    own = parallel.cuts[parallel.part]
    whole_layer = parallel.whole.get_submodule(name).eval()
    _fill(whole_layer, call.args[0])
    layer = copy.deepcopy(model.get_submodule(name)).eval().requires_grad_()
    filled = state(whole_layer)
    for leaf, tensor in state(layer).items():
        tensor.data = own[f"{name}.{leaf}"].of(filled[leaf].detach()).clone()
    cut = _compute_or_refuse(name, lambda: _run(layer.float(), name, call, lambda _, gradient: gradient))
    parallel.combine(cut.gradients)
    whole = _run(whole_layer, name, call, lambda leaf, gradient: own[leaf].of(gradient).clone())
    whole_layer.to("meta")
    _compare(name, cut, whole, parallel.group, f"in {len(parallel.cuts)} parts", ONE_PART)


def _kind(layer: nn.Module, name: str, parallel: Parallel) -> Any:
    """Return a layer's kind: the classes of its modules, and the share of its parameters that each part holds."""
    classes = tuple(type(module) for module in layer.modules())
    parameters = [parameter for parameter, _ in layer.named_parameters()]
    return classes, tuple((leaf, *(cuts[f"{name}.{leaf}"] for cuts in parallel.cuts)) for leaf in parameters)


def _calls(model: PreTrainedModel, names: Sequence[str], compute: Callable[[], object]) -> dict[str, _Call]:
    """Run the model, and return the arguments with which it calls each of the named layers."""
    calls = dict[str, _Call]()

    def keeping(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: calls.update({name: _Call(_widened(args), _widened(kwargs))})

    with ExitStack() as hooks, torch.no_grad():
        for name in names:
            layer = model.get_submodule(name)
            hooks.callback(layer.register_forward_pre_hook(keeping(name), with_kwargs=True).remove)
        compute()
    return calls


def _widened(given: Any) -> Any:
    """Return the arguments with every floating-point tensor in float32."""
    if isinstance(given, Tensor):
        return given.float() if given.is_floating_point() else given
    if isinstance(given, dict):
        return {name: _widened(value) for name, value in given.items()}
    if isinstance(given, tuple):
        widened = map(_widened, given)
        return type(given)(*widened) if hasattr(given, "_fields") else tuple(widened)
    return given


def _fill(whole: nn.Module, like: Tensor) -> None:
    """Give a layer on the meta device random weights that keep its output about as large as its input."""
    chance = torch.Generator(device=like.device).manual_seed(0)
    for name, empty in state(whole).items():
        owner, _, leaf = name.rpartition(".")
        weight = torch.empty(empty.shape, device=like.device)
        is_factor = weight.ndim < 2 and "bias" not in leaf
        std = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1
        weight.normal_(float(is_factor), std, generator=chance)
        is_parameter = isinstance(empty, nn.Parameter)
        setattr(whole.get_submodule(owner), leaf, nn.Parameter(weight) if is_parameter else weight)
    whole.to(like.device)


def _run(
    layer: nn.Module, name: str, call: _Call, own: Callable[[str, Tensor], Tensor], cut: Slices | None = None
) -> _Computed:
    """Run the layer forward and backward; of each parameter's gradient, keep what `own` returns.

    The input and the weights of the loss are the same on every rank; with `cut`, this rank takes its slices of them.
    """
    hidden = call.args[0]
    like = dict[str, Any](device=call.args[0].device)
    chance = torch.Generator(**like).manual_seed(1)
    gradients = dict[str, Tensor]()
    shape = hidden.shape if cut is None else (1, sum(LENGTHS), hidden.shape[2])
    inputs = torch.empty(shape, **like).normal_(generator=chance)
    weights = torch.linspace(-1, 1, inputs.numel(), **like).view(shape)
    if cut is not None:
        inputs = cut.own(inputs, 1)
        weights = cut.own(weights, 1)
    hidden = inputs.requires_grad_()
    names: dict[Tensor, str] = {parameter: f"{name}.{leaf}" for leaf, parameter in layer.named_parameters()}

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradients[names[parameter]] = own(names[parameter], parameter.grad)

    with torch.enable_grad(), each_gradient(names, keep):
        output = layer(hidden, *call.args[1:], **call.kwargs)
        output = output[0] if isinstance(output, tuple) else output
        (output * weights).sum().backward()
    for parameter, key in names.items():
        if key not in gradients:  # an expert that got no token
            gradients[key] = own(key, torch.zeros_like(parameter))
    assert hidden.grad is not None
    return _Computed(output.detach(), hidden.grad, gradients)


def _compare(name: str, cut: _Computed, whole: _Computed, group: str, how: str, hint: str) -> None:
    least = FLOOR * max(_rms(gradient) for gradient in whole.gradients.values())
    differences_of = {
        f"the output of {name}": _difference(cut.output, whole.output),
        f"the gradient of {name}'s input": _difference(cut.input_gradient, whole.input_gradient),
        **{
            f"the gradient of {parameter}": _difference(cut.gradients[parameter], whole.gradients[parameter], least)
            for parameter in sorted(whole.gradients)  # in the same order on every part
        },
    }
    differences = torch.tensor([*differences_of.values()], device=cut.output.device).nan_to_num(torch.inf)
    differences = cut_layers.reduced(differences, "max", group)  # so that all parts reach the same decision
    worst, what = max(zip(differences.tolist(), differences_of, strict=True))
    if worst > TOLERANCE:
        raise UnsupportedModelError(
            f"{what}, computed {how}, differs by {worst:.2g} from the full layer's, expected at most {TOLERANCE:g}",
            hint=hint,
        )


def _difference(computed: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the difference relative to the expected tensor's RMS, or to `least` if that is larger."""
    return _rms(computed - expected) / max(_rms(expected), least, torch.finfo(torch.float32).tiny)


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _compute_or_refuse(what: str, compute: Callable[[], Result]) -> Result:
    try:
        return compute()
    except MISFITS as error:
        if isinstance(error, torch.OutOfMemoryError | dist.DistError):
            raise
        raise UnsupportedModelError(
            f"{what} cannot compute with a part of its weights: {with_class(error)}", hint=ONE_PART
        ) from error


@contextmanager
def _exact() -> Iterator[None]:
    """Multiply in full float32 inside the block, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
