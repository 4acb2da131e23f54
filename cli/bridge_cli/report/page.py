"""Put a run, or several, on a page: one file, whose content security policy lets it load nothing else."""

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import Config, flag
from bridge.run.run_directory import RunDirectory
from bridge_cli.report import charts, samples
from bridge_cli.report.record import Column, Run, visible
from bridge_cli.steps import duration

TEMPLATE = Path(__file__).parent / "template"
MOST_EVENTS = 200
GENERATOR = "bridge report"
PLACES = ("save_path", "run_dir", "vllm_config_path", "vllm_port", "vllm_host", "resume")
"""Choices that differ between any two runs."""
Choice = tuple[str, str, str, str]
"""Flag, value, default and meaning."""
Choices = tuple[list[Choice], list[Choice]]
"""Those that differ from their defaults, and the others."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A run as the page shows it."""

    name: str
    run: Run
    status: tuple[str, str]
    """In a word, and in a sentence."""
    figures: Mapping[str, tuple[str, float | None]]
    """Name in `--json` -> title and value."""
    samples: samples.Samples
    choices: Mapping[str, Choices]
    """Heading -> the choices of the trainer, and those of the server."""
    notes: Sequence[str]

    @property
    def values(self) -> dict[str, float | None]:
        """Return the values of the figures."""
        return {key: value for key, (_, value) in self.figures.items()}


def view(name: str, run: Run, *, num_runs: int = 1) -> View:
    """Return what is shown of one of `num_runs` runs, which share the room for completions."""
    notes = [*run.notes]
    picked = samples.read(RunDirectory(run.path).rollouts, notes, longest=samples.LONGEST_TEXT // num_runs)
    return View(
        name=name, run=run, status=_status(run), figures=figures(run), samples=picked, notes=notes,
        choices={"": choices(run.config, TrainConfig, run.derived),
                 "The server": choices(run.server, ServeConfig, run.derived)},
    )  # fmt: skip


def html(views: Sequence[View]) -> str:
    """Return the page of one run, or of several side by side."""
    results = {"status": [each.status[0] for each in views]}
    results |= {title: [shown(each.values[key]) for each in views] for key, (title, _) in views[0].figures.items()}
    artist = charts.Artist({each.name: each.run for each in views})
    sections = {
        title: [drawing for chart in group for drawing in artist.drawings(chart)]
        for title, group in charts.sections(each.run for each in views).items()
    }
    plots: dict[str, Any] = {
        drawing.title: drawing.plot for group in sections.values() for drawing in group if drawing.plot
    }
    document = Document()
    with document.models.freeze():  # else Bokeh walks through all models again with each plot
        for plot in plots.values():
            document.add_root(plot)
    script, divs = components(plots, wrap_script=False) if plots else ("", {})
    script = "\n".join([*Resources(mode="inline", components=["bokeh"]).js_raw, script])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {"shown": shown, "duration": duration, "as_text": as_text, "messages": messages}
    return environment.get_template("report.html.j2").render(
        views=views, sections=sections, divs={title: Markup(div) for title, div in divs.items()},  # noqa: S704
        script=Markup(script), style=Markup((TEMPLATE / "report.css").read_text()),  # noqa: S704
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:",
        generator=GENERATOR, version=__version__, now=datetime.now().astimezone(), most_events=MOST_EVENTS,
        differing=differing([each.run.config for each in views]), results=results,
    )  # fmt: skip


def figures(run: Run) -> dict[str, tuple[str, float | None]]:
    """Return the numbers that sum up a run."""
    rewards, published = run.column("reward_mean"), run.column("fence_publish_s")
    few = max(1, min(20, len(rewards) // 10))
    names = ("reward_before", "reward_after", "weight_bytes_copied", "weight_bytes")
    ends = {name: value for name in names if isinstance(value := run.summary.get(name), int | float)}
    before, after = ends.get("reward_before"), ends.get("reward_after")
    if run.evaluations:
        first, last = run.evaluations[0], run.evaluations[-1]
        before = first["reward_mean"] if first["step"] < run.steps[0] else None
        after = last["reward_mean"] if last["step"] >= run.steps[0] else None
    fence_ms = run.column("fence_s")[~(published <= 0)] * 1e3  # of the steps that were published
    copied = ends.get("weight_bytes", ends.get("weight_bytes_copied"))
    return {
        "reward_first": ("reward, first steps", _of(np.mean, rewards[:few])),
        "reward_last": ("reward, last steps", _of(np.mean, rewards[-few:])),
        "held_out_before": ("held-out reward, before", before),
        "held_out_after": ("held-out reward, last", after),
        "steps": ("steps", float(len(run.steps))),
        "tokens_generated": ("tokens generated", _of(np.sum, run.column("tokens_generated"))),
        "unscored": ("unscored completions", _of(np.sum, run.column("unscored"))),
        "retries": ("retried requests", _of(np.sum, run.column("retries"))),
        "training_s": ("time in steps, s", _of(np.sum, run.column("step_s"))),
        "step_s": ("time per step, median, s", _of(np.median, run.column("step_s"))),
        "fence_ms": ("fence, median, ms", _of(np.median, fence_ms)),
        "fence_p90_ms": ("fence, 90th percentile, ms", _of(lambda known: np.quantile(known, 0.9), fence_ms)),
        "tokens_per_s": ("tokens generated per second, median", _of(np.median, run.column("generated_per_s"))),
        "logprob_diff_mean": ("|Δ log-probability|, median, nats", _of(np.median, run.column("logprob_diff_mean"))),
        "logprob_diff_max": ("|Δ log-probability|, largest, nats", _of(np.max, run.column("logprob_diff_max"))),
        "peak_memory_gib": ("peak memory of the trainer, GiB", _of(np.max, run.column("peak_memory_gib"))),
        "weight_bytes": ("weights beside the server's, bytes", copied),
    }


def choices(config: Mapping[str, Any], kind: type[Config], derived: Collection[str] = ()) -> Choices:
    """Return the choices that differ from their defaults, and the others with those that were `derived`."""
    changed, unchanged = list[Choice](), list[Choice]()
    for name, value in config.items():
        known, default, about = kind.choices().get(name), "–", "This version of Bridge does not know it."
        if known is not None:
            about = known.info.description or ""
            if not known.info.is_required():
                default = "derived" if name in derived else _written(known.info.default)
        written = _written(value)
        (unchanged if name in derived or written == default else changed).append((flag(name), written, default, about))
    return changed, unchanged


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the flag of every choice in which runs differ, and its value in each run."""
    names = dict.fromkeys(name for config in configs for name in config if name not in PLACES)
    rows = {flag(name): [_written(config[name]) if name in config else "–" for config in configs] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def as_text(value: object) -> str:
    """Return a JSON value as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


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
    """Return a number with its significant digits, and anything else as text."""
    if value is None or not isinstance(value, int | float):
        return "–" if value is None else as_text(value)
    if not np.isfinite(value):
        return "–"
    if value and abs(value) < 1e-4:
        return f"{value:.2e}".replace("e-0", "e-")
    rounded = float(f"{value:.{digits}g}")
    size, letter = next(((size, letter) for size, letter in ((1e9, "G"), (1e6, "M")) if abs(rounded) >= size), (1, ""))
    return f"{rounded / size:,.10g}{letter}"


def _status(run: Run) -> tuple[str, str]:
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
        return "absent"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, Path) else as_text(value)
