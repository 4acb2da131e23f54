"""The page: everything that is shown, put into the template and escaped.

It needs nothing beside itself: style and script are inside, and its own policy forbids everything else.

Not covered: where it goes (`command.py`).
"""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import __version__
from bridge.run.run_directory import RunDirectory
from cli.report import catalogue, charts, choices, curves, results, samples, wording
from cli.report.curves import last
from cli.report.drawing import Chart
from cli.report.events import Event
from cli.report.record import Run
from cli.report.results import Result
from cli.report.samples import Samples

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATE = Path(__file__).parent / "template"
GENERATOR = "bridge report"
"""By this the page is known as ours."""
MOST_EVENTS = 200
MOST_RUNS = charts.NUM_COLOURS


@dataclass(frozen=True, kw_only=True)
class Section:
    """Some charts under a heading."""

    title: str
    """The heading."""
    charts: Sequence[Chart]
    """What changes over the steps."""
    constant: Sequence[Chart]
    """What does not, and is told in a line."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One run as the page shows it."""

    name: str
    """As short as tells the runs apart."""
    run: Run
    """What was read."""
    status: tuple[str, str]
    """How it stands, in a word and in a sentence."""
    results: Mapping[str, Result]
    """What it came to."""
    samples: Samples
    """Some of its completions."""
    notes: Sequence[str]
    """What is missing or broken."""
    changed: Sequence[choices.Choice]
    """Choices that differ from their defaults."""
    unchanged: Sequence[choices.Choice]
    """The others."""
    server: Sequence[choices.Choice]
    """Choices of the server, where the run started it, that differ from their defaults."""


def view(name: str, run: Run, *, share: float = 1.0) -> View:
    """Return what is shown of a run, whose completions may have a share of the page's size."""
    picked = samples.read(RunDirectory(run.path).rollouts, share=share)
    changed, unchanged = choices.of_training(run.config)
    return View(
        name=name, run=run, status=results.status(run), results=results.of(run), samples=picked,
        notes=[*run.notes, *picked.notes], changed=changed, unchanged=unchanged,
        server=choices.of_server(run.server)[0],
    )  # fmt: skip


def html(views: Sequence[View]) -> str:
    """Return the page of one run, or of several side by side."""
    steps = _domain([each.run for each in views])
    sections = list(_sections(views, steps))
    hero = _hero(views, steps)
    drawn = [hero, *(chart for section in sections for chart in section.charts)]
    style, script = ((TEMPLATE / name).read_text() for name in ("report.css", "report.js"))
    return _environment().get_template("report.html.j2").render(
        views=views, hero=hero, sections=sections, style=_trusted(style), script=_trusted(script),
        policy=_policy(script), data={"steps": steps, "lines": {chart.key: chart.data for chart in drawn}},
        events=[each.run.events[:MOST_EVENTS] for each in views], generator=GENERATOR, version=__version__,
        now=datetime.now().astimezone(), differing=choices.differing([each.run.config for each in views]),
        is_thinned=any(len(each.run.steps) > 2 * curves.MOST_BUCKETS for each in views),
    )  # fmt: skip


def _hero(views: Sequence[View], steps: tuple[int, int]) -> Chart:
    if len(views) > 1:
        return charts.rewards_of({each.name: each.run for each in views}, steps)
    return charts.reward_of(views[0].run, steps, _marks(views[0].run.events))


def _sections(views: Sequence[View], steps: tuple[int, int]) -> Iterator[Section]:
    for title, figures in catalogue.SECTIONS.items():
        if len(views) > 1:
            found = list(charts.of_several({each.name: each.run for each in views}, figures, steps))
        else:
            found = list(charts.of_one(views[0].run, figures, steps, _marks(views[0].run.events)))
        constant = [chart for chart in found if chart.is_constant]
        yield Section(title=title, charts=[chart for chart in found if not chart.is_constant], constant=constant)


def _domain(runs: Sequence[Run]) -> tuple[int, int]:
    ends = [step for run in runs for step in (run.steps[0], run.steps[-1])]
    ends += [each["step"] for run in runs for each in run.evaluations]
    return min(ends), max(ends)


def _marks(events: Sequence[Event]) -> list[int]:
    return [event.step for event in events[:MOST_EVENTS] if event.step is not None]


def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE), autoescape=True, undefined=StrictUndefined, finalize=_finalize,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= FILTERS
    return environment


FILTERS = {
    "shown": wording.shown,
    "duration": wording.duration,
    "in_bytes": wording.in_bytes,
    "stretch": wording.stretch,
    "code": wording.code,
    "last": last,
    "percent": lambda share: f"{100 * share:.2f}",
    "clamp": lambda share: min(max(share, 0.0), 1.0),
}


def _trusted(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)  # noqa: S704  (a file of ours)


def _finalize(value: object) -> object:
    """Make what is left of a text visible; what is markup already was made of such texts."""
    return wording.visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _policy(script: str) -> str:
    """Return a policy that runs this script alone, and loads nothing: a second lock behind the escaping."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
