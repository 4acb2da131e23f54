"""What a file of safetensors says about its tensors, compared with what it has to hold; no tensor is read.

Not covered: writing and reading the tensors themselves (`model_folder.py`, `bridge/run/trainer_state.py`).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bridge.errors import UsageError

_DTYPE_CODES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def headers(path: Path) -> dict[str, str]:
    """Return every tensor's name and description in a file, which has to be as long as it says.

    Raises:
        UsageError: it is missing or no whole file of safetensors.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
            return {name: f"{part.get_dtype()} {tuple(part.get_shape())}" for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"{path} cannot be read: {' '.join(str(error).split())}", remedy="name a folder that is whole"
        ) from error


def describe(tensor: Tensor) -> str:
    """Return what `headers` says of `tensor` once it is written."""
    return f"{_DTYPE_CODES.get(tensor.dtype, tensor.dtype)} {tuple(tensor.shape)}"


def refuse_misfits(what: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Compare descriptions by name.

    Raises:
        UsageError: some differ or have no partner; the message names up to three of them.
    """
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    faults = [
        f"{name} is {found.get(name, 'absent')}, expected {expected.get(name, 'none of that name')}" for name in names
    ]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UsageError(
            f"{what} does not fit the model: {'; '.join(faults[:3])}{more}",
            remedy="name what was saved from this very model, in its own dtype",
        )
