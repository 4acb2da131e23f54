"""A saved adapter compared with the slots of a server; no matrix is read."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from bridge.errors import UsageError
from bridge.server.manifest import Shard
from bridge.weights import layout
from bridge.weights.layout import Shape
from bridge.weights.stored_tensors import headers

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_MATRIX = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_NOT_PLAIN = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")
"""What PEFT may add to plain LoRA, and vLLM or the slots' layout leave out; false or empty if unused."""


def check(folder: Path, shard: Shard) -> None:
    """Check that each matrix in `folder` has its place in the slots of `shard`, of any rank of a server.

    Raises:
        UsageError: it cannot be read, is not plain LoRA, or does not fit; the message names up to three reasons.
    """
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_text())
        extras = [f"{name} {config[name]}" for name in _NOT_PLAIN if config.get(name)]
    except (OSError, ValueError, AttributeError) as error:  # the last: it holds no object
        raise UsageError(f"{path} cannot be read: {error}", remedy="name a complete adapter") from error
    shapes = {name: part.shape for name, part in headers(folder / WEIGHTS_NAME).items()}
    faults = [*extras, *_misfits(shapes, shard)] or ([] if shapes else ["it has no matrices"])
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UsageError(
            f"the adapter {folder} does not fit the server's slots: {'; '.join(faults[:3])}{more}",
            remedy="name an adapter that was trained beside this server, such as SAVE_PATH/adapter_step_N",
        )


def _misfits(shapes: Mapping[str, Shape], shard: Shard) -> Iterator[str]:
    for name, shape in sorted(shapes.items()):
        matrix = _MATRIX.fullmatch(name)
        slot = shard.lora_slots.get(matrix["module"]) if matrix else None
        if matrix is None or slot is None:
            yield f"there is no slot for {name}"
            continue
        is_a = matrix["side"] == "A"  # a slot is [adapters, 1, *matrix]; an adapter may have a lower rank
        most = slot.lora_a.shape[2]
        outputs, inputs = layout.cut_of(shard.param_mappings[f"{matrix['module']}.weight"]).shape
        room, rank, width = ((most, inputs), 0, 1) if is_a else ((outputs, most), 1, 0)
        if len(shape) != 2 or shape[rank] > room[rank] or shape[width] != room[width]:
            yield f"{name} is {shape}, its slot {room}"
