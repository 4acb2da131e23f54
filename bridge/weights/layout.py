"""The layout: which view of vLLM's parameters holds which Hugging Face parameter, and a check that none is left out.

This module works on shapes and strides only; it needs neither tensors nor vLLM. The server joins the copies that vLLM's
loader makes of each parameter (`copy_recorder.py`) into one view: of the full parameter, or of the part that one
tensor-parallel rank holds. Server and trainer check each rank with `check_coverage`, and all ranks with `check_parts`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from bridge.errors import UnsupportedModelError, first_few
from bridge.server.manifest import View
from bridge.weights.rank_parts import Cut, Runs, held_by

Shape = tuple[int, ...]
OTHER_MODES = "use --mode lora_only or --mode none, which need no shared full weights"


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A part of a model's parameter that is copied unchanged into a server parameter; all numbers count elements."""

    start: int  # first element, counted in the model's parameter
    shape: Shape
    stride: Shape  # within the model's parameter
    parameter: str  # name of the server's parameter
    offset: int  # of the first element within the server's parameter
    server_stride: Shape  # within the server's parameter


class _Box(NamedTuple):
    """A part of a parameter as a box of its indices, and where the part is in the server's parameter."""

    low: Shape
    high: Shape
    offset: int
    steps: tuple[int | None, ...]  # the server's stride along each axis; None if the box has only one index there


def contiguous_stride(shape: Shape) -> Shape:
    """Return the strides of a row-major tensor of `shape`, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def join(name: str, shape: Shape, copies: Sequence[Copy]) -> View:
    """Return the view that the copies of parameter `name` make up: the full parameter, or one rank's block of it."""
    parameters = {copy.parameter for copy in copies}
    if len(parameters) != 1:
        raise _refusal(name, f"vLLM loads it into {' and '.join(sorted(parameters)) or 'none of its parameters'}")
    boxes = [_box(name, shape, copy) for copy in copies]
    runs = tuple(_merged((box.low[axis], box.high[axis]) for box in boxes) for axis in range(len(shape)))
    boxes = [box._replace(low=_in_part(box.low, runs), high=_in_part(box.high, runs)) for box in boxes]
    sizes = tuple(sum(length for _, length in axis) for axis in runs)
    first = next((box for box in boxes if not any(box.low)), None)
    if first is None or not _fill(boxes, sizes):
        raise _refusal(name, f"vLLM's {parameters.pop()} holds only some of its elements")
    own = contiguous_stride(sizes)
    stride = tuple(_step(boxes, axis) if size > 1 else own[axis] for axis, size in enumerate(sizes))
    for box in boxes:
        away = sum(step * here for step, here in zip(stride, box.low, strict=True))
        agrees = all(step in {None, whole} for step, whole in zip(box.steps, stride, strict=True))
        if not agrees or box.offset != first.offset + away:
            raise _refusal(name, "no single stride describes where vLLM places its parts")
    view = View(parameter=parameters.pop(), offset=first.offset, shape=sizes, stride=stride)
    return view if sizes == shape else view.model_copy(update={"whole": shape, "runs": runs})


def cut_of(view: View) -> Cut:
    """Return which part of its Hugging Face parameter `view` is."""
    return Cut(view.whole, view.runs) if view.runs else Cut.whole(view.shape)


def _merged(spans: Iterable[tuple[int, int]]) -> Runs:
    """Return sorted runs (start, length) for spans (start, end), merging those that touch or overlap."""
    merged: list[list[int]] = []
    for start, end in sorted({*spans}):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return tuple((start, end - start) for start, end in merged)


def _in_part(corner: Shape, runs: Sequence[Runs]) -> Shape:
    """Convert `corner` to indices within the part: along each axis, count the indices before it that are in `runs`."""
    return tuple(
        sum(min(max(index - start, 0), length) for start, length in axis)
        for index, axis in zip(corner, runs, strict=True)
    )


def _box(name: str, shape: Shape, copy: Copy) -> _Box:
    """Return the copied part as a box; raise UnsupportedModelError if it is not one."""
    own = contiguous_stride(shape)
    low = []
    rest = copy.start
    for step in own:
        low.append(rest // step)
        rest %= step
    high = [start + 1 for start in low]
    steps: list[int | None] = [None] * len(shape)
    for size, step, server_step in zip(copy.shape, copy.stride, copy.server_stride, strict=True):
        if size == 1:
            continue
        axis = next((axis for axis, whole in enumerate(own) if whole == step and shape[axis] > 1), None)
        if axis is None or low[axis] + size > shape[axis] or steps[axis] is not None:
            raise _refusal(name, f"the part that vLLM copies into {copy.parameter} is not a block")
        high[axis], steps[axis] = low[axis] + size, server_step
    return _Box(tuple(low), tuple(high), copy.offset, tuple(steps))


def _fill(boxes: Sequence[_Box], sizes: Shape) -> bool:
    """Return whether the boxes cover every index below `sizes`: each cell between their edges must be in a box."""
    edges = [
        sorted({0, size, *(box.low[axis] for box in boxes), *(box.high[axis] for box in boxes)})
        for axis, size in enumerate(sizes)
    ]
    indices = [{edge: index for index, edge in enumerate(axis)} for axis in edges]
    cells = {
        cell
        for box in boxes
        for cell in product(*(range(at[a], at[b]) for at, a, b in zip(indices, box.low, box.high, strict=True)))
    }
    return len(cells) == math.prod(len(axis) - 1 for axis in edges)


def _step(boxes: Sequence[_Box], axis: int) -> int:
    """Return the server's stride along `axis`: within a box, or else between two boxes that are adjacent along it."""
    within = next((box.steps[axis] for box in boxes if box.steps[axis] is not None), None)
    if within is not None:
        return within
    ordered = sorted(((*box.low[:axis], *box.low[axis + 1 :]), box.low[axis], box.offset) for box in boxes)
    for (row, here, offset), (next_row, there, next_offset) in pairwise(ordered):
        if row == next_row and there > here:
            return (next_offset - offset) // (there - here)  # if the division is inexact, the check of every box fails
    return 0


def _refusal(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name}: {reason}", hint=OTHER_MODES)


def check_coverage(
    model_shapes: Mapping[str, Shape],
    server_shapes: Mapping[str, Shape],
    views: Mapping[str, View],
    padding: Mapping[str, int],
) -> None:
    """Check that one rank's views match the model's shapes, and that every server element belongs to one view."""
    faults = [
        *(f"{name}: in the model, but not exported by vLLM" for name in sorted(model_shapes.keys() - views.keys())),
        *(f"{name}: exported by vLLM, but not in the model" for name in sorted(views.keys() - model_shapes.keys())),
        *(
            f"{name}: shape {model_shapes[name]} in the model, {view.shape} in {view.parameter}"
            for name, view in views.items()
            if name in model_shapes and not _is_part(cut_of(view), view.shape, model_shapes[name])
        ),
        *(
            f"{name}: invalid padding of {count} elements"
            for name, count in padding.items()
            if name not in server_shapes or count < 0
        ),
        *_ownership_faults(server_shapes, views, padding),
    ]
    _refuse(faults)


def check_parts(parts: Sequence[Mapping[str, View]]) -> None:
    """Check the views of all ranks: each parameter is split along at most one axis, and each index is on some rank."""
    names = sorted({name for views in parts for name in views})
    _refuse([f"{name}: only on some of vLLM's ranks" for name in names if any(name not in views for views in parts)])
    cuts = ((name, [cut_of(views[name]) for views in parts]) for name in names)
    _refuse([f"{name}: {fault}" for name, cuts_of_parts in cuts if (fault := _fault_of_parts(cuts_of_parts))])


def _fault_of_parts(cuts: Sequence[Cut]) -> str | None:
    """Return why the parts do not make up the full parameter; None if they do."""
    shape = cuts[0].shape
    if any(cut.shape != shape for cut in cuts):
        return "its full shape differs between vLLM's ranks"
    axes = {axis for cut in cuts for axis, size in enumerate(cut.part_shape) if size != shape[axis]}
    if len(axes) > 1:
        return "vLLM splits it along several axes"
    for axis in axes:
        cells = held_by([cut.runs[axis] for cut in cuts])
        if axis > 0 and any(len(parts) > 1 for _, _, parts in cells):
            return f"several of vLLM's ranks hold the same indices of axis {axis}"
        ends = [0, *(start + length for start, length, _ in cells)]
        starts = [*(start for start, _, _ in cells), shape[axis]]
        missing = next((end for end, start in zip(ends, starts, strict=True) if end != start), None)
        if missing is not None:
            return f"none of vLLM's ranks holds index {missing} of axis {axis}"
    return None


def _is_part(cut: Cut, held: Shape, whole: Shape) -> bool:
    """Return whether `cut` is a valid part, with shape `held`, of a parameter with shape `whole`."""
    if cut.shape != whole or len(cut.runs) != len(whole) or cut.part_shape != held:
        return False
    spans = ((run, size) for runs, size in zip(cut.runs, whole, strict=True) for run in runs)
    return all(start >= 0 and length > 0 and start + length <= size for (start, length), size in spans)


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise UnsupportedModelError(f"the model cannot be shared byte for byte: {first_few(faults)}", hint=OTHER_MODES)


def _ownership_faults(
    server_shapes: Mapping[str, Shape], views: Mapping[str, View], padding: Mapping[str, int]
) -> Iterator[str]:
    owned: dict[str, list[tuple[int, int, str]]] = {name: [] for name in server_shapes}
    for name, view in views.items():
        if view.parameter not in owned:
            yield f"{name}: mapped to {view.parameter}, which vLLM does not have"
        elif view.stride != contiguous_stride(view.shape):
            yield f"{name}: stride {view.stride} is not contiguous"
        else:
            owned[view.parameter].append((view.offset, view.offset + math.prod(view.shape), name))
    for parameter, spans in owned.items():
        total = math.prod(server_shapes[parameter])
        tail = padding.get(parameter, 0)
        edges = [(0, 0, "its start"), *sorted(spans), (total - tail, total, "its end")]
        for (_, end, before), (start, _, after) in pairwise(edges):
            if end != start:
                word = "overlap" if end > start else "gap"
                yield f"{parameter}: {word} of {abs(end - start)} elements between {before} and {after}"
