"""An adapter's folder as PEFT writes it, compared with the slots of a server; no matrix is read.

Not covered: writing it and loading it into a model (`adapter.py`), loading it into a slot, which vLLM does.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from bridge.errors import UsageError
from bridge.server.manifest import LoraSlot
from bridge.weights.layout import Shape

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_MATRIX = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_NOT_PLAIN = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")
"""What PEFT may add to plain LoRA, and vLLM or the slots' layout leave out; false or empty where it is not used."""


def check(folder: Path, slots: Mapping[str, LoraSlot]) -> None:
    """Check that each matrix in `folder` has its place in `slots`.

    Raises:
        UsageError: it cannot be read, is no plain LoRA, or does not fit; the message names up to three reasons.
    """
    config, shapes = _config(folder), _shapes(folder)
    extras = [f"{name} {config[name]}" for name in _NOT_PLAIN if config.get(name)]
    faults = [*extras, *_misfits(shapes, slots)] or ([] if shapes else ["it has no matrices"])
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UsageError(
            f"the adapter {folder} does not fit the server's slots: {'; '.join(faults[:3])}{more}",
            remedy="name an adapter that was trained beside this server, such as SAVE_PATH/adapter_step_N",
        )


def _config(folder: Path) -> dict[str, object]:
    path = folder / CONFIG_NAME
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(document, dict):
        raise _unreadable(path, TypeError("it holds no object"))
    return document


def _shapes(folder: Path) -> dict[str, Shape]:
    path = folder / WEIGHTS_NAME
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _misfits(shapes: Mapping[str, Shape], slots: Mapping[str, LoraSlot]) -> Iterator[str]:
    for name, shape in sorted(shapes.items()):
        matrix = _MATRIX.fullmatch(name)
        slot = slots.get(matrix["module"]) if matrix else None
        if matrix is None or slot is None:
            yield f"there is no slot for {name}"
        elif not _fits(shape, slot, matrix["side"]):
            room = (slot.lora_a if matrix["side"] == "A" else slot.lora_b).shape[2:]
            yield f"{name} is {shape}, its slot {room}"


def _fits(shape: Shape, slot: LoraSlot, side: str) -> bool:
    if len(shape) != 2:
        return False
    rank = slot.lora_a.shape[2]
    if side == "A":
        return shape[0] <= rank and shape[1] == slot.lora_a.shape[3]
    return shape[1] <= rank and shape[0] == slot.lora_b.shape[2]


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} cannot be read: {' '.join(str(error).split())}", remedy="name an adapter that is whole")
