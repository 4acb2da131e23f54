"""Ask the workers of all ranks (`worker.py`) about their tensors, and return one answer."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from fastapi import HTTPException

from bridge.errors import AttachError
from bridge.server.manifest import Manifest
from bridge.server.protocol import Element, Finiteness

PINS = """
vllm.v1.engine.async_llm: call async AsyncLLM.collective_rpc(method, timeout, args, kwargs)
"""
Answer = TypeVar("Answer")


def agreed(answers: Sequence[Answer], what: str) -> Answer:
    """Return the answer that all ranks give, or raise AttachError that names the first rank that differs."""
    for rank, answer in enumerate(answers):
        if repr(answer) != repr(answers[0]):  # NaN equals NaN here
            raise AttachError(
                f"the ranks disagree about {what}: rank {rank} answers {answer!r:.100}, expected {answers[0]!r:.100}"
                " as from rank 0",
                remedy="restart the server",
            )
    return answers[0]


async def finiteness(engine: Any) -> Finiteness:
    """Look for NaN and infinity in every rank's weights and adapter slots."""
    ranks = await engine.collective_rpc("bridge_finiteness")
    return Finiteness(
        num_tensors=agreed([count for count, _ in ranks], "the number of their tensors"),
        not_finite=tuple(dict.fromkeys(name for _, names in ranks for name in names)),
    )


async def digests(engine: Any, part: int) -> dict[str, str]:
    """Return the digests of one rank's parameters; HTTPException if there is no such rank."""
    each: list[dict[str, str]] = await engine.collective_rpc("bridge_digests")
    if not 0 <= part < len(each):
        raise HTTPException(404, f"this server has {len(each)} ranks, and none of number {part}")
    return each[part]


async def read(engine: Any, elements: Sequence[Element], exported: Manifest) -> tuple[float, ...]:
    """Read single elements; HTTPException if the model does not have them."""
    answers = await engine.collective_rpc("bridge_read", args=(_checked(elements, exported),))
    each = [iter(own) for own in answers]
    return tuple(next(each[element.part]) for element in elements)


async def write(engine: Any, elements: Sequence[Element], values: Sequence[float], exported: Manifest) -> None:
    """Set single elements; HTTPException if the model does not have them, or their types cannot hold the values."""
    documents = _checked(elements, exported)
    for element, value in zip(elements, values, strict=True):
        dtype: torch.dtype = getattr(torch, exported.dtype)
        if not abs(value) <= torch.finfo(dtype).max:  # nor is NaN
            raise HTTPException(422, f"{element.parameter} is {dtype}, and {value} is not a finite number of that type")
    await engine.collective_rpc("bridge_write", args=(documents, list(values)))


def _checked(elements: Sequence[Element], exported: Manifest) -> list[dict[str, Any]]:
    """Return `elements` as workers take them, if the model has them."""
    handles = exported.shard(0).ipc_handles  # all ranks have parameters of the same names
    unknown = [element.parameter for element in elements if element.parameter not in handles]
    if unknown:
        raise HTTPException(
            404,
            f"{len(unknown)} of {len(elements)} names are not parameters of {exported.model}, the first:"
            f" {unknown[0][:100]!r}; expected vLLM's own names, as in the manifest's ipc_handles",
        )
    for element in elements:
        if element.part >= len(exported.shards):
            raise HTTPException(422, f"this server has {len(exported.shards)} ranks, and none of number {element.part}")
        size = math.prod(exported.shard(element.part).ipc_handles[element.parameter].shape)
        if element.index >= size:
            raise HTTPException(422, f"{element.parameter} has {size} elements, so none has index {element.index}")
    return [element.model_dump() for element in elements]
