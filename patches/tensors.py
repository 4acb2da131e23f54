"""Requests for single tensors: what does not fit is refused before a worker sees it; and who holds no numbers is named.

Not covered: the routes (`routes.py`), reading and writing (`worker.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from fastapi import HTTPException

from bridge.server.manifest import Manifest
from bridge.server.protocol import Element, Finiteness

UNKNOWN, UNFIT = 404, 422


def check_elements(elements: Sequence[Element], exported: Manifest) -> None:
    """Refuse elements that the model does not have.

    Raises:
        HTTPException: 404 for a name, 422 for an index.
    """
    handles = exported.ipc_handles
    unknown = [element.parameter for element in elements if element.parameter not in handles]
    if unknown:
        raise HTTPException(
            UNKNOWN,
            f"{len(unknown)} of {len(elements)} names are no parameters of {exported.model}, the first:"
            f" {unknown[0][:100]!r}; expected vLLM's own names, as in the manifest's ipc_handles",
        )
    for element in elements:
        size = torch.Size(handles[element.parameter].shape).numel()
        if element.index >= size:
            raise HTTPException(UNFIT, f"{element.parameter} has {size} elements, and not one of index {element.index}")


def check_values(elements: Sequence[Element], values: Sequence[float], exported: Manifest) -> None:
    """Refuse values that the parameters' types do not hold.

    Raises:
        HTTPException: 422.
    """
    for element, value in zip(elements, values, strict=True):
        dtype: torch.dtype = getattr(torch, exported.ipc_handles[element.parameter].dtype)
        if not abs(value) <= torch.finfo(dtype).max:  # NaN is not, either
            raise HTTPException(UNFIT, f"{element.parameter} is {dtype}, and {value} is no finite number of that type")


async def finiteness(engine: Any) -> Finiteness:
    """Look for NaN and infinity in every rank's weights and adapter slots."""
    ranks = await engine.collective_rpc("bridge_finiteness")
    names = [name for _, names in ranks for name in names]
    return Finiteness(num_tensors=ranks[0][0], not_finite=tuple(dict.fromkeys(names)))
