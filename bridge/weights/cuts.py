"""From the copies that a loader makes of a parameter, part by part, to the one view that all of it is.

Pure: it knows numbers alone, neither tensors nor vLLM.

Not covered: seeing the copies (`copy_recorder.py`), and what is left out on the server's side (`layout.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from bridge.errors import UnsupportedModelError
from bridge.server.manifest import View
from bridge.weights.layout import OTHER_MODES, Shape, contiguous_stride


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A part of a model's parameter that was copied as it is into one of the server's; all numbers are elements."""

    start: int
    """First element, counted in the model's parameter."""
    shape: Shape
    """Shape of the part."""
    stride: Shape
    """Its strides in the model's parameter."""
    parameter: str
    """The server's parameter."""
    offset: int
    """First element, counted in the server's parameter."""
    server_stride: Shape
    """Its strides in the server's parameter."""


@dataclass(frozen=True)
class _Box:
    """A part as a box of the parameter's own indices: where it starts, how long it is, and the server's strides."""

    low: Shape
    sizes: Shape
    offset: int
    steps: tuple[int | None, ...]
    """The server's stride along each axis; None along those on which the box has one index."""


def join(name: str, shape: Shape, copies: Sequence[Copy]) -> View:
    """Return the view that the copies of the parameter `name` add up to: of all of it, or of one rank's block of it.

    Raises:
        UnsupportedModelError: they do not add up to one view.
    """
    parameters = {copy.parameter for copy in copies}
    if len(parameters) != 1:
        raise _refusal(name, f"vLLM loads it into {' and '.join(sorted(parameters)) or 'none of its parameters'}")
    boxes = [_box(name, shape, copy) for copy in copies]
    low = tuple(min(axis) for axis in zip(*(box.low for box in boxes), strict=True))
    high = tuple(max(axis) for axis in zip(*(_high(box) for box in boxes), strict=True))
    first = next((box for box in boxes if box.low == low), None)
    if first is None or not _fill(boxes, low, high):
        raise _refusal(name, f"vLLM's {parameters.pop()} takes some of its elements and leaves others out")
    sizes = tuple(end - start for start, end in zip(low, high, strict=True))
    stride = _stride(name, boxes, first, sizes)
    return View(parameter=parameters.pop(), offset=first.offset, shape=sizes, stride=stride)


def _box(name: str, shape: Shape, copy: Copy) -> _Box:
    """Return the part as a box; a part that runs on from one row into the next is none."""
    own = contiguous_stride(shape)
    low, rest = [], copy.start
    for step in own:
        low.append(rest // step)
        rest %= step
    sizes, steps = [1] * len(shape), [None] * len(shape) if shape else []
    for size, step, server_step in zip(copy.shape, copy.stride, copy.server_stride, strict=True):
        if size == 1:
            continue
        axis = next((axis for axis, whole in enumerate(own) if whole == step and shape[axis] > 1), None)
        if axis is None or low[axis] + size > shape[axis] or steps[axis] is not None:
            raise _refusal(name, f"vLLM cuts it for its {copy.parameter} in a way that is no block of it")
        sizes[axis], steps[axis] = size, server_step  # type: ignore[call-overload]
    return _Box(tuple(low), tuple(sizes), copy.offset, tuple(steps))


def _high(box: _Box) -> Shape:
    return tuple(start + size for start, size in zip(box.low, box.sizes, strict=True))


def _fill(boxes: Sequence[_Box], low: Shape, high: Shape) -> bool:
    """Tell whether the boxes leave no index between `low` and `high` out; cut at each edge, every cell is in one."""
    edges = [
        sorted({start, end, *(box.low[axis] for box in boxes), *(_high(box)[axis] for box in boxes)})
        for axis, (start, end) in enumerate(zip(low, high, strict=True))
    ]
    places = [{edge: place for place, edge in enumerate(axis)} for axis in edges]
    cells = math.prod(len(axis) - 1 for axis in edges)
    return len({cell for box in boxes for cell in _cells(box, places)}) == cells


def _cells(box: _Box, places: Sequence[dict[int, int]]) -> Iterator[Shape]:
    ends = _high(box)
    return product(*(range(axis[box.low[i]], axis[ends[i]]) for i, axis in enumerate(places)))


def _stride(name: str, boxes: Sequence[_Box], first: _Box, sizes: Shape) -> Shape:
    """Return the one stride along each axis by which every box lies where it does."""
    stride = list(contiguous_stride(sizes))
    for axis, size in enumerate(sizes):
        if size > 1:
            stride[axis] = _step(boxes, axis)
    for box in boxes:
        away = sum(step * (here - start) for step, here, start in zip(stride, box.low, first.low, strict=True))
        agrees = all(step in {None, whole} for step, whole in zip(box.steps, stride, strict=True))
        if not agrees or box.offset != first.offset + away:
            raise _refusal(name, "vLLM puts its parts where no one stride leads")
    return tuple(stride)


def _step(boxes: Sequence[_Box], axis: int) -> int:
    """Return the server's stride along `axis`: within a box, else between two that are neighbours along it."""
    within = next((box.steps[axis] for box in boxes if box.steps[axis] is not None), None)
    if within is not None:
        return within
    ordered = sorted(boxes, key=lambda box: (*box.low[:axis], *box.low[axis + 1 :], box.low[axis]))
    for one, other in pairwise(ordered):
        distance = other.low[axis] - one.low[axis]
        if distance > 0 and (*one.low[:axis], *one.low[axis + 1 :]) == (*other.low[:axis], *other.low[axis + 1 :]):
            return (other.offset - one.offset) // distance  # where it does not divide, the check of every box fails
    return 0


def _refusal(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name}: {reason}", remedy=OTHER_MODES)
