"""Charts in a terminal: a thin curve of braille dots, or bars with dots over them."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
DOT = "●"
BRAILLE, LEFT_DOTS, RIGHT_DOTS = 0x2800, (0, 0x40, 0x04, 0x02, 0x01), (0, 0x80, 0x20, 0x10, 0x08)
"""The empty braille character, and what each dot adds to it, from the bottom up; 0 adds none."""


def curve(values: Sequence[float]) -> str:
    """Return a thin curve, two values per character; NaN leaves a gap.

    Differences below a fifth of the largest value look flat.
    """
    low, high = bounds(values)
    middle, half = (low + high) / 2, max(high - low, abs(high) / 5) / 2
    dots = [_level(value, middle - half, middle + half, 4) for value in values]
    pairs = itertools.zip_longest(dots[::2], dots[1::2], fillvalue=0)
    return "".join(chr(BRAILLE + LEFT_DOTS[left] + RIGHT_DOTS[right]) for left, right in pairs)


def bars(values: Sequence[float], dots: Mapping[int, float], *, width: int, height: int) -> list[Text]:
    """Return lines, from the top down, with a bar for each value, or for the mean of several if they are many.

    `dots` maps an index of `values` to another value, drawn over the bar.
    """
    num_columns = min(width, len(values))
    edges = [place * len(values) // num_columns for place in range(num_columns + 1)] if num_columns else []
    columns = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = bounds([*columns, *dots.values()])
    full = len(BLOCKS) - 1
    levels = [_level(value, low, high, full * height) for value in columns]
    rows = [[(BLOCKS[min(max(level - full * row, 0), full)], "green") for level in levels] for row in range(height)]
    for place, value in dots.items():
        if columns and math.isfinite(value):
            column = min(max(place, 0) * num_columns // len(values), num_columns - 1)
            row = min(height * _level(value, low, high, full * height) // (full * height + 1), height - 1)
            rows[row][column] = (DOT, "bold yellow")
    return [Text.assemble(*cells) for cells in reversed(rows)]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest finite value."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _level(value: float, low: float, high: float, num_levels: int) -> int:
    """Return the place of a value between `low` and `high`, from 1 to `num_levels`; 0 for NaN."""
    if not math.isfinite(value):
        return 0
    return 1 + round((value - low) / (high - low) * (num_levels - 1)) if high > low else 1
