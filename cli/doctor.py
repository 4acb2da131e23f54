"""`bridge doctor`: print what every check found, what was expected and the command that mends it.

Not covered: which checks there are (`examination.py`), proof that a live server's weights are shared (`verify.py`).
"""

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from bridge.checks.result import Check, any_failed
from cli import console
from cli.console import cleaned
from cli.options import Json

FAILURE_FOUND = 3
"""Exit code when a check failed."""
STATUS_WIDTH, NAME_WIDTH, LABEL_WIDTH = 4, 21, 9
NARROWEST = 60
"""Columns; on a narrower terminal the lines are left to wrap by themselves."""


def doctor(
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            "--vllm-port",
            metavar="INTEGER",
            min=1,
            max=65535,
            envvar=["BRIDGE_PORT", "BRIDGE_VLLM_PORT"],
            show_envvar=False,
            help="Port of the server; absent: the manifest's, else 9001.",
        ),
    ] = None,
    vllm_config_path: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            envvar="BRIDGE_VLLM_CONFIG_PATH",
            show_envvar=False,
            help="The manifest; absent: searched for in $LOGDIR, the current folder and /tmp/atropos_bridge, or that of"
            " the only server that runs.",
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(
            metavar="auto|cpu|cuda",
            envvar="BRIDGE_DEVICE",
            show_envvar=False,
            help="Where vLLM is to run; auto: what the installed vLLM was built for.",
        ),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            envvar="BRIDGE_MODEL",
            show_envvar=False,
            help="A model's folder or name: tell by which modes it can be trained, from its configuration alone.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find what goes wrong before and while attaching, and name the command that mends it."""
    from cli.examination import examine

    with console.waiting("Looking at software, hardware, environment and server"):
        sections = list(examine(port, vllm_config_path, device, model))
    checks = [check for _, found in sections for check in found]
    if as_json:
        for check in checks:
            console.data(json.dumps(dataclasses.asdict(check)))
    else:
        report(sections)
    if any_failed(checks):
        raise typer.Exit(FAILURE_FOUND)


def report(sections: Iterable[tuple[str, list[Check]]]) -> None:
    """Print the checks for a person, and count them."""
    counts: Counter[str] = Counter()
    for title, checks in sections:
        console.people.print(Text(f"\n{title}", style="bold"))
        for check in checks:
            counts[check.status] += 1
            for line in lines(check, max(console.people.width, NARROWEST)):
                console.people.print(line)
    total = ", ".join(f"{counts[status]} {status}" for status in console.STATUS_STYLES)
    console.people.print(Text(f"\n{total}", style="bold"))


def lines(check: Check, width: int) -> Iterator[Text]:
    """Yield what was found and, unless that is well, what was expected and what mends it."""
    status = Text(f"{check.status:{STATUS_WIDTH}}", console.STATUS_STYLES[check.status])
    yield from hanging(Text.assemble("  ", status, "  ", f"{check.name:{NAME_WIDTH}}", "  "), check.found, width)
    label = " " * (STATUS_WIDTH + 4)
    if check.status in ("WARN", "FAIL"):
        yield from hanging(Text(f"{label}{'expected':{LABEL_WIDTH}} ", "dim"), check.expected, width)
    if check.remedy:
        heading = "next" if check.status == "SKIP" else "mend"
        yield from hanging(Text(f"{label}{heading:{LABEL_WIDTH}} ", "bold"), check.remedy, width)


def hanging(head: Text, text: str, width: int) -> Iterator[Text]:
    """Yield `text` behind `head`, its further lines indented as far; a word, such as a path, is never cut."""
    text, rest = cleaned(text), width - len(head)
    for number, part in enumerate(textwrap.wrap(text, rest, break_long_words=False, break_on_hyphens=False) or [""]):
        yield Text.assemble(head if number == 0 else " " * len(head), part)
