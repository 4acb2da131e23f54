"""Write safetensors files in shards, and check stored names, dtypes and shapes against a model or a server's slots.

Not covered: reading tensors.
"""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bridge.core import json_lines
from bridge.core.paths import ADAPTER_CONFIG
from bridge.errors import UsageError, first_few
from bridge.server.manifest import Shard
from bridge.weights.layout import Shape, cut_of

_DTYPE_CODES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
MAX_SHARD_BYTES = 5 * 10**9
"""Size of the largest file, and of the copy in host memory while it is written; a larger tensor gets its own file."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MATRIX = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_EXPERT = re.compile(r"\.experts\.\d+\.")
EXPERTS = "experts"
"""Name of the module of a layer's routed experts in transformers, vLLM and `--lora-target-modules`."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The projections of an expert that get an adapter, in vLLM's order."""
STACKED = f".{EXPERTS}.lora."
"""Part of the names of the experts' stacked LoRA matrices; in saved names, each expert's number replaces `lora`."""
_NOT_PLAIN = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "layer_replication",
    "alora_invocation_tokens", "trainable_token_indices", "fan_in_fan_out", "use_qalora", "use_bdlora",
    "arrow_config", "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip
"""PEFT's extensions of LoRA, with which an adapter's output is not alpha / r B A x; false or empty if unused."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which PEFT subtracts the new adapter from the base's own weights."""


class Stored(NamedTuple):
    """Dtype (safetensors' name for it) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def headers(path: Path) -> dict[str, Stored]:
    """Return the dtype and shape of each tensor in a file by name; safetensors also checks the file's length."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a mapping
            return {name: Stored(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"{path} cannot be read: {' '.join(str(error).split())}", hint="name a complete folder"
        ) from error


def write_shards(
    folder: Path,
    name: str,
    tensors: Iterable[tuple[str, Tensor]],
    copied: Callable[[Tensor], Tensor],
    *,
    metadata: dict[str, str] | None = None,
) -> dict[str, dict[str, int]]:
    """Write tensors to files `name`-00001-of-00002.safetensors etc.; return the byte size of each tensor, by file.

    A file has at most `MAX_SHARD_BYTES`, or a single tensor. `copied` is called on each tensor just before it is
    written, and returns the tensor to write.
    """
    files = list[dict[str, int]]()
    for shard in _shards(tensors, copied):
        save_file(shard, folder / f"{len(files)}.safetensors", metadata)
        files.append({key: tensor.nbytes for key, tensor in shard.items()})
        shard.clear()
    names = [f"{name}-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for number, file_name in enumerate(names):
        (folder / f"{number}.safetensors").rename(folder / file_name)
    return dict(zip(names, files, strict=True))


def _shards(tensors: Iterable[tuple[str, Tensor]], copied: Callable[[Tensor], Tensor]) -> Iterator[dict[str, Tensor]]:
    shard = dict[str, Tensor]()
    num_bytes = 0
    for key, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard = {}
            num_bytes = 0
        shard[key] = copied(tensor)
        num_bytes += tensor.nbytes
    if shard:
        yield shard


def stored_names(name: str, shape: Shape) -> list[str]:
    """Return the names under which an adapter's matrix is saved: its own, or one per expert."""
    return [name.replace(STACKED, f".{EXPERTS}.{number}.") for number in range(math.prod(shape[:-2]))]


def describe(tensor: Tensor) -> Stored:
    """Return what `headers` reports for `tensor` once it is written."""
    return Stored(_DTYPE_CODES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


def refuse_misfits(name: str, stored: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise UsageError if the descriptions of any tensor differ; `name` is the folder or file in the error message."""
    odd = sorted(key for key in stored.keys() | expected.keys() if stored.get(key) != expected.get(key))
    if odd:
        faults = [
            f"{key} is {stored.get(key, 'absent')}, expected {expected.get(key, 'no such tensor')}" for key in odd
        ]
        raise UsageError(
            f"{name} does not fit the model: {first_few(faults)}",
            hint="name a folder that was saved from this model in the same dtype",
        )


def not_plain(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of a saved adapter that make it more than plain LoRA, each with its value."""
    names = [name for name in _NOT_PLAIN if settings.get(name)]
    names += ["bias"] if settings.get("bias") not in (None, "none") else []
    names += ["init_lora_weights"] if str(settings.get("init_lora_weights")).startswith(_CHANGE_BASE) else []
    return [f"{name} {settings[name]}" for name in names]


def check_adapter(folder: Path, shard: Shard) -> None:
    """Check that each matrix in `folder` fits into a LoRA slot of `shard`, the shard of any server rank."""
    path = folder / ADAPTER_CONFIG
    try:
        config = json_lines.parsed(path.read_text())
        extras = not_plain(config)
        named = set(config.get("target_modules") or ())
    except (OSError, ValueError, AttributeError, TypeError) as error:  # the last two: values of the wrong type
        raise UsageError(f"{path} cannot be read: {error}", hint="name a complete adapter") from error
    shapes = {name: part.shape for name, part in headers(folder / ADAPTER_WEIGHTS).items()}
    faults = [*extras, *_misfits(shapes, shard)] or ([] if shapes else ["it has no matrices"])
    faults += [f"{name} is absent" for name in _of_experts(shard, named) if name not in shapes]
    if faults:
        raise UsageError(
            f"the adapter {folder} does not fit the server's slots: {first_few(faults)}",
            hint="name an adapter that was trained with this server, such as SAVE_PATH/adapter_step_N",
        )


def _of_experts(shard: Shard, projections: Container[str]) -> list[str]:
    """Return the saved names of the LoRA matrices of these projections, for all routed experts."""
    names: list[str] = []
    for name, slot in sorted(shard.lora_slots.items()):
        if STACKED in name and name.rpartition(".")[2] in projections:
            for side in "AB":
                names += stored_names(f"base_model.model.{name}.lora_{side}.weight", slot.lora_a.shape[1:])
    return names


def _misfits(shapes: Mapping[str, Shape], shard: Shard) -> Iterator[str]:
    for name, shape in sorted(shapes.items()):
        matrix = _MATRIX.fullmatch(name)
        module = _EXPERT.sub(STACKED, matrix["module"]) if matrix else ""
        slot = shard.lora_slots.get(module)
        if matrix is None or slot is None:
            yield f"there is no slot for {name}"
            continue
        is_a = matrix["side"] == "A"  # a slot: [adapters, 1 or experts, *matrix]; an adapter's rank may be lower
        most = slot.lora_a.shape[2]
        held = (slot.lora_b.shape[2], slot.lora_a.shape[3])
        view = shard.param_mappings.get(f"{module}.weight")  # None for experts, whose slots are not split
        outputs, inputs = held if view is None else cut_of(view).shape
        room, rank, width = ((most, inputs), 0, 1) if is_a else ((outputs, most), 1, 0)
        if len(shape) != 2 or shape[rank] > room[rank] or shape[width] != room[width]:
            yield f"{name} has shape {shape}, its slot {room}"
