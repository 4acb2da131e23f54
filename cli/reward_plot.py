"""Draw a training run's rewards as a PNG.

Not covered: any other metric of the run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZE_PIXELS = (900, 500)
DOTS_PER_INCH = 100
SMOOTHING = 0.8
"""Share of the past in the smoothed line: about five steps are visible in it."""
TRAINING_COLOUR = "#2f6fde"
HELD_OUT_COLOUR = "#d9480f"
QUIET_COLOUR = "#6b7280"


def plot(rewards: Sequence[float], held_out: tuple[float, float], path: Path) -> Path:
    """Draw into `path` the mean reward of every step, and the held-out reward before and after them; return `path`.

    Shapes: `rewards` [steps], at least one.
    """
    assert rewards, "a run of no steps has nothing to draw"
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    before, after = held_out
    width, height = SIZE_PIXELS
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(
            figsize=(width / DOTS_PER_INCH, height / DOTS_PER_INCH), dpi=DOTS_PER_INCH, layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        _draw_training(axes, rewards)
        _draw_held_out(axes, held_out, len(rewards))
        axes.set_title(f"Held-out reward: {before:.2f} before, {after:.2f} after", loc="left", fontweight="bold")
        _label(axes, [*rewards, *held_out])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    return path


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average, corrected for its start.

    Source: Adam (arXiv 1412.6980), section 3, for the correction.
    """
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(average / weight)
    return result


def _draw_training(axes: Any, rewards: Sequence[float]) -> None:
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color=TRAINING_COLOUR, alpha=0.3, linewidth=1.2, label="training, each step")
    axes.plot(steps, smoothed(rewards), color=TRAINING_COLOUR, linewidth=2.4, label="training, smoothed")
    if len(rewards) == 1:  # a line of one point is invisible
        axes.plot(steps, rewards, "o", color=TRAINING_COLOUR)


def _draw_held_out(axes: Any, held_out: tuple[float, float], num_steps: int) -> None:
    for step, reward, side, label in zip(
        (0, num_steps), held_out, (1, -1), ("held out, before and after", None), strict=True
    ):
        axes.axhline(reward, color=HELD_OUT_COLOUR, linestyle="--", linewidth=1, alpha=0.5)
        axes.plot(step, reward, "o", color=HELD_OUT_COLOUR, markersize=9, label=label, clip_on=False, zorder=5)
        axes.annotate(
            f"{reward:.2f}",
            (step, reward),
            xytext=(10 * side, -20),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            color=HELD_OUT_COLOUR,
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            zorder=6,
        )


def _label(axes: Any, shown: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02, y=0.12)
    if all(0 <= value <= 1 for value in shown):  # the usual rewards: show the whole of their range
        axes.set_ylim(0.0, 1.05)
    axes.grid(axis="y", color=QUIET_COLOUR, alpha=0.2)
    axes.legend(loc="lower right", facecolor="white", edgecolor="none", framealpha=0.9, fontsize=10)
