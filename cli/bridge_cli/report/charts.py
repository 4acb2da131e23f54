"""Draw a chart of each metric of `bridge/checkpoints/metric_table.py` with Bokeh, whose script goes into the page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CrosshairTool,
    HoverTool,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from bridge.checkpoints.metric_table import METRICS, SECTIONS, Metric, Total
from bridge.checkpoints.metrics import undeclared
from bridge.core.redaction import escaped
from bridge.types import HEALTHY_NATS
from bridge_cli.report.record import Column, Run

COLORS = ("#4a80dd", "#d9772b", "#239a72", "#a26be0", "#b58f1c", "#d8558c", "#1d9ab2", "#7c8797")
RAMP = ("#a9c8f0", "#86b0e8", "#6397dd", "#4479c4", "#e5bd62", "#e08e3c", "#d2603a", "#a3312b")
TEXT, EVENT, ALARM, HEALTHY = "#757f8c", "#b87a1e", "#d0443a", "#239a72"
"""All colors are readable on a light page, on a dark one and on paper."""
MOST_EVENTS = 40
"""Events marked in the charts; more would hide the curves."""
EACH_STEP = "each step"
"""Label of the only curve in a chart."""


MAIN, MISMATCH = "reward_mean", "logprob_diff_mean"
"""Metrics with special charts: `MAIN`'s shows evaluations and the names of events, `MISMATCH`'s the healthy range."""


def sections(runs: Iterable[Run]) -> dict[str, Sequence[Metric]]:
    """Return the metrics of each section; the last one includes those that a custom loss or a library loop logged."""
    names = sorted({name for run in runs for name in run.columns if name.partition("/")[0] not in METRICS})
    others = [replace(undeclared(name), title=name.replace("/", ": ", 1), about="As it was logged.") for name in names]
    return {**SECTIONS, "Other metrics": others}


class Line(NamedTuple):
    """A curve as it is drawn."""

    name: str
    color: str
    values: Column
    """One per step of the page; NaN is a gap."""
    is_faint: bool = False

    @property
    def known(self) -> Column:
        """Return the values that are not missing."""
        known: Column = self.values[np.isfinite(self.values)]
        return known


class Drawing(NamedTuple):
    """A chart as it is drawn."""

    title: str
    about: str
    lines: list[Line]
    plot: figure | None = None
    """None if no value changes during the run: the last values are enough."""
    references: Mapping[str, str] = {}
    """Name of each item drawn in addition to the lines -> its color."""


class Artist:
    """Draws all curves of a single run, or one curve for each of several."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        """Draw the runs, by their names."""
        self._runs = {escaped(name): run for name, run in runs.items()}
        self._single = next(iter(runs.values())) if len(runs) == 1 else None
        self._steps = np.unique(np.concatenate([np.array(run.steps, float) for run in runs.values()]))
        ends = [*self._steps[[0, -1]], *(float(row["step"]) for run in runs.values() for row in run.evaluations)]
        room = 0.01 * (max(ends) - min(ends)) or 1.0
        self._x_range = Range1d(min(ends) - room, max(ends) + room)
        self._pointer = Span(dimension="height", line_color=TEXT)

    def drawings(self, metric: Metric) -> Iterator[Drawing]:
        """Yield the charts of a metric; none if the runs have no values for it."""
        is_stacked = metric.chart in ("stacked", "ramp") and self._single is not None
        palette = RAMP if metric.chart == "ramp" and is_stacked else COLORS
        for title, curves in self._curves(metric):
            lines = [
                line for line in map(Line, curves, palette, curves.values())
                if line.known.size and (line.known.any() or not is_stacked)
            ]  # fmt: skip
            if not lines:
                continue
            if metric.name != MAIN and all(np.ptp(line.known) == 0 for line in lines):
                yield Drawing(title, metric.about, lines)
                continue
            if metric.chart == "smooth":
                raw = [lines[0]._replace(is_faint=True)] if list(curves) == [EACH_STEP] else []
                lines = raw + [
                    line._replace(name="smoothed" if raw else line.name, values=smoothed(line.values)) for line in lines
                ]
            plot = self._plot(metric, lines, is_stacked=is_stacked)
            yield Drawing(title, metric.about, lines, plot, dict(self._references(metric, plot)))

    def _curves(self, metric: Metric) -> Iterator[tuple[str, dict[str, Column]]]:
        """Yield the title and the curves of each chart; with several runs, each item of a metric gets its own chart."""
        unit = f", {metric.unit}" if metric.unit else ""
        columns = self._columns(metric)
        if self._single:
            curves = {label: self._values(self._single, name) for name, label in columns.items()}
            yield metric.title + unit, {label: metric.scale * values for label, values in curves.items()}
        elif metric.items is None:
            yield metric.title + unit, self._of_runs(metric, metric.name)
        elif metric.chart not in ("stacked", "ramp"):  # stacked and ramp charts show parts of other metrics
            for name, label in columns.items():
                yield f"{metric.title}: {label}{unit}", self._of_runs(metric, name)

    def _columns(self, metric: Metric) -> dict[str, str]:
        """Return the columns of a metric of a single run, with their labels."""
        if metric.items is not None:
            every = sorted({name for run in self._runs.values() for name in run.columns})
            items = metric.items or [name.partition("/")[2] for name in every if name.startswith(f"{metric.name}/")]
            return {f"{metric.name}/{item}": escaped(item.replace("_", " ")) for item in items if item}
        if metric.chart == "stacked" and isinstance(metric.derive, Total):
            return {name: METRICS[name].title for name in metric.derive.names}
        return {metric.name: EACH_STEP}

    def _of_runs(self, metric: Metric, name: str) -> dict[str, Column]:
        return {label: metric.scale * self._values(run, name) for label, run in self._runs.items()}

    def _values(self, run: Run, name: str) -> Column:
        values = np.full(len(self._steps), np.nan)
        values[np.searchsorted(self._steps, run.steps)] = run.column(name)
        return values

    def _plot(self, metric: Metric, lines: Sequence[Line], *, is_stacked: bool) -> figure:
        rows = np.array([line.values for line in lines])
        used = np.isfinite(rows).any(axis=0) | (not is_stacked)  # a stack has no gaps
        rows, steps = (np.nan_to_num(rows) if is_stacked else rows)[:, used], self._steps[used]
        plot = figure(
            height=300 if metric.name == MAIN else 190, sizing_mode="stretch_width",
            x_range=self._x_range, window_axis="x",
            y_axis_type="log" if metric.chart == "log" else "linear", tools="xbox_zoom,reset", toolbar_location=None,
            background_fill_color=None, border_fill_color=None, outline_line_color=None,
        )  # fmt: skip
        plot.xgrid.visible = False
        plot.ygrid[0].update(grid_line_alpha=0.2, grid_line_color=TEXT)
        lines_off = dict.fromkeys(("axis_line_color", "major_tick_line_color", "minor_tick_line_color"))
        for axis in plot.axis:
            axis.update(major_label_text_color=TEXT, **lines_off)
        plot.xaxis[0].update(ticker=BasicTicker(min_interval=1), formatter=NumeralTickFormatter(format="0,0"))
        if metric.chart == "log":
            plot.yaxis[0].formatter = PrintfTickFormatter(format="%.3g")
        top = rows.sum(axis=0) if is_stacked else np.fmax.reduce(rows)
        source = ColumnDataSource({"step": steps, "top": top.astype(np.float32)})
        names = [source.add(row.astype(np.float32), f"line{index}") for index, row in enumerate(rows)]
        if is_stacked:
            plot.varea_stack(names, x="step", source=source, color=[line.color for line in lines])
        for name, line, row in zip(names, lines, rows, strict=True) if not is_stacked else ():
            plot.line("step", name, source=source, color=line.color, alpha=0.4 if line.is_faint else 1, line_width=2)
            padded = np.isfinite([np.nan, *row, np.nan])
            # A line does not show a single value between two gaps, so it is drawn as a dot.
            isolated = padded[1:-1] & ~padded[:-2] & ~padded[2:]
            plot.scatter(steps[isolated], row[isolated], color=line.color, size=5)
        values = [(line.name, f"@{name}{{%.4g}}") for line, name in zip(lines, names, strict=True)]
        hover = HoverTool(
            renderers=[plot.line("step", "top", source=source, alpha=0)], mode="vline",
            tooltips=[("step", "@step{0,0}"), *values], formatters={f"@{name}": "printf" for name in names},
        )  # fmt: skip
        plot.add_tools(hover, CrosshairTool(overlay=self._pointer))
        return plot

    def _references(self, metric: Metric, plot: figure) -> Iterator[tuple[str, str]]:
        """Add evaluations, limits and events to a plot, and yield the name and the color of each."""
        if metric.name == MAIN:
            yield from self._held_out(plot)
        if metric.name == MISMATCH:
            low, high = HEALTHY_NATS
            plot.hstrip(low, high, fill_color=HEALTHY, fill_alpha=0.18, line_color=None)
            yield f"rounding only, in bf16: {low} to {high}", HEALTHY
            if self._single and isinstance(alarm := self._single.config.get("mismatch_alarm"), int | float):
                plot.hspan(alarm, line_color=ALARM, line_dash="dashed")
                yield f"--mismatch-alarm {alarm:g}", ALARM
        marked = [event for event in self._single.events if event.step is not None] if self._single else []
        if marked:
            texts = [escaped(event.text[:300]) for event in marked[:MOST_EVENTS]]
            source = ColumnDataSource({"x": [event.step for event in marked[:MOST_EVENTS]], "text": texts})
            marks = plot.vspan("x", source=source, line_color=EVENT, line_dash="dotted", line_width=1.5)
            plot.add_tools(HoverTool(renderers=[marks], tooltips=[("event at step", "@x"), ("", "@text")]))
            if metric.name == MAIN:
                yield "events", EVENT

    def _held_out(self, plot: figure) -> Iterator[tuple[str, str]]:
        """Add the rewards of evaluations to the chart of the reward."""
        for (name, run), own_color in zip(self._runs.items(), COLORS, strict=False):
            if run.evaluations:
                label, color = ("held out", COLORS[1]) if self._single else (f"{name}, held out", own_color)
                steps, rewards = zip(*((row["step"], row["reward_mean"]) for row in run.evaluations), strict=True)
                plot.line(steps, rewards, color=color, alpha=0.5)
                dots = plot.scatter(steps, rewards, color=color, size=9)
                plot.add_tools(HoverTool(renderers=[dots], tooltips=[("step", "@x"), (label, "@y{0.[0000]}")]))
                yield label, color


def smoothed(values: Column) -> Column:
    """Return the exponential moving average, corrected for its start as in Adam (arXiv 1412.6980)."""
    keep = 1 - 1 / max(5, len(values) // 40)
    average = 0.0
    weight = 0.0
    result = np.full(len(values), np.nan)
    for index in np.flatnonzero(np.isfinite(values)):
        average = keep * average + (1 - keep) * values[index]
        weight = keep * weight + (1 - keep)
        result[index] = average / weight
    return result
