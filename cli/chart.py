"""Curves in a terminal: a thin line of braille dots, or bars with dots over them."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
DOT = "●"
BRAILLE, LEFT_DOTS, RIGHT_DOTS = 0x2800, (0, 0x40, 0x04, 0x02, 0x01), (0, 0x80, 0x20, 0x10, 0x08)
"""The empty braille character, and what each dot adds to it, from the bottom up; 0 adds none."""


def curve(values: Sequence[float]) -> str:
    """Return a thin line through the values, two per character; NaN leaves a gap.

    Differences below a fifth of the largest value look flat.
    """
    low, high = bounds(values)
    middle, half = (low + high) / 2, max(high - low, abs(high) / 5) / 2
    dots = [_level(value, middle - half, middle + half, 4) if math.isfinite(value) else 0 for value in values]
    pairs = itertools.zip_longest(dots[::2], dots[1::2], fillvalue=0)
    return "".join(chr(BRAILLE + LEFT_DOTS[left] + RIGHT_DOTS[right]) for left, right in pairs)


def bars(values: Sequence[float], dots: Mapping[int, float], *, width: int, height: int) -> list[Text]:
    """Return lines, from the top down, with a bar for each value, or for the mean of several if they are many.

    `dots` maps a place in `values` to a further value, drawn over the bar.
    """
    columns = _columns(values, width)
    low, high = bounds([*columns, *dots.values()])
    rows = [[(_cell(value, low, high, row, height), "green") for value in columns] for row in range(height)]
    for place, value in dots.items():
        if columns and math.isfinite(value):
            column = min(max(place, 0) * len(columns) // len(values), len(columns) - 1)
            row = min(height * _level(value, low, high, 8 * height) // (8 * height + 1), height - 1)
            rows[row][column] = (DOT, "bold yellow")
    return [Text.assemble(*cells) for cells in reversed(rows)]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest finite value."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _columns(values: Sequence[float], width: int) -> list[float]:
    """Return `values`, or means of neighbours if there are more than `width`."""
    count = min(width, len(values))
    edges = [place * len(values) // count for place in range(count + 1)] if count else []
    return [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)]


def _level(value: float, low: float, high: float, num_levels: int) -> int:
    """Return the place of a value between `low` and `high`, from 1 to `num_levels`."""
    share = (value - low) / (high - low) if high > low else 0.0
    return 1 + round(share * (num_levels - 1))


def _cell(value: float, low: float, high: float, row: int, height: int) -> str:
    """Return what a bar shows in one row, counted from the bottom."""
    if not math.isfinite(value):
        return " "
    filled = _level(value, low, high, len(BLOCKS) * height) - len(BLOCKS) * row
    return " " if filled <= 0 else BLOCKS[min(filled, len(BLOCKS)) - 1]
