"""Declare the charts of a page, and draw them with Bokeh, whose script goes into the page."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from bokeh.models import BasicTicker, ColumnDataSource, CrosshairTool, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import BoxAnnotation, Span
from bokeh.plotting import figure

from bridge.run.metrics import StepMetrics
from bridge.types import HEALTHY_NATS
from bridge_cli.report.record import MOST_LAGS, RATES, SUMS, Column, Run, visible


class Chart(NamedTuple):
    """What one chart shows."""

    title: str
    unit: str
    about: str
    columns: Mapping[str, str]
    """Column of a run -> its name in the legend. Where runs are compared, only the first is shown."""
    kind: Literal["plain", "smooth", "log", "stacked"] = "smooth"
    """The first column of a `stacked` chart is the sum of the others."""


REWARD = Chart(
    "Mean reward", "", "Of each step's completions, and of the held-out problems.", {"reward_mean": "reward"}
)
PARTS = Chart("Parts of the reward", "", "Mean of each part, before its weight.", {})
"""Its columns are those of the run."""
BINS = ("< 0.001", "to 0.003", "to 0.01", "to 0.03", "to 0.1", "to 0.3", "to 1 nat", "more")
DIFFERENCE = Chart(
    "|Δ log-probability|", "nats", "vLLM against the trainer, on the trained tokens, before the update.",
    {"logprob_diff_mean": "mean", "logprob_diff_max": "max"}, "log",
)  # fmt: skip
HISTOGRAM = Chart(
    "Tokens by |Δ log-probability|", "%", "Share of the tokens in each range.",
    {"logprob_diff_large_share": "0.1 nats and more"}
    | {f"logprob_diff_histogram/{index}": name for index, name in enumerate(BINS)}, "stacked",
)  # fmt: skip
CHARTS: Mapping[str, Sequence[Chart]] = {
    "": (REWARD,),
    "Learning": (
        PARTS,
        Chart("Spread of the reward", "", "Standard deviation over the completions.", {"reward_std": "spread"}),
        Chart("Groups without a signal", "%", "All rewards of the group are equal.", {"no_signal_share": "groups"}),
        Chart("Completion length", "tokens", "Mean over the completions.", {"completion_tokens_mean": "tokens"}),
        Chart("Truncated completions", "%", "Stopped by --max-new-tokens.", {"truncated_share": "truncated"}),
        Chart("Turns", "", "Of the model in each completion, with tools; and calls that failed.",
              {"turns_mean": "turns", "tool_errors": "failed calls"}, "plain"),
        Chart("Entropy", "nats", "Mean over the sampled tokens, before the update.", {"entropy": "entropy"}),
        Chart("KL from the reference", "nats", "Mean over the tokens.", {"kl": "KL"}),
        Chart("Clipped tokens", "%", "Past the clip: the policy has moved far enough.",
              {"clipped_share": "all", "clipped_low_share": "low", "clipped_high_share": "high"}),
        Chart("Gradient norm", "", "Before clipping, mean over the updates.", {"grad_norm": "norm"}),
        Chart("Learning rate", "", "Of the first update of each step.", {"lr": "rate"}, "plain"),
        Chart("Policy loss", "", "Says little by itself: it need not fall.", {"loss": "loss"}),
        Chart("Changed weights", "%", "Weights whose bytes the step changed.", {"changed_weight_share": "changed"}),
        Chart("Updates", "", "Per batch; skipped if the gradient was not finite.",
              {"updates": "updates", "skipped_updates": "skipped"}, "plain"),
        Chart("Unscored, retried", "", "Completions without a reward, and retried requests.",
              {"unscored": "unscored", "retries": "retried"}, "plain"),
    ),
    "Two engines, one policy": (
        DIFFERENCE,
        HISTOGRAM,
        Chart("Importance weights", "", "Mean, and effective sample size: both are 1 if the engines agree.",
              {"importance_weight": "mean", "effective_share": "effective share"}),
        Chart("Corrected tokens", "%", "Importance weight truncated, or token masked.", {"corrected_share": "tokens"}),
        Chart("Staleness", "versions", "Age of the weights that sampled the tokens.",
              {"staleness": "oldest", "staleness_mean": "mean"}, "plain"),
        Chart("Tokens by age", "%", "Share of the tokens that are so many versions old.",
              {"older_share": "1 and more"} | {f"lag_shares/{lag}": f"{lag}" for lag in range(1, MOST_LAGS)},
              "stacked"),
        Chart("Groups in flight", "", "Begun and not trained on; replaced ones had no signal.",
              {"groups_in_flight": "in flight", "skipped_groups": "replaced"}, "plain"),
    ),
    "Time and memory": (
        Chart("Where a step's time goes", "s", "Waiting for rollouts, forward and backward passes, fence.",
              {"step_s": "in all", "rollout_s": "rollouts", "train_s": "training", "fence_s": "fence"},
              "stacked"),
        Chart("The fence", "ms", "The server generates nothing meanwhile.",
              {"fence_s": "in all", "fence_pause_s": "pause", "fence_write_s": "write", "fence_publish_s": "publish"},
              "stacked"),
        Chart("Tokens per second", "", "Generated while they are sampled, trained during the passes.",
              {"generated_per_s": "generated", "trained_per_s": "trained"}),
        Chart("Tokens per step", "", "Those without an advantage, or masked, are not trained on.",
              {"tokens_generated": "generated", "tokens_trained": "trained"}),
        Chart("Balance of the ranks", "", "Tokens of the busiest rank over the mean: the others wait for it.",
              {"rank_token_balance": "busiest"}, "plain"),
        Chart("Peak memory of the trainer", "GiB", "Of the GPU; on a CPU, of the process.",
              {"peak_memory_gib": "peak"}, "plain"),
    ),
}  # fmt: skip
OWN = "Other metrics"
KNOWN = {each.name for each in dataclasses.fields(StepMetrics)} | {*SUMS, *RATES, "sampling_s"}
FACTORS = {"%": 100.0, "ms": 1e3}
COLORS = ("#4a80dd", "#d9772b", "#239a72", "#a26be0", "#b58f1c", "#d8558c", "#1d9ab2", "#7c8797")
RAMP = ("#a9c8f0", "#86b0e8", "#6397dd", "#4479c4", "#e5bd62", "#e08e3c", "#d2603a", "#a3312b")
TEXT, EVENT, ALARM, HEALTHY = "#757f8c", "#b87a1e", "#d0443a", "#239a72"
"""All colors are readable on a light page, on a dark one and on paper."""
MOST_EVENTS = 40
"""Events marked in the charts; more would hide the curves."""


def sections(runs: Iterable[Run]) -> dict[str, Sequence[Chart]]:
    """Return the charts under their headings, and one chart for each other metric that a library loop logged."""
    names = sorted({name for run in runs for name in run.columns if name.partition("/")[0] not in KNOWN})
    own = [Chart(name.replace("/", ": ", 1), "", "As it was logged.", {name: "value"}) for name in names]
    return {**CHARTS, OWN: own} if own else dict(CHARTS)


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
    """None if nothing changes during the run: the last values say it all."""
    references: Mapping[str, str] = {}
    """What is drawn beside the lines -> its color."""


class Artist:
    """Draws all curves of a single run, or one curve for each of several."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        """Draw the runs, by their names."""
        self._runs = {visible(name): run for name, run in runs.items()}
        self._single = next(iter(runs.values())) if len(runs) == 1 else None
        self._steps = np.unique(np.concatenate([np.array(run.steps, float) for run in runs.values()]))
        ends = [*self._steps[[0, -1]], *(float(row["step"]) for run in runs.values() for row in run.evaluations)]
        room = 0.01 * (max(ends) - min(ends)) or 1.0
        self._x_range = Range1d(min(ends) - room, max(ends) + room)
        self._pointer = Span(dimension="height", line_color=TEXT)

    def drawings(self, chart: Chart) -> Iterator[Drawing]:
        """Yield the drawings of `chart`: none if the runs have no values for it."""
        is_stacked = chart.kind == "stacked" and self._single is not None
        palette = RAMP if chart is HISTOGRAM and is_stacked else COLORS
        for title, curves in self._curves(chart, is_stacked=is_stacked):
            lines = [
                line for line in map(Line, curves, palette, curves.values())
                if line.known.size and (line.known.any() or not is_stacked)
            ]  # fmt: skip
            if lines and chart is not REWARD and all(np.ptp(line.known) == 0 for line in lines):
                yield Drawing(title, chart.about, lines)
            elif lines:
                if chart.kind == "smooth":
                    raw = [lines[0]._replace(name="each step", is_faint=True)] if len(curves) == 1 else []
                    lines = raw + [
                        line._replace(name="smoothed" if raw else line.name, values=smoothed(line.values))
                        for line in lines
                    ]
                plot = self._plot(chart, lines, is_stacked=is_stacked)
                yield Drawing(title, chart.about, lines, plot, dict(self._references(chart, plot)))

    def _curves(self, chart: Chart, *, is_stacked: bool) -> Iterator[tuple[str, dict[str, Column]]]:
        """Yield the title and the curves of each chart: several runs have one chart for each part of the reward."""
        every = sorted({name for run in self._runs.values() for name in run.columns})
        parts = {name: visible(name.partition("/")[2]) for name in every if name.startswith("reward_parts/")}
        columns, unit = chart.columns or parts, f", {chart.unit}" if chart.unit else ""
        if self._single:
            names = [*columns][is_stacked:]
            yield chart.title + unit, {columns[name]: self._values(self._single, name, chart) for name in names}
            return
        for name in [*columns][: 1 if chart.columns else None]:
            title = chart.title if len(chart.columns) == 1 else f"{chart.title}: {columns[name]}"
            yield title + unit, {label: self._values(run, name, chart) for label, run in self._runs.items()}

    def _values(self, run: Run, name: str, chart: Chart) -> Column:
        values = np.full(len(self._steps), np.nan)
        values[np.searchsorted(self._steps, run.steps)] = run.column(name) * FACTORS.get(chart.unit, 1.0)
        return values

    def _plot(self, chart: Chart, lines: Sequence[Line], *, is_stacked: bool) -> figure:
        rows = np.array([line.values for line in lines])
        used = np.isfinite(rows).any(axis=0) | (not is_stacked)  # a stack has no gaps
        rows, steps = (np.nan_to_num(rows) if is_stacked else rows)[:, used], self._steps[used]
        plot = figure(
            height=300 if chart is REWARD else 190, sizing_mode="stretch_width", x_range=self._x_range, window_axis="x",
            y_axis_type="log" if chart.kind == "log" else "linear", tools="xbox_zoom,reset", toolbar_location=None,
            background_fill_color=None, border_fill_color=None, outline_line_color=None,
        )  # fmt: skip
        plot.xgrid.visible, plot.ygrid.grid_line_alpha = False, 0.2
        plot.axis.major_label_text_color = plot.ygrid.grid_line_color = TEXT
        plot.axis.axis_line_color = plot.axis.major_tick_line_color = plot.axis.minor_tick_line_color = None
        plot.xaxis.ticker, plot.xaxis.formatter = BasicTicker(min_interval=1), NumeralTickFormatter(format="0,0")
        top = rows.sum(axis=0) if is_stacked else np.fmax.reduce(rows)
        source = ColumnDataSource({"step": steps, "top": top.astype(np.float32)})
        names = [source.add(row.astype(np.float32), f"line{index}") for index, row in enumerate(rows)]
        if is_stacked:
            plot.varea_stack(names, x="step", source=source, color=[line.color for line in lines])
        for name, line, row in zip(names, lines, rows, strict=True) if not is_stacked else ():
            plot.line("step", name, source=source, color=line.color, alpha=0.4 if line.is_faint else 1, line_width=2)
            padded = np.isfinite([np.nan, *row, np.nan])
            alone = padded[1:-1] & ~padded[:-2] & ~padded[2:]  # between two gaps there is no line
            plot.scatter(steps[alone], row[alone], color=line.color, size=5)
        values = [(line.name, f"@{name}{{%.4g}}") for line, name in zip(lines, names, strict=True)]
        hover = HoverTool(
            renderers=[plot.line("step", "top", source=source, alpha=0)], mode="vline",
            tooltips=[("step", "@step{0,0}"), *values], formatters={f"@{name}": "printf" for name in names},
        )  # fmt: skip
        plot.add_tools(hover, CrosshairTool(overlay=self._pointer))
        return plot

    def _references(self, chart: Chart, plot: figure) -> Iterator[tuple[str, str]]:
        """Add evaluations, limits and events to a plot, and yield the name and the color of each."""
        for (name, run), each in zip(self._runs.items(), COLORS, strict=False):
            if chart is REWARD and run.evaluations:
                label, color = ("held out", COLORS[1]) if self._single else (f"{name}, held out", each)
                steps, rewards = zip(*((row["step"], row["reward_mean"]) for row in run.evaluations), strict=True)
                plot.line(steps, rewards, color=color, alpha=0.5)
                dots = plot.scatter(steps, rewards, color=color, size=9)
                plot.add_tools(HoverTool(renderers=[dots], tooltips=[("step", "@x"), (label, "@y{0.[0000]}")]))
                yield label, color
        if chart is DIFFERENCE:
            low, high = HEALTHY_NATS
            plot.add_layout(BoxAnnotation(bottom=low, top=high, fill_color=HEALTHY, fill_alpha=0.18, line_color=None))
            yield f"rounding alone, in bf16: {low} to {high}", HEALTHY
            if self._single and isinstance(alarm := self._single.config.get("mismatch_alarm"), int | float):
                plot.add_layout(Span(location=alarm, dimension="width", line_color=ALARM, line_dash="dashed"))
                yield f"--mismatch-alarm {alarm:g}", ALARM
        events = [each for each in self._single.events if each.step is not None] if self._single else []
        if events:
            texts = [visible(each.text[:300]) for each in events[:MOST_EVENTS]]
            source = ColumnDataSource({"x": [each.step for each in events[:MOST_EVENTS]], "text": texts})
            marks = plot.vspan("x", source=source, line_color=EVENT, line_dash="dotted", line_width=1.5)
            plot.add_tools(HoverTool(renderers=[marks], tooltips=[("event at step", "@x"), ("", "@text")]))
            if chart is REWARD:
                yield "events", EVENT


def smoothed(values: Column) -> Column:
    """Return the exponential moving average, corrected for its start as in Adam (arXiv 1412.6980)."""
    keep = 1 - 1 / max(5, len(values) // 40)
    average, weight, result = 0.0, 0.0, np.full(len(values), np.nan)
    for index in np.flatnonzero(np.isfinite(values)):
        average = keep * average + (1 - keep) * values[index]
        weight = keep * weight + (1 - keep)
        result[index] = average / weight
    return result
