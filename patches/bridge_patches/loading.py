"""Watch vLLM load a model: where in its parameters each weight goes, and whether it is still there afterward.

Where it goes: vLLM's own `load_weights` receives the model's parameters under their names in the files, but without
values, and its copies are recorded instead of executed (`bridge/weights/copy_recorder.py`). Whatever vLLM fuses,
stacks, pads, renames or ties is learned from the code that does it; there is no table per model family. A buffer that a
weight is loaded into, such as Gemma 4's `layer_scalar`, becomes a parameter of vLLM's model, and is exported like one.

Symptom: updates of some weights have no effect on what is generated.
Cause: after loading, vLLM rewrites weights for a kernel, or derives other tensors that the kernel reads: packed or
shuffled experts, the absorbed projections of latent attention.
What is done: each parameter is digested when its weights are loaded, and again after vLLM has processed them; tensors
that appear in between are also detected. A model with either is refused, with the names.

A model whose configuration ties its weights may still have a head in its files: vLLM loads both, and ties them if they
are equal (since 0.32). Such a model is shared like any tied one; a head with different values is refused.
Seen in vLLM 0.26 to 0.33, `vllm/model_executor/model_loader/base_loader.py`. Draft models are not watched.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.errors import BridgeError, UnsupportedModelError, first_few, own_head, with_class
from bridge.server.manifest import View
from bridge.weights import skeleton
from bridge.weights.copy_recorder import CopyRecorder
from bridge.weights.layout import OTHER_MODES, Shape, join
from bridge.weights.model_folder import first_names, saved_form, state, stored_buffers
from bridge.weights.rank_parts import digest
from bridge_patches import quantized, routed_experts, wrap

PINS = """
vllm.model_executor.model_loader.base_loader
    wrap BaseModelLoader.load_model(vllm_config, model_config, prefix)
    wrap BaseModelLoader.load_weights(model, model_config)  # the model already has its parameters, without values
vllm.model_executor.models.llama: call LlamaForCausalLM.load_weights(weights)  # as in every family
vllm.model_executor.layers.vocab_parallel_embedding
    VocabParallelEmbedding: org_vocab_size, num_embeddings_per_partition, shard_indices
    VocabParallelEmbeddingShardIndices: org_vocab_start_index, org_vocab_end_index, num_org_elements
vllm.lora.layers.base_linear: BaseLinearLayerWithLoRA: base_layer
# The trainer adopts the frequencies that it chooses (`bridge/weights/rope.py`).
vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope
    Phi3LongRoPEScaledRotaryEmbedding: use_long_rope, short_mscale, long_mscale
"""
WRAPPED = "base_layer"
"""vLLM's name for the layer inside a LoRA layer."""
LOADING_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""Exceptions of a `load_weights` that reads a weight's value, or finds no parameter for it."""


@dataclass
class Record:
    """How one model was loaded."""

    expected: dict[str, Shape] = field(default_factory=dict)
    """Hugging Face parameter -> its shape."""
    views: dict[str, View] = field(default_factory=dict)
    """Hugging Face parameter -> its view, which names vLLM's parameters as without LoRA."""
    tied: frozenset[str] = frozenset()
    """Hugging Face parameters to which the configuration ties others."""
    refusal: BridgeError | None = None
    """Why the model cannot be shared; None if it can."""

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Keep the first refusal until the weights are exported, since vLLM itself works without exporting them."""
        try:
            yield
        except BridgeError as error:
            self.refusal = self.refusal or error


RECORDS: WeakKeyDictionary[nn.Module, Record] = WeakKeyDictionary()
"""The record of every model that this process has loaded."""


def patch() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @wrap(BaseModelLoader, "load_model")
    def load_model(
        original: Callable[..., nn.Module], loader: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any
    ) -> nn.Module:
        load: Callable[[], nn.Module] = partial(original, loader, vllm_config, model_config, *args, **kwargs)
        if model_config is not vllm_config.model_config:  # a draft model
            return load()
        model = watched(load, loader, model_config)
        routed_experts.watch(model, vllm_config)
        return model


def record_of(model: nn.Module) -> Record:
    """Return the record of `model`; UnsupportedModelError if it cannot be shared."""
    record = RECORDS.get(model)
    if record is None:
        raise UnsupportedModelError(
            "vLLM loaded the weights with a loader that Bridge cannot watch", hint="start without --load-format"
        )
    if record.refusal is not None:
        raise record.refusal
    return record


def views(model: Any, empty: PreTrainedModel) -> dict[str, View]:
    """Return where each tensor in the files of `empty`, transformers' model without values, goes in vLLM's `model`.

    UnsupportedModelError if vLLM does not copy a parameter unchanged into a single place.
    """
    sources = {name: tensor.detach() for name, tensor in state(empty).items()}
    saved = saved_form(empty, sources)
    recorder = CopyRecorder(sources, state(model))
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(saved.items()))
    except BridgeError:
        raise
    except LOADING_ERRORS as error:
        raise UnsupportedModelError(
            f"vLLM's {type(model).__name__} does more than copy weights when it loads: {with_class(error)}",
            hint=OTHER_MODES,
        ) from error
    copies = recorder.copies(state(model))
    return {name: join(name, tuple(sources[name].shape), parts) for name, parts in copies.items()}


def _loaded_buffers_to_parameters(model: nn.Module, views: Mapping[str, View]) -> None:
    """Replace each buffer that gets a loaded weight with a parameter, so that it is exported like one."""
    loaded = {view.parameter for view in views.values()}
    for name, buffer in stored_buffers(model).items():
        if name in loaded:
            module, _, leaf = name.rpartition(".")
            owner = model.get_submodule(module)
            delattr(owner, leaf)
            owner.register_parameter(leaf, nn.Parameter(buffer, requires_grad=False))


def padding(model: nn.Module) -> dict[str, int]:
    """Return, for each padded vocabulary, the number of elements at its end that belong to no token."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, VocabParallelEmbedding):
            sizes[name] = (parameter.shape[0] - int(layer.shard_indices.num_org_elements)) * parameter[0].numel()
    return {name: size for name, size in sizes.items() if size}


def plain_names(model: nn.Module) -> dict[str, str]:
    """Map the name that each parameter would have without LoRA to its actual name."""
    names = quantized.parameters(model)
    return {".".join(part for part in name.split(".") if part != WRAPPED): name for name in names}


def watched(load: Callable[[], nn.Module], loader: Any, config: Any) -> nn.Module:
    """Return the model that `load` creates with `loader`, and store its record."""
    record = Record()
    digests: dict[str, str] = {}
    known: dict[int, ReferenceType[Tensor]] = {}
    empty: list[PreTrainedModel] = []
    """Transformers' model without values, until its parameters have been traced."""
    with record.refusing():  # built first, because vLLM may change transformers' classes
        empty.append(skeleton.build(config.model, config.dtype))
        record.expected = skeleton.shapes(empty[0])
        record.tied = frozenset(first for name, first in first_names(empty[0]).items() if name != first)

    def load_weights(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        with record.refusing():
            record.views = views(model, empty.pop()) if empty else record.views
            _loaded_buffers_to_parameters(model, record.views)
        original(model, *args, **kwargs)
        digests.update(_digests(model))
        known.update((id(tensor), ref(tensor)) for _, tensor in _tensors(model))

    wrap(loader, "load_weights")(load_weights)
    try:
        model = load()
    finally:
        del loader.load_weights
    weights = quantized.weights_of(model)
    digests_now = _digests(model)
    digests_now |= {name: digests_now[first] for name, first in first_names(model).items() if first in digests_now}
    rewritten = sorted(name for name, before in digests.items() if digests_now.get(name) != before)
    new = {name for name, tensor in _tensors(model) if known.get(id(tensor), lambda: None)() is not tensor}
    with record.refusing():
        _refuse(rewritten, "rewritten by vLLM for one of its kernels")
        _refuse(
            sorted(new - digests.keys() - quantized.names_of_scales(weights)),
            "derived by vLLM from weights, so it would not follow an update",
        )
        quantized.refuse_other_layouts(weights)
        _refuse_own_head(model, record)
    RECORDS[model] = record
    return model


def _digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(parameter) for name, parameter in quantized.parameters(model).items()}


def _refuse(names: list[str], why: str) -> None:
    if names:
        raise UnsupportedModelError(f"{first_few(names, separator=', ')}: {why}", hint=OTHER_MODES)


def _refuse_own_head(model: nn.Module, record: Record) -> None:
    """Refuse a head with its own values in a model whose configuration ties it: some loaders drop these values."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    embeddings = {record.views[name].parameter for name in record.tied if name in record.views}
    unowned = shapes.keys() - {view.parameter for view in record.views.values()}
    for embedding in embeddings & shapes.keys():
        if head := next((name for name in sorted(unowned) if shapes[name] == shapes[embedding]), None):
            raise own_head(head, embedding)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each floating-point tensor of a module, parameter or not, except single numbers, which are scales."""
    for prefix, module in model.named_modules():
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                    yield f"{prefix}.{name}", tensor
