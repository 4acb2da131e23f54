"""Prepare a model for training: choose its attention and layers, and check the result after each choice.

Not covered: the check itself (`packing_proof.py`), the head (`logprobs.py`), how many tokens fit (`budget.py`).
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from transformers import PreTrainedModel

from bridge.config import ComputeConfig
from bridge.errors import UnsupportedModelError
from bridge.passes import attention, kernels, layers, packing_proof, recurrence, routing, slices
from bridge.passes.logprobs import check_head
from bridge.passes.packing_proof import Expected
from bridge.passes.parallel import Parallel
from bridge.passes.parallel_proof import check_slices
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.routing import RouterReplay
from bridge.ranks.world import ALONE, Ranks

logger = logging.getLogger(__name__)

COMPILE_ERRORS = (TorchDynamoException, CppCompileError, InvalidCxxCompiler)
"""Errors of torch.compile if there is no compiler or an operation is unsupported; all other errors are raised."""


def prepare(
    model: PreTrainedModel,
    compute: ComputeConfig,
    *,
    max_model_len: int | None = None,
    experts: tuple[int, int] | None = None,
    parallel: Parallel | None = None,
    ranks: Ranks = ALONE,
) -> PreparedModel:
    """Give the model packed attention and, if configured, Liger kernels, compiled layers and recomputed activations.

    Call it once per run, before the first micro-batch. No parameter is moved or replaced. `max_model_len` is the
    longest possible sequence, if known. `experts` is the server's number of layers with experts, and of experts per
    token; None: the trainer's routers choose. With context parallelism each of the `ranks` gets a slice of every pass.

    Raises:
        UnsupportedModelError: packing changes what the model computes, or the model cannot replay experts or be sliced
            as configured. The model is left unchanged.
    """
    prepared = PreparedModel(model, parallel)
    try:
        with ranks.in_pass():
            if experts is not None:
                prepared.replay = _replay(model, experts, compute)
            if ranks.cp_size > 1:
                prepared.slices = slices.cut(model, ranks.cp_group)
            _prepare(prepared, compute, max_model_len, is_replayed=experts is not None)
            check_slices(prepared)
    except BaseException:
        prepared.release()
        raise
    return prepared


def _replay(model: PreTrainedModel, experts: tuple[int, int], compute: ComputeConfig) -> RouterReplay | None:
    """Make the model compute with the server's experts; if it cannot, raise only if the user asked for replay."""
    try:
        return RouterReplay.of(model, experts)
    except UnsupportedModelError as error:
        if compute.router_replay:
            raise
        logger.info(f"the trainer's routers choose the experts: {error.message}")
        return None


def _prepare(prepared: PreparedModel, compute: ComputeConfig, max_model_len: int | None, *, is_replayed: bool) -> None:
    """Choose attention and layers, and check each choice.

    Without replay, the model computes with given experts only during these checks, so that all of them use the same.
    """
    model = prepared.model
    if not is_replayed:
        prepared.replay = RouterReplay.if_known(model)
    with routing.refusing_misfits(model, "train another model, of those in docs/families.md, or report this one"):
        check_head(model, None if prepared.parallel is None else prepared.parallel.head_words)
        expected = Expected.of(prepared, max_model_len)
    compiles = compute.compiles_on(model.device.type)
    if model.device.type == "cpu" and not compiles and layers.bf16_is_emulated():
        layers.widen(model)  # not for compiled layers: each widened layer would be compiled separately
    if compute.liger_kernel:
        layers.use_liger_kernel(model)
    recurrence.keep_apart(model)
    _choose_attention(prepared, expected, compute.attention)
    if compiles:
        is_recomputed = bool(compute.gradient_checkpointing or compute.activation_offload)
        _compile(prepared, expected, recomputed=is_recomputed)
    prepared.shares_prompts = _may_share_prompts(prepared, expected)
    if compute.gradient_checkpointing:
        _recompute(prepared)
        prepared.kept = layers.INPUTS
    if not is_replayed and prepared.replay is not None and not prepared.is_compiled:
        prepared.replay.release()  # replay takes time in eager mode, but none in compiled code
        prepared.replay = None


def recompute_activations(prepared: PreparedModel, kept: layers.Kept = layers.INPUTS) -> None:
    """Make each layer keep only what `kept` says for the backward pass, and recompute the rest there.

    The compiler does the recomputing if a layer is a single graph without random numbers; it would draw new numbers.
    All other layers run uncompiled and are called again: with several graphs, the second call might use other graphs
    than the first.
    """
    prepared.kept = kept
    if prepared.is_compiled:
        layers.compile_layers(prepared.model, recomputed=True, keeps_attention=kept.attention)
    _recompute(prepared, keeps_attention=kept.attention)


def _choose_attention(prepared: PreparedModel, expected: Expected, kernel: str) -> None:
    """Use Bridge's attention if it is correct, otherwise the model's own, which builds a mask from the positions."""
    model = prepared.model
    kernel_note = kernels.choose(model, kernel)
    own = attention.chosen(model)
    try:
        attention.choose(model, attention.NAME)
        expected.check(prepared)
    except UnsupportedModelError as error:
        if prepared.slices is not None:
            raise
        attention.choose(model, own)
        expected.check(prepared)
        logger.info(f"attention: the model's own ({own}), with a mask of tokens x tokens: {error.message}")
    else:
        if attention.chosen(model) != attention.NAME:
            logger.info(f"attention: {type(model).__name__} supports only its own, with a mask of tokens x tokens")
        elif model.device.type == "cuda":
            logger.info(kernel_note)


def _may_share_prompts(prepared: PreparedModel, expected: Expected) -> bool:
    if attention.chosen(prepared.model) != attention.NAME:
        return False
    try:
        expected.check(prepared, share_prompts=True)
    except UnsupportedModelError as error:
        logger.info(f"prompts are not shared: {error.message}")
        return False
    return True


def _compile(prepared: PreparedModel, expected: Expected, *, recomputed: bool) -> None:
    """Compile the layers; if torch cannot compile them, or if the result is wrong, leave them uncompiled.

    The backward pass is compiled here, too, unless activations are recomputed or offloaded: then `_recompute` does it.
    """
    model = prepared.model
    prepared.hooks.append(layers.let_inputs_need_gradients(model))
    layers.compile_layers(model, recomputed=recomputed)
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            expected.check(prepared)
            if not recomputed:
                _run_all_forms(prepared)
    except (*COMPILE_ERRORS, UnsupportedModelError) as error:
        layers.uncompile_layers(model)
        logger.info(f"layers are not compiled: {' '.join(str(error).strip().splitlines()[:2])}")
    else:
        torch._dynamo.config.suppress_errors = True  # forms that fail to compile later run eagerly, with a warning


def _recompute(prepared: PreparedModel, *, keeps_attention: bool = False) -> None:
    """Recompute in the compiled layers if they can, otherwise with transformers' checkpointing."""
    if prepared.is_compiled:
        reason = _against_recomputing(prepared)
        if reason is None:
            return
        layers.uncompile_layers(prepared.model)
        logger.info(f"layers are not compiled: they are recomputed, and {reason}")
    layers.call_again(prepared.model, keeps_attention=keeps_attention)
    prepared.hooks += getattr(prepared.model, "_require_grads_hooks", [])  # transformers' own, on the embeddings


def _against_recomputing(prepared: PreparedModel) -> str | None:
    """Compile the layers, and return why the compiled code cannot recompute activations; None: it can."""
    device = prepared.model.device
    num_breaks = _num_breaks()
    random_state = _random_state(device)
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            _run_all_forms(prepared)
    except COMPILE_ERRORS as error:
        return f"torch cannot compile that: {' '.join(str(error).strip().splitlines()[:2])}"
    if _num_breaks() > num_breaks:
        return "torch splits a layer into several graphs"
    return None if torch.equal(_random_state(device), random_state) else "they draw random numbers"


def _num_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _run_all_forms(prepared: PreparedModel) -> None:
    """Run forward and backward in every form that a run needs: several sequences, different lengths, shared prompts.

    It leaves no gradient behind, and calls no gradient hook.
    """
    model = prepared.model
    tokens_T = packing_proof.example_tokens(model)
    trained = layers.first_trained(model)
    lengths = packing_proof.LENGTHS
    forms: list[Callable[[], Tensor]] = [
        lambda: packing_proof.packed(prepared, tokens_T, lengths),
        lambda: packing_proof.packed(prepared, tokens_T[lengths[0] :], lengths[1:]),
    ]
    if attention.chosen(model) == attention.NAME:
        forms.append(lambda: packing_proof.packed_sharing(prepared, tokens_T))
    for compute_hidden in forms if trained else ():
        torch.autograd.grad(compute_hidden().float().sum(), trained)
