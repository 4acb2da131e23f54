"""`bridge report`: one HTML page of one run, or of several side by side.

Not covered: what is on it (`page.py`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.core import atomic_file
from bridge.errors import UsageError
from bridge.run.run_directory import REPORT
from cli import console
from cli.options import Json

if TYPE_CHECKING:
    from cli.report.page import View

NAME = REPORT
HEAD_BYTES = 2048
"""Where a page of ours says so."""

Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="The page; absent: report.html in the run, here for several."),
]


def report(runs: Runs, *, out: Out = None, as_json: Json = False) -> None:
    """Write one HTML page with plots and sample completions of a run, or compare several.

    It needs no network and nothing beside itself. A run that is under way can be looked at, too.
    """
    from cli.report import results

    folders = list({folder.resolve(): folder for folder in reversed(runs)}.values())[::-1]
    target = out or (folders[0] if len(folders) == 1 else Path()) / NAME
    views = write(folders, target)
    for each in views:
        for line in each.notes:
            console.note(f"{each.name}: {line}", style="dim")
    console.note(f"wrote {target} ({target.stat().st_size / 1000:,.0f} kB): open it in a browser")
    told = [
        {"run": str(each.run.path), "status": each.status[0], **results.as_json(each.results), "notes": each.notes}
        for each in views
    ]
    console.data(json.dumps({"report": str(target), "runs": told}) if as_json else str(target))


def write(folders: Sequence[Path], target: Path) -> list["View"]:
    """Write the page of the runs in `folders` to `target`, and return what it shows.

    Raises:
        UsageError: one is no run, there are too many, or `target` cannot be written or is no page of ours.
    """
    from cli.report import page, record

    if len(folders) > page.MOST_RUNS:
        raise UsageError(
            f"{len(folders)} runs on one page are too many to tell apart", remedy=f"at most {page.MOST_RUNS}"
        )
    try:
        _check(target)
        read = [record.read(folder) for folder in folders]
        views = [page.view(name, run, share=1 / len(read)) for name, run in zip(names(folders), read, strict=True)]
    except OSError as error:
        what = error.filename or " or ".join(map(str, folders))
        raise UsageError(f"cannot read {what}: {error.strerror}", remedy="see who may read it") from error
    _write(target, page.html(views))
    return views


def names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["/".join(each[-length:]) for each in parts]
        if len(set(short)) == len(short):
            break
    return short


def _check(target: Path) -> None:
    """Refuse to write over anything but a page of ours.

    Raises:
        UsageError: something else is there.
    """
    from cli.report.page import GENERATOR

    if target.is_dir():
        raise UsageError(f"{target} is a folder", remedy=f"--out {target / NAME}")
    if not target.exists():
        return
    with target.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if f'content="{GENERATOR}'.encode() not in head:
        raise UsageError(f"{target} is no report of ours, and is left as it is", remedy="name another file with --out")


def _write(target: Path, text: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.replace(target, text.encode())
    except (OSError, UsageError) as error:
        reason = error.message if isinstance(error, UsageError) else f"cannot write {target}: {error.strerror}"
        raise UsageError(
            reason, remedy="name another file with --out, where there is room and you may write"
        ) from error
