"""Curves in a terminal: one line of small dots, or bars of several lines with large dots over them.

Not covered: what they show (`panel.py`).
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
DOT = "●"
BRAILLE, LEFT_DOTS, RIGHT_DOTS = 0x2800, (0, 0x40, 0x04, 0x02, 0x01), (0, 0x80, 0x20, 0x10, 0x08)
"""The character without dots, and what a dot adds to it; the lowest comes first, and before it none."""


def curve(values: Sequence[float]) -> str:
    """Return a thin line through the values, two to a character; one that is no number leaves a gap.

    What differs by less than a fifth of the largest looks level.
    """
    low, high = bounds(values)
    middle, half = (low + high) / 2, max(high - low, abs(high) / 5) / 2
    dots = [_level(value, middle - half, middle + half, 4) if math.isfinite(value) else 0 for value in values]
    pairs = itertools.zip_longest(dots[::2], dots[1::2], fillvalue=0)
    return "".join(chr(BRAILLE + LEFT_DOTS[left] + RIGHT_DOTS[right]) for left, right in pairs)


def bars(values: Sequence[float], dots: Mapping[int, float], *, width: int, height: int) -> list[Text]:
    """Return lines, the highest first, with a bar for each value, or for the mean of several where they are many.

    `dots` are further values, by the place in `values` that they belong to.
    """
    columns = _columns(values, width)
    low, high = bounds([*columns, *dots.values()])
    lines = [[_cell(value, low, high, row, height) for value in columns] for row in range(height)]
    marks = set()
    for place, value in dots.items():
        column = min(max(place, 0) * len(columns) // max(len(values), 1), len(columns) - 1)
        if column >= 0 and math.isfinite(value):
            row = min(height * _level(value, low, high, 8 * height) // (8 * height + 1), height - 1)
            lines[row][column] = DOT
            marks.add((row, column))
    return [_line(cells, {column for at, column in marks if at == row}) for row, cells in reversed([*enumerate(lines)])]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest of the values that are numbers."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _columns(values: Sequence[float], width: int) -> list[float]:
    """Return `values`, or means of neighbours where there are more than `width`."""
    count = min(width, len(values))
    edges = [place * len(values) // count for place in range(count + 1)] if count else []
    return [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)]


def _level(value: float, low: float, high: float, num_levels: int) -> int:
    """Return a value's place between `low` and `high`, from 1 to `num_levels`."""
    share = (value - low) / (high - low) if high > low else 0.0
    return 1 + round(share * (num_levels - 1))


def _cell(value: float, low: float, high: float, row: int, height: int) -> str:
    """Return what a bar shows in one row, counted from the lowest."""
    if not math.isfinite(value):
        return " "
    filled = _level(value, low, high, len(BLOCKS) * height) - len(BLOCKS) * row
    return " " if filled <= 0 else BLOCKS[min(filled, len(BLOCKS)) - 1]


def _line(cells: Sequence[str], dots: set[int]) -> Text:
    """Return one row, in as few differently coloured parts as there are."""
    parts = itertools.groupby(enumerate(cells), key=lambda cell: cell[0] in dots)
    return Text.assemble(
        *(("".join(cell for _, cell in run), "bold yellow" if is_dot else "green") for is_dot, run in parts)
    )
