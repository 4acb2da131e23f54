"""Charts out of runs: of one run with all their lines, of several with one line for each run.

Not covered: what they show (`catalogue.py`), and how they are drawn (`drawing.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cli.report import curves
from cli.report.catalogue import Figure, one
from cli.report.curves import Line
from cli.report.drawing import Chart
from cli.report.events import Column
from cli.report.lines import number
from cli.report.record import Run

NUM_COLOURS = 8
HELD_OUT_COLOUR = 1
MOST_MARKS = 40
"""Events that are marked in the charts; more would hide the curves."""


def reward_of(run: Run, steps: tuple[int, int], marks: Sequence[int]) -> Chart:
    """Return the chart of a run's reward, each step and smoothed, and of its evaluations."""
    over = curves.span(len(run.steps))
    column = run.column("reward_mean")
    lines = [
        Line(name="each step", points=curves.thinned(run.steps, column), kind="faint"),
        Line(name=f"over {over} steps", points=curves.thinned(run.steps, curves.smoothed(column, over))),
        *_held_out(run, "held out", HELD_OUT_COLOUR),
    ]
    return _reward(lines, steps, marks)


def rewards_of(runs: Mapping[str, Run], steps: tuple[int, int]) -> Chart:
    """Return the chart of several runs' rewards, smoothed, and of their evaluations."""
    lines = [_smooth(name, one("reward_mean")(run), run, colour) for colour, (name, run) in enumerate(runs.items())]
    for colour, (name, run) in enumerate(runs.items()):
        lines += _held_out(run, f"{name}, held out", colour)
    return _reward(lines, steps, ())


def _reward(lines: Sequence[Line], steps: tuple[int, int], marks: Sequence[int]) -> Chart:
    return Chart(
        key="reward", title="Mean reward", lines=[line for line in lines if _has_values(line)], steps=steps,
        about="Of each step's completions, sampled before its update; of the held-out problems, after that many steps.",
        scale="share", is_wide=True, marks=marks[:MOST_MARKS],
    )  # fmt: skip


def _held_out(run: Run, name: str, colour: int) -> list[Line]:
    """Return the evaluations as dots, joined by a thin line that is in no legend."""
    points = [(float(row["step"]), float(row["reward_mean"])) for row in run.evaluations]
    joined = Line(name="", points=list(points), colour=colour, kind="faint")
    return [joined, Line(name=name, points=list(points), colour=colour, kind="dots")] if points else []


def of_one(run: Run, figures: Sequence[Figure], steps: tuple[int, int], marks: Sequence[int]) -> Iterator[Chart]:
    """Yield each figure's chart, where the run has something to draw in it."""
    for figure in figures:
        lines = [line for line in _lines(figure, run) if _has_values(line)]
        if lines:
            alarm = number(run.config.get("mismatch_alarm")) if figure.band else None
            yield replace(_chart(figure, lines, steps), marks=marks[:MOST_MARKS], alarm=alarm)


def of_several(runs: Mapping[str, Run], figures: Sequence[Figure], steps: tuple[int, int]) -> Iterator[Chart]:
    """Yield each figure's chart with one line a run, where a run has something to draw in it."""
    for figure in _single(figures, runs.values()):
        lines = [_compared(figure, name, run, colour) for colour, (name, run) in enumerate(runs.items())]
        if any(map(_has_values, lines)):
            title = figure.compared_title or figure.title
            chart = _chart(figure, [line for line in lines if _has_values(line)], steps)
            yield replace(chart, title=title, is_ramp=False)


def _single(figures: Sequence[Figure], runs: Iterable[Run]) -> Iterator[Figure]:
    """Yield the figures, that of the reward's parts as one for each part."""
    names = dict.fromkeys(name for run in runs for name in run.items("reward_parts"))
    for figure in figures:
        if figure.key != "parts":
            yield figure
            continue
        for index, name in enumerate(names):
            title = f"Reward, part {name}"
            read = one(f"reward_parts/{name}")
            yield replace(figure, key=f"part-{index}", title=title, compared=read)


def _chart(figure: Figure, lines: Sequence[Line], steps: tuple[int, int]) -> Chart:
    return Chart(
        key=figure.key, title=figure.title, about=figure.about, lines=lines, steps=steps, scale=figure.scale,
        band=figure.band, is_ramp=figure.ramp,
    )  # fmt: skip


def _lines(figure: Figure, run: Run) -> list[Line]:
    columns = {name: column for name, column in figure.curves(run).items() if any(y is not None for y in column)}
    if figure.stacked:
        return _stacked(columns, run, figure.first_colour)
    if not figure.smooth or len(run.steps) <= curves.span(0):
        return [_plain(name, column, run, colour) for colour, (name, column) in enumerate(columns.items())]
    lines = [_smooth(name, column, run, colour) for colour, (name, column) in enumerate(columns.items())]
    if len(lines) > 1:  # several noisy lines hide each other
        return lines
    faint = [replace(_plain("each step", column, run, 0), kind="faint") for column in columns.values()]
    return faint + [replace(line, name="smoothed") for line in lines]


def _stacked(columns: Mapping[str, Column], run: Run, first_colour: int) -> list[Line]:
    known = [index for index, ys in enumerate(zip(*columns.values(), strict=True)) if any(y is not None for y in ys)]
    known_rows = [[column[index] for index in known] for column in columns.values()]
    xs, rows = curves.averaged([run.steps[index] for index in known], known_rows)
    return [
        Line(name=name, points=list(zip(xs, row, strict=True)), colour=colour, kind="area")
        for colour, (name, row) in enumerate(zip(columns, rows, strict=True), first_colour)
        if any(row)
    ]


def _compared(figure: Figure, name: str, run: Run, colour: int) -> Line:
    column = figure.compared(run) if figure.compared else next(iter(figure.curves(run).values()), run.column(""))
    return (_smooth if figure.smooth or figure.stacked else _plain)(name, column, run, colour)


def _smooth(name: str, column: Column, run: Run, colour: int) -> Line:
    ys = curves.smoothed(column, curves.span(len(run.steps)))
    return Line(name=name, points=curves.thinned(run.steps, ys), colour=colour % NUM_COLOURS)


def _plain(name: str, column: Column, run: Run, colour: int) -> Line:
    return Line(name=name, points=curves.thinned(run.steps, column), colour=colour % NUM_COLOURS)


def _has_values(line: Line) -> bool:
    return any(y is not None for _, y in line.points)
