"""Render one or several runs as a page: a single file, whose content security policy blocks loading anything else."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bridge import __version__
from bridge.checkpoints.metric_table import METRICS, Metric, PerSecond
from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import Config, flag
from bridge.core.redaction import escaped
from bridge_cli.live import duration
from bridge_cli.report import charts
from bridge_cli.report.charts import Artist, Drawing
from bridge_cli.report.record import Column, Run

TEMPLATE = "page.html.j2"
MOST_EVENTS = 200
GENERATOR = "bridge report"
PATH_CHOICES = ("save_path", "run_dir", "vllm_config_path", "vllm_port", "vllm_host", "resume")
"""Choices that differ between any two runs."""
END = ("reward_before", "reward_after", "weight_bytes_copied", "weight_bytes")
"""Keys of the summary that are shown."""
OVER_RUN: Mapping[str, Callable[[Column], Any]] = {"total": np.sum, "median": np.median, "largest": np.max}
Choice = tuple[str, str, str, str]
"""Flag, value, default and meaning."""


def html(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of several side by side."""
    of_runs = [figures(run) for run in runs]
    results = {
        "Status": [status(run)[0] for run in runs],
        **{title: [shown(of_run[key][1]) for of_run in of_runs] for key, (title, _) in of_runs[0].items()},
    }
    artist = Artist({run.name: run for run in runs})
    sections: dict[str, list[Drawing]] = {
        title: [drawing for metric in metrics for drawing in artist.drawings(metric)]
        for title, metrics in charts.sections(runs).items()
    }
    plots: dict[str, Any] = {
        drawing.title: drawing.plot for group in sections.values() for drawing in group if drawing.plot
    }
    document = Document()
    with document.models.freeze():  # otherwise Bokeh walks through all models again for each plot
        for plot in plots.values():
            document.add_root(plot)
    script, divs = components(plots, wrap_script=False) if plots else ("", {})
    script = "\n".join([*Resources(mode="inline", components=["bokeh"]).js_raw, script])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        finalize=lambda value: escaped(value) if type(value) is str else value,
    )  # fmt: skip
    filters = shown, duration, as_text, messages, status, choices, values, described
    environment.filters |= {function.__name__: function for function in filters}
    return environment.get_template(TEMPLATE).render(
        views=runs, sections=sections, divs={title: Markup(div) for title, div in divs.items()},  # noqa: S704
        script=Markup(script),  # noqa: S704
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:",
        generator=GENERATOR, version=__version__, now=datetime.now().astimezone(), most_events=MOST_EVENTS,
        differing=differing([run.config for run in runs]) | differing([software(run) for run in runs], name=str),
        results=results,
    )  # fmt: skip


def figures(run: Run) -> dict[str, tuple[str, float | None]]:
    """Return the numbers that sum up a run."""
    rewards, published = run.column("reward_mean"), run.column("fence_publish_s")
    few = max(1, min(20, len(rewards) // 10))
    ends = {name: value for name in END if isinstance(value := run.summary.get(name), int | float)}
    before, after = ends.get("reward_before"), ends.get("reward_after")
    if run.evaluations:
        first, last = run.evaluations[0], run.evaluations[-1]
        before = first["reward_mean"] if first["step"] < run.steps[0] else None
        after = last["reward_mean"] if last["step"] >= run.steps[0] else None
    copied = ends.get("weight_bytes", ends.get("weight_bytes_copied"))
    fence_ms = run.column("fence_s")[~(published <= 0)] * 1e3  # of the steps that were published
    return {
        "reward_first": ("Reward, first steps", _of(np.mean, rewards[:few])),
        "reward_last": ("Reward, last steps", _of(np.mean, rewards[-few:])),
        "held_out_before": ("Held-out reward, before", before),
        "held_out_after": ("Held-out reward, last", after),
        "steps": ("Steps", float(len(run.steps))),
        "training_s": ("Time in steps, s", _of(np.sum, run.column("step_s"))),
        "fence_ms": ("Fence, median, ms", _of(np.median, fence_ms)),
        "fence_p90_ms": ("Fence, 90th percentile, ms", _of(lambda known: np.quantile(known, 0.9), fence_ms)),
        **{
            metric.name: (
                ", ".join(filter(None, (metric.title, metric.over_run, metric.unit))),
                _value_over_run(metric, run),
            )
            for metric in METRICS.values()
            if metric.over_run
        },
        "weight_bytes": ("Weights beside the server's, bytes", copied),
    }


def _value_over_run(metric: Metric, run: Run) -> float | None:
    if isinstance(metric.derive, PerSecond):  # not the mean over steps, where short steps weigh as much as long ones
        amounts, seconds = run.column(metric.derive.amount), run.column(metric.derive.seconds)
        known = ~np.isnan(amounts + seconds)
        total_s = float(seconds[known].sum())
        return float(amounts[known].sum()) / total_s if total_s else None
    return _of(OVER_RUN[metric.over_run], run.column(metric.name))


def values(run: Run) -> dict[str, Any]:
    """Return the status and the figures of a run, as data."""
    return {"status": status(run)[0]} | {key: value for key, (_, value) in figures(run).items()}


def choices(run: Run) -> dict[str, tuple[list[Choice], list[Choice]]]:
    """Return the choices of the trainer and of the server: those that differ from their defaults, and the others."""
    tables: dict[str, tuple[list[Choice], list[Choice]]] = {}
    given: list[tuple[str, type[Config], Mapping[str, Any]]] = [
        ("", TrainConfig, run.config),
        ("The server", ServeConfig, run.server),
    ]
    for title, kind, config in given:
        changed, unchanged = tables.setdefault(title, ([], []))
        for name, value in config.items():
            known = kind.choices().get(name)
            default = "–"
            about = "This version of Bridge does not know it."
            if known is not None:
                about = known.info.description or ""
                if not known.info.is_required():
                    default = "derived" if name in run.derived else _written(known.info.default)
            is_default = name in run.derived or _written(value) == default
            (unchanged if is_default else changed).append((flag(name), _written(value), default, about))
    return tables


def software(run: Run) -> dict[str, str]:
    """Return the versions and the device of the last start of a run."""
    last = run.starts[-1] if run.starts else {}
    return {name: as_text(value) for name, value in last.items() if name not in ("time", "command")}


def differing(configs: Sequence[Mapping[str, Any]], *, name: Callable[[str], str] = flag) -> dict[str, list[str]]:
    """Return the flag of every choice in which runs differ, and its value in each run; `name` turns keys into flags."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in PATH_CHOICES)
    rows = {name(key): [_written(config[key]) if key in config else "–" for config in configs] for key in keys}
    return {title: values for title, values in rows.items() if len(set(values)) > 1}


def as_text(value: object) -> str:
    """Return a JSON value as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def described(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a problem other than its prompt and the prompt for models without a chat template."""
    return {name: value for name, value in problem.items() if name not in ("prompt", "plain_prompt")}


def messages(prompt: object) -> list[tuple[str, str]]:
    """Return role and text of each part of a prompt; the role of plain text is empty."""
    parts = prompt if isinstance(prompt, list) else [prompt]
    return [
        (as_text(part.get("role", "")), as_text(part["content"]))
        if isinstance(part, dict) and "content" in part
        else ("", as_text(part))
        for part in parts
    ]


def shown(value: object, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, and anything else as text."""
    if value is None or not isinstance(value, int | float):
        return "–" if value is None else as_text(value)
    if not np.isfinite(value):
        return "–"
    if value and abs(value) < 1e-4:
        return f"{value:.2e}".replace("e-0", "e-")
    rounded = float(f"{value:.{digits}g}")
    size, letter = next(((size, letter) for size, letter in ((1e9, "G"), (1e6, "M")) if abs(rounded) >= size), (1, ""))
    return f"{rounded / size:,.10g}{letter}"


def status(run: Run) -> tuple[str, str]:
    planned = run.config.get("training_steps")
    done = f"step {run.steps[-1]:,}" + (f" of {planned:,}" if isinstance(planned, int) else "")
    if run.summary:
        return "finished", done
    if run.holder:
        return "running", f"process {run.holder} is at {done}"
    return "unfinished", f"stopped after {done} without a summary: interrupted, killed, or running on another machine"


def _of(function: Callable[[Column], Any], column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(function(known)) if known.size else None


def _written(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, Path) else as_text(value)
