"""Numbers on their way to a page: smoothed, thinned to what a screen can show, scaled, written.

Not covered: which numbers (`charts.py`), and how they are drawn (`drawing.py`).
Shapes: xs, ys [points]; None in ys is a gap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Points = list[tuple[float, float | None]]
MOST_BUCKETS = 240
"""Stretches that a curve is cut into where it has more points than fit; two points are drawn of each."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    """What the legend calls it."""
    points: Points
    """Where it goes; None is a gap."""
    colour: int = 0
    """Which of the page's colours."""
    kind: Literal["line", "faint", "dots", "area"] = "line"
    """`faint` is drawn thin behind the others; `dots` has a mark at each point; an `area` lies on those before."""


def span(num_points: int) -> int:
    """Return over how many points a curve of `num_points` is smoothed."""
    return max(5, num_points // 40)


def smoothed(ys: Sequence[float | None], over: int) -> list[float | None]:
    """Return the exponential moving average, corrected for its start, with most of its weight `over` so many points.

    Source: Adam (arXiv 1412.6980), section 3, for the correction.
    """
    keep = 1 - 1 / over
    average, weight, result = 0.0, 0.0, list[float | None]()
    for y in ys:
        if y is not None:
            average = keep * average + (1 - keep) * y
            weight = keep * weight + (1 - keep)
        result.append(None if y is None else average / weight)
    return result


def thinned(xs: Sequence[float], ys: Sequence[float | None]) -> Points:
    """Return the points to draw: all, or of each stretch the lowest and the highest, so that no spike is lost."""
    points = list(zip(xs, ys, strict=True))
    if len(points) <= 2 * MOST_BUCKETS:
        return points
    inner = [point for bucket in _buckets(points[1:-1]) for point in _extremes(bucket)]
    return [points[0], *inner, points[-1]]


def _buckets(points: Points) -> Iterator[Points]:
    edges = [len(points) * index // MOST_BUCKETS for index in range(MOST_BUCKETS + 1)]
    yield from (points[begin:end] for begin, end in pairwise(edges))


def _extremes(bucket: Points) -> Points:
    known = [(y, x) for x, y in bucket if y is not None]
    if not known:
        return bucket[:1]
    return [(x, y) for x, y in sorted((x, y) for y, x in {min(known), max(known)})]


def averaged(xs: Sequence[float], rows: Sequence[Sequence[float | None]]) -> tuple[list[float], list[list[float]]]:
    """Return the points of curves that are stacked: all, or the mean of each stretch; a gap counts as 0."""
    filled = [[y or 0.0 for y in ys] for ys in rows]
    if len(xs) <= MOST_BUCKETS:
        return list(xs), filled
    edges = [len(xs) * index // MOST_BUCKETS for index in range(MOST_BUCKETS + 1)]
    pairs = list(pairwise(edges))
    means = [[sum(ys[begin:end]) / (end - begin) for begin, end in pairs] for ys in filled]
    return [float(xs[(begin + end) // 2]) for begin, end in pairs], means


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`, at most so many: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)
    begin, end = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [index * step for index in range(begin, end + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten from `low` to `high`, with numbers between them where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(decades) > 4 else (1, 3) if len(decades) > 2 else (1, 2, 5)
    stride = -(-len(decades) // 6)
    values = [factor * 10.0**decade for decade in decades[::stride] for factor in factors]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def quantile(values: Sequence[float | None], share: float) -> float | None:
    """Return the value below which `share` of the known ones lie; None where none is known."""
    known = sorted(value for value in values if value is not None)
    return known[min(int(share * len(known)), len(known) - 1)] if known else None


def last(points: Points) -> float | None:
    """Return the last known value."""
    return next((y for _, y in reversed(points) if y is not None), None)


def ends(points: Points) -> tuple[float, float] | None:
    """Return the first and the last known value."""
    known = [y for _, y in points if y is not None]
    return (known[0], known[-1]) if known else None
