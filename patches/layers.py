"""Read off vLLM's own layer objects how each of its parameters is cut into Hugging Face parameters.

Names come from vLLM's own `WeightsMapper` and `packed_modules_mapping`, sizes from the fused layers;
there is no table per model family. With LoRA on, vLLM wraps its layers, and a parameter is called
`...base_layer.weight`: such a name without that part is the plain one, which vLLM's mappings know.

Not covered: checking the result (`bridge.weights.layout.check_coverage`), tensor-parallel cuts of
layers that vLLM shards by column.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from bridge.errors import UnsupportedModelError
from bridge.weights.layout import OTHER_MODES, rows
from bridge.weights.shard import View

Place = tuple[str, Any]
"""A vLLM parameter by its plain name, and which shard of it (None: all of it)."""
WRAPPED = "base_layer"
"""What vLLM's LoRA layers call the layer that they wrap (vLLM 0.26 to 0.33)."""


def places(model: nn.Module, names: Iterable[str]) -> dict[str, Place]:
    """Return which shard of which of vLLM's parameters each Hugging Face parameter of `names` is.

    Raises:
        UnsupportedModelError: a parameter that vLLM's own mappings do not lead to.
    """
    held = _plain_names(model).keys()
    return {name: _place(model, held, name) for name in names}


def views(model: nn.Module, found: Mapping[str, Place]) -> dict[str, View]:
    """Return where in vLLM's `model` each of the `places` lies.

    Raises:
        UnsupportedModelError: a layer that is cut in an unknown way.
    """
    real = _plain_names(model)
    parameters = dict(model.named_parameters())
    cuts: dict[str, View] = {}
    for name, (plain, shard) in found.items():
        parameter = real[plain]
        layer = model.get_submodule(parameter.rpartition(".")[0])
        start, count = _rows(layer, shard, parameters[parameter].shape[0])
        cuts[name] = rows(parameter, tuple(parameters[parameter].shape), start, count)
    return cuts


def padding(model: nn.Module) -> dict[str, int]:
    """Return, per padded vocabulary, how many elements at its end stand for no token."""
    tails = {}
    for name, parameter in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, VocabParallelEmbedding):
            spare = parameter.shape[0] - _vocabulary_rows(layer)
            if spare:
                tails[name] = spare * parameter[0].numel()
    return tails


def _plain_names(model: nn.Module) -> dict[str, str]:
    """Return the name of each parameter as it would be without LoRA -> its name."""
    names = (name for name, _ in model.named_parameters())
    return {".".join(part for part in name.split(".") if part != WRAPPED): name for name in names}


def _place(model: nn.Module, held: Container[str], name: str) -> Place:
    mapped, shard = _mapped(model, name)
    if mapped in held:
        return mapped, shard
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    prefix, _, leaf = mapped.rpartition(".")
    parent, _, module = prefix.rpartition(".")
    for fused, parts in packed.items():
        candidate = f"{parent}.{fused}.{leaf}" if parent else f"{fused}.{leaf}"
        if module in parts and candidate in held:
            return candidate, parts.index(module)
    raise UnsupportedModelError(
        f"{name}: vLLM's {type(model).__name__} has no parameter for it (its own mapping leads to {mapped})",
        remedy=OTHER_MODES,
    )


def _mapped(model: nn.Module, name: str) -> Place:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name, None
    place: Place | None = mapper._map_name_with_shard(name)
    if place is None:
        raise UnsupportedModelError(f"{name}: vLLM's mapping drops it", remedy=OTHER_MODES)
    return place


def _rows(layer: nn.Module, shard: Any, total: int) -> tuple[int, int]:
    """Return the first row and the number of rows of `shard` in `layer`'s parameters."""
    if isinstance(layer, VocabParallelEmbedding):
        return 0, _vocabulary_rows(layer)
    if shard is None:
        return 0, total
    if isinstance(layer, QKVParallelLinear) and isinstance(shard, str | int):
        part = shard if isinstance(shard, str) else "qkv"[shard]
        return layer._get_shard_offset_mapping(part), layer._get_shard_size_mapping(part)
    if isinstance(layer, MergedColumnParallelLinear) and isinstance(shard, int):
        sizes = [size // layer.tp_size for size in layer.output_sizes]
        return sum(sizes[:shard]), sizes[shard]
    raise UnsupportedModelError(
        f"shard {shard!r} of vLLM's {type(layer).__name__} is cut in a way that Bridge does not know",
        remedy=OTHER_MODES,
    )


def _vocabulary_rows(layer: VocabParallelEmbedding) -> int:
    return int(layer.shard_indices.num_org_elements)
