"""A chart: its lines become SVG paths, tick labels and the numbers that are shown when a step is pointed at.

The drawing is stretched to whatever width the page has; labels lie beside it as text of their own size.

Not covered: which charts there are (`charts.py`), colours and fonts (`template/report.css`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from cli.report import curves
from cli.report.curves import Line, Points
from cli.report.wording import shown

Scale = Literal["linear", "zero", "share", "log", "auto"]
"""`zero`: from 0. `share`: from 0 to 1 where all values are. `auto`: from 0, or logarithmic where some stick out."""
WIDTH, HEIGHT = 1000, 400
"""Units of the drawing."""
MARGIN = 0.06
"""Share of the height that is left free above and below a curve."""
LOG_FROM = 30.0
"""A chart of scale `auto` is logarithmic where its largest value is so many times the median."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of healthy values, shaded."""

    low: float
    """Where it begins."""
    high: float
    """Where it ends."""
    name: str
    """What it is."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over the steps."""

    key: str
    """Its name in the page's links."""
    title: str
    """What is shown, with its unit."""
    about: str
    """What that means, in a sentence."""
    lines: Sequence[Line]
    """What is drawn, in this order."""
    steps: tuple[int, int]
    """First and last step of the page."""
    scale: Scale = "linear"
    """Of the heights."""
    band: Band | None = None
    """Healthy values."""
    alarm: float | None = None
    """Value from which on it is unhealthy."""
    is_wide: bool = False
    """Whether it takes the page's whole width."""
    is_ramp: bool = False
    """Whether the lines' colours go from good to bad."""
    marks: Sequence[int] = field(default=())
    """Steps at which something happened."""

    @property
    def is_stacked(self) -> bool:
        """Tell whether the lines are parts of a whole."""
        return any(line.kind == "area" for line in self.lines)

    @property
    def is_constant(self) -> bool:
        """Tell whether a table says as much as the drawing: no line of more than a point changes."""
        known = [{y for _, y in line.points if y is not None} for line in self.lines]
        return all(len(values) <= 1 for values in known)

    @cached_property
    def values(self) -> list[float]:
        """Return everything that has to fit in."""
        if self.is_stacked:
            return [sum(ys) for ys in zip(*([y or 0.0 for _, y in line.points] for line in self.lines), strict=True)]
        return [y for line in self.lines for _, y in line.points if y is not None]

    @cached_property
    def is_log(self) -> bool:
        """Tell whether heights are logarithms."""
        if self.scale == "auto":
            middle = curves.quantile(self.values, 0.5) or 0.0
            return min(self.values) > 0 and max(self.values) > LOG_FROM * middle
        return self.scale == "log" and any(value > 0 for value in self.values)

    @cached_property
    def range(self) -> tuple[float, float]:
        """Return the lowest and the highest value that has a place."""
        if self.is_log:
            return self._log_range()
        low, high = min(self.values), max(self.values)
        if self.scale == "share" and low >= 0 and high <= 1:
            return 0.0, 1.0
        if self.scale != "linear" or self.is_stacked:
            low, high = min(low, 0.0), max(high, 0.0)
        room = MARGIN * (high - low) or abs(high) * 0.1 or 1.0
        return low - (room if low != 0 else 0.0), high + (0.0 if self.is_stacked and high <= 1 + 1e-6 else room)

    def _log_range(self) -> tuple[float, float]:
        shown = [value for value in self.values if value > 0]
        shown += [self.band.low, self.band.high] if self.band else []
        low, high = min(shown), max(shown)
        if self.alarm is not None and self.alarm < 10 * high:
            high = max(high, self.alarm)
        return low / 1.3, high * 1.3

    def x(self, step: float) -> float:
        """Return where a step lies, from 0 at the left to 1."""
        first, last = self.steps
        return (step - first) / (last - first) if last > first else 0.5

    def y(self, value: float) -> float:
        """Return where a value lies, from 0 at the bottom to 1."""
        low, high = self.range
        if self.is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    @cached_property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Return the place and the text of each label below."""
        first, last = self.steps
        whole = sorted({round(tick) for tick in curves.ticks(first, last, 8 if self.is_wide else 5)})
        return [(self.x(step), f"{step:,}") for step in whole if first <= step <= last]

    @cached_property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Return the place and the text of each label at the left."""
        low, high = self.range
        values = curves.log_ticks(low, high) if self.is_log else curves.ticks(low, high)
        return [(self.y(value), shown(value, 6)) for value in values]

    @cached_property
    def paths(self) -> list[str]:
        """Return each line's SVG path."""
        if not self.is_stacked:
            return [self._path(line.points, dots=line.kind == "dots") for line in self.lines]
        base = [0.0] * len(self.lines[0].points)
        paths = []
        for line in self.lines:
            top = [below + (y or 0.0) for below, (_, y) in zip(base, line.points, strict=True)]
            xs = [x for x, _ in line.points]
            paths.append(self._outline(xs, base, top))
            base = top
        return paths

    def _outline(self, xs: Sequence[float], base: Sequence[float], top: Sequence[float]) -> str:
        there = [self._place(x, y) for x, y in zip(xs, top, strict=True)]
        back = [self._place(x, y) for x, y in zip(reversed(xs), reversed(base), strict=True)]
        if len(xs) == 1:  # a stretch of no width is invisible: it becomes the whole width
            there, back = [(0.0, there[0][1]), (WIDTH, there[0][1])], [(WIDTH, back[0][1]), (0.0, back[0][1])]
        return "M" + "L".join(f"{x:.0f} {y:.1f}" for x, y in [*there, *back]) + "Z"

    def _path(self, points: Points, *, dots: bool) -> str:
        """Return a path, broken at gaps; a point that stands alone, or each if `dots`, is a line of no length."""
        pieces, drawing = [], False
        following = [*(self._has_place(y) for _, y in points[1:]), False]
        for (step, value), goes_on in zip(points, following, strict=True):
            if value is None or not self._has_place(value):
                drawing = False
                continue
            x, y = self._place(step, value)
            alone = dots or not (drawing or goes_on)
            pieces.append(f"{'L' if drawing and not dots else 'M'}{x:.1f} {y:.1f}{'h0' if alone else ''}")
            drawing = True
        return "".join(pieces)

    def _has_place(self, value: float | None) -> bool:
        return value is not None and (value > 0 or not self.is_log)

    def _place(self, step: float, value: float) -> tuple[float, float]:
        return WIDTH * self.x(step), HEIGHT * (1 - self.y(value))

    @property
    def data(self) -> list[list[list[float | None]]]:
        """Return each line's steps and values, for the page's script."""
        return [
            [[x for x, _ in line.points], [None if y is None else float(f"{y:.4g}") for _, y in line.points]]
            for line in self.lines
        ]

    @property
    def spoken(self) -> str:
        """Return the chart in words, for those who cannot see it."""
        return f"{self.title}, steps {self.steps[0]:,} to {self.steps[1]:,}. " + ". ".join(
            f"{line.name}: from {shown(known[0])} to {shown(known[1])}"
            for line in self.lines
            if line.kind != "faint" and (known := curves.ends(line.points))
        )
