"""`bridge report`: write one HTML page about a run, or about several side by side.

`record` reads a run directory, `charts` draws the curves, `page` fills in the template. Nothing here loads torch; Bokeh
and jinja2 are imported only to write a page.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridge.checkpoints.run_directory import REPORT
from bridge.core import atomic_file
from bridge.errors import UsageError
from bridge_cli import console
from bridge_cli.options import HOME, Json

if TYPE_CHECKING:
    from bridge_cli.report.record import Run

HEAD_BYTES = 2048
"""A report names its generator within this many bytes; any other file is never overwritten."""
MOST_RUNS = 8
"""Maximum number of runs on a page, one per color."""

Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.", show_default=False, **HOME)]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="The page (default: report.html in the run, or here for several).", **HOME
    ),
]


def report(runs: Runs, *, out: Out = None, as_json: Json = False) -> None:
    """Write an HTML page with the curves and sample completions of a run, or compare several.

    The page is one file and needs no network. The run may still be in progress.
    """
    folders = list({folder.resolve(): folder for folder in reversed(runs)}.values())[::-1]
    target = out or (folders[0] if len(folders) == 1 else Path()) / REPORT
    documents = []
    for run, figures in write(folders, target):
        documents.append({"run": str(run.path), **figures, "notes": run.notes})
        for line in run.notes:
            console.note(f"{run.name}: {line}", style="dim")
    console.note(f"wrote {target} ({target.stat().st_size / 1e6:.1f} MB): open it in a browser")
    console.data(json.dumps({"report": str(target), "runs": documents}) if as_json else str(target))


def write(folders: Sequence[Path], target: Path) -> "list[tuple[Run, dict[str, Any]]]":
    """Write the page about the runs in `folders` to `target`, and return them with their figures.

    Raises:
        UsageError: a folder is not a run, there are too many, or `target` cannot be written or is not a report.
    """
    if len(folders) > MOST_RUNS:
        raise UsageError(f"{len(folders)} runs do not fit on one page", hint=f"name at most {MOST_RUNS}")
    if target.is_dir():
        raise UsageError(f"{target} is a directory", hint=f"--out {target / REPORT}")
    from bridge_cli.report import page, record

    elsewhere = "name another file with --out"
    try:
        if target.exists():
            with target.open("rb") as file:
                if f'content="{page.GENERATOR}'.encode() not in file.read(HEAD_BYTES):
                    raise UsageError(f"{target} exists and is not a report", hint=elsewhere)
        named = zip(folders, names(folders), strict=True)
        runs = [record.read(folder, name, num_runs=len(folders)) for folder, name in named]
    except OSError as error:
        what = error.filename or " or ".join(map(str, folders))
        raise UsageError(f"cannot read {what}: {error.strerror}", hint="check its permissions") from error
    content = page.html(runs).encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.replace(target, content)
    except (OSError, UsageError) as error:
        message = error.message if isinstance(error, UsageError) else f"cannot write {target}: {error.strerror}"
        raise UsageError(message, hint=elsewhere) from error
    return [(run, page.values(run)) for run in runs]


def names(folders: Sequence[Path]) -> list[str]:
    """Return the paths relative to the folder that they have in common."""
    resolved = [folder.resolve() for folder in folders]
    common = os.path.commonpath([folder.parent for folder in resolved])
    return [str(folder.relative_to(common)) for folder in resolved]
