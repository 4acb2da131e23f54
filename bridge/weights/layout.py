"""The layout: which views make up which Hugging Face parameter, and the proof that nothing is left out.

Pure: it knows shapes alone, neither tensors nor vLLM. The server fills it from vLLM's own layer
objects (`patches/loading.py`); both sides check it with `check_coverage`.

Not covered: opening memory (`attach.py`).
"""

import math
from collections.abc import Mapping
from itertools import pairwise

from bridge.errors import UnsupportedModelError
from bridge.server.manifest import View

Shape = tuple[int, ...]
OTHER_MODES = "use --mode lora_only or --mode none, which need no shared full weights"


def rows(parameter: str, shape: Shape, start: int, count: int) -> View:
    """Return the view of `count` rows from row `start` of a contiguous parameter of `shape`."""
    row = math.prod(shape[1:])
    return View(parameter=parameter, offset=start * row, shape=(count, *shape[1:]), stride=contiguous_stride(shape))


def contiguous_stride(shape: Shape) -> Shape:
    """Return the strides of a row-major tensor of `shape`, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def check_coverage(
    model_shapes: Mapping[str, Shape],
    server_shapes: Mapping[str, Shape],
    views: Mapping[str, View],
    padding: Mapping[str, int],
) -> None:
    """Check that views and model agree in every shape, and that each server element is owned exactly once.

    Raises:
        UnsupportedModelError: a parameter of either side without a partner, a wrong shape, an overlap
            or a gap; the first three of them are named.
    """
    faults = [
        *(f"{name}: in the model, not among vLLM's" for name in sorted(model_shapes.keys() - views.keys())),
        *(f"{name}: exported by vLLM, not in the model" for name in sorted(views.keys() - model_shapes.keys())),
        *_shape_faults(model_shapes, views),
        *_ownership_faults(server_shapes, views, padding),
    ]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UnsupportedModelError(
            f"the model cannot be shared byte for byte: {'; '.join(faults[:3])}{more}", remedy=OTHER_MODES
        )


def _shape_faults(model_shapes: Mapping[str, Shape], views: Mapping[str, View]) -> list[str]:
    return [
        f"{name}: shape {model_shapes[name]} in the model, {view.shape} in {view.parameter}"
        for name, view in views.items()
        if name in model_shapes and model_shapes[name] != view.shape
    ]


def _ownership_faults(
    server_shapes: Mapping[str, Shape], views: Mapping[str, View], padding: Mapping[str, int]
) -> list[str]:
    owned: dict[str, list[tuple[int, int, str]]] = {name: [] for name in server_shapes}
    faults = [
        f"{name}: {count} elements of padding, which vLLM cannot have there"
        for name, count in padding.items()
        if name not in owned or count < 0
    ]
    for name, view in views.items():
        if view.parameter not in owned:
            faults.append(f"{name}: lies in {view.parameter}, which vLLM does not have")
        elif view.stride != contiguous_stride(view.shape):
            faults.append(f"{name}: stride {view.stride} is not contiguous")
        else:
            owned[view.parameter].append((view.offset, view.offset + math.prod(view.shape), name))
    for parameter, spans in owned.items():
        total = math.prod(server_shapes[parameter])
        tail = padding.get(parameter, 0)
        edges = [(0, 0, "its start"), *sorted(spans), (total - tail, total, "its end")]
        for (_, end, before), (start, _, after) in pairwise(edges):
            if end != start:
                word = "overlap" if end > start else "gap"
                faults.append(f"{parameter}: {word} of {abs(end - start)} elements between {before} and {after}")
    return faults
