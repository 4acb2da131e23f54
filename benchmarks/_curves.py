"""Learning curves as an SVG: accuracy against steps and against minutes, with one line per side."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import count

Points = Sequence[Mapping[str, float]]
"""The evaluations of one run, with the keys of `benchmarks.learning.curve`."""
TITLES = {"bridge": "Bridge", "trl": "TRL"}
COLORS = {"bridge": "#2f6fd0", "trl": "#d9772b"}
AXES = {
    "step": "steps", "minutes": "minutes since the first step", "minutes_of_command": "minutes since the command",
}  # fmt: skip
WIDTH, HEIGHT = 400, 260
LEFT, TOP, GAP = 60, 40, 80
STYLE = (
    'text { font: 13px ui-sans-serif, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #44505f; }'
    " .end { text-anchor: end; } .middle { text-anchor: middle; }"
)


def picture(runs_of_sides: Mapping[str, Sequence[Points]]) -> str:
    """Return an SVG with the median over the runs of each side as a line, and their range as an area."""
    sides = {side: runs for side, runs in runs_of_sides.items() if runs}
    width, height = len(AXES) * (WIDTH + GAP), TOP + HEIGHT + 50
    label = f"Accuracy on held-out problems against {', '.join(AXES.values())}"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, axis in enumerate(AXES):
        lines += [f'<g transform="translate({LEFT + number * (WIDTH + GAP)},{TOP})">', *_panel(sides, axis), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def medians(runs: Sequence[Points], axis: str) -> Iterator[dict[str, float]]:
    """Yield the median, minimum and maximum accuracy of all runs at each evaluation, at the median of `axis`."""
    for points in zip(*runs, strict=False):
        values = [point["accuracy"] for point in points]
        middle = {axis: statistics.median(point[axis] for point in points), "median": statistics.median(values)}
        yield {**middle, "least": min(values), "most": max(values)}


def _panel(sides: Mapping[str, Sequence[Points]], axis: str) -> Iterator[str]:
    curves = {side: list(medians(runs, axis)) for side, runs in sides.items()}
    every = [point for points in curves.values() for point in points]
    most_x = max(point[axis] for point in every) or 1.0
    top = min(1.0, 0.1 * (1 + int(10 * max(point["most"] for point in every))))

    def at(x: float, y: float) -> str:
        return f"{WIDTH * x / most_x:.1f},{HEIGHT * (1 - y / top):.1f}"

    for tick in range(round(10 * top) + 1):
        height = HEIGHT * (1 - tick / 10 / top)
        yield f'<path d="M0,{height:.1f}h{WIDTH}" stroke="#dde2e8"/>'
        yield f'<text class="end" x="-8" y="{height + 4:.1f}">{10 * tick} %</text>'
    for tick_x in _ticks(most_x):
        yield f'<text class="middle" x="{WIDTH * tick_x / most_x:.1f}" y="{HEIGHT + 18}">{tick_x:g}</text>'
    yield f'<text class="middle" x="{WIDTH / 2}" y="{HEIGHT + 38}">{escape(AXES[axis])}</text>'
    yield '<text x="-8" y="-18">held-out problems solved</text>'
    for number, (side, points) in enumerate(curves.items()):
        area = [at(point[axis], point["most"]) for point in points]
        area += [at(point[axis], point["least"]) for point in reversed(points)]
        line = " ".join(at(point[axis], point["median"]) for point in points)
        color, height = COLORS[side], HEIGHT - 34 + 20 * number
        yield f'<polygon points="{" ".join(area)}" fill="{color}" fill-opacity="0.15"/>'
        yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"/>'
        yield f'<text class="end" x="{WIDTH}" y="{height}" style="fill:{color}">{TITLES[side]}</text>'


def _ticks(most: float) -> Iterator[float]:
    """Yield five to ten round numbers from 0 to `most`."""
    size = next(
        size for power in count(-3) for size in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if most <= 8 * size
    )
    yield from (round(number * size, 6) for number in range(int(most / size + 1e-9) + 1))
