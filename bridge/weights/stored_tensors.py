"""The names, types and shapes in a safetensors file, compared with the expected ones; no tensor is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bridge.errors import UsageError

_DTYPE_CODES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


class Stored(NamedTuple):
    """Type, as safetensors names it, and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def headers(path: Path) -> dict[str, Stored]:
    """Return what a file stores, by name, and check its length.

    Raises:
        UsageError: it is missing or not a whole safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
            return {name: Stored(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"{path} cannot be read: {' '.join(str(error).split())}", remedy="name a complete folder"
        ) from error


def describe(tensor: Tensor) -> Stored:
    """Return what `headers` reports of `tensor` once it is written."""
    return Stored(_DTYPE_CODES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


def refuse_misfits(name: str, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Compare descriptions by name; errors call the whole `name`.

    Raises:
        UsageError: some differ or have no partner; the message names up to three of them.
    """
    odd = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    if odd:
        faults = [
            f"{key} is {found.get(key, 'absent')}, expected {expected.get(key, 'none of that name')}" for key in odd[:3]
        ]
        more = f"; and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise UsageError(
            f"{name} does not fit the model: {'; '.join(faults)}{more}",
            remedy="name what was saved from this very model, in its own dtype",
        )
