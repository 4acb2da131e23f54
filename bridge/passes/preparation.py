"""Preparing a model for training: its attention, its layers, and a check of what comes out after each choice.

Whatever is chosen has to give what transformers itself gives for each sequence alone: a family that treats positions
or masks in a way of its own is refused here, and not trained wrongly.

Not covered: the check (`expected.py`), the head (`logprobs.py`), how many tokens fit (`budget.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import BridgeError, UnsupportedModelError
from bridge.passes import attention, layers, wide_linear
from bridge.passes.expected import LENGTHS, Expected, Note, example_tokens, packed, packed_sharing
from bridge.passes.logprobs import check_head

MISFITS = (AttributeError, TypeError, ValueError, LookupError, NotImplementedError)
"""What a family raises that is called in another way than the rest."""
COMPILE_ERRORS = (TorchDynamoException, CppCompileError, InvalidCxxCompiler)
"""What torch raises when it cannot compile; anything else is a mistake and is raised."""


def prepare(model: PreTrainedModel, config: TrainConfig, note: Note, *, max_model_len: int | None = None) -> bool:
    """Give the model packed attention, and whatever of liger-kernel, compilation and recomputation is asked for.

    Once per run, before the first micro-batch. No parameter is moved or replaced. Return whether completions of one
    prompt may share it. `max_model_len` bounds the length of a sequence, where it is known.

    Raises:
        UnsupportedModelError: what the model computes of packed sequences is not what it computes of each alone.
        UsageError: liger-kernel was asked for, and cannot be used.
    """
    with _refusing_misfits(model):
        check_head(model)
        expected = Expected(model, max_model_len)
    compiles = model.device.type == "cuda" if config.compute.compile_layers is None else config.compute.compile_layers
    if model.device.type == "cpu" and not compiles and wide_linear.is_wanted():
        wide_linear.widen(model)  # not both: torch would compile every layer for itself
    if config.compute.liger_kernel:
        layers.use_liger_kernel(model)
    _choose_attention(model, expected, note)
    recomputes = bool(config.compute.gradient_checkpointing)
    if compiles:
        _compile(model, expected, note, recomputed=recomputes)
    shares_prompts = _may_share_prompts(model, expected, note)
    if recomputes:
        _recompute(model, note)
    return shares_prompts


@contextmanager
def _refusing_misfits(model: PreTrainedModel) -> Iterator[None]:
    """Refuse a family whose code cannot be called as that of the others."""
    try:
        yield
    except MISFITS as error:
        if isinstance(error, BridgeError):
            raise
        words = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run as other language models are: {words}",
            remedy="train another model, of those in docs/families.md, or report this one",
        ) from error


def recompute_activations(model: PreTrainedModel, note: Note) -> None:
    """Have each layer keep its input alone for the backward pass, and compute the rest again there.

    The compiler does so where a layer is one graph without random numbers, which it would draw anew. Any other layer is
    called again, and not compiled: of several graphs the second call might be given others than the first.

    Raises:
        UnsupportedModelError: the model cannot.
    """
    if layers.are_compiled(model):
        layers.compile_layers(model, recomputed=True)
    _recompute(model, note)


def _recompute(model: PreTrainedModel, note: Note) -> None:
    """Leave recomputing to the layers' code, if it is compiled for that and can be gone through twice."""
    if layers.are_compiled(model):
        reason = _against_recomputing(model)
        if reason is None:
            return
        layers.uncompile_layers(model)
        note(f"layers are not compiled: they are recomputed, and {reason}")
    layers.call_again(model)


def _choose_attention(model: PreTrainedModel, expected: Expected, note: Note) -> None:
    """Use our attention where it is right, else the model's own, which makes a mask of the positions."""
    own = model.config._attn_implementation
    try:
        attention.choose(model, attention.NAME)
        expected.check(model, note)
    except UnsupportedModelError as error:
        attention.choose(model, own)
        expected.check(model, note)
        note(f"attention: the model's own ({own}), with a mask of tokens x tokens: {error.message}")
    else:
        if model.config._attn_implementation != attention.NAME:
            note(f"attention: {type(model).__name__}'s own, with a mask of tokens x tokens: it can have no other")


def _may_share_prompts(model: PreTrainedModel, expected: Expected, note: Note) -> bool:
    """Tell whether completions of one prompt may share it; where attention is ours and they may not, say why."""
    if model.config._attn_implementation != attention.NAME:
        return False
    try:
        expected.check(model, note, share_prompts=True)
    except UnsupportedModelError as error:
        note(f"prompts are not shared: {error.message}")
        return False
    return True


def _compile(model: PreTrainedModel, expected: Expected, note: Note, *, recomputed: bool) -> None:
    """Compile the layers; where torch cannot, or what comes out is wrong, leave them.

    The backward pass, too, unless activations are to be recomputed: `_recompute` then goes through it.
    """
    layers.compile_layers(model, recomputed=recomputed)
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            expected.check(model, note)
            if not recomputed:
                _run_all_forms(model)
    except (*COMPILE_ERRORS, UnsupportedModelError) as error:
        layers.uncompile_layers(model)
        note(f"layers are not compiled: {' '.join(str(error).strip().splitlines()[:2])}")
    else:
        torch._dynamo.config.suppress_errors = True  # a form that comes later and fails runs uncompiled, with a warning


def _against_recomputing(model: PreTrainedModel) -> str | None:
    """Compile the layers as they are to be, and return why their code cannot be gone through twice; None: it can."""
    num_breaks, random_state = layers.num_breaks(), _random_state(model.device)
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            _run_all_forms(model)
    except COMPILE_ERRORS as error:
        return f"torch cannot compile that: {' '.join(str(error).strip().splitlines()[:2])}"
    if layers.num_breaks() > num_breaks:
        return "torch makes several graphs of one"
    return None if torch.equal(_random_state(model.device), random_state) else "draw random numbers"


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _run_all_forms(model: PreTrainedModel) -> None:
    """Go forward and backward through what a run has: several sequences, other lengths, shared prompts."""
    tokens_T = example_tokens(model)
    _run_backward(model, lambda: packed(model, tokens_T, LENGTHS))
    _run_backward(model, lambda: packed(model, tokens_T[LENGTHS[0] :], LENGTHS[1:]))
    if model.config._attn_implementation == attention.NAME:
        _run_backward(model, lambda: packed_sharing(model, tokens_T))


def _run_backward(model: PreTrainedModel, compute_hidden: Callable[[], Tensor]) -> None:
    """Go through the backward pass, if there is one, without leaving a gradient or calling what waits for one."""
    if trained := first_trained(model):
        torch.autograd.grad(compute_hidden().float().sum(), trained)


def first_trained(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained parameters of the first layer that has any: their gradients need all of the backward pass."""
    candidates = ([p for p in part.parameters() if p.requires_grad] for part in (*layers.decoder_layers(model), model))
    return next((trained for trained in candidates if trained), [])
