"""`bridge verify`: prove on a live server that there is one copy of the weights (`bridge/checks/verify.py`)."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from bridge.checks.result import Check, any_failed
from bridge.server import discovery, manifest
from cli import console
from cli.options import Json, option

FAILED_EXIT_CODE = 3

PATH = "The manifest (default: the first one in $LOGDIR, the current folder and /tmp/atropos_bridge)."
ManifestPath = Annotated[Path | None, option("--vllm-config-path", "PATH", PATH)]


def verify(*, vllm_config_path: ManifestPath = None, as_json: Json = False) -> None:
    """Prove that a running server and a trainer share one copy of the weights.

    If no manifest is found, the only running server is used. Exits with 3 if a check fails.
    """
    path = discovery.find(vllm_config_path)
    if vllm_config_path is None and path not in manifest.search_path():
        console.note(f"the only running server was started elsewhere: {path}")
    if any_failed(proof(path, as_json=as_json)):
        raise typer.Exit(FAILED_EXIT_CODE)


def proof(path: Path, *, as_json: bool) -> list[Check]:
    """Run every check on the server of the manifest at `path`, print each result at once, and return them all."""
    from bridge.checks import verify as checks

    return shown(checks.verify(path), as_json=as_json)


def shown(checks: Iterable[Check], *, as_json: bool) -> list[Check]:
    """Print each check at once, for a person and, with `as_json`, for a program too; return them all."""
    seen = []
    for check in checks:
        seen.append(check)
        console.verdict(check.status, f"{check.name}: {check.found}")
        if check.status == "FAIL":
            console.note(f"      expected: {check.expected}\n      hint: {check.remedy}")
        if as_json:
            console.data(json.dumps(dataclasses.asdict(check)))
    return seen
